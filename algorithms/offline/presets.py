"""Presets of BC and MARWIL by the names of `envs.presets`; given flags replace a preset's values.

The presets of other algorithms suit steps of a policy in training. Only the discount is a fact of the environment.
"""

from appo.envs.presets import Preset

PRESETS: dict[str, Preset] = {
    "MountainCar": {"gamma": 0.999},
    "MountainCarContinuous": {"gamma": 0.999},
    "LunarLander": {"gamma": 0.999},
    "LunarLanderContinuous": {"gamma": 0.999},
    "Pendulum": {"gamma": 0.9},
    "highway": {"gamma": 0.8},
}
"""Name of a preset -> flags of learning. Other known environments use the defaults of the flags."""


def learning_preset(name: str) -> Preset:
    """Return flag -> value of learning for a name that `appo.envs.presets.find_name` returns."""
    return PRESETS.get(name, {})
