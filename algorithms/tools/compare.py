"""`appo compare` shows in what runs differ, and how well they learned at equal env steps and after equal time."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from appo.algorithms.ops.intervals import student_interval
from appo.algorithms.run.algorithms import DEFAULT, flag_table
from appo.algorithms.run.folder import find_runs, saved_flags
from appo.algorithms.run.summary import summary
from appo.algorithms.run.trust import LOOKED_AT, Reading
from appo.algorithms.runtime.monitor.curves import Axis, Point, read_curve, value_at
from appo.algorithms.tools.flags import CompareConfig
from appo.utils.command_line import complain, say, words_of
from appo.utils.errors import AppoError, UsageError
from appo.utils.metrics import duration, short_number
from appo.utils.values import json_text, shown

SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)  # of what the shortest run has
LOCATION_FLAGS = ("experiment", "experiments_root", "train_dir", "restart_behavior", "config", "trust")
"""Flags that differ between any two runs."""

Read = TypeVar("Read")


class Run(NamedTuple):
    """One of the runs that are compared.

    Attributes:
        name: as it was named on the command line.
        flags: those it was last started with.
        state: finished, crashed, ...
        curve: its mean return.
        last_return: the mean over its last episodes.
    """

    name: str
    flags: Mapping[str, object]
    state: str
    curve: Sequence[Point]
    last_return: float | None = None


class Row(NamedTuple):
    """A line of the table: a value per run, None where there is none."""

    name: str
    values: Sequence[Any]


def compare(config: CompareConfig) -> int:
    """Print the differences of runs; return the exit code.

    Raises:
        UsageError: there is no such run, or it cannot be read.
    """
    directories = find_runs(config.runs, Path(config.train_dir, config.experiments_root))
    if len(directories) < 2:
        raise UsageError(f"appo compare needs two runs or more, got {len(directories)}")
    found = read_each(directories, read_run)
    sections = comparison(found)
    if config.json:
        tables = {title: {row.name: row.values for row in rows} for title, rows in sections.items()}
        settings = [setting._asdict() for setting in settings_of(found)]
        say(json_text({"runs": [run.name for run in found], **tables, "settings": settings}))
    else:
        say("\n".join(_text([run.name for run in found], sections)))
        if lines := sweep_table(found):
            say("\n".join(["", *lines]))
    return 0


def read_each(directories: Mapping[str, Path], read: Callable[[str, Path], Read]) -> list[Read]:
    """Read runs by their names and folders; one that cannot be read is left out, which is said in one line.

    Raises:
        AppoError, OSError: none of them can be read; the first of these errors.
    """
    found, failed = [], dict[str, AppoError | OSError]()
    for name, directory in directories.items():
        try:
            found.append(read(name, directory))
        except (AppoError, OSError) as error:
            failed[name] = error
    if not found:
        raise next(iter(failed.values()))
    for name, why in failed.items():
        complain(f"warning: {shown(name)} is left out: {' '.join(str(why).split())}\n")
    return found


def read_run(name: str, directory: Path) -> Run:
    """Read a run from its directory."""
    said = summary(directory)
    state, last = (said.state, said.last_return) if said else ("unknown", None)
    return Run(name, flags_of_run(directory), state, read_curve(directory), last)


def flags_of_run(directory: Path) -> dict[str, object]:
    """Return the flags a run was last started with; those that its version did not know have their defaults."""
    return default_flags(directory) | saved_flags(directory)


def default_flags(directory: Path) -> dict[str, object]:
    """Return every flag of a run with its default, as JSON holds it."""
    reading = Reading.of(directory)
    # A stranger's algorithm is not imported to be compared: then its own flags have no defaults.
    table = flag_table(DEFAULT if reading.refusal(LOOKED_AT) else str(reading.content.get("algo", DEFAULT)))
    return {name: list(f.default) if isinstance(f.default, tuple) else f.default for name, f in table.flags.items()}


def comparison(runs: Sequence[Run]) -> dict[str, list[Row]]:
    """Return tables by title: the flags that differ, results, and returns at equal env steps and after equal hours."""
    return {
        "flags": [
            Row(name, [run.flags.get(name) for run in runs]) for name in differing_flags([run.flags for run in runs])
        ],
        "results": [
            Row("state", [run.state for run in runs]),
            *(Row(name, [figure(run.curve) if run.curve else None for run in runs]) for name, figure in RESULTS),
        ],
        "return_at_env_steps": _at_equal(runs, "env_steps"),
        "return_at_hours": _at_equal(runs, "hours"),
    }


def differing_flags(flags: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the names of flags that differ between runs, but for those that differ between any two runs."""
    names = dict.fromkeys(name for mapping in flags for name in mapping if name not in LOCATION_FLAGS)
    missing = object()
    return [name for name in names if any(f.get(name, missing) != flags[0].get(name, missing) for f in flags)]


