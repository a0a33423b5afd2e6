"""Presets of A3C stand under the names that `envs.presets` gives to environments; given flags overrule them.

Small batches and no importance ratio: rates, bonus of entropy and number of environments were found on one core, see
`docs/a3c.md`. The bonus is small because advantages are not normalized; with 0.01 it outweighs them where an episode's
reward is rare.
"""

from appo.envs.family import Preset
from appo.envs.presets import MUJOCO_NAMES

# Also for an environment without a preset, where it shows numbers and choices only.
NUMBERS: Preset = {
    "optimizer": "adam",
    "learning_rate": 1e-3,
    "gae_lambda": 0.95,
    "exploration_loss_coeff": 0.0003,
    "normalize_returns": True,
    "num_envs_per_worker": 4,
}
CONTINUOUS: Preset = {"exploration_loss_coeff": 0.0, "num_envs_per_worker": 8}
# And where it shows images. On frames that are scaled and no more, as in Mnih et al. 2016, Pong stood still at -20
# for a million agent steps; their running mean and deviation make the background disappear.
IMAGES: Preset = NUMBERS | {"learning_rate": 5e-4, "exploration_loss_coeff": 0.005}

CARTPOLE: Preset = NUMBERS | {"rollout": 32, "exploration_loss_coeff": 0.005}
# The first values of a critic are wrong by more than a policy can bear that shares its layers and has a reward once in
# fifty episodes.
ACROBOT: Preset = NUMBERS | {
    "rollout": 32,
    "exploration_loss_coeff": 0.0,
    "actor_critic_share_weights": False,
    "num_envs_per_worker": 8,
}
LUNAR_LANDER: Preset = CARTPOLE | {"gamma": 0.995, "exploration_loss_coeff": 0.0}
ATARI: Preset = IMAGES | {"lr_schedule": "linear", "train_for_env_steps": 40_000_000}  # where the rate reaches 0

PRESETS: dict[str, Preset] = {
    "toy": {},
    "CartPole": CARTPOLE,
    "Acrobot": ACROBOT,
    "LunarLander": LUNAR_LANDER,
    **dict.fromkeys(
        ("MountainCarContinuous", "LunarLanderContinuous", "BipedalWalker", "BipedalWalkerHardcore", "Pendulum"),
        NUMBERS | CONTINUOUS,
    ),
    **dict.fromkeys(MUJOCO_NAMES, NUMBERS | CONTINUOUS),
    "dm_control": NUMBERS | CONTINUOUS,
    "atari": ATARI,
    "vizdoom": IMAGES,
}
"""By the name of a preset; a known environment that is missing here is learned with `NUMBERS`."""


def learning_preset(name: str) -> Preset:
    """Return flag -> value of learning for the name of a preset, as `appo.envs.presets.find_name` returns it."""
    return PRESETS.get(name, NUMBERS)


def learning_by_kind(*, images: bool, continuous: bool) -> Preset:
    """Return flag -> value of learning for an unknown environment.

    Args:
        images: whether it shows images, alone or beside others.
        continuous: whether actions, or parts of them, are numbers.
    """
    return (IMAGES if images else NUMBERS) | (CONTINUOUS if continuous else {})
