"""Presets of BC and MARWIL stand under the names that `envs.presets` gives to environments; given flags overrule them.

The settings of other algorithms suit steps that their own policy acts. Only the discount is a fact of the environment.
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
"""By the name of a preset; a known environment that is missing here is learned with the defaults of the flags."""


def learning_preset(name: str) -> Preset:
    """Return flag -> value of learning for the name of a preset, as `appo.envs.presets.find_name` returns it."""
    return PRESETS.get(name, {})