# Settings: runs that differ in their seed only are one, as in the table that ends a sweep.


class Setting(NamedTuple):
    """The runs of several seeds that have all other flags in common.

    Attributes:
        flags: in which settings differ.
        runs: how many there are.
        returns: the last one of each run that has one.
        mean: of these returns; None: there is none.
        margin: half of the 95 % interval of the mean; None with fewer than two returns.
    """

    flags: Mapping[str, object]
    runs: int
    returns: Sequence[float]
    mean: float | None
    margin: float | None

    @property
    def text(self) -> str:
        """Return the mean with its interval."""
        if self.mean is None:
            return "-"
        if self.margin is None:
            return f"{self.mean:.2f}"
        return f"{self.mean:.2f} [{self.mean - self.margin:.2f}, {self.mean + self.margin:.2f}]"


def settings_of(runs: Sequence[Run]) -> list[Setting]:
    """Return the settings of runs, that with the highest return first."""
    names = [name for name in differing_flags([run.flags for run in runs]) if name != "seed"]
    pooled: dict[str, list[Run]] = {}
    for run in runs:
        pooled.setdefault(json_text([run.flags.get(name) for name in names]), []).append(run)
    settings = []
    for group in pooled.values():
        returns = [run.last_return for run in group if run.last_return is not None]
        mean, margin = student_interval(returns) if returns else (None, None)
        margin = margin if len(returns) > 1 else None
        settings.append(Setting({n: group[0].flags.get(n) for n in names}, len(group), returns, mean, margin))
    return sorted(settings, key=lambda one: -math.inf if one.mean is None else one.mean, reverse=True)


def sweep_table(runs: Sequence[Run], *, whole: bool = False) -> list[str]:
    """Return a header and a line per setting, the best first; unless `whole` nothing where each has one run only."""
    settings = settings_of(runs)
    if len(settings) == len(runs) and not whole:
        return []
    head = [*settings[0].flags, "runs", "last return"]
    rows = [head, *([*map(words_of, one.flags.values()), str(one.runs), one.text] for one in settings)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    title = "runs that differ in their seed only as one, by the mean of their last returns with its 95 % interval"
    return [title, *("  ".join(map(str.rjust, row, widths)) for row in rows)]


def _throughput(curve: Sequence[Point]) -> float | None:
    """Return env steps per second of all the time trained."""
    return curve[-1].env_steps / curve[-1].hours / 3600 if curve[-1].hours else None


RESULTS: Sequence[tuple[str, Callable[[Sequence[Point]], float | None]]] = (
    ("env_steps", lambda curve: curve[-1].env_steps),
    ("hours", lambda curve: curve[-1].hours),
    ("env_steps_per_second", _throughput),
    ("final_return", lambda curve: curve[-1].value),
    ("best_return", lambda curve: max(point.value for point in curve)),
)


def _at_equal(runs: Sequence[Run], axis: Axis) -> list[Row]:
    """Return a row for each of some positions on the axis that all runs have reached."""
    ends = [run.curve[-1].at(axis) for run in runs if run.curve]
    if len(ends) < 2:
        return []
    positions = [share * min(ends) for share in SHARES]
    return [Row(repr(position), [value_at(run.curve, axis, position) for run in runs]) for position in positions]


def _text(names: Sequence[str], sections: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return the tables as text, one below the other in the same columns."""
    titles = {"flags": "flags that differ", "results": "", "return_at_env_steps": "mean return after env steps"}
    rows: list[tuple[str, ...]] = [("", *(shown(name) for name in names))]
    for title, content in sections.items():
        heading = titles.get(title, "mean return after")
        rows += [("",), (heading,)] if heading and content else [("",)] if content else []
        rows += [(_label(title, row.name), *(_cell(title, row.name, value) for value in row.values)) for row in content]
    whole = [row for row in rows if len(row) > 1]
    widths = [max(len(row[column]) for row in whole) for column in range(len(names) + 1)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]


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
