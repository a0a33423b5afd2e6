"""The folders of runs: names, places, flags of every start, sources of weights, and search."""

import contextlib
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from appo.envs.given import is_again, unnumbered
from appo.utils.checkpoint_files import listed
from appo.utils.command_line import complain
from appo.utils.errors import ResourceError, UsageError
from appo.utils.metrics import BLOCK_BYTES, LONGEST_LINE, READ_BYTES
from appo.utils.run_folder import (
    CHECKPOINT_FOLDERS,
    CONFIG_FILE,
    STATUS_FILE,
    RunFolder,
    append_json_line,
    open_own,
    write_json_atomic,
)
from appo.utils.values import is_number, nearest, shown

log = logging.getLogger(__name__)
MEASURED = "measured"
"""Key in config.json, beside flags, of the costs that the first start measured, see `tuning/measure.py`."""
MARK = "mark"
"""Key in config.json, beside flags, of the mark of the user, see `trust.py`."""
LOCATION = ("config", "experiment", "experiments_root", "train_dir", "restart_behavior", "trust")
"""Flags that no start reads from a saved run: they say where the run is, and whether the user trusts it."""
DEEPEST = 4
"""Depth of nested folders below a group in which runs are searched."""
MOST_NAMED = 20
"""Runs of a group that a message lists."""
SET_ASIDE = re.compile(r"(.+)\.bak\d+")
"""Name of an older run that a start has set aside, see `directory/taking.py`."""
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


def check_name(flag: str, name: str) -> None:
    """Refuse a name that could leave its folder, be hidden or surprise a shell (UsageError)."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"--{flag}={shown(name)} is no name for a folder: use at most 200 of A-Z a-z 0-9 . _ - and no leading dot"
        )


def check_folders(train_dir: str, experiments_root: str, experiment: str) -> None:
    """Refuse names that are no place of a run (UsageError); root and experiment may be empty."""
    if not train_dir:
        raise UsageError("--train_dir must not be empty")
    for part in experiments_root.split("/") if experiments_root else ():
        check_name("experiments_root", part)
    if experiment:
        check_name("experiment", experiment)


def check_writable(directory: Path) -> None:
    """Refuse a run directory that cannot be created or written (UsageError); nothing is created."""
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
    """Return the name of a new run: the name of the env and the first free number."""
    return numbered(
        group, re.sub(r"[^A-Za-z0-9._-]", "_", re.split(r"[:/]", unnumbered(env))[-1])[:190].lstrip(".") or "run"
    )


def numbered(group: Path, stem: str) -> str:
    """Return the stem with the first number after the numbers in use."""
    matches = filter(None, map(re.compile(re.escape(stem) + r"_(\d{1,18})").fullmatch, folders(group)))
    return f"{stem}_{max((int(match[1]) for match in matches), default=0) + 1}"


def folders(group: Path) -> list[str]:
    """Return all names in a folder, sorted; empty for a missing folder (UsageError: not readable)."""
    try:
        return sorted(entry.name for entry in os.scandir(group))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"cannot list {shown(str(group))}: {error.strerror}") from None


def saved_flags(directory: Path) -> dict[str, object]:
    """Return the stored flags of a run's last start; empty without a start (UsageError: damaged or not readable)."""
    return flags_in(RunFolder(directory).read_config())


def flags_in(content: Mapping[str, object]) -> dict[str, object]:
    """Return the content of a config.json without the entries that are no flags."""
    return {name: value for name, value in content.items() if name not in (MEASURED, MARK)}


