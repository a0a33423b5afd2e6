"""Returns of Ape-X with the presets, and with a replay that draws uniformly.

    python -m benchmarks.scores.apex_returns [--trial NAME ...] [--seeds 1 2 3 4 5]
        [--add] [--json=FILE] [--markdown=FILE]

A run is `appo train --algo=APEX --env=ID` with the agent steps of the trial's table. The newest checkpoint then plays
100 episodes greedily. The exit code is 1 if a mean return is below the goal: 475 in CartPole, -75 in Acrobot, 265 in
LunarLander (SLM-Lab's table has 265.9 for a double DQN with prioritised replay), 18 in Pong without sticky actions. On
the cliff all actions are random: both ways of drawing see the same steps, a few in 20,000 with a reward.
"""

import sys
from collections.abc import Mapping

from appo.algorithms.cli import run_command
from benchmarks.scores.returns import Goals, measure
from benchmarks.scores.trials import Trial


def _trial(env: str, env_steps: int, **flags: object) -> Trial:
    """Return a trial with the preset; two hours end a run that would never end."""
    return Trial(env, env_steps, seconds=7200, flags={"algo": "APEX", "device": "cpu", **flags}, episodes=100)


CLIFF: Mapping[str, object] = {
    "env_kwargs": "length=11",
    "epsilon": 1,
    "epsilon_alpha": 0,
    "num_workers": 1,
    "num_envs_per_worker": 4,
    "inference": "serial",
    "normalize_input": False,
    "nonlinearity": "relu",
    "encoder_mlp_layers": "128,128",
    "rollout": 16,
    "batch_size": 64,
    "learning_rate": 1e-3,
    "max_grad_norm": 10,
    "n_steps": 1,
    "learning_starts": 1000,
    "replay_capacity": 100_000,
    "replay_ratio": 1,
    "target_update_interval": 20,  # every copy moves a value one cell closer to the start
    "max_weight_sync_delay": 0,
}
TRIALS = {
    "cartpole": _trial("CartPole-v1", 60_000),
    "acrobot": _trial("Acrobot-v1", 100_000),
    "lunar_lander": _trial("LunarLander-v3", 300_000),
    "lunar_lander_uniform": _trial("LunarLander-v3", 300_000, prioritized_replay=False),
    "cliff": _trial("toy/Cliff-v0", 20_000, **CLIFF),
    "cliff_uniform": _trial("toy/Cliff-v0", 20_000, **CLIFF, prioritized_replay=False),
    "pong": _trial("ALE/Pong-v5", 3_600_000, env_kwargs="repeat_action_probability=0"),
}
ASKED = {"cartpole": 475.0, "acrobot": -75.0, "lunar_lander": 265.0, "pong": 18.0}
GOALS = Goals("apex_returns", "Returns of Ape-X with its presets.", TRIALS, ASKED)


def main() -> int:
    return measure(GOALS)


if __name__ == "__main__":
    sys.exit(run_command(main))
