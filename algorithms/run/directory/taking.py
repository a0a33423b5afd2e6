"""A start takes the folder of a run. An older run there is resumed, set aside or removed; links are refused."""

import contextlib
import glob
import itertools
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from appo.algorithms.run.folder import folders, numbered
from appo.utils.directories import make_durable, sync_directory
from appo.utils.errors import AppoError, UsageError
from appo.utils.lock import RunLock
from appo.utils.log_files import tail
from appo.utils.run_folder import RunFolder, own_folder
from appo.utils.values import shown

log = logging.getLogger(__name__)


@contextlib.contextmanager
def lock_run_folder(
    directory: Path, behavior: str, *, unnamed: bool = False, begun: Callable[[], bool] = lambda: True
) -> Iterator[RunLock]:
    """Hold the lock of a run's folder while entered; the folder is writable and belongs to no other run.

    Args:
        directory: directory of the run.
        behavior: value of `--restart_behavior`, for an existing run.
        unnamed: whether the user left the run without a name; a number that another start took is replaced by the next.
        begun: returns at the end whether training has begun. If not, an older run comes back, and a folder made here is
            removed, unless the folder contains an incident of an environment.

    Raises:
        DirectoryInUse: another process trains in the folder.
        UsageError: the folder cannot be made or written, contains links, or the older folder is no run.
        ResourceError: the file system has no locks.
    """
    with old_run_out_of_the_way(directory, behavior, begun):
        parents = (directory, *directory.parents)
        made = list(itertools.takewhile(lambda path: not os.path.lexists(path), parents))  # the innermost first
        try:
            if unnamed:
                directory = _make_unnamed(directory)
            run = RunFolder(directory)
            with own_folder(run.logs, make=True):
                pass
        except OSError as error:
            raise UsageError(f"cannot write the run to {shown(str(directory))}: {error.strerror}") from None
        refuse_unwritable(directory)
        refuse_links(directory)
        with RunLock(run.lock) as lock:
            try:
                yield lock
            finally:
                if (made or unnamed) and not (begun() or any(run.incidents.glob("*"))):
                    _remove_made([directory, *made[1:]])


def _make_unnamed(directory: Path) -> Path:
    """Make the folder of an unnamed run, under the next number if another start was quicker (OSError)."""
    make_durable(directory.parent)
    stem = directory.name.rpartition("_")[0]
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory)
            sync_directory(directory.parent)
            return directory
        directory = directory.with_name(numbered(directory.parent, stem))


