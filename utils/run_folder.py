"""The folder of a run: every name in it stands here, and every file in it is opened here.

What lies inside a checkpoint or among incidents and videos is named by the modules that write those.

A run may come from elsewhere, and its links lead anywhere. So each folder from that of the run downwards is opened by
its name in the one above it, and a link is never followed: neither to write or remove something, nor to read. A file
that is written in place must not have a second name, as that may be anybody's file. Above the folder of the run links
are the user's own and followed.
"""

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from appo.utils.directories import make_durable
from appo.utils.errors import UsageError
from appo.utils.values import refuse_deep, shown

CONFIG_FILE = "config.json"
HISTORY_FILE = "config_history.jsonl"
STATUS_FILE = "status.json"
METRICS_FILE = "metrics.jsonl"
PAGE_FILE = "README.md"
CURVE_FILE = "plots/learning_curve.png"
LINEAGE_FILE = "lineage.json"
LINEAGE_PICTURE = "lineage.png"
LOCK_FILE = ".lock"
LOGS = "logs"
INCIDENTS = "incidents"
SUMMARIES = ".summary"
EVALUATION = "eval"
RESULTS_FILE = "results.jsonl"
VIDEOS = "videos"
PLOTS = CURVE_FILE.partition("/")[0]
CODE = "code"
CODE_STARTS_FILE = "starts.jsonl"

CHECKPOINTS = "checkpoint_p"
"""Name of the folder of a policy's checkpoints, before the number of the policy."""

CORRUPT = "corrupt"
"""Name of the folder beside checkpoints of one kind in which those lie that do not verify."""
REPLAY = "replay_p"
"""Begin of the name of the file of a policy's replay, before the number of the policy."""

CHECKPOINT_FOLDERS = {
    "latest": "",
    "best": "best",
    "best_evaluated": "best_evaluated",
    "milestone": "milestones",
    "past": "past",
}
"""Kind of a checkpoint -> its folder inside the checkpoints of its policy."""

MIB = 1 << 20
OWN_BYTES = 16 * MIB
"""More than any file of JSON in a run has."""
CONFIG_BYTES, STATUS_BYTES = MIB, 3 * MIB
"""More than the flags of a run have, and than its status has. Parsed, JSON takes up to 25 times its size."""

_KINDS = "|".join(name for name in CHECKPOINT_FOLDERS.values() if name)
_INNER_FOLDER = re.compile(
    rf"(?:^|/)(?:{LOGS}|{CODE}|{INCIDENTS}|{PLOTS}|{EVALUATION}(?:/{VIDEOS})?|(?:{EVALUATION}/)?{re.escape(SUMMARIES)}(?:/p\d+)?"
    rf"|{CHECKPOINTS}\d+(?:/(?:{_KINDS}))?(?:/{CORRUPT})?)$"
)
"""End of the path of every folder inside that of a run."""


