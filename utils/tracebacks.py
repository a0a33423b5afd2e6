"""Tracebacks from the user's own code on."""

import os
import sysconfig
import traceback

from appo.utils.errors import PACKAGE, AppoError, SpaceMismatch, UsageError

NOT_THE_USERS = (
    "<frozen ",
    f"{PACKAGE}{os.sep}",
    *(str(PACKAGE.parent.parent / name) for name in ("train_appo.py", "enjoy_appo.py")),
    *{f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")},
)
"""Begins of the paths of Python's files, of installed packages and of ours."""


def traceback_of(error: AppoError) -> str:
    """Return the traceback to print below the line of an error; "" if the line suffices.

    A mistake in a flag or against an interface needs no traceback, unless the user's own code raised.
    """
    cause = error.__cause__
    if error.traceback or cause is None:
        return error.traceback
    text, has_own_code = _format(cause)
    return text if has_own_code or not isinstance(error, UsageError | SpaceMismatch) else ""


def format_error(error: BaseException) -> str:
    """Return the traceback of an error, from the user's own code on if present."""
    return _format(error)[0]


def comes_from_own_code(error: BaseException) -> bool:
    """Return whether the user's own code took part in raising an error."""
    return _format(error)[1]


def _format(error: BaseException) -> tuple[str, bool]:
    """Return the traceback of an error without the frames before the user's code, and whether such code is present.

    Frames that the user's code has called stay: a library may explain the mistake.
    """
    whole = traceback.TracebackException.from_exception(error)
    waiting, has_own_code = [whole], False
    while waiting:
        one = waiting.pop()
        own = next((place for place, frame in enumerate(one.stack) if _is_own(frame.filename)), None)
        if own is not None:
            one.stack = traceback.StackSummary.from_list(one.stack[own:])
        # A file that does not compile has no frame.
        has_own_code |= own is not None or _is_own(getattr(one, "filename", None) or "<frozen ")
        waiting += [*filter(None, (one.__cause__, one.__context__)), *(one.exceptions or ())]
    return "".join(whole.format()), has_own_code


def _is_own(filename: str) -> bool:
    if filename.endswith((".pyx", ".pxd", ".pxi")) and not os.path.isfile(filename):
        return False  # a source of Cython: libraries that were built elsewhere contain only the result
    is_package = "/site-packages/" in filename or "/dist-packages/" in filename
    return not is_package and not filename.startswith(NOT_THE_USERS)