def _remove_made(made: Sequence[Path]) -> None:
    """Remove the folder of a run that never began, after logging the ends of its logs, and empty folders made above."""
    directory, *above = made
    _say_last_lines(directory)
    # Out of the way in one step: a folder that is half removed would look like a run.
    aside = directory.with_name(f".removed-{directory.name}-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        os.rename(directory, aside)
        shutil.rmtree(aside, ignore_errors=True)
    for folder in above:
        with contextlib.suppress(OSError):  # another run is in it by now
            os.rmdir(folder)


def _say_last_lines(directory: Path) -> None:
    for path in sorted(RunFolder(directory).logs.glob("*.log")):
        if lines := tail(path, 20):
            log.info("%s had said, before its folder was removed:\n%s", path.stem, "\n".join(lines))


@contextlib.contextmanager
def old_run_out_of_the_way(directory: Path, behavior: str, begun: Callable[[], bool]) -> Iterator[None]:
    """Set the folder of an existing run aside, if asked; hold its lock while entered.

    The folder comes back unless another run has begun to train in its place. `remove_old` removes overwritten runs.

    Raises:
        DirectoryInUse: another process trains in the folder.
        UsageError: the folder is no run, or cannot be renamed.
    """
    if behavior == "resume" or not os.path.lexists(directory):
        yield
        return
    run = RunFolder(directory)
    if not all(map(os.path.isfile, (run.status, run.lock))) or directory.is_symlink():
        raise UsageError(
            f"--restart_behavior={behavior}: {shown(str(directory))} is not the folder of a run; not touched"
        )
    with RunLock(run.lock):
        # A crash while files are removed leaves no run that looks whole; see `remove_old`.
        aside = directory.with_name(f".removed-{directory.name}-{secrets.token_hex(4)}")
        if behavior == "restart":
            numbered_names = (directory.with_name(f"{directory.name}.bak{number}") for number in itertools.count(1))
            aside = next(path for path in numbered_names if not os.path.lexists(path))
        try:
            os.rename(directory, aside)
        except OSError as error:
            raise UsageError(f"cannot rename {shown(str(directory))}: {error.strerror}") from None
        if behavior == "restart":
            log.info("the old run is %s now", aside)
        try:
            yield
        finally:
            if not begun() and os.path.lexists(aside):
                _bring_back(aside, directory)


def _bring_back(aside: Path, directory: Path) -> None:
    """Move the older run back, with the incidents of the start that failed, unless another run has begun there."""
    is_there = os.path.lexists(directory)
    try:
        with RunLock(RunFolder(directory).lock) if is_there else contextlib.nullcontext():
            if is_there:
                _say_last_lines(directory)
            with (
                contextlib.suppress(OSError),  # there are none
                own_folder(RunFolder(directory).incidents) as new,
                own_folder(RunFolder(aside).incidents, make=True) as old,
            ):
                for name in os.listdir(new):
                    os.rename(name, name, src_dir_fd=new, dst_dir_fd=old)
            shutil.rmtree(directory, ignore_errors=True)
            os.rename(aside, directory)
    except (OSError, AppoError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        log.warning("the old run is %s now, and cannot be renamed back: %s", aside, reason)
    else:
        log.info("no new run has begun: %s is as it was", directory)


def remove_old(directory: Path) -> None:
    """Remove older runs that `--restart_behavior=overwrite` has set aside, and remains of crashes."""
    for aside in directory.parent.glob(f".removed-{glob.escape(directory.name)}-{'[0-9a-f]' * 8}"):
        shutil.rmtree(aside, ignore_errors=True)
        log.info("the old run in %s is removed", directory)


def refuse_unwritable(directory: Path) -> None:
    """Refuse a folder with a file or folder that cannot be read or written (UsageError), before training."""
    run = RunFolder(directory)
    folders = [directory, run.logs, *run.checkpoint_folders()]
    files = [path for folder in folders[:2] for path in folder.glob("*") if os.path.isfile(path)]
    needs = [*((folder, os.R_OK | os.W_OK | os.X_OK) for folder in folders), *((f, os.R_OK | os.W_OK) for f in files)]
    for path, needed in needs:
        if not os.access(path, needed):
            raise UsageError(f"cannot write the run to {shown(str(directory))}: no permission for {shown(str(path))}")


def refuse_links(directory: Path) -> None:
    """Refuse a run's folder that contains, at any depth, something other than files and folders (UsageError).

    Links in a run of foreign origin can lead anywhere. `utils.run_folder` follows no link when it opens a file; here
    the run is refused before the start.
    """
    if directory.is_symlink():
        raise UsageError(f"{shown(str(directory))} is a link: name the folder of the run itself, where it lies")
    run = RunFolder(directory)
    in_place = {run.lock, run.history, run.metrics, run.results}
    for path, found in _walk(directory):
        name = shown(str(path))
        if stat.S_ISDIR(found.st_mode):
            if path in in_place:
                raise UsageError(f"{name} is a folder, where a run has a file")
        elif not stat.S_ISREG(found.st_mode):
            kind = "a link" if stat.S_ISLNK(found.st_mode) else "neither file nor folder"
            raise UsageError(f"{name} is {kind}: what a run writes must lie in its own folder")
        elif (path in in_place or path.parent == run.logs) and found.st_nlink > 1:
            raise UsageError(
                f"{name} has a second name (a hard link), which may be that of another file: give a copy this name"
            )


def _walk(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield every path below a folder with its stat, without following links (UsageError: an unreadable folder)."""
    waiting = [directory]
    while waiting:
        folder = waiting.pop()
        for name in folders(folder):
            path = folder / name
            with contextlib.suppress(FileNotFoundError):  # another process trains, or evaluates
                found = os.lstat(path)
                yield path, found
                if stat.S_ISDIR(found.st_mode):
                    waiting.append(path)
