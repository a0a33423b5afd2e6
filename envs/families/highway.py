"""highway-env's environments are made as it makes them, but for pictures where there is no screen."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec as Registration

from appo.envs.config import EnvConfig
from appo.envs.families import Family
from appo.envs.wrappers import RepeatAction, make_registered, stack_frames

FAMILY = Family(
    "highway-env",
    package="highway_env",
    extra="highway",
    ids=r"(highway|merge|roundabout|parking|intersection|racetrack|u-turn|two-way|exit|lane-keeping)(-\w+)*-v\d",
    claims_ids=False,
    names=r"(highway|merge|roundabout|parking|intersection|racetrack|u-turn|two-way|exit|lane-keeping)(-\w+)*",
    entry_points=r"highway_env\.",
    register=partial(import_module, "highway_env"),
)


class Drawn(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Draws in memory; where pygame has no screen, highway-env takes it that nobody looks, and leaves all black."""

    def render(self) -> Any:
        """Draw the road."""
        picture = self.env.render()
        viewer = self.env.unwrapped.viewer  # type: ignore[attr-defined]
        if viewer is None or viewer.enabled:
            return picture
        viewer.enabled = True
        return self.env.render()


def make_single(registration: Registration, config: EnvConfig, arguments: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    """Make one road."""
    if config.horizon is not None:
        arguments = arguments | {"max_episode_steps": config.horizon * (config.env_frameskip or 1)}
    env: gymnasium.Env[Any, Any] = Drawn(make_registered(registration, **arguments))
    if config.env_frameskip is not None:
        env = RepeatAction(env, config.env_frameskip)
    return env if config.env_framestack is None else stack_frames(env, config.env_framestack)
