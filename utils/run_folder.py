"""The folder of a run: all names in the folder, and the functions that open its files.

Names inside checkpoints, incidents and videos belong to the modules that write the files.

A run may come from a stranger, with links to any place. So each folder of a run is opened by name in the folder above,
and no link is followed: not for writing, removing or reading. A file that is written in place must not have a second
name, which may belong to another program. Links above the run's folder are the user's own, and followed.
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

from appo.utils.directories import closing, make_durable
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
RANK = "rank_"
"""Begin of the name of the folder, among the logs, with the run of a further rank, before the number of the rank."""
INCIDENTS = "incidents"
SUMMARIES = ".summary"
EVALUATION = "eval"
RESULTS_FILE = "results.jsonl"
VIDEOS = "videos"
PLOTS = CURVE_FILE.partition("/")[0]
CODE = "code"
CODE_STARTS_FILE = "starts.jsonl"
CHECKPOINTS = "checkpoint_p"
"""Begin of the name of the folder with a policy's checkpoints, before the number of the policy."""
CORRUPT = "corrupt"
"""Name of the folder for checkpoints that do not verify, beside the checkpoints of each kind."""
REPLAY = "replay_p"
"""Begin of the name of the file with a policy's replay, before the number of the policy."""
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
"""Largest file of JSON in a run."""
CONFIG_BYTES, STATUS_BYTES = MIB, 3 * MIB
"""Largest flags and largest status of a run. Parsed JSON takes up to 25 times the size of the text."""
_KINDS = "|".join(name for name in CHECKPOINT_FOLDERS.values() if name)
_INNER_FOLDER = re.compile(
    rf"(?:^|/)(?:{LOGS}|{CODE}|{INCIDENTS}|{PLOTS}|{EVALUATION}(?:/{VIDEOS})?|(?:{EVALUATION}/)?{re.escape(SUMMARIES)}(?:/p\d+)?"
    rf"|{CHECKPOINTS}\d+(?:/(?:{_KINDS}))?(?:/{CORRUPT})?)$"
)
"""End of the path of every folder inside a run's folder."""
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that open a new file."""


class RunFolder:
    """Paths in the folder of a run; only methods access the disk.

    Attributes:
        config: file of the newest start's flags and measurements.
        history: file of all starts' flags, a line each.
        status: file of the run's state, refreshed during training.
        metrics: file of a record per policy and report, a line each.
        page: README of the run, written when training ends.
        curve: picture of the learning curve, with a link on the page.
        lineage, lineage_picture: file and picture of all decisions about the policies of a population.
        lock: file locked by the process that trains.
        logs: folder of a log per process.
        incidents: folder of the steps that led to failures.
        evaluation: folder of the results of evaluations during or after training.
        results: file of a record per evaluation, a line each.
        videos: folder of filmed evaluations.
        code: folder of the differences between the user's code and its commits.
        code_starts: file of commits and differences per start with a change, a line each.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.history = path / CONFIG_FILE, path / HISTORY_FILE
        self.status, self.metrics = path / STATUS_FILE, path / METRICS_FILE
        self.page, self.curve = path / PAGE_FILE, path / CURVE_FILE
        self.lineage, self.lineage_picture = path / LINEAGE_FILE, path / LINEAGE_PICTURE
        self.lock, self.logs, self.incidents = path / LOCK_FILE, path / LOGS, path / INCIDENTS
        self.evaluation, self.code = path / EVALUATION, path / CODE
        self.results, self.videos = self.evaluation / RESULTS_FILE, self.evaluation / VIDEOS
        self.code_starts = self.code / CODE_STARTS_FILE

    def log(self, name: str) -> Path:
        """Return the absolute path of a process's log: the process may change the working directory."""
        return (self.logs / f"{name}.log").absolute()

    def rank(self, number: int) -> Path:
        """Return the folder of a further rank: a run of its own, without checkpoints."""
        return self.logs / f"{RANK}{number}"

    def summaries(self, policy: int) -> Path:
        """Return the folder of TensorBoard's files for a policy's training."""
        return self.path / SUMMARIES / f"p{policy}"

    def evaluation_summaries(self, policy: int) -> Path:
        """Return the folder of TensorBoard's files for a policy's evaluations."""
        return self.evaluation / SUMMARIES / f"p{policy}"

    def checkpoints(self, policy: int, kind: str = "latest") -> Path:
        """Return the folder of a policy's checkpoints of a kind, see `CHECKPOINT_FOLDERS`."""
        return self.path / f"{CHECKPOINTS}{policy}" / CHECKPOINT_FOLDERS[kind]

    def replay(self, policy: int, shard: int | None = None) -> Path:
        """Return the file of a policy's replay, or of a shard of the replay."""
        return self.path / (f"{REPLAY}{policy}" if shard is None else f"{REPLAY}{policy}.{shard}")

    def replays(self) -> list[Path]:
        """Return the files of replays, sorted, without files that were put aside."""
        pattern = rf"{REPLAY}[0-9]+(\.[0-9]+)?"
        return sorted(path for path in self.path.glob(f"{REPLAY}*") if re.fullmatch(pattern, path.name))

    def checkpoint_folders(self) -> list[Path]:
        """Return everything named like a policy's checkpoints, sorted, for checks that cover all."""
        return sorted(self.path.glob(f"{CHECKPOINTS}*"))

    def policies(self) -> list[int]:
        """Return the numbers of the policies with checkpoints, sorted."""
        names = (path.name.removeprefix(CHECKPOINTS) for path in self.checkpoint_folders())
        return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))

    def read_config(self) -> dict[str, object]:
        """Return the content of `config`; {} without a file, before the first start.

        Raises:
            UsageError: the file is damaged, unreadable or no plain file.
        """
        return read_own_mapping(self.config, CONFIG_BYTES) if os.path.lexists(self.config) else {}

    def read_status(self) -> dict[str, Any]:
        """Return the content of `status`; {} without a readable file."""
        try:
            return read_own_mapping(self.status, STATUS_BYTES)
        except UsageError:
            return {}


