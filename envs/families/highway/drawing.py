"""Pictures of roads on a machine without a screen."""

from typing import Any

import gymnasium


class DrawnInMemory(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Enables the viewer, which stays disabled and returns black pictures if pygame has no screen."""

    def render(self) -> Any:
        """Draw the road."""
        picture = self.env.render()
        viewer = self.env.unwrapped.viewer  # type: ignore[attr-defined]
        if viewer is None or viewer.enabled:
            return picture
        viewer.enabled = True
        return self.env.render()
