"""Every way a run can end, each with its documented exit code, and where the user's own code raised."""

import errno
import os
import sysconfig
import traceback
from pathlib import Path


class AppoError(Exception):
    """A failure whose message is one line a user can act on."""

    exit_code = 1
    lasting = False  # another process in the same place would only repeat it
    traceback = ""  # of the worker it happened in, when it helps to see it


class UsageError(AppoError):
    """The command line, a config file or a name given by the user is wrong."""

    exit_code = 2
    lasting = True


class CannotBeDrawn(UsageError):
    """The environment is to be drawn and takes no `render_mode`."""


class OtherNumber(UsageError):
    """A vector was made with another number of environments than it was asked for: with `made`."""

    def __init__(self, text: str, made: int) -> None:
        super().__init__(text)
        self.made = made


class EnvironmentFailure(AppoError):
    """The environment raised, or returned something its spaces do not allow."""

    exit_code = 3


class SpaceMismatch(EnvironmentFailure):
    """The environment returned what its spaces, or gymnasium's interface, do not allow: a mistake in its code."""

    lasting = True


class NotFinite(EnvironmentFailure):
    """The environment returned a reward or an observation that is NaN or infinite."""


class NothingAllowed(EnvironmentFailure):
    """The environment's action mask leaves nothing to choose."""


class NumericsError(AppoError):
    """Losses, gradients or weights are not finite and skipping did not help."""

    exit_code = 4
    lasting = True


class ResourceError(AppoError):
    """Memory, disk, file descriptors or GPU memory do not suffice."""

    exit_code = 5


def text_of(error: BaseException) -> str:
    """The text of an exception without line breaks; one of the user's may not even be able to say it.

    Without a text, as of a bare assert, it is the place where it was raised; the name of a MemoryError says enough.
    """
    try:
        return " ".join(str(error).split()) or ("" if isinstance(error, MemoryError) else _place_of(error))
    except Exception as another:
        return f"no text, as its __str__ raised {type(another).__name__}"


def _place_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    path = Path(frames[-1].filename)
    line = f": {frames[-1].line}" if frames[-1].line else ""
    return f"no text, in {path.parent.name}/{path.name}, line {frames[-1].lineno}{line}"


def lack_of(error: BaseException) -> ResourceError | None:
    """Return the line for the user when the system had no more of something; None for all other errors.

    That is memory, of the machine or a GPU, processes, threads and open files: libraries have many kinds of errors.
    """
    text = text_of(error)[:200]
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in text:
        return ResourceError(f"too little free memory: lower the sizes of the network or the number of envs ({text})")
    if isinstance(error, RuntimeError) and "can't start new thread" in text:
        return ResourceError("no more threads may be started: `ulimit -u`, or pids.max of the cgroup, allows too few")
    if isinstance(error, OSError) and error.errno in LACKS:
        return ResourceError(f"{LACKS[error.errno]} ({text})")
    lack = without_gpu_memory(error)
    if lack is not None:
        lack.traceback = "".join(traceback.format_exception(error))
    return lack


LACKS = {
    errno.ENOMEM: "too little free memory",
    errno.EAGAIN: "no more processes may be started: `ulimit -u`, or pids.max of the cgroup, allows too few",
    errno.EMFILE: "too few files may be open: raise `ulimit -n`",
    errno.ENFILE: "the machine has too many files open",
}
"""What the system had no more of, by the number of its error."""


def without_gpu_memory(error: BaseException) -> ResourceError | None:
    """Return the line for the user when a GPU had no memory left; None for all other errors.

    torch's own error is told by its name, so that nobody needs to import torch for that.
    """
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    if ("torch", "OutOfMemoryError") not in kinds:
        return None
    first, *_ = str(error).splitlines() or [""]
    return ResourceError(
        "the GPU has too little free memory: lower --microbatch_size or --batch_size, --num_policies or the network's"
        f" sizes, or end other programs that use it ({first[:200]})"
    )


class CheckpointError(AppoError):
    """No checkpoint of the run can be used."""

    exit_code = 6
    lasting = True


class NothingTrained(AppoError):
    """The budget of the run is over, and no batch was ever full."""

    exit_code = 7


class DirectoryInUse(AppoError):
    """Another process trains in this run directory."""

    exit_code = 75


# Where the user's own code raised.


PACKAGE = Path(__file__).parent.parent
"""Folder of the package `appo`; its parent is an entry of `sys.path` that has no other package of ours."""

NOT_THE_USERS = (
    "<frozen ",
    f"{PACKAGE}{os.sep}",
    *(str(PACKAGE.parent.parent / name) for name in ("train_appo.py", "enjoy_appo.py")),
    *{f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")},
)
"""What the files of frames begin with that are Python's, of an installed package, or ours."""


COMPILED = (".pyx", ".pxd", ".pxi")
"""Ends of the names of files that Cython compiles: libraries bring the result alone."""


def traceback_of(error: AppoError) -> str:
    """Return the traceback that a person is shown below the line of an error; empty if the line says all.

    A mistake of the user in a flag needs none, unless code of the user's own has raised.
    """
    cause = error.__cause__
    if error.traceback or cause is None:
        return error.traceback
    text, has_own_code = _format(cause)
    return text if has_own_code or error.exit_code != UsageError.exit_code else ""


def format_error(error: BaseException) -> str:
    """Return the traceback of an error, from the user's own code on where that took part."""
    return _format(error)[0]


def comes_from_own_code(error: BaseException) -> bool:
    """Return whether code of the user's own took part in raising an error."""
    return _format(error)[1]


def _format(error: BaseException) -> tuple[str, bool]:
    """Return the traceback of an error, without the frames before the first one of the user's code; whether it has one.

    What the user's code has called in turn stays: a library may say there what is wrong.
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
    packages = ("/site-packages/", "/dist-packages/")
    if filename.endswith(COMPILED) and not os.path.isfile(filename):  # of a library: it was built somewhere else
        return False
    return not filename.startswith(NOT_THE_USERS) and not any(name in filename for name in packages)


class Interrupted(AppoError):
    """The user or the system asked the run to end; what was learned has been saved."""

    exit_code = 130


class NotSaved(Interrupted):
    """The run was asked to end, and what was learned last could not be saved, as on a full disk."""

    exit_code = 74  # EX_IOERR of sysexits.h


class StopNow(BaseException):
    """A second Ctrl-C: end at once, without saving. No `Exception`, so that nothing on the way out handles it."""


class Terminated(Interrupted):
    """SIGTERM: as `Interrupted`, with the exit code schedulers expect."""

    exit_code = 143