def root_of(folder: Path) -> Path:
    """Return the run's folder that contains a folder, or is the folder itself, by the names of the layout."""
    inner = _INNER_FOLDER.search(text := os.fspath(folder))
    return Path(text[: inner.start()] or ("/" if text.startswith("/") else ".")) if inner else folder


@contextlib.contextmanager
def own_folder(path: Path, *, make: bool = False, to_read: bool = False) -> Iterator[int]:
    """While entered, a folder of a run is open as a descriptor, for the `dir_fd` of functions of `os`.

    Args:
        path: folder of a run, or a folder inside.
        make: make the folder and all folders above durably if missing.
        to_read: the caller changes nothing, and the run's folder may be a link.

    Raises:
        OSError: the folder cannot be opened or made, or is or lies behind a link.
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
    """While entered, the last of nested folders is open as a descriptor; only the root may be a link.

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
    """Return a descriptor of a folder by name in an open folder.

    Raises:
        OSError: the folder cannot be opened or made, or is a link.
    """
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=above)
            os.fsync(above)
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    except OSError as error:
        raise _explained(error, above, name) from None


def _explained(error: OSError, folder: int, name: str) -> OSError:
    """Return the error, with a plain text if the name is a link: the kernel has two errors for links."""
    with contextlib.suppress(OSError):
        if stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode):
            return OSError(errno.ELOOP, f"{shown(name)} is a link, and no link is followed here")
    return error


def open_own(path: Path) -> BinaryIO:
    """Open a file of a run for reading, without waiting for the writer of a pipe.

    Raises:
        OSError: the file cannot be read, is no plain file, or is or lies behind a link.
    """
    with own_folder(path.parent, to_read=True) as folder:
        return open_in(folder, path.name)


def open_in(folder: int, name: str) -> BinaryIO:
    """Open a file by name in an open folder; see `open_own`."""
    return os.fdopen(_open_plain(folder, name, os.O_RDONLY), "rb")


def append_to_own(path: Path, *, mode: int = 0o644, make: bool = False) -> int:
    """Return a descriptor of a file of a run, to read and to append in place; the file is made if missing.

    Raises:
        OSError: the file cannot be written, is no plain file, has a second name (a hard link), or is or lies behind a
            link.
    """
    with own_folder(path.parent, make=make) as folder:
        return _open_plain(folder, path.name, os.O_RDWR | os.O_APPEND | os.O_CREAT, mode)


def update_own(path: Path) -> int:
    """Return a descriptor of a file of a run, to read and write in place; the file is made if missing.

    Raises:
        OSError: see `append_to_own`.
    """
    with own_folder(path.parent) as folder:
        return _open_plain(folder, path.name, os.O_RDWR | os.O_CREAT)


