"""Presets of A3C by the names of `envs.presets`; given flags replace a preset's values.

Batches are small and no importance ratio corrects the policy lag. Rates, entropy bonus and number of environments come
from experiments on one core, see `docs/a3c.md`. The bonus is small because advantages are not normalized: a bonus of
0.01 outweighs the advantages if rewards are rare.
"""

from appo.envs.family import Preset
from appo.envs.presets import MUJOCO_NAMES

# Also for environments without a preset whose observations contain no image.
NUMBERS: Preset = {
    "optimizer": "adam",
    "learning_rate": 1e-3,
    "gae_lambda": 0.95,
    "exploration_loss_coeff": 0.0003,
    "normalize_returns": True,
    "num_envs_per_worker": 4,
}
CONTINUOUS: Preset = {"exploration_loss_coeff": 0.0, "num_envs_per_worker": 8}
# For images. With frames that are only scaled, as in Mnih et al. 2016, Pong stayed at -20 for a million agent steps;
# normalization by running mean and deviation removes the background.
IMAGES: Preset = NUMBERS | {"learning_rate": 5e-4, "exploration_loss_coeff": 0.005}

CARTPOLE: Preset = NUMBERS | {"rollout": 32, "exploration_loss_coeff": 0.005}
# The first values of the critic are far off. A policy with shared layers, and with a reward once in fifty episodes,
# does not survive the error.
ACROBOT: Preset = NUMBERS | {
    "rollout": 32,
    "exploration_loss_coeff": 0.0,
    "actor_critic_share_weights": False,
    "num_envs_per_worker": 8,
}

PRESETS: dict[str, Preset] = {
    "toy": {},
    "CartPole": CARTPOLE,
    "Acrobot": ACROBOT,
    "LunarLander": CARTPOLE | {"gamma": 0.995, "exploration_loss_coeff": 0.0},
    **dict.fromkeys(
        ("MountainCarContinuous", "LunarLanderContinuous", "BipedalWalker", "BipedalWalkerHardcore", "Pendulum"),
        NUMBERS | CONTINUOUS,
    ),
    **dict.fromkeys((*MUJOCO_NAMES, "dm_control"), NUMBERS | CONTINUOUS),
    "atari": IMAGES | {"lr_schedule": "linear", "train_for_env_steps": 40_000_000},  # where the rate reaches 0
    "vizdoom": IMAGES,
}
"""Name of a preset -> flags of learning. Other known environments use `NUMBERS`."""
