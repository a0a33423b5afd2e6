"""The best policy of a run so far: when there is a new one, and where it is kept."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from algorithms.runtime.config import RunConfig
from algorithms.runtime.monitor import PolicyProgress
from algorithms.runtime.plain_state import read_plain
from algorithms.runtime.state_block import LearnerState
from utils import checkpoint
from utils.errors import CheckpointError

log = logging.getLogger(__name__)

DIRECTORY = "best"
KEY = "best"  # in state.json: which metric, and its value


class Best:
    """The best checkpoint of one policy, alone in a directory of its own; a later start knows how good it is.

    Args:
        directory: of the policy's checkpoints.
        config: of the run.
    """

    def __init__(self, directory: Path, config: RunConfig) -> None:
        self.directory, self.config = directory / DIRECTORY, config
        self.value = self._kept()

    def better(self, progress: PolicyProgress) -> float | None:
        """The metric of a policy, over a full window of episodes, if finite and better than ever; higher is better."""
        name, _, kind = self.config.save_best_metric.rpartition("/")
        statistic = progress.statistics().get(name)
        if self.config.save_best_after < 0 or progress.totals["env_steps"] < self.config.save_best_after:
            return None
        if statistic is None or statistic.count < progress.stats_avg:
            return None
        value = {"mean": statistic.mean, "min": statistic.min, "max": statistic.max}[kind]
        return value if math.isfinite(value) and value > self.value else None

    def mark(self, state: LearnerState, value: float) -> LearnerState:
        """The state with what makes it the best."""
        return replace(state, meta={**state.meta, KEY: {"metric": self.config.save_best_metric, "value": value}})

    def save(self, name: str, files: dict[str, bytes], value: float) -> None:
        """Keep a checkpoint instead of the one before; files are those of a state that `mark` has marked.

        Raises:
            ResourceError: the disk is full or refuses; the best before is untouched.
        """
        path = checkpoint.save(self.directory, name, files)
        self.value = value
        log.info("saved %s, the best so far: %s %.6g", path, self.config.save_best_metric, value)
        self._keep_only(path)

    def _kept(self) -> float:
        """Value of the best one on disk, which stays alone; -inf if there is none, or it was measured otherwise."""
        checkpoint.clean_temporaries(self.directory)
        found: list[tuple[float, Path]] = []
        for path in sorted(self.directory.glob("ckpt_*")):
            try:
                checkpoint.verify(path)
                read_plain(checkpoint.read(path, "state.json"))
            except CheckpointError as error:
                log.warning("damaged best checkpoint set aside: %s", error)
                checkpoint.quarantine(self.directory, (checkpoint.Damaged(path, str(error)),))
                continue
            found.append((_worth(path, self.config.save_best_metric), path))
        value, path = max(found, default=(-math.inf, self.directory))
        self._keep_only(path)
        return value

    def _keep_only(self, path: Path) -> None:
        for other in self.directory.glob("ckpt_*"):
            if other != path:
                checkpoint.remove(other)


def load_best(
    directory: Path, metric: str, check: Callable[[dict[str, bytes]], object] = lambda files: None
) -> checkpoint.Loaded | None:
    """The best checkpoint that verifies and stands the check, by this metric; None where there is none.

    A crash between saving the new and removing the old leaves both. Their order by env steps says nothing: training
    that went back to an older checkpoint may have found something better with fewer.

    Raises:
        CheckpointError: there are checkpoints and none can be read.
    """
    return checkpoint.load(directory, lambda path: _worth(path, metric), check)


def _worth(path: Path, metric: str) -> float:
    """How good a best checkpoint says it is; -inf if by another metric.

    One that cannot be read comes first: whoever loads it finds out that it is damaged, and says so.
    """
    try:
        kept = read_plain(checkpoint.read(path, "state.json")).get(KEY, {})
    except CheckpointError:
        return math.inf
    return float(kept["value"]) if kept.get("metric") == metric else -math.inf
