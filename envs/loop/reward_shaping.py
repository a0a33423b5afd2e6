"""Rewards with coefficients that training may change: how the coefficients are found and set.

The environment, or a wrapper, has a method `get_default_reward_shaping()`, which returns a dict of numbers (nested
dicts and lists are allowed), and `set_reward_shaping(shaping, agent)`, which sets the coefficients of an agent.
"""

import json
from collections.abc import Mapping
from typing import Any

import gymnasium

from appo.envs.conversion import reraise
from appo.utils.errors import SpaceMismatch

GETTER, SETTER = "get_default_reward_shaping", "set_reward_shaping"


def default_reward_shaping(env: gymnasium.Env[Any, Any], name: str) -> dict[str, Any]:
    """Return the coefficients of an environment as JSON values; {} without the two methods.

    Raises:
        EnvironmentFailure: the method raised, or did not return a dict of numbers.
    """
    if not (env.has_wrapper_attr(GETTER) and env.has_wrapper_attr(SETTER)):
        return {}
    try:
        found = env.get_wrapper_attr(GETTER)()
    except BaseException as error:
        reraise(name, error)
    try:
        plain = json.loads(json.dumps(found, allow_nan=False, default=lambda number: number.item()))
    except (TypeError, ValueError, AttributeError):
        plain = None
    if not isinstance(plain, dict):
        raise SpaceMismatch(f"{name}: {GETTER} must return a dict of finite numbers")
    return plain


def set_reward_shaping(env: gymnasium.Env[Any, Any], name: str, agent: int, shaping: Mapping[str, Any]) -> None:
    """Set the coefficients of an agent's reward."""
    try:
        env.get_wrapper_attr(SETTER)(dict(shaping), agent)
    except BaseException as error:
        reraise(name, error)