class RunFolder:
    """The folder of one run. It says where things are; nothing is created or looked at until a method reads.

    Args:
        path: of the folder.

    Attributes:
        config: flags of the newest start, and what was measured for them.
        history: flags of every start, one line each.
        status: how the run is, refreshed while it trains.
        metrics: a record of every policy per report, one line each.
        page: README of the run, written when training ends.
        curve: picture of its learning curve, to which the page links.
        lineage, lineage_picture: every decision about the policies of a population, and the picture of them.
        lock: held by the process that trains.
        logs: folder of a log per process.
        incidents: folder of what led to failures.
        evaluation: folder of what evaluations beside the run or after it have found.
        results: a record per evaluation, one line each.
        videos: folder of filmed evaluations.
        code: folder of what differed in the user's code from its commits.
        code_starts: commits and diffs of the starts at which they changed, one line each.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.history = path / CONFIG_FILE, path / HISTORY_FILE
        self.status, self.metrics = path / STATUS_FILE, path / METRICS_FILE
        self.page, self.curve = path / PAGE_FILE, path / CURVE_FILE
        self.lineage, self.lineage_picture = path / LINEAGE_FILE, path / LINEAGE_PICTURE
        self.lock, self.logs, self.incidents = path / LOCK_FILE, path / LOGS, path / INCIDENTS
        self.evaluation = path / EVALUATION
        self.results, self.videos = self.evaluation / RESULTS_FILE, self.evaluation / VIDEOS
        self.code = path / CODE
        self.code_starts = self.code / CODE_STARTS_FILE

    def log(self, name: str) -> Path:
        """Return the log of a process, absolute: the process may change its working directory."""
        return (self.logs / f"{name}.log").absolute()

    def summaries(self, policy: int) -> Path:
        """Return the folder of TensorBoard's files of a policy's training."""
        return self.path / SUMMARIES / f"p{policy}"

    def evaluation_summaries(self, policy: int) -> Path:
        """Return the folder of TensorBoard's files of a policy's evaluations."""
        return self.evaluation / SUMMARIES / f"p{policy}"

    def checkpoints(self, policy: int, kind: str = "latest") -> Path:
        """Return the folder of a policy's checkpoints of a kind, see `CHECKPOINT_FOLDERS`."""
        return self.path / f"{CHECKPOINTS}{policy}" / CHECKPOINT_FOLDERS[kind]

    def replay(self, policy: int, shard: int | None = None) -> Path:
        """Return the file in which the replay of a policy, or a shard of it, is kept."""
        return self.path / (f"{REPLAY}{policy}" if shard is None else f"{REPLAY}{policy}.{shard}")

    def replays(self) -> list[Path]:
        """Return the files in which replays are kept, sorted; those that were put aside are none of them."""
        pattern = re.compile(rf"{REPLAY}[0-9]+(\.[0-9]+)?")
        return sorted(path for path in self.path.glob(f"{REPLAY}*") if pattern.fullmatch(path.name))

    def checkpoint_folders(self) -> list[Path]:
        """Return everything that is named like the checkpoints of a policy, sorted: checks leave nothing out."""
        return sorted(self.path.glob(f"{CHECKPOINTS}*"))

    def policies(self) -> list[int]:
        """Return the numbers of the policies that have checkpoints, sorted."""
        pattern = re.compile(rf"{CHECKPOINTS}(0|[1-9][0-9]*)")
        return sorted(int(match[1]) for path in self.checkpoint_folders() if (match := pattern.fullmatch(path.name)))

    def read_config(self) -> dict[str, object]:
        """Return the content of `config`; {} if there is none, as before the first start.

        Raises:
            UsageError: it is damaged, not readable or no plain file.
        """
        return read_own_mapping(self.config, CONFIG_BYTES) if os.path.lexists(self.config) else {}

    def read_status(self) -> dict[str, Any]:
        """Return the content of `status`; {} if there is none that can be read."""
        try:
            return read_own_mapping(self.status, STATUS_BYTES)
        except UsageError:
            return {}


# Opening: folders by their names in the folder above, files by their names in their folder.


def root_of(folder: Path) -> Path:
    """Return the folder of the run in which a folder lies, which may be that itself; its layout tells by the names."""
    inner = _INNER_FOLDER.search(text := os.fspath(folder))
    if inner is None:
        return folder
    return Path(text[: inner.start()] or ("/" if text.startswith("/") else "."))


@contextlib.contextmanager
def own_folder(path: Path, *, make: bool = False, to_read: bool = False) -> Iterator[int]:
    """While entered, a folder of a run is open as a descriptor, for the `dir_fd` of functions of `os`.

    Args:
        path: of the folder of a run, or of one inside.
        make: it and all above it are made where they are missing, and their names are on disk then.
        to_read: nothing is changed in it, and the folder of the run itself may be a link.

    Raises:
        OSError: it cannot be opened or made, or is a link, or lies behind one.
    """
    root = root_of(path)
    inner = path.relative_to(root).parts
    if not to_read and root.name not in ("", ".."):
        inner, root = (root.name, *inner), root.parent
    if make:
        make_durable(root)
    with inner_folder(root, inner, make=make) as descriptor:
        yield descriptor


