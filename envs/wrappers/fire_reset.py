"""FIRE begins every game, as ale-py's vector environment does by `use_fire_reset`."""

from typing import Any

import gymnasium


class FireReset(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Presses FIRE after every reset, in games of Atari with such an action."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Return the observation after FIRE."""
        observation, info = self.env.reset(seed=seed, options=options)
        meanings: list[str] = self.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
        if "FIRE" not in meanings:
            return observation, info
        observation, _, terminated, truncated, info = self.env.step(meanings.index("FIRE"))
        return self.env.reset(options=options) if terminated or truncated else (observation, info)
