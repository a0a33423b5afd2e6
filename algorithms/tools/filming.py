"""Videos of evaluations: the newest policy at play, at intervals."""

import contextlib
import math
import time
from dataclasses import replace
from pathlib import Path

from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.playing.saved_run import SavedRun
from appo.algorithms.playing.video import draw_offscreen
from appo.algorithms.tools.enjoy import play_run
from appo.utils.command_line import complain, say
from appo.utils.errors import AppoError, EnvironmentFailure, ResourceError, UsageError
from appo.utils.run_folder import names_in_own, own_folder, remove_own
from appo.utils.tracebacks import traceback_of


class Filming:
    """Films the first episode of evaluations; a failure costs one film.

    Args:
        folder: folder of the videos.
        every_minutes: least time between two videos of a policy; 0: no videos.
    """

    def __init__(self, folder: Path, every_minutes: float) -> None:
        self.folder, self.every_seconds = folder, 60 * every_minutes
        self._failed: dict[int, float] = {}  # time of the last failure of a policy
        self._warned = False  # since the last success
        if self.every_seconds:
            draw_offscreen()  # before a drawing library is imported

    def is_due(self, policy: int) -> bool:
        """Return whether the newest video of a policy, perhaps from before a restart, is old enough."""
        if not self.every_seconds:
            return False
        newest = self._failed.get(policy, -math.inf)
        for path in self.folder.glob(f"p{policy}_*.mp4"):
            with contextlib.suppress(OSError):  # removed in between
                newest = max(newest, path.stat().st_mtime)
        return not 0 <= time.time() - newest < self.every_seconds  # a time in the future: the clock was put back

    def film(self, run: SavedRun, flags: EvaluationConfig, seed: int) -> None:
        """Play the first episode once more, drawn; warn at the first of several failures in a row.

        The episode is the evaluated episode if the environment draws random numbers from the seed only.
        """
        name = f"p{flags.policy_index}_{int(run.checkpoint.name[5:]):012}"
        for unfinished in names_in_own(self.folder):
            if unfinished.startswith(f".p{flags.policy_index}_"):  # of a process that was killed
                with contextlib.suppress(OSError):  # an obstacle is reported when the new film is written
                    remove_own(self.folder / unfinished)
        path = self.folder / f"{name}.mp4"
        filmed = replace(flags, save_video=str(path), max_num_episodes=1, json=True)
        try:
            with own_folder(self.folder, make=True):
                video = play_run(run, filmed, seed).video
        except (UsageError, EnvironmentFailure, ResourceError, OSError) as error:
            self._failed[flags.policy_index] = time.time()
            if not self._warned:
                trace = traceback_of(error) if isinstance(error, AppoError) else ""
                complain(f"warning: no video of an evaluation: {error}\n{trace}")
            self._warned = True
            return
        self._warned = False
        if video is not None and video.pictures:
            say(f"video: {path}, {video.pictures} pictures at {video.pictures_per_second:g} per second")