@contextlib.contextmanager
def inner_folder(root: Path, names: Iterable[str], *, make: bool = False) -> Iterator[int]:
    """While entered, the last of folders inside one another is open as a descriptor; only the root may be a link.

    Raises:
        OSError: see `own_folder`.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names:
            above, descriptor = descriptor, enter(descriptor, name, make=make)
            os.close(above)
        yield descriptor
    finally:
        os.close(descriptor)


def enter(above: int, name: str, *, make: bool = False) -> int:
    """Return a descriptor of a folder by its name in another one, which is open; see `own_folder`.

    Raises:
        OSError: it cannot be opened or made, or is a link.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=above)
            os.fsync(above)
    try:
        return os.open(name, flags, dir_fd=above)
    except OSError as error:
        raise _explained(error, above, name) from None


def _explained(error: OSError, folder: int, name: str) -> OSError:
    """Return the error of opening something, which says so where that is a link: the kernel has two words for it."""
    with contextlib.suppress(OSError):
        if stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode):
            return OSError(errno.ELOOP, f"{shown(name)} is a link, and no link is followed here")
    return error


def open_own(path: Path) -> BinaryIO:
    """Open a file that a run has written, for reading; a pipe is not waited on.

    Raises:
        OSError: it cannot be read, is no plain file, or lies behind a link.
    """
    with own_folder(path.parent, to_read=True) as folder:
        return open_in(folder, path.name)


def open_in(folder: int, name: str) -> BinaryIO:
    """Open a file by its name in a folder that is open; see `open_own`."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(_open_plain(folder, name, flags), "rb")


def append_to_own(path: Path, *, mode: int = 0o644, make: bool = False) -> int:
    """Return a descriptor of a file of a run that is read and written in place, always at its end; made if missing.

    Args:
        path: of the file.
        mode: of a new file.
        make: its folder is made if missing, too.

    Raises:
        OSError: it cannot be written, is no plain file, has a second name (a hard link), or is or lies behind a link.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with own_folder(path.parent, make=make) as folder:
        return _open_plain(folder, path.name, flags, mode)


def update_own(path: Path, *, mode: int = 0o644) -> int:
    """Open a file of a run to be read and written anywhere in it; make it if it is not there.

    Raises:
        OSError: it cannot be opened, is no plain file, or has another name.
    """
    with own_folder(path.parent) as folder:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return _open_plain(folder, path.name, flags, mode)


def new_own(path: Path, *, make: bool = False) -> int:
    """Return a descriptor of a new file of a run, to be written; see `append_to_own`.

    Raises:
        OSError: there is something of that name, or nothing can be made there.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with own_folder(path.parent, make=make) as folder:
        return os.open(path.name, flags, 0o644, dir_fd=folder)


def _open_plain(folder: int, name: str, flags: int, mode: int = 0o644) -> int:
    try:
        descriptor = os.open(name, flags, mode, dir_fd=folder)
    except OSError as error:
        raise _explained(error, folder, name) from None
    found = os.fstat(descriptor)
    writes = flags & os.O_ACCMODE != os.O_RDONLY
    if stat.S_ISREG(found.st_mode) and not (writes and found.st_nlink > 1):
        return descriptor
    os.close(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, f"{shown(name)} is no plain file")
    raise OSError(errno.EMLINK, f"{shown(name)} has {found.st_nlink} names, and the others may not be of this run")


def is_named(descriptor: int, path: Path) -> bool:
    """Whether a file that is open has this path, and has not been removed, replaced or renamed since."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False
    except OSError:  # it cannot be said, and nothing can be done
        return True


