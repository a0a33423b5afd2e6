"""The best checkpoint of a policy: when a policy has improved, and where its checkpoint is kept."""

import functools
import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from appo.algorithms.runtime.config import RunConfig
from appo.algorithms.runtime.memory.learner_state import LearnerState
from appo.algorithms.runtime.memory.plain_state import LARGEST_PLAIN, read_plain
from appo.algorithms.runtime.monitor.policy_progress import PolicyProgress
from appo.utils import checkpoint_files
from appo.utils.errors import CheckpointError

log = logging.getLogger(__name__)

KEY = "best"  # in state.json: the metric and its value


class Best:
    """The best checkpoint of one policy, alone in its directory; later starts read its value."""

    def __init__(self, directory: Path, config: RunConfig) -> None:
        self.directory, self.config = directory, config
        self.value, self._path = self._find_best()
        self._has_warned = False

    def better(self, progress: PolicyProgress) -> float | None:
        """Return the metric of a policy over a full window of episodes, if finite and higher than ever; else None."""
        name, _, kind = self.config.save_best_metric.rpartition("/")
        statistic = progress.statistics().get(name)
        if progress.frozen or not 0 <= self.config.save_best_after <= progress.totals["env_steps"]:
            return None
        has_episodes = progress.episode_return.count >= progress.stats_avg
        if statistic is None and has_episodes and not self._has_warned:
            self._has_warned = True
            known = ", ".join(progress.statistics())
            log.warning("no episode has reported %s (--save_best_metric) so far, only %s", name, known)
        if statistic is None or statistic.count < progress.stats_avg:
            return None
        value = {"mean": statistic.mean, "min": statistic.min, "max": statistic.max}[kind]
        return value if math.isfinite(value) and value > self.value else None

    def mark(self, state: LearnerState, value: float) -> LearnerState:
        """Return the state with the metric of the best."""
        return replace(state, meta={**state.meta, KEY: {"metric": self.config.save_best_metric, "value": value}})

    def save(self, name: str, files: dict[str, bytes], value: float) -> None:
        """Replace the best checkpoint by files of a marked state.

        Raises:
            ResourceError: the disk is full or refuses; the earlier best is untouched.
        """
        path = checkpoint_files.save(self.directory, name, files)
        self.value, self._path = value, path
        log.info("saved %s, the best so far: %s %.6g", path, self.config.save_best_metric, value)
        self._keep_only(path)

    def forget_what_is_gone(self) -> None:
        """Begin anew if the best checkpoint was removed."""
        try:
            os.lstat(self._path)
        except FileNotFoundError:
            self.value = -math.inf
        except OSError as error:  # only out of reach
            log.debug("%s cannot be looked for: %s", self._path, error)

    def _find_best(self) -> tuple[float, Path]:
        """Return value and path of the best on disk, and remove all others; -inf without one, or by another metric."""
        checkpoint_files.clean_temporaries(self.directory)
        found: list[tuple[float, Path]] = []
        for _, path in reversed(checkpoint_files.listed_if_readable(self.directory)):
            try:
                checkpoint_files.verify(path)
                read_plain(checkpoint_files.read(path, "state.json", LARGEST_PLAIN))
            except CheckpointError as error:
                log.warning("damaged best checkpoint set aside: %s", error)
                checkpoint_files.quarantine(self.directory, (checkpoint_files.Damaged(path, str(error)),))
                continue
            found.append((_worth(path, self.config.save_best_metric), path))
        value, path = max(found, default=(-math.inf, self.directory))
        self._keep_only(path)
        return value, path

    def _keep_only(self, path: Path) -> None:
        for _, other in checkpoint_files.listed_if_readable(self.directory):
            if other != path:
                checkpoint_files.remove(other)


def load_best(
    directory: Path,
    metric: str,
    check: Callable[[dict[str, bytes]], object] = lambda files: None,
    limit: checkpoint_files.Limit | None = None,
) -> checkpoint_files.Loaded | None:
    """Load the best valid checkpoint by this metric that passes the check; None without any.

    A crash between saving the new and removing the old leaves both. Their order by env steps means nothing: training
    that returned to an older checkpoint may have found a better one with fewer steps.

    Raises:
        CheckpointError: checkpoints exist and none can be read.
    """
    return checkpoint_files.load(directory, functools.partial(_worth, metric=metric), check, limit=limit)


def _worth(path: Path, metric: str) -> float:
    """Return the value in a best checkpoint; -inf for another metric.

    An unreadable checkpoint comes first: the loader then finds and reports the damage.
    """
    try:
        kept = read_plain(checkpoint_files.read(path, "state.json", LARGEST_PLAIN)).get(KEY, {})
    except CheckpointError:
        return math.inf
    return float(kept["value"]) if kept.get("metric") == metric else -math.inf
