"""Population-based training on CartPole: four learning rates from far too small to far too large, with and without PBT.

    python -m benchmarks.scores.population [--seeds 1 2 3] [--contender NAME ...] [--add] [--json=FILE]

Both runs of a seed have the same seconds and, except for `--with_pbt`, the same flags. The benchmark prints the final
mean return of every policy and of the worst policy.
"""

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from appo.algorithms.cli import run_command
from appo.algorithms.population.lineage import read_events
from appo.utils.metrics import last_values, read_metrics
from benchmarks.shared import runs, seeds

RATES = (1e-6, 1e-5, 1e-3, 1e-1)
FLAGS: Mapping[str, object] = {
    "env": "CartPole-v1", "num_policies": len(RATES), "per_policy": f"learning_rate={','.join(map(str, RATES))}",
    "train_for_seconds": 80, "pbt_start_mutation": 10_000, "pbt_period_env_steps": 10_000, "pbt_min_episodes": 20,
    "stats_avg": 40, "num_workers": 2, "num_envs_per_worker": 16,
}  # fmt: skip
CONTENDERS: Mapping[str, Mapping[str, object]] = {
    "population": {"with_pbt": True},
    "alone": {"with_pbt": False},
}


class Trained(NamedTuple):
    """End of a run: mean return of each policy, copies and mutations, seconds."""

    returns: list[float]
    copies: int
    mutations: int
    rates: list[float]
    seconds: float

    def line(self) -> str:
        returns = " ".join(f"{one:.1f}" for one in self.returns)
        what = f"{self.copies} copies, {self.mutations} mutations, {self.seconds:.0f} s"
        return f"returns {returns}, worst {min(self.returns):.1f}, {what}"


def train(flags: Mapping[str, object], seed: int, prefix: Sequence[str]) -> Trained:
    with runs.finished({**FLAGS, **flags, "seed": seed}, prefix) as run:
        records = read_metrics(run.directory / "metrics.jsonl")
        events = read_events(run.directory)
    last = [last_values(r for r in records if r["policy"] == policy) for policy in range(len(RATES))]
    kinds = Counter(event.kind for event in events if event.state == "applied")
    returns, rates = ([one[name] for one in last] for name in ("reward/mean", "pbt/learning_rate"))
    return Trained(returns, kinds["copy"], kinds["mutation"], rates, run.seconds)


def main() -> int:
    arguments = seeds.parser_of("Population-based training on CartPole.", CONTENDERS).parse_args()
    seeds.train_all("population", arguments, lambda name, seed: train(CONTENDERS[name], seed, arguments.prefix))
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
