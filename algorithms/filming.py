"""Videos of evaluations: how the newest policy plays, every now and then."""

import contextlib
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

from algorithms.evaluation import Run, play_run
from algorithms.evaluation_config import EvaluationConfig
from algorithms.video import draw_offscreen
from utils.command_line import say
from utils.errors import EnvironmentFailure, ResourceError, UsageError


class Filming:
    """Films the first episode of evaluations; what fails costs one film.

    Args:
        folder: of the videos.
        every_minutes: the least time between two videos of a policy; 0: none are made.
    """

    def __init__(self, folder: Path, every_minutes: float) -> None:
        self.folder, self.every_seconds = folder, 60 * every_minutes
        self._failed: dict[int, float] = {}  # when a film of a policy last did
        self._warned = False  # since one succeeded
        if self.every_seconds:
            draw_offscreen()  # before anything imports what can draw

    def is_due(self, policy: int) -> bool:
        """Whether the newest video of a policy, which may be of a run before a restart, is old enough."""
        if not self.every_seconds:
            return False
        newest = self._failed.get(policy, -math.inf)
        for path in self.folder.glob(f"p{policy}_*.mp4"):
            with contextlib.suppress(OSError):  # somebody has just removed it
                newest = max(newest, path.stat().st_mtime)
        return not 0 <= time.time() - newest < self.every_seconds  # one of the future tells of a clock put back

    def film(self, run: Run, flags: EvaluationConfig, seed: int) -> None:
        """Play the first episode once more, drawn; the first of several failures in a row is said.

        It is the same episode where the environment draws its random numbers from the seed.
        """
        name = f"p{flags.policy_index}_{int(run.checkpoint.name[5:]):012}"
        for unfinished in self.folder.glob(f".p{flags.policy_index}_*.mp4"):  # of a process that was killed
            with contextlib.suppress(OSError):  # whatever is in the way says so when the new one is written
                unfinished.unlink()
        path = self.folder / f"{name}.mp4"
        filmed = replace(flags, save_video=str(path), max_num_episodes=1, json=True)
        try:
            video = play_run(run, filmed, seed).video
        except (UsageError, EnvironmentFailure, ResourceError) as error:
            self._failed[flags.policy_index] = time.time()
            if not self._warned:
                sys.stderr.write(f"warning: no video of an evaluation: {error}\n")
            self._warned = True
            return
        self._warned = False
        if video is not None and video.pictures:
            say(f"video: {path}, {video.pictures} pictures at {video.pictures_per_second:g} per second")