class WeightSource(NamedTuple):
    """Checkpoints of a policy, whose weights another run starts from.

    Attributes:
        run: folder of the run.
        policy: number of the policy.
        kind: kind of the checkpoints.
        env_steps: env steps of the chosen checkpoint; None: the newest, or the best of kind `best`.
    """

    run: RunFolder
    policy: int
    kind: str = "latest"
    env_steps: int | None = None

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the checkpoints."""
        return self.run.checkpoints(self.policy, self.kind)


def find_source(text: str, group: Path) -> WeightSource:
    """Find the source `RUN[:policy][:best]` or `RUN[:policy]:ckpt_ENV_STEPS`; RUN is in the group, or is a path.

    Raises:
        UsageError: the checkpoint does not exist.
    """
    words = text.split(":")
    best = len(words) > 1 and words[-1] == "best"
    chosen = re.fullmatch(r"ckpt_(\d{1,15})", words[-1]) if len(words) > 1 else None
    words = words[: len(words) - (best or chosen is not None)]
    policy = int(words.pop()) if len(words) > 1 and re.fullmatch(r"\d{1,9}", words[-1]) else 0
    name = ":".join(words)
    if (run := next((path for path in (group / name, Path(name)) if os.path.isfile(path / CONFIG_FILE)), None)) is None:
        raise UsageError(
            f"--init_from={shown(text)}: no run {shown(name)}, neither in {shown(str(group))} nor as a path"
        )
    if chosen is not None:
        return _chosen(text, RunFolder(run), policy, int(chosen[1]))
    source = WeightSource(RunFolder(run), policy, "best" if best else "latest")
    if not listed(source.checkpoints):
        raise UsageError(f"--init_from={shown(text)}: there is no checkpoint in {shown(str(source.checkpoints))}")
    return source


def _chosen(text: str, run: RunFolder, policy: int, env_steps: int) -> WeightSource:
    """Return the checkpoint of a policy at these env steps, of any kind (UsageError: no checkpoint)."""
    steps = {kind: [n for n, _ in listed(run.checkpoints(policy, kind))] for kind in CHECKPOINT_FOLDERS}
    for kind, found in steps.items():
        if env_steps in found:
            return WeightSource(run, policy, kind, env_steps)
    known = ", ".join(f"ckpt_{n}" for n in sorted({n for found in steps.values() for n in found})) or "none"
    where = shown(str(run.checkpoints(policy)))
    raise UsageError(f"--init_from={shown(text)}: there is no such checkpoint in {where}; there are: {known}")


def find_runs(words: Sequence[str], group: Path) -> dict[str, Path]:
    """Return the folders of the runs that words name, each once; the name of a group stands for all runs inside.

    The name of a run is its word; in a group, the word of the group and the path inside. Files and folders without a
    run are skipped with a warning, except logs of `appo launch`, which a shell's `*` includes.

    Raises:
        UsageError: a word names no file, or no word names a run.
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
    """Return the folder of the single run that a word names, see `find_runs` (UsageError: no run, or several)."""
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
    """Return the folders of all runs in a group and its subgroups, sorted by path.

    A link may lead to a run, not to a group. Older runs that a start has set aside are skipped.

    Raises:
        UsageError: the folder cannot be listed; unreadable subfolders are skipped with a warning.
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
    """Return name and folder of the run of this name, or of the runs in its group (UsageError: no such name)."""
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
    """Return whether a folder contains the flags or the status of a run."""
    # Path.is_file raises for a name longer than any, and for a folder that may not be entered.
    return any(os.path.isfile(path / file) for file in (CONFIG_FILE, STATUS_FILE))


def _plays(saved: str, env: str) -> bool:
    return saved == env or is_again(saved, env)


def newest_run(group: Path, env: str) -> Path:
    """Return the directory of the last started run of an env (empty: of any), groups included (UsageError: no run)."""
    started = []
    for path in runs_in(group):
        with contextlib.suppress(UsageError):  # a damaged run must not hide the others
            if os.path.isfile(path / CONFIG_FILE) and (not env or _plays(str(saved_flags(path).get("env")), env)):
                started.append((RunFolder(path).config.stat().st_mtime_ns, path))
    if not started:
        raise UsageError(f"no run{f' of {shown(env)}' if env else ''} in {shown(str(group))}; train one first")
    return max(started)[1]


def journal(
    directory: Path,
    flags: Mapping[str, object],
    changed: Sequence[str],
    env_steps: Sequence[int],
    measured: Mapping[str, object] | None = None,
) -> None:
    """Store the flags of a start, and the changed flags with the env steps of each policy; store measured costs.

    `flags` may contain their `MARK`, which the history omits. A full disk does not stop a run that resumes.

    Raises:
        ResourceError: the disk refuses the configuration, and no earlier start has stored any.
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
    """Return the time of a run's first start (seconds since 1970), an identity among runs of the name; 0: unknown."""
    try:
        with open_own(RunFolder(directory).history) as history:
            begun = json.loads(history.readline(LONGEST_LINE))["time"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return 0.0
    return float(begun) if is_number(begun) else 0.0


def count_starts(directory: Path) -> int:
    """Return the number of recorded starts, in the part of the file that is read; 0 for an unreadable file."""
    try:
        with open_own(RunFolder(directory).history) as history:
            blocks = iter(lambda: history.read(min(BLOCK_BYTES, max(0, READ_BYTES - history.tell()))), b"")
            return sum(block.count(b"\n") for block in blocks)
    except OSError:
        return 0
