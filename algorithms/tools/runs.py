"""`appo runs` lists runs and groups of runs with progress and returns; the command only reads, and imports no torch."""

import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from appo.algorithms.run.folder import find_runs, runs_in
from appo.algorithms.run.summary import LIVING_STATES, RunSummary, summaries, summary
from appo.algorithms.tools.flags import RunsConfig
from appo.utils.command_line import say
from appo.utils.errors import UsageError
from appo.utils.values import shown


class Group(NamedTuple):
    """A line about a group of runs: numbers of runs by state, and the best return."""

    group: str
    runs: int
    done: int
    running: int
    interrupted: int
    failed: int
    best_return: float | None
    active: float


def list_runs(config: RunsConfig) -> int:
    """Print runs and groups of a folder, or the named runs, last active first; return the exit code (UsageError)."""
    folder = Path(config.train_dir, config.experiments_root)
    if config.runs:
        runs, groups = _named(find_runs(config.runs, folder)), dict[str, list[RunSummary]]()
    else:
        runs, groups = summaries(folder), _groups(folder)
        if not (runs or os.path.isdir(folder)):
            raise UsageError(f"there is no folder {shown(str(folder))}: --train_dir names the folder of all runs")
    if config.json:
        say(json.dumps([run._asdict() for run in (*runs, *chain(*groups.values()))]))
        return 0
    tables = [_table(runs, time.time())] if runs else []
    tables += [_table_of_groups([_group(*one) for one in groups.items()], time.time())] if groups else []
    say("\n\n".join(map("\n".join, tables)) if tables else f"no runs in {shown(str(folder))}")
    return 0


def _named(directories: Mapping[str, Path]) -> list[RunSummary]:
    """Return the summaries of runs under the given names, last active first."""
    found = [run._replace(name=name) for name, path in directories.items() if (run := summary(path)) is not None]
    return sorted(found, key=lambda run: (-run.active, run.name))


def _groups(folder: Path) -> dict[str, list[RunSummary]]:
    """Return the runs of each group in a folder."""
    groups: dict[str, dict[str, Path]] = {}
    for path in runs_in(folder):
        name = path.relative_to(folder)
        if len(name.parts) > 1:
            groups.setdefault(name.parts[0], {})[str(name)] = path
    return {name: runs for name, directories in groups.items() if (runs := _named(directories))}


def _group(name: str, runs: Sequence[RunSummary]) -> Group:
    count = Counter({"finished": "done", "interrupted": "interrupted"}.get(run.state, "failed") for run in runs)
    running = sum(run.state in LIVING_STATES for run in runs)
    best = max((run.best_return for run in runs if run.best_return is not None), default=None)
    ended = count["done"], running, count["interrupted"], count["failed"] - running
    return Group(name, len(runs), *ended, best, max(run.active for run in runs))


def _table_of_groups(groups: Sequence[Group], now: float) -> list[str]:
    rows: list[tuple[str, ...]] = [("group", *(name.replace("_", " ") for name in Group._fields[1:]))]
    for group in sorted(groups, key=lambda one: -one.active):
        best = "-" if group.best_return is None else f"{group.best_return:.2f}"
        rows.append((shown(group.group), *map(str, group[1:6]), best, f"{age(now - group.active)} ago"))
    return _columns(rows, 1)


def _table(runs: Sequence[RunSummary], now: float) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("run", "env", "algo", "state", "env steps", "budget", "left", "best return", "last return", "active")
    ]
    for run in runs:
        share = "-" if run.share is None else f"{run.share:.0%}"
        steps = "-" if run.env_steps is None else f"{run.env_steps:,}"
        returns = ("-" if value is None else f"{value:.2f}" for value in (run.best_return, run.last_return))
        env = shown(run.env) if run.env else "-"
        left = "-" if run.seconds_left is None else age(run.seconds_left)
        ago = f"{age(now - run.active)} ago"
        algo = shown(run.algo) if run.algo else "-"
        rows.append((shown(run.name), env, algo, shown(run.state), steps, share, left, *returns, ago))
    return _columns(rows, 4)


def _columns(rows: Sequence[Sequence[str]], num_words: int) -> list[str]:
    """Return rows in columns: `num_words` columns of words, then numbers."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    words, numbers = range(num_words), range(num_words, len(widths))
    return [
        "  ".join([*(row[i].ljust(widths[i]) for i in words), *(row[i].rjust(widths[i]) for i in numbers)])
        for row in rows
    ]


def age(seconds: float) -> str:
    """Return a duration in the largest unit that fits."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
