"""Samples and seconds to a return, beside Sample Factory 2 and Stable-Baselines3.

    python -m benchmarks.scores.learning [--seeds 1 2 3] [--contender NAME ...] [--add] [--json=FILE]

Contenders named after a precision learn with equal hyperparameters: the defaults of Sample Factory, with batches and a
learning rate that work for the environment; so does `sample_factory`. A `preset` is `train_appo.py --env=ID`;
`*_stable_baselines3` has the tuned hyperparameters of rl-baselines3-zoo; all runs of Pong have no sticky actions. The
benchmark counts samples (agent steps trained on) until the mean return of the last 100 episodes reaches the goal, and
seconds from the start of the command. A run that misses the goal reports the mean return at the end.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from appo.algorithms.cli import run_command
from appo.utils.metrics import read_metrics
from benchmarks.peers.interpreters import DEFAULT_CACHE, interpreter
from benchmarks.shared import runs, seeds
from benchmarks.shared.measuring import ROOT
from benchmarks.shared.workloads import PONG

DRIVERS = ROOT / "benchmarks" / "peers"
SAME: Mapping[str, object] = {
    "rollout": 32, "gamma": 0.99, "with_vtrace": False, "gae_lambda": 0.95, "ppo_clip_ratio": 0.1,
    "ppo_clip_value": 1.0, "value_loss_coeff": 0.5, "adam_eps": 1e-6, "num_workers": 2, "worker_num_splits": 1,
}  # fmt: skip
SAME_CARTPOLE = SAME | {
    "batch_size": 512, "num_batches_per_iteration": 1, "ppo_epochs": 2, "learning_rate": 1e-3,
    "exploration_loss_coeff": 0.003, "max_grad_norm": 4.0, "num_envs_per_worker": 8, "env_vectorization": "python",
}  # fmt: skip
SAME_PONG = SAME | PONG | {
    "batch_size": 256, "num_batches_per_iteration": 4, "ppo_epochs": 1, "learning_rate": 5e-4, "vtrace_lambda": 1.0,
    "exploration_loss_coeff": 0.01, "max_grad_norm": 0.5, "num_envs_per_worker": 16, "policy_init_gain": 1.0,
}  # fmt: skip


class Task(NamedTuple):
    """A learning task.

    Attributes:
        env: id of the environment.
        frames: frames per sample.
        goal: mean return that ends training.
        most_samples: samples that end training; 0: no limit.
        most_seconds: seconds that end training.
    """

    env: str
    frames: int
    goal: float
    most_samples: int
    most_seconds: int

    def budget(self) -> dict[str, object]:
        """Return the budget as flags of train_appo.py."""
        steps = {"train_for_env_steps": self.most_samples * self.frames} if self.most_samples else {}
        return {"env": self.env, "train_until_return": self.goal, "train_for_seconds": self.most_seconds, **steps}


CARTPOLE = Task("CartPole-v1", 1, 475.0, 2_000_000, 300)
PONG_BY_SAMPLES = Task("ALE/Pong-v5", 4, 18.0, 500_000, 3600)
PONG_BY_TIME = Task("ALE/Pong-v5", 4, 18.0, 0, 1800)
LUNAR_LANDER = Task("LunarLander-v3", 1, 200.0, 0, 300)
HALF_CHEETAH = Task("HalfCheetah-v5", 1, 3000.0, 0, 300)


class Contender(NamedTuple):
    """A contender: ours with flags, or a peer with the words of its driver."""

    task: Task
    flags: Mapping[str, object] = {}
    peer: str = ""
    words: tuple[str, ...] = ()


def _sample_factory(task: Task, workload: str) -> Contender:
    return Contender(task, peer="sample_factory", words=("sample_factory_driver.py", workload))


def _stable_baselines3(task: Task) -> Contender:
    return Contender(task, peer="stable_baselines3", words=("stable_baselines3_ppo_driver.py", task.env))


CONTENDERS = {
    "preset": Contender(CARTPOLE),
    "fp32": Contender(CARTPOLE, SAME_CARTPOLE | {"precision": "fp32"}),
    "bf16": Contender(CARTPOLE, SAME_CARTPOLE | {"precision": "bf16"}),
    "sample_factory": _sample_factory(CARTPOLE, "cartpole_learning"),
    "stable_baselines3": _stable_baselines3(CARTPOLE),
    "pong_preset": Contender(PONG_BY_TIME, {"env_kwargs": PONG["env_kwargs"]}),
    "pong_fp32": Contender(PONG_BY_SAMPLES, SAME_PONG | {"precision": "fp32"}),
    "pong_bf16": Contender(PONG_BY_SAMPLES, SAME_PONG | {"precision": "bf16"}),
    "pong_sample_factory": _sample_factory(PONG_BY_SAMPLES, "pong_learning"),
    "pong_sample_factory_by_time": _sample_factory(PONG_BY_TIME, "pong_learning"),
    "lunar_lander_preset": Contender(LUNAR_LANDER),
    "lunar_lander_sample_factory": _sample_factory(LUNAR_LANDER, "lunar_lander"),
    "lunar_lander_stable_baselines3": _stable_baselines3(LUNAR_LANDER),
    "half_cheetah_preset": Contender(HALF_CHEETAH),
    "half_cheetah_sample_factory": _sample_factory(HALF_CHEETAH, "halfcheetah"),
    "half_cheetah_stable_baselines3": _stable_baselines3(HALF_CHEETAH),
}


class Learned(NamedTuple):
    """Samples and seconds to the goal, or a missed goal, and the mean return at the end."""

    samples: int
    seconds: float
    reached: bool
    mean: float | None

    def line(self) -> str:
        """Return the summary for terminal and tables."""
        got = "" if self.reached else f" to {self.mean:.1f}" if self.mean is not None else " to nothing"
        return f"{self.samples:,}{got} in {self.seconds:.1f} s"


def train(contender: Contender, seed: int, prefix: Sequence[str]) -> Learned:
    """Train with train_appo.py."""
    with runs.finished({**contender.flags, **contender.task.budget(), "seed": seed}, prefix) as run:
        last = read_metrics(run.directory / "metrics.jsonl")[-1]
        return Learned(last["samples"], run.seconds, run.has_reached_goal(), last.get("reward/mean"))


def train_peer(contender: Contender, cache: Path, seed: int, prefix: Sequence[str]) -> Learned:
    """Train with a peer, and end the run at the goal."""
    python, task, (driver, *words) = interpreter(contender.peer, cache), contender.task, contender.words
    with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder:
        log_path = Path(folder, "output.log")
        command = [str(python), str(DRIVERS / driver), *words, folder, f"--seed={seed}"]
        begin = time.monotonic()

        def look() -> Learned | None:
            seconds, samples, mean = time.monotonic() - begin, 0, None
            for one in _reports(log_path):
                samples = one["samples"]
                mean = mean if one["return"] is None else one["return"]
                if mean is not None and mean >= task.goal:
                    return Learned(samples, seconds, True, mean)
                if 0 < task.most_samples <= samples or one.get("ended"):
                    return Learned(samples, seconds, False, mean)
            return Learned(samples, seconds, False, mean) if seconds > task.most_seconds else None

        return runs.until(command, look, prefix, log_path)


def _reports(log_path: Path) -> list[dict[str, Any]]:
    """Return the reports in the output of a driver: samples, mean return if known, and whether training has ended."""
    lines = log_path.read_text(errors="replace").splitlines() if log_path.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def main() -> int:
    parser = seeds.parser_of("Learning per sample.", CONTENDERS)
    parser.add_argument(
        "--cache", type=Path, default=DEFAULT_CACHE, help=f"folder of interpreters (default {DEFAULT_CACHE})"
    )
    arguments = parser.parse_args()

    def train_one(name: str, seed: int) -> Learned:
        contender = CONTENDERS[name]
        if contender.peer:
            return train_peer(contender, arguments.cache, seed, arguments.prefix)
        return train(contender, seed, arguments.prefix)

    seeds.train_all("learning", arguments, train_one)
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
