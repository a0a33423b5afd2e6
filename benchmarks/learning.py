"""Learning per sample: CartPole to a mean return of 475 in both precisions, and beside Sample Factory 2.

    python -m benchmarks.learning [--seeds 1 2 3] [--contender NAME ...] [--add] [--json=FILE]

All learn with the same hyperparameters: those of Sample Factory's defaults, with a batch and a rate for CartPole.
`preset` is what `train_appo.py --env=CartPole-v1` does. Counted are the env steps trained on until the mean return of
the last 100 episodes is there, and the seconds from the start of the command.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from algorithms.cli import run_command
from benchmarks import runs, seeds
from benchmarks.measuring import ROOT
from benchmarks.peers.interpreters import DEFAULT_CACHE, interpreter
from utils.metrics import read_metrics

GOAL, MOST_ENV_STEPS, MOST_SECONDS = 475.0, 2_000_000, 300
DRIVER = ROOT / "benchmarks" / "peers" / "sample_factory_driver.py"
SAME: Mapping[str, object] = {
    "rollout": 32, "batch_size": 512, "num_batches_per_iteration": 1, "ppo_epochs": 2, "learning_rate": 1e-3,
    "gamma": 0.99, "with_vtrace": False, "gae_lambda": 0.95, "ppo_clip_ratio": 0.1, "ppo_clip_value": 1.0,
    "value_loss_coeff": 0.5, "exploration_loss_coeff": 0.003, "max_grad_norm": 4.0, "adam_eps": 1e-6,
    "num_workers": 2, "num_envs_per_worker": 8, "worker_num_splits": 1, "env_vectorization": "python",
}  # fmt: skip
OURS: Mapping[str, Mapping[str, object]] = {
    "preset": {},
    "fp32": SAME | {"precision": "fp32"},
    "bf16": SAME | {"precision": "bf16"},
}
PEER = "sample_factory"


class Learned(NamedTuple):
    """When the goal was reached, or that it was not (`env_steps` is then what was trained on)."""

    env_steps: int
    seconds: float
    reached: bool

    def line(self) -> str:
        """For the terminal."""
        return f"{self.env_steps:,} env steps{'' if self.reached else ' NOT REACHED'}, {self.seconds:.1f} s"


def train(flags: Mapping[str, object], seed: int, prefix: Sequence[str]) -> Learned:
    """One run of ours."""
    given = {
        **flags, "env": "CartPole-v1", "seed": seed,
        "train_until_return": GOAL, "train_for_env_steps": MOST_ENV_STEPS,
    }  # fmt: skip
    with runs.finished(given, prefix) as run:
        last = read_metrics(run.directory / "metrics.jsonl")[-1]
    return Learned(last["env_steps"], run.seconds, last["reward/mean"] >= GOAL)


def train_peer(cache: Path, seed: int, prefix: Sequence[str]) -> Learned:
    """One run of Sample Factory 2."""
    python = interpreter(PEER, cache)
    with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder:
        log_path = Path(folder, "output.log")
        command = [str(python), str(DRIVER), "cartpole_learning", folder, f"--seed={seed}"]
        begin = time.monotonic()

        def look() -> Learned | None:
            seconds, steps = time.monotonic() - begin, 0
            for steps, mean in _returns(log_path):
                if mean >= GOAL:
                    return Learned(steps, seconds, reached=True)
            return Learned(steps, seconds, reached=False) if seconds > MOST_SECONDS or steps > MOST_ENV_STEPS else None

        return runs.until(command, look, prefix, log_path)


def _returns(log_path: Path) -> list[tuple[int, float]]:
    """Samples and the mean return at that time, as the driver has printed them."""
    lines = log_path.read_text(errors="replace").splitlines() if log_path.exists() else []
    found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    return [(one["samples"], one["return"]) for one in found if one.get("return") is not None]


def main() -> int:
    """Train all contenders on all seeds, taking turns."""
    parser = seeds.parser_of("Learning per sample on CartPole.", (*OURS, PEER))
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help=f"of interpreters (default {DEFAULT_CACHE})")
    arguments = parser.parse_args()

    def train_one(name: str, seed: int) -> Learned:
        if name == PEER:
            return train_peer(arguments.cache, seed, arguments.prefix)
        return train(OURS[name], seed, arguments.prefix)

    seeds.train_all("learning", arguments, train_one)
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
