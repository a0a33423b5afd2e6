"""Training by the command's own code, but with main in this process: its workers are forked in milliseconds."""

import json
from pathlib import Path

from appo.algorithms import cli
from tests.chaos.runs import SMALL


def train(folder: Path, *flags: str, env: str = "CartPole-v1") -> Path:
    """Train to a good end in `folder/train_dir/run`, as `TrainingRun` does; return that folder."""
    words = [f"--env={env}", f"--train_dir={folder / 'train_dir'}", "--experiment=run", *SMALL, *flags]
    assert cli.run_command(lambda: cli.run("train", words)) == 0
    return folder / "train_dir" / "run"


def totals_of(directory: Path) -> dict[str, int]:
    """The counts in a run's status."""
    totals: dict[str, int] = json.loads((directory / "status.json").read_text())["totals"]
    return totals
