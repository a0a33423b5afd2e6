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
from appo.utils.errors import UsageError
from appo.utils.files import make_durable, sync_directory
from appo.utils.lock import RunLock
from appo.utils.logging import tail
from appo.utils.run_folder import (
    RunFolder,
    own_folder,
)
from appo.utils.values import shown

log = logging.getLogger(__name__)

LAST_LINES = 20
"""Lines of each log that are said when the folder of a run goes which has never begun."""


@contextlib.contextmanager
def lock_run_folder(
    directory: Path, behavior: str, *, unnamed: bool = False, begun: Callable[[], bool] = lambda: True
) -> Iterator[RunLock]:
    """Keep the folder of a run, in which this lock lies, while entered: it can be written and is nobody else's.

    Args:
        directory: of the run.
        behavior: what becomes of a run that is there, as the flag has it.
        unnamed: nobody has named the run: where another one has taken the number in its name meanwhile, it gets the
            next.
        begun: asked at the end, whether training has begun. Otherwise an old run comes back, and a folder that was made
            here goes, unless it has what led an environment to fail.

    Raises:
        DirectoryInUse: another process trains in it.
        UsageError: it cannot be made or written, holds links, or what is to be set aside is no run.
        ResourceError: the file system has no locks.
    """
    with old_run_out_of_the_way(directory, behavior, begun):
        made = _missing_folders(directory)
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


def _missing_folders(directory: Path) -> list[Path]:
    """Return the folder of a run and those above it that are not there yet, the innermost first."""
    return list(itertools.takewhile(lambda path: not os.path.lexists(path), (directory, *directory.parents)))


def _make_unnamed(directory: Path) -> Path:
    """Make the folder of a run that nobody has named, under the next number if another start was quicker (OSError)."""
    make_durable(directory.parent)
    stem = directory.name.rpartition("_")[0]
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory)
            sync_directory(directory.parent)
            return directory
        directory = directory.with_name(numbered(directory.parent, stem))


def _remove_made(made: Sequence[Path]) -> None:
    """Remove the folder of a run that has never begun, and those above it, which were made for it, if they are empty.

    What its logs say is said here, as it may be why there is no run.
    """
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
    """Log the last lines in the logs of a run whose folder is to go."""
    for path in sorted(RunFolder(directory).logs.glob("*.log")):
        if lines := tail(path, LAST_LINES):
            log.info("%s had said, before its folder was removed:\n%s", path.stem, "\n".join(lines))


@contextlib.contextmanager
def old_run_out_of_the_way(directory: Path, behavior: str, begun: Callable[[], bool]) -> Iterator[None]:
    """Set the folder of an existing run aside, if that is asked for; its lock is held while entered.

    It comes back if no other run has begun to train in its place. `remove_old` removes what is to be overwritten.

    Raises:
        DirectoryInUse: another process trains in it.
        UsageError: it is no run's folder, or cannot be renamed.
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
        hidden = directory.with_name(f".removed-{directory.name}-{secrets.token_hex(4)}")
        aside = _unused_name(directory) if behavior == "restart" else hidden
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
    """Give the old run its place again, with the incidents of the environments of the start that failed."""
    if os.path.lexists(directory):
        _say_last_lines(directory)
    with (
        contextlib.suppress(OSError),  # there are none
        own_folder(RunFolder(directory).incidents) as new,
        own_folder(RunFolder(aside).incidents, make=True) as old,
    ):
        for name in os.listdir(new):
            os.rename(name, name, src_dir_fd=new, dst_dir_fd=old)
    shutil.rmtree(directory, ignore_errors=True)
    try:
        os.rename(aside, directory)
    except OSError as error:
        log.warning("the old run is %s now, and cannot be renamed back: %s", aside, error.strerror)
    else:
        log.info("no new run has begun: %s is as it was", directory)


def remove_old(directory: Path) -> None:
    """Remove old runs that `--restart_behavior=overwrite` has set aside, and those that a crash has left over."""
    for aside in directory.parent.glob(f".removed-{glob.escape(directory.name)}-{'[0-9a-f]' * 8}"):
        shutil.rmtree(aside, ignore_errors=True)
        log.info("the old run in %s is removed", directory)


def _unused_name(directory: Path) -> Path:
    number = 1
    while os.path.lexists(aside := directory.with_name(f"{directory.name}.bak{number}")):
        number += 1
    return aside


def refuse_unwritable(directory: Path) -> None:
    """Refuse to train in a folder in which something cannot be read or written (UsageError): it is found out later."""
    run = RunFolder(directory)
    folders = [directory, run.logs, *run.checkpoint_folders()]
    files = [path for folder in folders[:2] for path in folder.glob("*") if os.path.isfile(path)]
    needs = [*((folder, os.R_OK | os.W_OK | os.X_OK) for folder in folders), *((f, os.R_OK | os.W_OK) for f in files)]
    for path, needed in needs:
        if not os.access(path, needed):
            raise UsageError(f"cannot write the run to {shown(str(directory))}: no permission for {shown(str(path))}")


def refuse_links(directory: Path) -> None:
    """Refuse to write into the folder of a run in which, at any depth, something is no file or folder (UsageError).

    The links of a run that came from elsewhere can lead anywhere, and what is written or pruned there is not ours. Each
    file is opened without following them anyway, see `utils.run_folder`; here it is said before anything begins.
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
    """Yield all that lies below a folder, with its kind; no link is followed, files that go away are left out.

    Raises:
        UsageError: a folder cannot be read.
    """
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
