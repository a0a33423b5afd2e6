"""Settings: runs that differ only in their seed count as one setting."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from appo.algorithms.ops.intervals import student_interval
from appo.algorithms.tools.comparison.saved_runs import ComparedRun, differing_flags
from appo.utils.command_line import words_of
from appo.utils.values import json_text


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
        if self.mean is None:
            return "-"
        if self.margin is None:
            return f"{self.mean:.2f}"
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
        margin = margin if len(returns) > 1 else None
        settings.append(Setting({n: group[0].flags.get(n) for n in names}, len(group), returns, mean, margin))
    return sorted(settings, key=lambda one: -math.inf if one.mean is None else one.mean, reverse=True)


def sweep_table(runs: Sequence[ComparedRun], *, whole: bool = False) -> list[str]:
    """Return a header and a line per setting, best first; without `whole`, nothing if every setting has one run."""
    settings = settings_of(runs)
    if len(settings) == len(runs) and not whole:
        return []
    head = [*settings[0].flags, "runs", "last return"]
    rows = [head, *([*map(words_of, one.flags.values()), str(one.runs), one.text] for one in settings)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    title = "runs that differ in their seed only as one, by the mean of their last returns with its 95 % interval"
    return [title, *("  ".join(map(str.rjust, row, widths)) for row in rows)]
