"""Presets of A3C stand under the names that `envs.presets` gives to environments; given flags overrule them.

Rates, discounts and lengths begin with those of rl-baselines3-zoo (hyperparams/a2c.yml) for the synchronous variant,
and of Mnih et al. 2016 for Atari.
"""

from envs.presets import Preset

CLASSIC: Preset = {
    "optimizer": "adam",
    "learning_rate": 1e-3,
    "rollout": 32,
    "gae_lambda": 0.95,
    "exploration_loss_coeff": 0.005,
    "normalize_returns": True,
    "num_envs_per_worker": 4,
}
# Arithmetic and schedule of Mnih et al. 2016, section 8: frames that are scaled and no more, RMSProp with a rate that
# falls to 0, gradients of 20 steps as in later reports.
ATARI: Preset = {
    "rollout": 20,
    "learning_rate": 7e-4,
    "lr_schedule": "linear",
    "exploration_loss_coeff": 0.01,
    "value_loss_coeff": 0.5,
    "gamma": 0.99,
    "normalize_images": False,
    "train_for_env_steps": 40_000_000,  # where the rate reaches 0
}

PRESETS: dict[str, Preset] = {
    **dict.fromkeys(("CartPole", "Acrobot"), CLASSIC),
    "LunarLander": CLASSIC | {"gamma": 0.995, "exploration_loss_coeff": 0.01},
    "atari": ATARI,
}
"""By the name of a preset; a known environment that is missing here is learned with the defaults of the flags."""


def learning_preset(name: str) -> Preset:
    """Return flag -> value of learning for the name of a preset, as `envs.presets.find_name` returns it."""
    return PRESETS.get(name, {})