def replace_own(path: Path, content: bytes | Iterable[bytes], *, durable: bool = True, make: bool = False) -> None:
    """Replace a file of a run in one step; a crash at any point leaves the content of before or the new one.

    Args:
        path: of the file.
        content: all of it, whole or in pieces.
        durable: wait until it is on disk; without, a power failure (no other crash) may leave an empty file.
        make: its folder is made if missing.

    Raises:
        OSError: the folder is missing, not writable or full, or lies behind a link.
    """
    temporary = f".{path.name}-{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with own_folder(path.parent, make=make) as folder:
        with contextlib.suppress(FileNotFoundError):  # of a process that had this number and was killed
            os.unlink(temporary, dir_fd=folder)
        try:
            with os.fdopen(os.open(temporary, flags, 0o644, dir_fd=folder), "wb") as file:
                file.writelines((content,) if isinstance(content, bytes) else content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            raise
        if durable:
            os.fsync(folder)  # without this a power failure may bring the old directory entry back


def write_json_atomic(path: Path, value: object, *, durable: bool = True, indent: int | None = 2) -> None:
    """Replace a JSON file of a run in one step, see `replace_own`.

    Args:
        path: of the file.
        value: of JSON.
        durable: wait until it is on disk.
        indent: spaces per level; None: all in one line.

    Raises:
        OSError: as `replace_own`.
        TypeError, ValueError: the value is not JSON.
    """
    text = json.dumps(value, indent=indent, allow_nan=False) + "\n"
    replace_own(path, text.encode(), durable=durable)


def append_json_line(path: Path, value: object) -> None:
    """Append one line of JSON by a single write, so that no other writer's line is split by it.

    Raises:
        OSError: the file cannot be opened or the disk is full.
        TypeError, ValueError: the value is not JSON.
    """
    line = json.dumps(value, allow_nan=False) + "\n"
    descriptor = append_to_own(path)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read_own_mapping(
    path: Path,
    most_bytes: int = OWN_BYTES,
    opened: Callable[[Path], BinaryIO] = open_own,
    parse: Callable[[str], object] = json.loads,
) -> dict[str, object]:
    """Return the mapping in a small file of a run.

    Args:
        path: path of the file.
        most_bytes: largest size.
        opened: function that opens the file.
        parse: function that reads the text, JSON by default.

    Raises:
        UsageError: the file is missing, unreadable, too large, damaged or no mapping of names.
    """
    try:
        with opened(path) as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    return parse_mapping(content, str(path), most_bytes, parse)


def parse_mapping(
    content: bytes, name: str, most_bytes: int, parse: Callable[[str], object] = json.loads
) -> dict[str, Any]:
    """Return the mapping in the content of a small file, see `read_own_mapping`.

    Args:
        content: bytes of the file.
        name: name of the file, for messages.
        most_bytes: largest size.
        parse: function that reads the text.

    Raises:
        UsageError: the content is too large, damaged or no mapping of names.
    """
    try:
        if len(content) > most_bytes:
            raise ValueError(f"it is larger than {most_bytes >> 20} MiB")
        value = parse(content.decode())
        refuse_deep(value)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is damaged: {error}") from None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"{name} must hold a mapping of flags to values")
    return value


def names_in_own(path: Path) -> list[str]:
    """Return the names of all that lies in a folder of a run, sorted; none where it is missing, or behind a link."""
    try:
        with own_folder(path) as folder:
            return sorted(os.listdir(folder))
    except OSError:
        return []


def remove_own(path: Path) -> None:
    """Remove a file of a run, or a link itself, if it is there.

    Raises:
        OSError: it cannot be removed, or lies behind a link.
    """
    with contextlib.suppress(FileNotFoundError), own_folder(path.parent) as folder:
        os.unlink(path.name, dir_fd=folder)


def put_aside_own(path: Path) -> str:
    """Rename a file of a run to its name with `.old-N`, N the first that nothing has; return the new name.

    Raises:
        OSError: it cannot be renamed, or lies behind a link.
    """
    with own_folder(path.parent) as folder:
        taken, number = set(os.listdir(folder)), 1
        while (name := f"{path.name}.old-{number}") in taken:
            number += 1
        os.rename(path.name, name, src_dir_fd=folder, dst_dir_fd=folder)
    return name


def rename_own(path: Path, name: str) -> None:
    """Give something in a folder of a run another name there.

    Raises:
        OSError: it cannot be renamed, or lies behind a link.
    """
    with own_folder(path.parent) as folder:
        os.replace(path.name, name, src_dir_fd=folder, dst_dir_fd=folder)
