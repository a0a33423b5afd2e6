"""Self-play on rock-paper-scissors: whether the mean of the past versions chooses evenly.

    python -m benchmarks.scores.self_play [--seeds 1 2 3] [--contender NAME ...] [--add] [--json=FILE]

Gradients circle around the only strategy that cannot be exploited, so no single version needs to be near the strategy.
The benchmark prints the mean strategy of the versions from the second half of training, the largest distance of the
mean from a third, and the largest distance of a single version. Without self-play (`--contender alone`) the policy
plays against itself; versions are saved equally often.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from appo.algorithms.cli import run_command
from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.playing.player import load_player
from appo.algorithms.tools.flags import MatchConfig
from appo.algorithms.tools.match import find_side
from appo.envs.make import make_alone
from appo.utils.metrics import last_values, read_metrics
from benchmarks.shared import runs, seeds

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
    """Outcome of a run.

    Attributes:
        mean: mean strategy of all versions of the second half: rock, paper, scissors.
        farthest: largest difference between the mean and a third.
        worst_version: largest difference between a single version and a third.
        win_rate: win rate against the pool at the end; 0 without a pool.
        seconds: seconds of the run.
    """

    mean: list[float]
    farthest: float
    worst_version: float
    win_rate: float
    seconds: float

    def line(self) -> str:
        mean = " ".join(f"{one:.3f}" for one in self.mean)
        far = f"{self.farthest:.3f} from a third (at most {TOLERANCE}), one version {self.worst_version:.3f}"
        return f"{mean}, {far}, win rate {self.win_rate:.2f}, {self.seconds:.0f} s"


def strategies(directory: Path) -> list[list[float]]:
    """Return the probabilities of each past version in the first round."""
    versions = sorted(int(path.name[5:]) for path in (directory / "checkpoint_p0" / "past").glob("ckpt_*"))
    config, flags = MatchConfig(train_dir=str(directory.parent)), EvaluationConfig(no_render=True)
    envs = None
    rows = []
    for version in versions:
        run = find_side(f"{directory.name}:{version}", 0, config)
        envs = envs or make_alone(run.config.env)
        player, _ = load_player(run, envs.spec, flags, seed=0)
        shown, first = torch.zeros(2, 3), torch.ones(2, dtype=torch.bool)
        with torch.inference_mode():
            logits, _, _ = player.policy.flat.module.act({"obs": shown}, first, player.rnn_state)
        rows.append(logits[0].softmax(0).tolist())
    if envs is not None:
        envs.close()
    return rows


def train(flags: Mapping[str, object], seed: int, prefix: Sequence[str]) -> Trained:
    with runs.finished({**FLAGS, **flags, "seed": seed}, prefix) as run:
        of_versions = np.array(strategies(run.directory))
        win_rate = last_values(read_metrics(run.directory / "metrics.jsonl")).get("selfplay/win_rate", 0.0)
    mean = of_versions.mean(axis=0)
    far, worst = (float(np.abs(one - 1 / 3).max()) for one in (mean, of_versions))
    return Trained(mean.tolist(), far, worst, float(win_rate), run.seconds)


def main() -> int:
    """Train on all seeds; exit code 1 after a broken promise."""
    parser = seeds.parser_of("Self-play on rock-paper-scissors.", CONTENDERS)
    parser.set_defaults(names=("past",))
    arguments = parser.parse_args()
    results = seeds.train_all("self_play", arguments, lambda n, seed: train(CONTENDERS[n], seed, arguments.prefix))
    promised = results.get("past", {"seeds": {}})["seeds"].values()
    return os.EX_OK if all(of["farthest"] <= TOLERANCE for of in promised) else 1


if __name__ == "__main__":
    sys.exit(run_command(main))