def new_own(path: Path) -> int:
    """Return a descriptor of a new file of a run, to write (OSError: the name is taken, or the file cannot be made)."""
    with own_folder(path.parent, make=True) as folder:
        return os.open(path.name, NEW, 0o644, dir_fd=folder)


def _open_plain(folder: int, name: str, flags: int, mode: int = 0o644) -> int:
    try:
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=folder)
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
    """Return whether an open file still has its path: not removed, replaced or renamed."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False
    except OSError:  # unknown, and nothing can be done
        return True


def replace_own(path: Path, content: bytes | Iterable[bytes], *, durable: bool = True, make: bool = False) -> None:
    """Replace a file of a run in one step; a crash at any point leaves the old or the new content.

    Args:
        path: path of the file.
        content: new content, whole or in pieces.
        durable: wait for the disk; otherwise a power failure (no other crash) may leave an empty file.
        make: make the folder if missing.

    Raises:
        OSError: the folder is missing, not writable or full, or lies behind a link.
    """
    temporary = f".{path.name}-{os.getpid()}"
    with own_folder(path.parent, make=make) as folder:
        with contextlib.suppress(FileNotFoundError):  # of a killed process with the same number
            os.unlink(temporary, dir_fd=folder)
        try:
            with os.fdopen(os.open(temporary, NEW, 0o644, dir_fd=folder), "wb") as file:
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
            os.fsync(folder)  # otherwise a power failure may restore the old entry


def write_json_atomic(path: Path, value: object, *, durable: bool = True, indent: int | None = 2) -> None:
    """Replace a JSON file of a run in one step; `durable` waits for the disk, see `replace_own`.

    Raises:
        OSError: see `replace_own`.
        TypeError, ValueError: the value is not JSON.
    """
    replace_own(path, f"{json.dumps(value, indent=indent, allow_nan=False)}\n".encode(), durable=durable)


def append_json_line(path: Path, value: object) -> None:
    """Append one line of JSON by a single write, which splits no line of other writers.

    Raises:
        OSError: the file cannot be opened or the disk is full.
        TypeError, ValueError: the value is not JSON.
    """
    line = json.dumps(value, allow_nan=False) + "\n"
    with closing(append_to_own(path)) as descriptor:
        os.write(descriptor, line.encode())


def read_own_mapping(
    path: Path, most_bytes: int = OWN_BYTES, opened: Callable[[Path], BinaryIO] = open_own
) -> dict[str, object]:
    """Return the mapping in a small file of JSON in a run.

    Raises:
        UsageError: the file is missing, unreadable, too large, damaged or no mapping of names.
    """
    try:
        with opened(path) as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    return parse_mapping(content, str(path), most_bytes)


def parse_mapping(
    content: bytes, name: str, most_bytes: int, parse: Callable[[str], object] = json.loads
) -> dict[str, Any]:
    """Return the mapping in the content of a small file, see `read_own_mapping`.

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
    """Return the sorted names in a folder of a run; [] if the folder is missing or behind a link."""
    try:
        with own_folder(path) as folder:
            return sorted(os.listdir(folder))
    except OSError:
        return []


def remove_own(path: Path) -> None:
    """Remove a file of a run, or a link itself, if present.

    Raises:
        OSError: the file cannot be removed, or lies behind a link.
    """
    with contextlib.suppress(FileNotFoundError), own_folder(path.parent) as folder:
        os.unlink(path.name, dir_fd=folder)


def put_aside_own(path: Path) -> str:
    """Append `.old-N` to the name of a file of a run, with the first free N; return the new name.

    Raises:
        OSError: the file cannot be renamed, or lies behind a link.
    """
    with own_folder(path.parent) as folder:
        taken, number = set(os.listdir(folder)), 1
        while (name := f"{path.name}.old-{number}") in taken:
            number += 1
        os.rename(path.name, name, src_dir_fd=folder, dst_dir_fd=folder)
    return name


def rename_own(path: Path, name: str) -> None:
    """Rename a file or folder within a folder of a run (OSError: the file cannot be renamed, or lies behind a link)."""
    with own_folder(path.parent) as folder:
        os.replace(path.name, name, src_dir_fd=folder, dst_dir_fd=folder)
