"""Returns of an algorithm in several environments, over seeds, compared with goals.

The newest checkpoint of a run plays 100 unseen episodes with the most probable actions.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from benchmarks.scores.trials import Scored, Trial, score
from benchmarks.shared import markdown, seeds

MODE = "most_probable"
SEEDS = [1, 2, 3, 4, 5]


class Goals(NamedTuple):
    """Trials of a benchmark with goals.

    Attributes:
        benchmark: name in result files.
        description: text for `--help`.
        trials: trials by name.
        asked: goal by name of a trial: mean return over the seeds.
    """

    benchmark: str
    description: str
    trials: Mapping[str, Trial]
    asked: Mapping[str, float]


HEADS = (
    "trial",
    "environment",
    "env steps",
    "seeds",
    "return of each",
    "mean ± deviation over seeds",
    "asked for",
    "seconds",
)


class Row(NamedTuple):
    """Returns of the seeds of a trial.

    Attributes:
        asked: goal of the mean return; None: no goal.
        returns: mean return of each seed, in the order of `seeds`; nan: no episode ended.
        seconds: mean seconds of training.
    """

    name: str
    trial: Trial
    asked: float | None
    seeds: tuple[int, ...]
    returns: tuple[float, ...]
    seconds: float

    @property
    def mean(self) -> float:
        """Return the mean over the seeds; nan if a seed ended no episode."""
        return fmean(self.returns)

    @property
    def reached(self) -> bool:
        return self.asked is None or self.mean >= self.asked

    def cells(self) -> tuple[str, ...]:
        deviation = stdev(self.returns) if len(self.returns) > 1 else 0.0
        mean = f"**{self.mean:,.1f} ± {deviation:,.1f}**" + ("" if self.reached else " (missed)")
        each = ", ".join(f"{value:,.1f}" for value in self.returns)
        seeds = ", ".join(map(str, self.seeds))
        asked = "" if self.asked is None else f"{self.asked:g}"
        return self.name, self.trial.env, f"{self.trial.env_steps:,}", seeds, each, mean, asked, f"{self.seconds:,.0f}"


def rows(goals: Goals, results: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return a row per trial, in the order of the trials."""
    found = []
    for name, trial in goals.trials.items():
        by_seed = sorted(results.get(name, {}).get("seeds", {}).items(), key=lambda pair: int(pair[0]))
        if by_seed:
            means = [one["played"][MODE]["mean"] for _, one in by_seed]
            returns = tuple(math.nan if mean is None else mean for mean in means)
            seconds = fmean(one["seconds"] for _, one in by_seed)
            numbers = tuple(int(seed) for seed, _ in by_seed)
            found.append(Row(name, trial, goals.asked.get(name), numbers, returns, seconds))
    return found


def table(goals: Goals, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table, with dates and commits."""
    return f"{markdown.table(HEADS, (row.cells() for row in rows(goals, results)))}\n\n{markdown.measured(results)}\n"


def measure(goals: Goals, argv: Sequence[str] | None = None) -> int:
    """Train and play seed by seed, then write the table; return the exit code, 1 if a goal is missed.

    Raises:
        UsageError: invalid command line.
        RunError: runs failed.
    """
    parser = seeds.parser_of(goals.description, goals.trials, "--trial")
    parser.set_defaults(seeds=SEEDS)
    parser.add_argument("--markdown", type=Path, help="file for the table, which is printed in any case")
    arguments = parser.parse_args(argv)

    def train_one(name: str, seed: int) -> Scored:
        return score(goals.trials[name], seed, arguments.prefix)

    results = seeds.train_all(goals.benchmark, arguments, train_one)
    results = seeds.show(arguments, results, lambda kept: table(goals, kept))
    return int(not all(row.reached for row in rows(goals, results)))
