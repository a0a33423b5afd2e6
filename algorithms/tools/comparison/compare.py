"""`appo compare` prints the differences of runs: flags, results, and returns at equal env steps and equal times."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from appo.algorithms.run.folder import find_runs
from appo.algorithms.run.summary import number_of
from appo.algorithms.runtime.monitor.curves import Axis, Point, value_at
from appo.algorithms.tools.comparison.saved_runs import (
    ComparedRun,
    differing_flags,
    read_each,
    read_run,
    settings_of,
    sweep_table,
)
from appo.algorithms.tools.flags import CompareConfig
from appo.algorithms.tools.runs import columns
from appo.utils.command_line import say, words_of
from appo.utils.errors import UsageError
from appo.utils.metrics import duration, short_number
from appo.utils.values import json_text, shown

Rows = Mapping[str, Sequence[Any]]
"""Lines of a table: name -> a value per run, None for a missing value."""


def compare(config: CompareConfig) -> int:
    """Print the differences of runs; return the exit code (UsageError: a run is missing or cannot be read)."""
    directories = find_runs(config.runs, Path(config.train_dir, config.experiments_root))
    if len(directories) < 2:
        raise UsageError(f"appo compare needs two runs or more, got {len(directories)}")
    found = read_each(directories, read_run)
    sections = comparison(found)
    if config.json:
        settings = [setting._asdict() for setting in settings_of(found)]
        say(json_text({"runs": [run.name for run in found], **sections, "settings": settings}))
    else:
        say("\n".join(_text([run.name for run in found], sections)))
        if lines := sweep_table(found):
            say("\n".join(["", *lines]))
    return 0


def comparison(runs: Sequence[ComparedRun]) -> dict[str, Rows]:
    """Return tables by title: differing flags, results, returns at equal env steps, returns after equal hours."""
    return {
        "flags": {name: [r.flags.get(name) for r in runs] for name in differing_flags([r.flags for r in runs])},
        "results": {
            "state": [run.state for run in runs],
            **{name: [figure(run.curve) if run.curve else None for run in runs] for name, figure in RESULTS},
            "best_return": [_best_return(run) for run in runs],
        },
        "return_at_env_steps": _at_equal(runs, "env_steps"),
        "return_at_hours": _at_equal(runs, "hours"),
    }


RESULTS: Sequence[tuple[str, Callable[[Sequence[Point]], float | None]]] = (
    ("env_steps", lambda curve: curve[-1].env_steps),
    ("hours", lambda curve: curve[-1].hours),
    ("env_steps_per_second", lambda curve: curve[-1].env_steps / curve[-1].hours / 3600 if curve[-1].hours else None),
    ("final_return", lambda curve: curve[-1].value),
)


def _best_return(run: ComparedRun) -> float | None:
    """Return the best mean return over a full window of episodes (any window if none was full)."""
    window = number_of(run.flags.get("stats_avg")) or 0
    full = [point for point in run.curve if point.episodes >= window]
    return max((point.value for point in full or run.curve), default=None)


def _at_equal(runs: Sequence[ComparedRun], axis: Axis) -> Rows:
    """Return a row for each position on the axis that all runs have reached."""
    ends = [run.curve[-1].at(axis) for run in runs if run.curve]
    if len(ends) < 2:
        return {}
    positions = [share * min(ends) for share in (0.1, 0.25, 0.5, 0.75, 1.0)]
    return {repr(position): [value_at(run.curve, axis, position) for run in runs] for position in positions}


def _text(names: Sequence[str], sections: Mapping[str, Rows]) -> list[str]:
    """Return the tables as text, one below the other in common columns."""
    titles = {"flags": "flags that differ", "results": "", "return_at_env_steps": "mean return after env steps"}
    rows: list[tuple[str, ...]] = [("", *(shown(name) for name in names))]
    for title, content in sections.items():
        heading = titles.get(title, "mean return after")
        rows += [("",), (heading,)] if heading and content else [("",)] if content else []
        rows += [(_label(title, name), *(_cell(title, name, x) for x in values)) for name, values in content.items()]
    return columns(rows, 1)


def _label(title: str, name: str) -> str:
    if title == "return_at_env_steps":
        return short_number(float(name))
    if title == "return_at_hours":
        return duration(float(name) * 3600)
    return {"hours": "time"}.get(name, name).replace("_", " ") if title == "results" else name


def _cell(title: str, name: str, value: object) -> str:
    if value is None:
        return "-"
    if title == "flags" or not isinstance(value, int | float):
        return words_of(value)
    if name == "hours":
        return duration(value * 3600)
    return short_number(value) if name.startswith("env_steps") else f"{value:.2f}"
