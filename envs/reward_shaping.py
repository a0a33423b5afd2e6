"""Environments whose rewards have coefficients that training may change: where they are found and how they are set.

Such an environment, or a wrapper around it, has `get_default_reward_shaping()`, which returns a dict of numbers (dicts
and lists of them are taken too), and `set_reward_shaping(shaping, agent)`, which rewards an agent by such a dict from
then on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import gymnasium

from envs.conversion import reraise
from envs.spec import EnvSpec
from utils.errors import SpaceMismatch

if TYPE_CHECKING:
    from envs.env_set import EnvSet

GETTER, SETTER = "get_default_reward_shaping", "set_reward_shaping"


def default_reward_shaping(env: gymnasium.Env[Any, Any], name: str) -> dict[str, Any]:
    """The coefficients of an environment as JSON values; {} where it has none that can be set.

    Raises:
        EnvironmentFailure: it raised, or they are no dict of numbers.
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
    """Reward an agent of an environment by these coefficients from now on."""
    try:
        env.get_wrapper_attr(SETTER)(dict(shaping), agent)
    except BaseException as error:
        reraise(name, error)


class ShapedRows:
    """Base of what steps an `EnvSet`: finds the environment and the agent of a row."""

    spec: EnvSpec
    _envs: EnvSet

    def shape_rewards(self, row: int, shaping: Mapping[str, Any]) -> None:
        """Reward a row by these coefficients from now on."""
        self._envs.shape_rewards(*divmod(row, self.spec.num_agents), shaping)
