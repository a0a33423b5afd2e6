"""The layout of a run's folder: every name in it stands here and nowhere else.

What lies inside a checkpoint or among incidents and videos is named by the modules that write those.
"""

import os
import re
from pathlib import Path
from typing import Any

from utils.errors import UsageError
from utils.files import read_mapping

CONFIG_FILE = "config.json"
HISTORY_FILE = "config_history.jsonl"
STATUS_FILE = "status.json"
METRICS_FILE = "metrics.jsonl"
PAGE_FILE = "README.md"
CURVE_FILE = "plots/learning_curve.png"
LINEAGE_FILE = "lineage.json"
LINEAGE_PICTURE = "lineage.png"
LOCK_FILE = ".lock"
LOGS = "logs"
INCIDENTS = "incidents"
SUMMARIES = ".summary"
EVALUATION = "eval"
RESULTS_FILE = "results.jsonl"
VIDEOS = "videos"

CHECKPOINTS = "checkpoint_p"
"""Name of the folder of a policy's checkpoints, before the number of the policy."""

CHECKPOINT_FOLDERS = {
    "latest": "",
    "best": "best",
    "best_evaluated": "best_evaluated",
    "milestone": "milestones",
    "past": "past",
}
"""Kind of a checkpoint -> its folder inside the checkpoints of its policy."""


class RunFolder:
    """The folder of one run. It says where things are; nothing is created or looked at until a method reads.

    Args:
        path: of the folder.

    Attributes:
        config: flags of the newest start, and what was measured for them.
        history: flags of every start, one line each.
        status: how the run is, refreshed while it trains.
        metrics: a record of every policy per report, one line each.
        page: README of the run, written when training ends.
        curve: picture of its learning curve, to which the page links.
        lineage, lineage_picture: every decision about the policies of a population, and the picture of them.
        lock: held by the process that trains.
        logs: folder of a log per process.
        incidents: folder of what led to failures.
        evaluation: folder of what evaluations beside the run or after it have found.
        results: a record per evaluation, one line each.
        videos: folder of filmed evaluations.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.history = path / CONFIG_FILE, path / HISTORY_FILE
        self.status, self.metrics = path / STATUS_FILE, path / METRICS_FILE
        self.page, self.curve = path / PAGE_FILE, path / CURVE_FILE
        self.lineage, self.lineage_picture = path / LINEAGE_FILE, path / LINEAGE_PICTURE
        self.lock, self.logs, self.incidents = path / LOCK_FILE, path / LOGS, path / INCIDENTS
        self.evaluation = path / EVALUATION
        self.results, self.videos = self.evaluation / RESULTS_FILE, self.evaluation / VIDEOS

    def log(self, name: str) -> Path:
        """Return the log of a process, absolute: the process may change its working directory."""
        return (self.logs / f"{name}.log").absolute()

    def summaries(self, policy: int) -> Path:
        """Return the folder of TensorBoard's files of a policy's training."""
        return self.path / SUMMARIES / f"p{policy}"

    def evaluation_summaries(self, policy: int) -> Path:
        """Return the folder of TensorBoard's files of a policy's evaluations."""
        return self.evaluation / SUMMARIES / f"p{policy}"

    def checkpoints(self, policy: int, kind: str = "latest") -> Path:
        """Return the folder of a policy's checkpoints of a kind, see `CHECKPOINT_FOLDERS`."""
        return self.path / f"{CHECKPOINTS}{policy}" / CHECKPOINT_FOLDERS[kind]

    def checkpoint_folders(self) -> list[Path]:
        """Return everything that is named like the checkpoints of a policy, sorted: checks leave nothing out."""
        return sorted(self.path.glob(f"{CHECKPOINTS}*"))

    def policies(self) -> list[int]:
        """Return the numbers of the policies that have checkpoints, sorted."""
        pattern = re.compile(rf"{CHECKPOINTS}(0|[1-9][0-9]*)")
        return sorted(int(match[1]) for path in self.checkpoint_folders() if (match := pattern.fullmatch(path.name)))

    def read_config(self) -> dict[str, object]:
        """Return the content of `config`; {} if there is none, as before the first start.

        Raises:
            UsageError: it is damaged, not readable or no plain file.
        """
        return read_mapping(self.config, own=True) if os.path.lexists(self.config) else {}

    def read_status(self) -> dict[str, Any]:
        """Return the content of `status`; {} if there is none that can be read."""
        try:
            return read_mapping(self.status, own=True)
        except UsageError:
            return {}
