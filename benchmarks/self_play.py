"""Self-play on rock-paper-scissors: whether the past versions, taken together, choose evenly by chance.

    python -m benchmarks.self_play [--seeds 1 2 3] [--json=FILE]

A gradient runs in circles around the only strategy that cannot be exploited, so no single version need be near it. Said
are the mean strategy of the versions of the second half of training, how far it is from a third at most, and the same
of the worst single version. Without self-play (`--contender alone`) the policy plays itself; its versions are taken as
often.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from algorithms.cli import run_command
from algorithms.evaluation import load_player, make_envs
from algorithms.evaluation_config import EvaluationConfig
from algorithms.match import found
from algorithms.match_config import MatchConfig
from benchmarks import measuring, runs
from benchmarks.measuring import ROOT
from utils.metrics import last_values, read_metrics

VERSIONS, PERIOD = 20, 5_000
FLAGS: Mapping[str, object] = {
    "env": "toy/RockPaperScissors-v0", "self_play": True, "self_play_pool_size": VERSIONS,
    "self_play_period_env_steps": PERIOD, "train_for_env_steps": 2 * VERSIONS * PERIOD, "learning_rate": 5e-4,
    "exploration_loss_coeff": 0.1, "use_rnn": False, "encoder_mlp_layers": 32, "rollout": 8, "batch_size": 1024,
    "normalize_input": False, "inference": "serial", "num_envs_per_worker": 128, "plot": False, "tensorboard": False,
}  # fmt: skip
CONTENDERS: Mapping[str, Mapping[str, object]] = {
    "past": {"self_play_past_share": 0.8},
    "alone": {"self_play_past_share": 0.0},
}
TOLERANCE = 0.05


class Trained(NamedTuple):
    """What a run has learned.

    Attributes:
        mean: strategy of all versions of the second half together: rock, paper, scissors.
        farthest: largest difference of it to a third.
        worst_version: the same of the version for which it is largest.
        win_rate: against the pool at the end; 0 if it was not played.
        seconds: of the run.
    """

    mean: list[float]
    farthest: float
    worst_version: float
    win_rate: float
    seconds: float


def strategies(directory: Path) -> list[list[float]]:
    """With which probability each past version of a run chooses what in the first round."""
    versions = sorted(int(path.name[5:]) for path in (directory / "checkpoint_p0" / "past").glob("ckpt_*"))
    config, flags = MatchConfig(train_dir=str(directory.parent)), EvaluationConfig(no_render=True)
    envs = None
    rows = []
    for version in versions:
        run = found(f"{directory.name}:{version}", 0, config)
        envs = envs or make_envs(run.config, flags)
        player, _ = load_player(run, envs.spec, flags, seed=0)
        shown, first = torch.zeros(2, 3), torch.ones(2, dtype=torch.bool)
        with torch.inference_mode():
            logits, _, _ = player.model.act({"obs": shown}, first, player.rnn_state)
        rows.append(logits[0].softmax(0).tolist())
    if envs is not None:
        envs.close()
    return rows


def train(flags: Mapping[str, object], seed: int, prefix: Sequence[str]) -> Trained:
    """One run."""
    with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder:
        given = {**FLAGS, **flags, "seed": seed, "train_dir": folder, "experiment": "run"}
        command = [sys.executable, str(ROOT / "train_appo.py"), *(f"--{name}={value}" for name, value in given.items())]
        begin = time.monotonic()
        runs.run_to_end(command, prefix)
        seconds, directory = time.monotonic() - begin, Path(folder, "run")
        of_versions = np.array(strategies(directory))
        mean = of_versions.mean(axis=0)
        far, worst = (float(np.abs(one - 1 / 3).max()) for one in (mean, of_versions))
        win_rate = last_values(read_metrics(directory / "metrics.jsonl")).get("selfplay/win_rate", 0.0)
        return Trained(mean.tolist(), far, worst, float(win_rate), seconds)


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The results as people read them."""
    lines = [f"{'':<8}  mean strategy of the second half, farthest from a third (at most {TOLERANCE}), of one version"]
    for name, result in results.items():
        for seed, of in result["seeds"].items():
            mean = " ".join(f"{one:.3f}" for one in of["mean"])
            far = f"{of['farthest']:.3f}  {of['worst_version']:.3f}"
            lines.append(f"{name:<8}  seed {seed}: {mean}  {far}  win rate {of['win_rate']:.2f}  {of['seconds']:.0f} s")
    return "\n".join(lines)


def main() -> int:
    """Train on all seeds; an error if the promise is not kept."""
    parser = argparse.ArgumentParser(description="Self-play on rock-paper-scissors.")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3], help="(default 1 2 3)")
    parser.add_argument("--contender", nargs="*", choices=CONTENDERS, default=["past"], help="past, alone")
    runs.add_file_arguments(parser)
    arguments = parser.parse_args()
    results: dict[str, dict[str, Any]] = {name: {"seeds": {}} for name in arguments.contender}
    for seed in arguments.seeds:
        for name, result in results.items():
            result["seeds"][str(seed)] = train(CONTENDERS[name], seed, arguments.prefix)._asdict()
    measuring.save(arguments.json, "self_play", results)
    print(table(results))
    promised = results.get("past", {"seeds": {}})["seeds"].values()
    return os.EX_OK if all(of["farthest"] <= TOLERANCE for of in promised) else 1


if __name__ == "__main__":
    sys.exit(run_command(main))
