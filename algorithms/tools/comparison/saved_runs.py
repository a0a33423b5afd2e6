"""Runs as stored in their folders: flags, state and curve; runs that differ only in their seed are one setting."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from appo.algorithms.ops.intervals import student_interval
from appo.algorithms.run.algorithms import DEFAULT, flag_table
from appo.algorithms.run.folder import LOCATION, saved_flags
from appo.algorithms.run.summary import summary
from appo.algorithms.run.trust import LOOKED_AT, Reading
from appo.algorithms.runtime.monitor.curves import Point, read_curve
from appo.algorithms.tools.runs import columns
from appo.utils.command_line import complain, words_of
from appo.utils.errors import AppoError
from appo.utils.values import json_text, shown

Read = TypeVar("Read")


class ComparedRun(NamedTuple):
    """A run to be compared."""

    name: str
    flags: Mapping[str, object]
    curve: Sequence[Point] = ()
    state: str = ""
    last_return: float | None = None


def read_each(directories: Mapping[str, Path], read: Callable[[str, Path], Read]) -> list[Read]:
    """Read runs by name and folder; leave out unreadable runs with a warning (the first error if none can be read)."""
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


def read_run(name: str, directory: Path) -> ComparedRun:
    """Read a run from its directory."""
    said = summary(directory)
    state, last = (said.state, said.last_return) if said else ("unknown", None)
    return ComparedRun(name, flags_of_run(directory), read_curve(directory), state, last)


def flags_of_run(directory: Path) -> dict[str, object]:
    """Return the flags of the last start of a run, defaults for flags that the run lacks."""
    return default_flags(directory) | saved_flags(directory)


def default_flags(directory: Path) -> dict[str, object]:
    """Return every flag of a run with the default, as in JSON."""
    reading = Reading.of(directory)
    # The algorithm of a stranger is not imported, so flags of the algorithm have no defaults.
    table = flag_table(DEFAULT if reading.refusal(LOOKED_AT) else str(reading.content.get("algo", DEFAULT)))
    return {name: list(f.default) if isinstance(f.default, tuple) else f.default for name, f in table.flags.items()}


def differing_flags(flags: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the names of flags that differ between runs, except `LOCATION`."""
    names = dict.fromkeys(name for mapping in flags for name in mapping if name not in LOCATION)
    missing = object()
    return [name for name in names if any(f.get(name, missing) != flags[0].get(name, missing) for f in flags)]


class Setting(NamedTuple):
    """Runs with equal flags except the seed.

    Attributes:
        flags: flags in which settings differ.
        runs: number of runs.
        returns: last return of each run with a return.
        mean: mean of `returns`; None without returns.
        margin: half of the 95 % interval of the mean; None with fewer than two returns.
    """

    flags: Mapping[str, object]
    runs: int
    returns: Sequence[float]
    mean: float | None
    margin: float | None

    @property
    def text(self) -> str:
        """Return the mean with the interval."""
        if self.mean is None or self.margin is None:
            return "-" if self.mean is None else f"{self.mean:.2f}"
        return f"{self.mean:.2f} [{self.mean - self.margin:.2f}, {self.mean + self.margin:.2f}]"


def settings_of(runs: Sequence[ComparedRun]) -> list[Setting]:
    """Return the settings of runs, the highest return first."""
    names = [name for name in differing_flags([run.flags for run in runs]) if name != "seed"]
    pooled: dict[str, list[ComparedRun]] = {}
    for run in runs:
        pooled.setdefault(json_text([run.flags.get(name) for name in names]), []).append(run)
    settings = []
    for group in pooled.values():
        returns = [run.last_return for run in group if run.last_return is not None]
        mean, margin = student_interval(returns) if returns else (None, None)
        own = {name: group[0].flags.get(name) for name in names}
        settings.append(Setting(own, len(group), returns, mean, margin if len(returns) > 1 else None))
    return sorted(settings, key=lambda one: -math.inf if one.mean is None else one.mean, reverse=True)


def sweep_table(runs: Sequence[ComparedRun], *, whole: bool = False) -> list[str]:
    """Return a header and a line per setting, best first; without `whole`, nothing if every setting has one run."""
    settings = settings_of(runs)
    if len(settings) == len(runs) and not whole:
        return []
    rows = [[*map(words_of, one.flags.values()), str(one.runs), one.text] for one in settings]
    title = "runs that differ in their seed only as one, by the mean of their last returns with its 95 % interval"
    return [title, *columns([[*settings[0].flags, "runs", "last return"], *rows], 0)]
