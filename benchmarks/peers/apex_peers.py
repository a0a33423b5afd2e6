"""Ape-X beside the DQN of two peers, at equal work: `python -m benchmarks.peers.apex_peers`.

    python -m benchmarks.peers.apex_peers [--workload NAME ...] [--contender NAME ...] [--cache=DIR] [--json=FILE]

Both sides use every agent step eight times, in batches of equal size, and train equal networks on one environment,
without dueling and double Q-learning. Ours draws by priorities and sums three rewards; the peers draw uniformly and use
one reward. A peer has one process with one or two threads and one environment; the faster counts. Runs named `_8_envs`
show Stable-Baselines3 with several environments, which saves much time where environments cost little. The runs of all
contenders take turns, A B C A B C ..., so changes of the machine affect all contenders alike.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from appo.algorithms.cli import run_command
from benchmarks.peers.interpreters import DEFAULT_CACHE, interpreter
from benchmarks.shared import runs
from benchmarks.shared.runs import Timing
from benchmarks.shared.workloads import PONG, Workload

OURS, INTERPRETER = "apex", "stable_baselines3"


class Peer(NamedTuple):
    """A peer: driver in `benchmarks/peers`, threads and environments."""

    driver: str
    threads: int
    envs: int

    @property
    def title(self) -> str:
        """Return the name in tables."""
        return f"{self.driver} with {f'{self.envs} environments' if self.envs > 1 else 'its best number of threads'}"


PEERS = {
    **{
        f"{name}_{threads}": Peer(name, threads, 1)
        for name in ("stable_baselines3", "cleanrl_dqn")
        for threads in (1, 2)
    },
    "stable_baselines3_8_envs": Peer("stable_baselines3", 1, 8),
}
"""By the name of the contender."""

USES, LEARNING_STARTS, CAPACITY = 8, 1000, 50_000
EQUAL = {
    "algo": "APEX",
    "double_q": False,
    "dueling": False,
    "replay_ratio": USES,
    "learning_starts": LEARNING_STARTS,
    "replay_capacity": CAPACITY,
    "target_update_interval": 2500,
    "normalize_input": False,
    "use_rnn": False,
    "train_for_env_steps": 10**9,  # a preset may end before the measurement
}
SMALL = {
    "encoder_mlp_layers": "64,64",
    "nonlinearity": "relu",
    "rollout": 16,
    "env_vectorization": "python",
    "num_workers": 1,
    "num_envs_per_worker": 64,
    "inference": "local",
}
WORKLOADS = {
    "pong": Workload(
        "ALE/Pong-v5", PONG | EQUAL | {"batch_size": 512, "rollout": 32}, "Pong, Nature network, batch 512"
    ),
    "pong_32": Workload("ALE/Pong-v5", PONG | EQUAL | {"batch_size": 32, "rollout": 32}, "the same, batch 32"),
    "cartpole": Workload("CartPole-v1", SMALL | EQUAL | {"batch_size": 256}, "CartPole, MLP 64x64, batch 256"),
}


def measure(workload: str, plan: argparse.Namespace, before: Mapping[str, Any]) -> dict[str, Any]:
    """Measure all contenders on one workload in turns, and add the runs to the earlier runs."""
    names = [name for name in (OURS, *PEERS) if name in (plan.contender or (OURS, *PEERS))]
    timing = runs.timing_of(plan)
    python = interpreter(INTERPRETER, plan.cache) if names != [OURS] else Path(sys.executable)
    observed = {name: list(found) for name, found in before.get("contenders", {}).items()}
    for _ in range(plan.repeats):
        for name in names:
            found = runs.train(WORKLOADS[workload], timing) if name == OURS else peer(python, workload, name, timing)
            observed.setdefault(name, []).append(found._asdict())
            speed, memory = found.samples_per_second, found.pss_mib
            print(f"{workload}: {name}: {speed:,.0f} agent steps/s, {memory:,.0f} MiB", flush=True)
    return {"what": WORKLOADS[workload].what, "seconds": timing.seconds, "contenders": observed}


def peer(python: Path, workload: str, name: str, timing: Timing) -> runs.Observed:
    """Run the peer with a name."""
    flags, one = WORKLOADS[workload].flags, PEERS[name]
    driver = Path(__file__).with_name(f"{one.driver}_driver.py")
    numbers = {
        "batch_size": flags["batch_size"],
        "uses": USES,
        "learning_starts": LEARNING_STARTS,
        "capacity": CAPACITY,
        "threads": one.threads,
        **({"envs": one.envs} if one.driver == "stable_baselines3" else {}),
    }
    with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder:
        log_path = Path(folder, "output.log")
        words = [f"--{flag}={value}" for flag, value in numbers.items()]
        command = [str(python), str(driver), WORKLOADS[workload].env, *words]
        return runs.observe(command, lambda: runs.reported_progress(log_path), timing, log_path, {"PYTHONPATH": ""})


def ratios(result: Mapping[str, Any]) -> dict[str, float]:
    """Return our median speed over each peer's with the best number of threads, by title."""
    medians = {name: runs.summary(one)["samples_per_second"].median for name, one in result["contenders"].items()}
    best: dict[str, float] = {}
    for name, one in PEERS.items():
        if name in medians:
            best[one.title] = max(best.get(one.title, 0.0), medians[name])
    return {title: medians[OURS] / speed for title, speed in best.items()} if OURS in medians else {}


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"{'':<10}  {'':<24}  agent steps/s  lowest - highest   CPU  PSS MiB"]
    for workload, result in results.items():
        for name, of_one in result["contenders"].items():
            r = runs.summary(of_one)
            speed = r["samples_per_second"]
            extremes = f"{speed.lowest:,.0f} - {speed.highest:,.0f}"
            lines.append(
                f"{workload:<10}  {name:<24}  {speed.median:>13,.0f}  {extremes:>16}  {r['cpu_share']:>4.0%}"
                f"  {r['pss_mib']:>7,.0f}"
            )
        for title, times in ratios(result).items():
            lines.append(f"{workload:<10}  ours is {times:.2f} times {title}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.apex_peers", description="Speed beside peers.")
    known = (OURS, *PEERS)
    parser.add_argument("--workload", nargs="*", choices=WORKLOADS, metavar="NAME", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--contender", nargs="*", choices=known, metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument(
        "--cache", type=Path, default=DEFAULT_CACHE, help=f"folder of interpreters (default {DEFAULT_CACHE})"
    )
    runs.add_run_arguments(parser)
    arguments = parser.parse_args(argv)
    names = arguments.workload or WORKLOADS
    results = runs.each_workload("apex_peers", arguments, names, lambda name, old: measure(name, arguments, old))
    print(table(results))
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
