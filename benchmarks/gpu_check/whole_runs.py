"""Checks with whole runs, each a process of its own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from appo.utils.metrics import read_metrics
from benchmarks.gpu_check.report import Failed, Report, within

START_SECONDS = 60  # processes of a run import torch and set up CUDA one after another
FALLBACKS = ("cannot be captured and runs as it is", "cannot be pinned")
LOG_LINES = 15


def run(report: Report, name: str, **flags: object) -> list[dict[str, Any]]:
    """Train in a separate process; return the records of metrics.jsonl."""
    given = {"experiment": name, "train_dir": report.directory, "device": report.device, "seed": 1} | flags
    given = {"tensorboard": False, "report_interval_seconds": 1, "experiment_summaries_interval": 1} | given
    words = [f"--{key}={value}" for key, value in given.items()]
    limit = max(10.0, min(report.seconds_left, START_SECONDS + float(str(flags.get("train_for_seconds", 60)))))
    command = [sys.executable, "-m", "benchmarks.gpu_check.twin", *words]
    logs = report.directory / name / "logs"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        raise Failed(f"not done after {limit:.0f} s\n{_ends_of(logs)}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-800:]
        raise Failed(f"exit code {done.returncode}: {said}\n{_ends_of(logs)}")
    for line in (line for path in sorted(logs.glob("*.log")) for line in path.read_text().splitlines()):
        if any(words in line for words in FALLBACKS):
            raise Failed(line)
    return read_metrics(report.directory / name / "metrics.jsonl")


def _ends_of(logs: Path) -> str:
    """Return the last log lines of every process."""
    ends = {
        path.name: path.read_text(errors="replace").splitlines()[-LOG_LINES:] for path in sorted(logs.glob("*.log"))
    }
    return "\n".join(f"  {name}: {line}" for name, lines in ends.items() for line in lines)


def rate(records: list[dict[str, Any]]) -> float:
    """Return samples per second from a third of the run's time to the end."""
    last = records[-1]
    first = next(r for r in records if r["elapsed_seconds"] >= last["elapsed_seconds"] / 3)
    seconds = last["elapsed_seconds"] - first["elapsed_seconds"]
    return (last["samples"] - first["samples"]) / seconds if seconds else 0.0


def last_of(records: list[dict[str, Any]], key: str) -> float:
    values = [record[key] for record in records if key in record]
    if not values:
        raise Failed(f"{key} was never reported")
    return float(values[-1])


def reproduction(report: Report, name: str, limit: float, **flags: object) -> str:
    """Check that the learner, with a learning rate of 0, computes the logits and values of acting."""
    given = {"inference": "central", "learning_rate": 0, "verify_reproduction": True, "train_for_env_steps": 4000}
    records = run(report, f"reproduction_{name}", **given | flags)
    detail = within(last_of(records, "train/reproduction_error"), limit)
    return f"{detail} in {last_of(records, 'train/reproduction_steps'):.0f} steps"


def learning(report: Report, name: str, goal: float, seconds: float, **flags: object) -> str:
    """Check that training reaches a return within `seconds`."""
    seconds = min(seconds, report.seconds_left - START_SECONDS)
    if seconds <= 0:
        raise Failed("no time left")
    records = run(report, f"learning_{name}", train_until_return=goal, train_for_seconds=seconds, **flags)
    reached = max(float(r["reward/mean"]) for r in records if "reward/mean" in r)
    if reached < goal:
        raise Failed(f"a mean return of {reached:.1f} instead of {goal:g}")
    return f"a mean return of {reached:.1f} in {records[-1]['elapsed_seconds']:.0f} s, {rate(records):,.0f} samples/s"
