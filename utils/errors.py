"""Every way a run can end, each with its documented exit code."""

import errno
import traceback
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
"""Folder of the package `appo`; the parent is an entry of `sys.path` without other packages of ours."""


class AppoError(Exception):
    """A failure with a message of one line that a user can act on."""

    exit_code = 1
    lasting = False  # another process in the same place would only repeat the failure
    traceback = ""  # of the worker that failed, if helpful


class UsageError(AppoError):
    """The command line, a config file or a name given by the user is wrong."""

    exit_code = 2
    lasting = True


class CannotBeDrawn(UsageError):
    """The environment is to be drawn and takes no `render_mode`."""


class OtherNumber(UsageError):
    """A vector made another number of environments than requested: `made`."""

    def __init__(self, text: str, made: int) -> None:
        super().__init__(text)
        self.made = made


class EnvironmentFailure(AppoError):
    """The environment raised, or returned a value that its spaces do not allow."""

    exit_code = 3


class SpaceMismatch(EnvironmentFailure):
    """The environment broke its spaces or gymnasium's interface: a mistake in its code."""

    lasting = True


class NotFinite(EnvironmentFailure):
    """The environment returned a reward or an observation that is NaN or infinite."""


class NothingAllowed(EnvironmentFailure):
    """The environment's action mask leaves no choice."""


class NumericsError(AppoError):
    """Losses, gradients or weights are not finite, and skipping batches did not help."""

    exit_code = 4
    lasting = True


class ResourceError(AppoError):
    """Memory, disk, file descriptors or GPU memory do not suffice."""

    exit_code = 5


class CheckpointError(AppoError):
    """No checkpoint of the run can be used."""

    exit_code = 6
    lasting = True


class NothingTrained(AppoError):
    """The run is over, and nothing was trained."""

    exit_code = 7


class DirectoryInUse(AppoError):
    """Another process trains in this run directory."""

    exit_code = 75


class Interrupted(AppoError):
    """The user or the system requested the end of the run; all progress has been saved."""

    exit_code = 130


class NotSaved(Interrupted):
    """The end was requested, and the last progress could not be saved, for example on a full disk."""

    exit_code = 74  # EX_IOERR of sysexits.h


class Terminated(Interrupted):
    """SIGTERM: like `Interrupted`, with the exit code that schedulers expect."""

    exit_code = 143


class StopNow(BaseException):
    """A second Ctrl-C: end at once, without saving. Not an `Exception`, so handlers on the way out do not catch it."""


def text_of(error: BaseException) -> str:
    """Return the text of an exception without line breaks, also if the user's `__str__` raises.

    An exception without a text, as of a bare assert, gives the place of the raise; the name of a MemoryError suffices.
    """
    try:
        return " ".join(str(error).split()) or ("" if isinstance(error, MemoryError) else _place_of(error))
    except Exception as another:
        return f"no text, as its __str__ raised {type(another).__name__}"


def _place_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    path, line = Path(frames[-1].filename), frames[-1].line
    return f"no text, in {path.parent.name}/{path.name}, line {frames[-1].lineno}{f': {line}' if line else ''}"


def lack_of(error: BaseException) -> ResourceError | None:
    """Return the line for the user if the system ran out of a resource; None for all other errors.

    Resources are memory of the machine or a GPU, processes, threads and open files. Libraries raise many kinds of
    errors.
    """
    text = text_of(error)[:200]
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in text:
        return ResourceError(f"too little free memory: lower the sizes of the network or the number of envs ({text})")
    if isinstance(error, RuntimeError) and "can't start new thread" in text:
        return ResourceError("no more threads may be started: `ulimit -u`, or pids.max of the cgroup, allows too few")
    if isinstance(error, OSError) and error.errno in LACKS:
        return ResourceError(f"{LACKS[error.errno]} ({text})")
    # torch's error is recognized by name, without importing torch.
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    if ("torch", "OutOfMemoryError") not in kinds:
        return None
    first, *_ = str(error).splitlines() or [""]
    lack = ResourceError(
        "the GPU has too little free memory: lower --microbatch_size or --batch_size, --num_policies or the network's"
        f" sizes, or end other programs that use it ({first[:200]})"
    )
    lack.traceback = "".join(traceback.format_exception(error))
    return lack


LACKS = {
    errno.ENOMEM: "too little free memory",
    errno.EAGAIN: "no more processes may be started: `ulimit -u`, or pids.max of the cgroup, allows too few",
    errno.EMFILE: "too few files may be open: raise `ulimit -n`",
    errno.ENFILE: "the machine has too many files open",
}
"""Number of an error -> the missing resource."""
