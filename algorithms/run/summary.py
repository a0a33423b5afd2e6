"""Summaries of runs, read from their files: progress, state and returns. Free of torch."""

import contextlib
import fcntl
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from appo.algorithms.runtime.config import ENDLESS
from appo.algorithms.runtime.monitor.curves import EPISODES, RETURN
from appo.utils.directories import closing
from appo.utils.errors import UsageError
from appo.utils.metrics import parse_record, sampled_lines
from appo.utils.run_folder import CONFIG_BYTES, STATUS_BYTES, RunFolder, open_own, read_own_mapping
from appo.utils.values import is_number

LIVING_STATES = ("starting", "training")
TAIL_BYTES = 1 << 16
SAMPLED_BYTES = 1 << 24  # of the reports of a run, where no best checkpoint says how good it was


class RunSummary(NamedTuple):
    """One run in a list; unknown values are None.

    Attributes:
        state: starting, training, finished, interrupted, failed; crashed: ended without a final status; damaged:
            unreadable files; unknown: no status.
        env_steps: env steps that all policies together have learned from.
        share: spent share of the budget of env steps, samples or seconds, the largest of the three; None: no limit.
        seconds_left: estimated seconds to the end of a training run.
        best_return, last_return: mean return over the last episodes, of the best policy.
        active: time (seconds since 1970) of the last write.
    """

    name: str
    env: str | None
    algo: str | None
    state: str
    reason: str
    env_steps: int | None
    share: float | None
    seconds_left: float | None
    best_return: float | None
    last_return: float | None
    active: float


def summaries(directories: Mapping[str, Path]) -> list[RunSummary]:
    """Return the summaries of runs under the given names, the last active first. Damaged runs hide no others."""
    found = [run._replace(name=name) for name, path in directories.items() if (run := summary(path)) is not None]
    return sorted(found, key=lambda run: (-run.active, run.name))


def summary(directory: Path) -> RunSummary | None:
    """Summarize a run by the files in its directory; None: not the directory of a run."""
    folder = RunFolder(directory)
    times: dict[Path, float] = {}
    for path in (folder.config, folder.status, folder.metrics):
        with contextlib.suppress(OSError):
            times[path] = path.stat().st_mtime
    if not times.keys() & {folder.config, folder.status}:
        return None
    config, status = _mapping(folder.config, CONFIG_BYTES), _mapping(folder.status, STATUS_BYTES)
    damaged = config is None or status is None
    config, status = config or {}, status or {}
    last = last_records(folder.metrics)
    env_steps = _env_steps(status, last)
    state = "damaged" if damaged else _text(status.get("state")) or "unknown"
    if state in LIVING_STATES and not is_locked(folder.lock):
        state = "crashed"  # it is not alive to say that it has ended
    last_return = max(_last_returns(status, last), default=None)
    share, limit = number_of(status.get("share")), number_of(config.get("train_for_env_steps"))
    if share is None and state != "training" and limit and limit < ENDLESS["env_steps"]:
        # The status of a start that has not trained. Each policy may take as many steps as the limit.
        share = max((number / limit for one in last if is_number(number := one.get("env_steps"))), default=None)
    return RunSummary(
        name=directory.name,
        env=_text(config.get("env")),
        algo=_text(config.get("algo")),
        state=state,
        reason=_text(status.get("reason")) or "",
        env_steps=env_steps,
        share=None if share is None else min(1.0, max(0.0, share)),
        seconds_left=number_of(status.get("seconds_left")) if state == "training" else None,
        best_return=_best_return(folder, last_return, number_of(config.get("stats_avg")) or 0),
        last_return=last_return,
        active=max(times.values()),
    )


def is_locked(lock: Path) -> bool:
    """Return whether a process trains there; takes a shared lock for an instant."""
    try:
        with closing(os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # held, or it cannot be known, as on a file system without locks: then believe the status
        return True
    return False


def _env_steps(status: Mapping[str, Any], last: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the env steps of all policies together: the largest figure in any file."""
    totals = status.get("totals")
    steps = [number for record in last if is_number(number := record.get("env_steps"))]
    known = [totals.get("env_steps") if isinstance(totals, dict) else None, sum(steps) if steps else None]
    return max((int(number) for number in known if is_number(number)), default=None)


def _last_returns(status: Mapping[str, Any], last: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the mean return of policies that learn: from the status, which is written often, else the last report."""
    means, frozen = status.get("return_mean"), {one.get("policy") for one in last if one.get("env_steps") == 0}
    learning = [one for one in last if one.get("policy") not in frozen] or last
    if isinstance(means, list) and len(frozen) < len(means):
        means = [mean for policy, mean in enumerate(means) if policy not in frozen]
    for values in (means if isinstance(means, list) else [], [record.get(RETURN) for record in learning]):
        if known := [number for value in values if (number := number_of(value)) is not None]:
            return known
    return []


def last_records(metrics: Path) -> list[dict[str, Any]]:
    """Return the last record of every policy; reads only the end of the file."""
    last: dict[object, dict[str, Any]] = {}
    with contextlib.suppress(OSError), open_own(metrics) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        for line in reversed(file.read().split(b"\n")):
            record = parse_record(line)  # None for a torn line, like the first one of a tail
            if record is not None and isinstance(record.get("policy"), int):
                last.setdefault(record["policy"], record)
    return list(last.values())


def _best_return(folder: RunFolder, last: float | None, window: float) -> float | None:
    """Return the best mean return so far: from best checkpoints, else from reports, else the last one.

    Reports about fewer episodes than `window` count if there are no others: the first to end may be the lucky ones.
    """
    paths = (path for policy in folder.policies() for path in folder.checkpoints(policy, "best").glob("ckpt_*"))
    marks = ((_mapping(path / "state.json", CONFIG_BYTES) or {}).get("best") for path in paths)
    # A different metric may have chosen the checkpoint.
    values = (mark.get("value") for mark in marks if isinstance(mark, dict) and mark.get("metric") == RETURN)
    known = [value for value in values if is_number(value)]
    if not known:
        reported = list(_reported_returns(folder.metrics))
        known = [value for value, episodes in reported if episodes >= window] or [value for value, _ in reported]
    best = max(known, default=last)
    return best if last is None or best is None else max(best, last)


def _reported_returns(metrics: Path) -> Iterator[tuple[float, float]]:
    """Yield mean returns of a sampled metrics log, each with the number of episodes; nan: unknown."""
    with contextlib.suppress(OSError), open_own(metrics) as file:
        for line in sampled_lines(file, SAMPLED_BYTES):
            # Policies that never learn have no best return here.
            if math.isfinite(value := _figure(line, RETURN)) and b'"env_steps":0,' not in line:
                yield value, _figure(line, EPISODES)


def _figure(line: bytes, name: str) -> float:
    """Return a figure of a record; nan: missing. Parsing the whole line would take ten times as long."""
    _, _, after = line.partition(f'"{name}":'.encode())
    try:
        return float(after.partition(b",")[0].rstrip(b"}\n"))
    except ValueError:
        return math.nan


def _mapping(path: Path, most_bytes: int) -> dict[str, Any] | None:
    """Return the mapping in a JSON file; {}: no file; None: damaged or too large."""
    if not os.path.lexists(path):
        return {}
    try:
        return read_own_mapping(path, most_bytes)
    except UsageError:
        return None


def number_of(value: object) -> float | None:
    """Return a number that a file may contain; None for any other value."""
    return value if is_number(value) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
