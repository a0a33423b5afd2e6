"""The folders of runs: names and places, search, saved flags and the journal of starts, lock, setting aside."""

import contextlib
import glob
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from appo.envs.given import unnumbered
from appo.utils.checkpoint_files import listed
from appo.utils.command_line import complain
from appo.utils.directories import make_durable, sync_directory
from appo.utils.errors import ResourceError, UsageError
from appo.utils.lock import RunLock
from appo.utils.log_files import tail
from appo.utils.metrics import BLOCK_BYTES, LONGEST_LINE, READ_BYTES
from appo.utils.run_folder import (
    CHECKPOINT_FOLDERS,
    CONFIG_FILE,
    STATUS_FILE,
    RunFolder,
    append_json_line,
    open_own,
    own_folder,
    write_json_atomic,
)
from appo.utils.values import is_number, nearest, shown

log = logging.getLogger(__name__)

MEASURED = "measured"
"""What config.json holds beside flags: what a run's first start has measured, see `tuning.py`."""

LAST_LINES = 20
"""Lines of each log that are said when the folder of a run goes which has never begun."""

MARK = "mark"
"""The other thing beside flags: that the run is the user's own, see `trust.py`."""

DEEPEST = 4
"""Folders inside one another below that of a group, in which its runs are looked for."""

MOST_NAMED = 20
"""Runs of a group that a message lists."""

SET_ASIDE = re.compile(r"(.+)\.bak\d+")
"""Name of an old run that a start has set aside, see `_unused_name`."""

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


def check_name(flag: str, name: str) -> None:
    """Refuse a name that could leave its folder, hide in it or surprise a shell (UsageError)."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"--{flag}={shown(name)} is no name for a folder: use at most 200 of A-Z a-z 0-9 . _ - and no leading dot"
        )


def check_folders(train_dir: str, experiments_root: str, experiment: str) -> None:
    """Refuse names that do not say where a run is (UsageError); an empty root or experiment names none."""
    if not train_dir:
        raise UsageError("--train_dir must not be empty")
    for part in experiments_root.split("/") if experiments_root else ():
        check_name("experiments_root", part)
    if experiment:
        check_name("experiment", experiment)


def check_writable(directory: Path) -> None:
    """Refuse a run directory that cannot be created or written (UsageError), without creating anything."""
    try:
        existing = directory.absolute()
        while not os.path.lexists(existing):
            existing = existing.parent
        usable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot use {shown(str(directory))}: {error}") from None
    if not usable:
        reason = "not writable" if existing.is_dir() else "not a folder"
        raise UsageError(f"cannot write the run to {shown(str(directory))}: {shown(str(existing))} is {reason}")


def new_name(group: Path, env: str) -> str:
    """Return the name of a new run: the env's own name and the first number after those in use."""
    return _numbered(
        group, re.sub(r"[^A-Za-z0-9._-]", "_", re.split(r"[:/]", unnumbered(env))[-1])[:190].lstrip(".") or "run"
    )


def _numbered(group: Path, stem: str) -> str:
    pattern = re.compile(re.escape(stem) + r"_(\d{1,9})")
    numbers = [int(match[1]) for name in folders(group) if (match := pattern.fullmatch(name))]
    return f"{stem}_{max(numbers, default=0) + 1}"


def folders(group: Path) -> list[str]:
    """Return all names in a folder, sorted; none where it is missing (UsageError: it cannot be read)."""
    try:
        return sorted(entry.name for entry in os.scandir(group))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"cannot list {shown(str(group))}: {error.strerror}") from None


def saved_flags(directory: Path) -> dict[str, object]:
    """Return the flags with which a run was last started, as stored; nothing if it was never started.

    Raises:
        UsageError: the stored configuration is damaged or not readable.
    """
    content = RunFolder(directory).read_config()
    return {name: value for name, value in content.items() if name not in (MEASURED, MARK)}


def saved_measurement(directory: Path) -> dict[str, Any]:
    """Return the measurement that a run's config.json holds; nothing if it holds none.

    Raises:
        UsageError: the stored configuration is damaged or not readable.
    """
    measured = RunFolder(directory).read_config().get(MEASURED)
    return measured if isinstance(measured, dict) else {}


