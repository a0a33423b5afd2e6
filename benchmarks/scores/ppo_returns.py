"""Returns of synchronous PPO with the hyperparameters of rl-baselines3-zoo, the reference of other tables.

    python -m benchmarks.scores.ppo_returns [--trial NAME ...] [--seeds 1 2 3 4 5]
        [--add] [--json=FILE] [--markdown=FILE]

Flags give every hyperparameter that the zoo sets or leaves to Stable-Baselines3; no preset decides. A run is a single
process (`--inference=serial`) on one core and reproduces bit by bit: to use two cores, start two commands with separate
files. The newest checkpoint then plays 100 unseen episodes with the most probable actions. The exit code is 1 if an
environment misses the goal.

Differences without a flag: the last layer of the critic starts with the gain of the hidden layers instead of 1; where
the zoo divides rewards by the deviation of discounted returns, our critic predicts value targets in units of the
targets' deviation; observations are clipped to 5 deviations instead of 10; schedules follow the share of the budget
before an iteration instead of after the iteration.

Source: https://github.com/DLR-RM/rl-baselines3-zoo, hyperparams/ppo.yml, and the defaults of stable_baselines3.PPO.
"""

import math
import sys
from collections.abc import Mapping

from appo.algorithms.cli import run_command
from benchmarks.scores.returns import Goals, measure
from benchmarks.scores.trials import Trial

M = 1_000_000

ONE_PROCESS: Mapping[str, object] = {
    "algo": "PPO",
    "device": "cpu",
    "precision": "fp32",
    "inference": "serial",
    "num_workers": 1,
    "worker_num_splits": 1,
    "auto_tune": False,
    "env_vectorization": "python",
    "decorrelate_envs_on_one_worker": False,  # like DummyVecEnv: all environments begin at a reset
}
SB3: Mapping[str, object] = {
    "encoder_mlp_layers": "64,64",
    "nonlinearity": "tanh",
    "policy_initialization": "orthogonal",
    "policy_init_gain": math.sqrt(2),
    "actor_critic_share_weights": False,
    "use_rnn": False,
    "adaptive_stddev": False,
    "initial_stddev": 1.0,
    "normalize_input": False,
    "normalize_returns": False,
    "normalize_advantages": "batch",
    "recompute_advantages": False,
    "shuffle_minibatches": True,
    "learning_rate": 3e-4,
    "lr_schedule": "constant",
    "ppo_clip_ratio": 0.2,
    "ppo_clip_schedule": "constant",
    "ppo_clip_value": 0.0,
    "exploration_loss_coeff": 0.0,
    "value_loss_coeff": 0.5,
    "max_grad_norm": 0.5,
    "adam_eps": 1e-5,
    "target_kl": 0.0,
    "reward_scale": 1.0,
    "reward_clip": 0.0,
}
"""The defaults of Stable-Baselines3's PPO and of its MlpPolicy, which the zoo does not repeat."""
NORMALIZED: Mapping[str, object] = {"normalize_input": True, "normalize_returns": True}
"""The zoo's `normalize: true`."""


def _rollouts(n_envs: int, n_steps: int, batch_size: int) -> dict[str, object]:
    """Translate sizes of an iteration from the zoo's names to flags."""
    return {
        "num_envs_per_worker": n_envs,
        "rollout": n_steps,
        "batch_size": batch_size,
        "num_batches_per_iteration": n_envs * n_steps // batch_size,
    }


def _trial(env: str, env_steps: int, *flags: Mapping[str, object]) -> Trial:
    """Return a trial; later flags override earlier flags, and two hours end a run that would never end."""
    merged = {name: value for part in (ONE_PROCESS, SB3, *flags) for name, value in part.items()}
    return Trial(env, env_steps, seconds=7200, flags=merged, episodes=100)


TRIALS = {
    "cartpole": _trial(
        "CartPole-v1",
        100_000,
        _rollouts(8, 32, 256),
        {"ppo_epochs": 20, "gamma": 0.98, "gae_lambda": 0.8, "learning_rate": 1e-3},
        {"lr_schedule": "linear", "ppo_clip_schedule": "linear"},
    ),
    "acrobot": _trial(
        "Acrobot-v1",
        M,
        NORMALIZED,
        _rollouts(16, 256, 64),
        {"ppo_epochs": 4, "gamma": 0.99, "gae_lambda": 0.94},
    ),
    "lunar_lander": _trial(
        "LunarLander-v3",
        M,
        _rollouts(16, 1024, 64),
        {"ppo_epochs": 4, "gamma": 0.999, "gae_lambda": 0.98, "exploration_loss_coeff": 0.01},
    ),
    "half_cheetah": _trial(
        "HalfCheetah-v5",
        M,
        NORMALIZED,
        _rollouts(1, 512, 64),
        {"ppo_epochs": 20, "gamma": 0.98, "gae_lambda": 0.92, "learning_rate": 2.0633e-5, "ppo_clip_ratio": 0.1},
        {"exploration_loss_coeff": 0.000401762, "value_loss_coeff": 0.58096, "max_grad_norm": 0.8},
        {"encoder_mlp_layers": "256,256", "nonlinearity": "relu", "policy_initialization": "torch_default"},
        {"initial_stddev": math.exp(-2)},  # log_std_init
    ),
}
# Published returns of the zoo, minus the spread over seeds and episodes.
ASKED = {"cartpole": 500.0, "acrobot": -85.0, "lunar_lander": 225.0, "half_cheetah": 5155.0}
GOALS = Goals("ppo_returns", "Returns of PPO with the hyperparameters of rl-baselines3-zoo.", TRIALS, ASKED)


def main() -> int:
    return measure(GOALS)


if __name__ == "__main__":
    sys.exit(run_command(main))
