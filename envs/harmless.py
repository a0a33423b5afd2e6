"""Arguments of environments that an untrusted run may set."""

import re
from collections.abc import Mapping
from itertools import chain

import gymnasium

from appo.envs import families
from appo.envs.agents import pettingzoo
from appo.envs.family import MANY_STEPS, WEIGHT, Harmless
from appo.envs.toys.toy import register_toys

LONGEST_LIST = 64
OF_ALL: Harmless = {"max_episode_steps": MANY_STEPS, "disable_env_checker": 1, "render_mode": r"rgb_array"}
"""Arguments of gymnasium itself."""

ALWAYS_THERE: Mapping[str, Harmless] = {
    r"gymnasium\.envs\.classic_control": {"sutton_barto_reward": 1, "goal_velocity": 10, "g": 1000},
    r"gymnasium\.envs\.toy_text": {
        **dict.fromkeys(("natural", "sab", "is_slippery", "is_rainy", "fickle_passenger", "success_rate"), 1.0),
        "map_name": r"4x4|8x8",
        "reward_schedule": WEIGHT,
    },
    r"appo\.envs\.toys\.": {
        **dict.fromkeys(("delay", "num_cues", "length", "num_axes", "num_agents", "num_rounds"), 1e4),
        **dict.fromkeys(("max_steps", "num_steps", "episode_steps", "obs_bytes"), MANY_STEPS),
        **dict.fromkeys(("observation", "action", "mask"), r"\w{0,40}"),
        "autoreset_mode": r"NextStep|SameStep",
    },
}
"""Regular expression of entry points -> harmless arguments of environments that need no further package."""


def harmful_arguments(name: str, arguments: Mapping[str, object]) -> list[str]:
    """List the arguments of an environment that an untrusted run may not set; nothing is imported or made."""
    harmless = {**OF_ALL, **_harmless_arguments(name)}
    return [word for word, value in arguments.items() if not is_harmless(harmless, word, value)]


def _harmless_arguments(name: str) -> Harmless:
    register_toys()
    if pettingzoo.ID.fullmatch(name):
        return pettingzoo.HARMLESS
    registered = gymnasium.registry.get(name)
    entry_point = registered.entry_point if registered is not None else ""
    if not isinstance(entry_point, str):  # a class that a plug-in has registered
        entry_point = f"{getattr(entry_point, '__module__', '')}."
    known = (module.FAMILY for module in families.modules().values())
    of_families = (family.harmless for family in known if family.is_adapted(name, entry_point))
    elsewhere = (harmless for begin, harmless in ALWAYS_THERE.items() if re.match(begin, entry_point))
    return next(chain(of_families, elsewhere), {})


def is_harmless(harmless: Harmless, name: str, value: object) -> bool:
    """Return whether an argument is listed and within its bounds."""
    limit = harmless.get(name)
    if limit is None:
        return False
    if isinstance(value, list):
        return len(value) <= LONGEST_LIST and all(
            not isinstance(part, list) and is_harmless(harmless, name, part) for part in value
        )
    if isinstance(limit, str):
        return isinstance(value, str) and re.fullmatch(limit, value) is not None
    return value is None or (isinstance(value, bool | int | float) and abs(value) <= limit)