class Source(NamedTuple):
    """The checkpoints of a policy that another run begins with.

    Attributes:
        run: folder of the run.
        policy: of the run.
        kind: of the checkpoints.
        env_steps: of the chosen one; None: the newest, or the best of the best.
    """

    run: RunFolder
    policy: int
    kind: str = "latest"
    env_steps: int | None = None

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the checkpoints."""
        return self.run.checkpoints(self.policy, self.kind)


CHOSEN = re.compile(r"ckpt_(\d{1,15})")


def find_source(text: str, group: Path) -> Source:
    """Find the source `RUN[:policy][:best]` or `RUN[:policy]:ckpt_ENV_STEPS`; RUN lies in the group, or is a path.

    Raises:
        UsageError: there is no such checkpoint.
    """
    words = text.split(":")
    best = len(words) > 1 and words[-1] == "best"
    chosen = CHOSEN.fullmatch(words[-1]) if len(words) > 1 else None
    words = words[: len(words) - (best or chosen is not None)]
    policy = int(words.pop()) if len(words) > 1 and words[-1].isdecimal() else 0
    name = ":".join(words)
    run = next((path for path in (group / name, Path(name)) if _has(path)), None)
    if run is None:
        raise UsageError(
            f"--init_from={shown(text)}: no run {shown(name)}, neither in {shown(str(group))} nor as a path"
        )
    if chosen is not None:
        return _chosen(text, RunFolder(run), policy, int(chosen[1]))
    source = Source(RunFolder(run), policy, "best" if best else "latest")
    if not listed(source.checkpoints):
        raise UsageError(f"--init_from={shown(text)}: there is no checkpoint in {shown(str(source.checkpoints))}")
    return source


def _chosen(text: str, run: RunFolder, policy: int, env_steps: int) -> Source:
    """Return the checkpoint of a policy at so many env steps, of whichever kind it is (UsageError: there is none)."""
    steps = {kind: [n for n, _ in listed(run.checkpoints(policy, kind))] for kind in CHECKPOINT_FOLDERS}
    for kind, found in steps.items():
        if env_steps in found:
            return Source(run, policy, kind, env_steps)
    known = ", ".join(f"ckpt_{n}" for n in sorted({n for found in steps.values() for n in found})) or "none"
    where = shown(str(run.checkpoints(policy)))
    raise UsageError(f"--init_from={shown(text)}: there is no such checkpoint in {where}; there are: {known}")


# Words of a command line: a run, or a group of runs, by its name in the folder of all runs, or by its path.


def find_runs(words: Sequence[str], group: Path) -> dict[str, Path]:
    """Return the folders of the runs that words name, each once; the word for a group of runs names all of them.

    A run has its word as name, one of a group the word of the group and its path in there. A file or folder without a
    run is left out, which is said but for logs of `appo launch`: a shell names these where `*` stands for all there is.

    Raises:
        UsageError: a word names nothing that is there, or there is no run in any.
    """
    found: dict[Path, tuple[str, Path]] = {}
    named = {word: _named(word, group) for word in words}
    for name, path in itertools.chain(*named.values()):
        found.setdefault(path.resolve(), (name, path))
    if not found:
        raise UsageError(f"there is no run in {shown(' '.join(words))}")
    for word in (word for word, runs in named.items() if not runs):
        if not word.endswith(".log") and Path(word).name != RunFolder(Path()).logs.name:
            complain(f"warning: no run in {shown(word)}\n")
    return dict(found.values())


def find_run(word: str, group: Path) -> Path:
    """Return the folder of the one run that a word names, see `find_runs`.

    Raises:
        UsageError: it names no run, or a group of several.
    """
    try:
        found = _named(word, group)
    except UsageError as error:
        raise UsageError(f"there is {error}") from None
    if not found:
        raise UsageError(f"there is no run in {shown(word)}")
    if len(found) > 1:
        names = ", ".join(shown(name) for name, _ in found[:MOST_NAMED])
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        raise UsageError(f"{shown(word)} is a group of {len(found)} runs, and one run is needed: {names}{more}")
    return found[0][1]


def runs_in(group: Path, deepest: int = DEEPEST) -> list[Path]:
    """Return the folders of all runs in a group, those in groups inside it included, sorted by their paths.

    A link may lead to a run, but not to a group. A run that a new start of its name has set aside is none of them.

    Raises:
        UsageError: the folder cannot be listed; one inside it is left out, which is said.
    """
    names, found = folders(group), []
    for name in names:
        path, old = group / name, SET_ASIDE.fullmatch(name)
        if name.startswith(".") or (old and old[1] in names):
            continue
        if is_run(path):
            found.append(path)
        elif deepest and os.path.isdir(path) and not path.is_symlink():
            try:
                found += runs_in(path, deepest - 1)
            except UsageError as error:
                complain(f"warning: left out: {error}\n")
    return found


def _named(word: str, group: Path) -> list[tuple[str, Path]]:
    """Return name and folder of the run that a word names, or of those in the group of that name.

    Raises:
        UsageError: there is nothing of that name.
    """
    paths = (group / word, Path(word)) if word else ()
    for path in paths:
        if is_run(path):
            # Above the run links are the user's own; whether the folder of the run is one is seen by who writes in it.
            return [(word, path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name)]
    groups = [path.resolve() for path in paths if os.path.isdir(path)]
    for path in groups:
        if found := runs_in(path):
            return [(os.path.join(word, run.relative_to(path)), run) for run in found]
    if groups or any(map(os.path.exists, paths)):
        return []
    known = [name for name in folders(group) if os.path.isdir(group / name)] if os.path.isdir(group) else []
    raise UsageError(f"no run {shown(word)}, neither in {shown(str(group))} nor as a path{nearest(word, known)}")


def is_run(path: Path) -> bool:
    """Return whether a folder is that of a run: there are its flags, or its status."""
    return any(_has(path, file) for file in (CONFIG_FILE, STATUS_FILE))


def _has(path: Path, file: str = CONFIG_FILE) -> bool:
    # Path.is_file raises for a name longer than any, and for a folder that may not be entered.
    return os.path.isfile(path / file)


def _env_of(directory: Path) -> object:
    """Return the env of a run, None where that cannot be read: a damaged run must not hide the good ones."""
    try:
        return saved_flags(directory).get("env")
    except UsageError:
        return None


def newest_run(group: Path, env: str) -> Path:
    """Return the directory of the run of an env (of any if empty) that was started last, also in a group.

    Raises:
        UsageError: there is none.
    """
    started = []
    for path in runs_in(group):
        if _has(path) and (not env or _env_of(path) == env):
            started.append((RunFolder(path).config.stat().st_mtime_ns, path))
    if not started:
        raise UsageError(f"no run{f' of {shown(env)}' if env else ''} in {shown(str(group))}; train one first")
    return max(started)[1]


# The journal: every start is written down with its flags.


def journal(
    directory: Path,
    flags: Mapping[str, object],
    changed: Sequence[str],
    env_steps: Sequence[int],
    measured: Mapping[str, object] | None = None,
) -> None:
    """Store the flags of a start, and what has changed, at which env steps of each policy; and what was measured.

    Flags may come with their `MARK`, which is of no use in the history. A run that goes on does so though the disk is
    full, as what it has learned is worth more than a note of its flags.

    Raises:
        ResourceError: the disk does not take it, and no earlier start has stored any.
    """
    run = RunFolder(directory)
    own = {name: value for name, value in flags.items() if name != MARK}
    start = {"time": time.time(), "env_steps": env_steps, "changed": changed, "flags": own}
    try:
        write_json_atomic(run.config, {**flags, **({MEASURED: measured} if measured else {})})
        append_json_line(run.history, start)
    except OSError as error:
        lost = f"cannot write the configuration to {directory}: {error.strerror}"
        if not run.config.exists():
            raise ResourceError(lost) from None
        log.warning("%s; training goes on, and the flags of this start are not written down", lost)
    if changed:
        log.info("changed: %s", ", ".join(changed))


def begun_at(directory: Path) -> float:
    """Return when a run began (seconds since 1970), which tells it from others of its name; 0 if that is not known."""
    try:
        with open_own(RunFolder(directory).history) as history:
            begun = json.loads(history.readline(LONGEST_LINE))["time"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return 0.0
    return float(begun) if is_number(begun) else 0.0


def count_starts(directory: Path) -> int:
    """Return how many starts of a run are written down, in as much as is read of a file; 0 if that cannot be read."""
    try:
        with open_own(RunFolder(directory).history) as history:
            blocks = iter(lambda: history.read(min(BLOCK_BYTES, max(0, READ_BYTES - history.tell()))), b"")
            return sum(block.count(b"\n") for block in blocks)
    except OSError:
        return 0


# A start takes the folder: what is there is kept, set aside or refused.


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
        directory = directory.with_name(_numbered(directory.parent, stem))


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
