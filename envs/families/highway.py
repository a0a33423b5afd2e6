"""highway-env: as it makes its environments, but for pictures where there is no screen."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec as Registration

from envs.config import EnvConfig
from envs.wrappers import RepeatAction, make_registered, stack_frames


class Drawn(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Draws in memory; where pygame has no screen, highway-env takes it that nobody looks, and leaves all black."""

    def render(self) -> Any:
        """What the environment draws."""
        picture = self.env.render()
        viewer = self.env.unwrapped.viewer  # type: ignore[attr-defined]
        if viewer is None or viewer.enabled:
            return picture
        viewer.enabled = True
        return self.env.render()


def make_single(registration: Registration, config: EnvConfig, arguments: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    """One road."""
    if config.horizon is not None:
        arguments = arguments | {"max_episode_steps": config.horizon * (config.env_frameskip or 1)}
    env: gymnasium.Env[Any, Any] = Drawn(make_registered(registration, **arguments))
    if config.env_frameskip is not None:
        env = RepeatAction(env, config.env_frameskip)
    return env if config.env_framestack is None else stack_frames(env, config.env_framestack)
