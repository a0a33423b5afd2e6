"""`appo runs` lists runs and groups of runs with progress and returns; the command only reads, and imports no torch."""

import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from appo.algorithms.run.folder import find_runs, folders, runs_in
from appo.algorithms.run.summary import LIVING_STATES, RunSummary, summaries
from appo.algorithms.tools.flags import RunsConfig
from appo.utils.command_line import say
from appo.utils.errors import UsageError
from appo.utils.values import shown


def list_runs(config: RunsConfig) -> int:
    """Print runs and groups of a folder, or the named runs, last active first; return the exit code (UsageError)."""
    folder = Path(config.train_dir, config.experiments_root)
    if config.runs:
        runs, groups = summaries(find_runs(config.runs, folder)), dict[str, list[RunSummary]]()
    else:
        runs, groups = summaries({name: folder / name for name in folders(folder)}), _groups(folder)
        if not (runs or os.path.isdir(folder)):
            raise UsageError(f"there is no folder {shown(str(folder))}: --train_dir names the folder of all runs")
    if config.json:
        say(json.dumps([run._asdict() for run in (*runs, *chain(*groups.values()))]))
        return 0
    tables = [_table(runs, time.time())] if runs else []
    tables += [_table_of_groups(groups, time.time())] if groups else []
    say("\n\n".join(map("\n".join, tables)) if tables else f"no runs in {shown(str(folder))}")
    return 0


def _groups(folder: Path) -> dict[str, list[RunSummary]]:
    """Return the runs of each group in a folder, the group with the last active run first."""
    groups: dict[str, dict[str, Path]] = {}
    for path in runs_in(folder):
        name = path.relative_to(folder)
        if len(name.parts) > 1:
            groups.setdefault(name.parts[0], {})[str(name)] = path
    found = {name: runs for name, directories in groups.items() if (runs := summaries(directories))}
    return dict(sorted(found.items(), key=lambda item: -item[1][0].active))


def _table_of_groups(groups: Mapping[str, Sequence[RunSummary]], now: float) -> list[str]:
    """Return a line about every group: numbers of runs by state, the best return, and the last activity."""
    rows: list[tuple[str, ...]] = [
        ("group", "runs", "done", "running", "interrupted", "failed", "best return", "active")
    ]
    for name, runs in groups.items():
        count = Counter("running" if run.state in LIVING_STATES else run.state for run in runs)
        states = count["finished"], count["running"], count["interrupted"]
        counts = (str(number) for number in (len(runs), *states, len(runs) - sum(states)))
        best = max((run.best_return for run in runs if run.best_return is not None), default=None)
        rows.append((shown(name), *counts, _number(best), f"{age(now - runs[0].active)} ago"))
    return columns(rows, 1)


def _table(runs: Sequence[RunSummary], now: float) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("run", "env", "algo", "state", "env steps", "budget", "left", "best return", "last return", "active")
    ]
    for run in runs:
        share = "-" if run.share is None else f"{run.share:.0%}"
        steps = "-" if run.env_steps is None else f"{run.env_steps:,}"
        left = "-" if run.seconds_left is None else age(run.seconds_left)
        words = (shown(word) if word else "-" for word in (run.name, run.env, run.algo, run.state))
        returns = map(_number, (run.best_return, run.last_return))
        rows.append((*words, steps, share, left, *returns, f"{age(now - run.active)} ago"))
    return columns(rows, 4)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def columns(rows: Sequence[Sequence[str]], num_words: int) -> list[str]:
    """Return rows in columns: `num_words` columns of words, then numbers. A row of a single cell is a heading."""
    widths = [max(map(len, column)) for column in zip(*(row for row in rows if len(row) > 1), strict=True)]
    pads = [str.ljust] * num_words + [str.rjust] * (len(widths) - num_words)
    return [
        "  ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=False)).rstrip()
        for row in rows
    ]


def age(seconds: float) -> str:
    """Return a duration in the largest unit that fits."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
