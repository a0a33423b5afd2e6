"""Returns of Ape-X with its presets, and with a replay that draws all steps alike.

    python -m benchmarks.apex_returns [--trial NAME ...] [--seeds 1 2 3 4 5] [--add] [--json=FILE] [--markdown=FILE]

A run is what `appo train --algo=APEX --env=ID` starts, with as many agent steps as the name of the trial has in the
table. The newest checkpoint then plays 100 episodes greedily. The exit code is 1 if an environment has less than what
is asked for: a return of 475 in CartPole, -75 in Acrobot, 265 in LunarLander (SLM-Lab's table has 265.9 for its double
DQN with prioritised replay).
"""

import sys

from algorithms.cli import run_command
from benchmarks.returns import Goals, measure
from benchmarks.scores import Trial


def _trial(env: str, env_steps: int, **flags: object) -> Trial:
    """An environment with its preset; two hours end a run that would never end."""
    return Trial(env, env_steps, seconds=7200, flags={"algo": "APEX", "device": "cpu", **flags}, episodes=100)


TRIALS = {
    "cartpole": _trial("CartPole-v1", 60_000),
    "acrobot": _trial("Acrobot-v1", 100_000),
    "lunar_lander": _trial("LunarLander-v3", 300_000),
    "lunar_lander_uniform": _trial("LunarLander-v3", 300_000, prioritized_replay=False),
}
ASKED = {"cartpole": 475.0, "acrobot": -75.0, "lunar_lander": 265.0}
GOALS = Goals("apex_returns", "Returns of Ape-X with its presets.", TRIALS, ASKED)


def main() -> int:
    """Train and play all, seed by seed, then write the table."""
    return measure(GOALS)


if __name__ == "__main__":
    sys.exit(run_command(main))
