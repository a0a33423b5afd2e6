"""VizDoom's observations, resized, with a true last frame and an honest end."""

import contextlib
import multiprocessing.process
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from appo.envs.spec import SINGLE_KEY
from appo.utils.errors import UsageError

SCREEN = "screen"
NAMES = {"labels"}
"""Images whose numbers are names, which have no average."""
IMAGES = NAMES | {SCREEN, "depth", "automap"}


class DoomObservations(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Resizes images, and repeats the last real frame at the end of an episode.

    The screen becomes the main observation ("obs"). Texts are left out: texts have no fixed size. The engine has no
    picture of a finished episode, and the package returns a black picture, for which a value estimate would be wrong,
    so the frame before is returned. A timeout is a truncation, even if the package reports a termination.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], width: int, height: int):
        super().__init__(env)
        import cv2

        cv2.setNumThreads(1)
        self._cv2 = cv2
        self._size = (width, height)
        assert isinstance(env.observation_space, spaces.Dict)
        self._spaces = {k: s for k, s in env.observation_space.spaces.items() if not isinstance(s, spaces.Text)}
        self.observation_space = spaces.Dict({_name(key): self._space(key) for key in self._spaces})
        self._last: dict[str, Any] = {}
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def close(self) -> None:
        """End the engine, and remove the engine's files."""
        super().close()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None  # a reset starts the engine again

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode; an engine that starts leaves files in a folder of its own."""
        running = self.unwrapped.game.is_running()  # type: ignore[attr-defined]
        if not running:
            self._scratch = self._scratch or _scratch_directory()
        with contextlib.nullcontext() if self._scratch is None or running else contextlib.chdir(self._scratch.name):
            observation, info = self.env.reset(seed=seed, options=options)
        self._last = self._shown(observation)
        return self._last, info

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Take the action for all skipped frames."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if truncated:
            terminated = bool(self.unwrapped.game.is_player_dead())  # type: ignore[attr-defined]
        if self.unwrapped.state is not None:  # type: ignore[attr-defined] # None once the engine's game is over
            self._last = self._shown(observation)
        return self._last, float(reward), terminated, truncated and not terminated, info

    def _space(self, key: str) -> spaces.Box:
        space = self._spaces[key]
        assert isinstance(space, spaces.Box)
        if key not in IMAGES:
            return space
        width, height = self._size
        return spaces.Box(0, 255, (height, width, space.shape[2]), np.uint8)

    def _shown(self, observation: dict[str, Any]) -> dict[str, Any]:
        return {
            _name(key): self._resized(key, observation[key]) if key in IMAGES else np.array(observation[key])
            for key in self._spaces
        }

    def _resized(self, key: str, image: Any) -> Any:
        height, width = image.shape[:2]
        if (width, height) == self._size:
            return image.copy()  # it is shown again at the end, when the engine has another in its memory
        # Interpolation sees every pixel of an image less than twice as large, in a quarter of the time of averaging.
        halved = width >= 2 * self._size[0] or height >= 2 * self._size[1]
        brightness = self._cv2.INTER_AREA if halved else self._cv2.INTER_LINEAR
        interpolation = self._cv2.INTER_NEAREST if key in NAMES else brightness
        resized = self._cv2.resize(image, self._size, interpolation=interpolation)
        return resized.reshape(*resized.shape[:2], -1)  # a single channel is dropped on the way


def smallest_resolution(width: int, height: int) -> str:
    """Find the engine's resolution with the fewest pixels and at least the given width and height.

    Raises:
        UsageError: no resolution is as large.
    """
    from vizdoom import ScreenResolution

    sizes = [re.fullmatch(r"RES_(\d+)X(\d+)", name) for name in dir(ScreenResolution)]
    known = [(int(size[1]), int(size[2]), size[0]) for size in sizes if size]
    covering = [(w * h, name) for w, h, name in known if w >= width and h >= height]
    if not covering:
        raise UsageError(f"--res_w={width} --res_h={height}: no resolution of VizDoom is as large")
    return min(covering)[1]


def _scratch_directory() -> tempfile.TemporaryDirectory[str]:
    """Make a private folder in which an engine starts and leaves a file at the end.

    In a process of a run the folder lies in the folder of multiprocessing's sockets, which is removed with the run even
    if the process is killed.
    """
    above = multiprocessing.process.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    scratch = tempfile.TemporaryDirectory(
        prefix="vizdoom-", dir=above if above and os.path.isdir(above) else None, ignore_cleanup_errors=True
    )
    Path(scratch.name, "_vizdoom").mkdir()
    return scratch


def _name(key: str) -> str:
    return SINGLE_KEY if key == SCREEN else key
