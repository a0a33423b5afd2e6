"""Population-based training on CartPole: four learning rates from far too small to far too large, with and without it.

    python -m benchmarks.population [--seeds 1 2 3] [--json=FILE]

Both runs of a seed have the same flags but for `--with_pbt`, and the same seconds. Said is the mean return of the last
episodes of every policy, and of the worst one, at the end.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from algorithms.cli import run_command
from algorithms.population.lineage import read_events
from benchmarks import measuring, runs
from benchmarks.measuring import ROOT
from utils.metrics import last_values, read_metrics

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
    """How a run ended: mean return of each policy, what became of them, and how long it took."""

    returns: list[float]
    copies: int
    mutations: int
    rates: list[float]
    seconds: float


def train(flags: Mapping[str, object], seed: int, prefix: Sequence[str]) -> Trained:
    """One run."""
    with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder:
        given = {**FLAGS, **flags, "seed": seed, "train_dir": folder, "experiment": "run"}
        command = [sys.executable, str(ROOT / "train_appo.py"), *(f"--{name}={value}" for name, value in given.items())]
        begin = time.monotonic()
        runs.run_to_end(command, prefix)
        seconds, directory = time.monotonic() - begin, Path(folder, "run")
        records = read_metrics(directory / "metrics.jsonl")
        last = [last_values(r for r in records if r["policy"] == policy) for policy in range(len(RATES))]
        events = read_events(directory)
        kinds = Counter(event.kind for event in events if event.state == "applied")
        returns, rates = ([one[name] for one in last] for name in ("reward/mean", "pbt/learning_rate"))
        return Trained(returns, kinds["copy"], kinds["mutation"], rates, seconds)


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The results as people read them."""
    lines = [f"{'':<12}  mean return of each policy at the end, the worst, copies and mutations, seconds"]
    for name, result in results.items():
        for seed, of in result["seeds"].items():
            returns = " ".join(f"{one:6.1f}" for one in of["returns"])
            what = f"worst {min(of['returns']):6.1f}  {of['copies']} copies, {of['mutations']} mutations"
            lines.append(f"{name:<12}  seed {seed}: {returns}  {what}  {of['seconds']:.0f} s")
    return "\n".join(lines)


def main() -> int:
    """Train both on all seeds, taking turns."""
    parser = argparse.ArgumentParser(description="Population-based training on CartPole.")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3], help="(default 1 2 3)")
    parser.add_argument("--contender", nargs="*", choices=CONTENDERS, metavar="NAME", help="population, alone")
    runs.add_file_arguments(parser)
    arguments = parser.parse_args()
    results: dict[str, dict[str, Any]] = {name: {"seeds": {}} for name in arguments.contender or CONTENDERS}
    for seed in arguments.seeds:
        for name, result in results.items():
            trained = train(CONTENDERS[name], seed, arguments.prefix)
            result["seeds"][str(seed)] = trained._asdict()
            print(f"{name}: seed {seed}: worst {min(trained.returns):.1f}, {trained.seconds:.0f} s", flush=True)
    measuring.save(arguments.json, "population", results)
    print(table(results))
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
