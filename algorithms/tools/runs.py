"""`appo runs` lists runs, how far they are and how well they play. It reads only, and needs no torch."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from algorithms.run.summary import RunSummary, summaries
from algorithms.tools.flags import RunsConfig
from utils.command_line import say
from utils.errors import UsageError
from utils.values import shown

UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def list_runs(config: RunsConfig) -> int:
    """Print all runs of a folder, the one that was active last first; return the exit code.

    Raises:
        UsageError: there is no such folder, or it cannot be read.
    """
    group = Path(config.train_dir, config.experiments_root)
    now = time.time()
    runs = summaries(group)
    if not (runs or os.path.isdir(group)):
        raise UsageError(f"there is no folder {shown(str(group))}: --train_dir names the folder of all runs")
    if config.json:
        say(json.dumps([run._asdict() for run in runs]))
    else:
        say("\n".join(_table(runs, now)) if runs else f"no runs in {shown(str(group))}")
    return 0


def _table(runs: Sequence[RunSummary], now: float) -> list[str]:
    """Return a header and a line per run, in columns."""
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
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    words, numbers = range(4), range(4, len(widths))
    return [
        "  ".join([*(row[i].ljust(widths[i]) for i in words), *(row[i].rjust(widths[i]) for i in numbers)])
        for row in rows
    ]


def age(seconds: float) -> str:
    """Return how long ago a moment is, in the largest unit that fits."""
    for size, unit in UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
