"""The run with a killer behind the benchmark `recovery`."""

import argparse
import logging
import os
import shutil
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from appo.algorithms.run.config import parse_train
from appo.algorithms.run.main import Run
from appo.algorithms.runtime.processes.progress import Progress
from appo.algorithms.runtime.processes.supervisor import Supervisor
from appo.algorithms.runtime.runner import run_to_end
from appo.utils.logging import configure
from benchmarks.shared import measuring, promises
from benchmarks.shared.promises import Figure

ROLES = ("actor_0", "policy_worker_0.0", "learner_0")
SETTLE_SECONDS = 0.5
LIMIT_SECONDS = 20.0
MOST_SECONDS = {"actor": (0.3, 1.0), "policy_worker": (1.0, 1.5), "learner": (3.0, 3.0)}  # median and p99


class Killer(threading.Thread):
    """Kills supervised processes of a run, and measures the recovery."""

    def __init__(self, supervisor: Supervisor, progress: Progress, trials: int) -> None:
        super().__init__(daemon=True)
        self.supervisor, self.progress, self.trials = supervisor, progress, trials
        self.seconds: dict[str, list[float]] = {role: [] for role in ROLES}

    def run(self) -> None:
        while not self.supervisor.begun or not self.progress.trained():
            time.sleep(0.01)
        for _ in range(self.trials):
            for role in ROLES:
                time.sleep(SETTLE_SECONDS)
                self.seconds[role].append(self._recovery(role))
        os.kill(os.getpid(), signal.SIGINT)

    def _recovery(self, role: str) -> float:
        victim = self.supervisor.places[role].process
        os.kill(victim.pid or 0, signal.SIGKILL)
        killed = time.monotonic()
        self._until(lambda: self._successor_is_ready(role, victim))
        units = self.supervisor.places[role].work_before or 0
        if role != "learner_0":
            self._until(lambda: self.progress.of(role) > units)
        trained = self.progress.trained()
        self._until(lambda: self.progress.trained() > trained)
        return time.monotonic() - killed

    def _successor_is_ready(self, role: str, victim: Any) -> bool:
        place = self.supervisor.places.get(role)
        return place is not None and place.process is not victim and place.work_before is not None

    def _until(self, condition: Any) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, "the run has not recovered"
            time.sleep(0.001)


class MeasuredRun(Run):
    """A run with a killer."""

    trials = 0
    killer: Killer | None = None

    def _workers(self, *arguments: Any) -> Any:
        workers = super()._workers(*arguments)
        assert hasattr(workers, "supervisor")
        self.killer = Killer(workers.supervisor, workers.stalls.progress, self.trials)
        self.killer.start()
        return workers


def main() -> int:
    parser = argparse.ArgumentParser(description="Length of a pause in training after a kill.")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--json", type=Path, default=None)
    given, words = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="recovery"))
    flags = ["--env=CartPole-v1", "--inference=central", "--num_workers=2", "--seed=1", *words]
    config = parse_train([*flags, f"--train_dir={folder}", "--experiment=run"])
    configure("main", None, logging.ERROR)
    try:
        with MeasuredRun(config) as run:
            run.trials = given.trials
            try:
                run_to_end(run.turns())
            except Exception as error:
                print(error)
        assert run.killer is not None
        results = {" ".join(["cartpole", *words]): result(run.killer.seconds)}
        measuring.save(given.json, "recovery", results)
        return promises.show(results)
    finally:
        shutil.rmtree(folder)


def result(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return two figures per role: the median, and the longest of 99 % of all times."""
    figures = []
    for role, times in seconds.items():
        ordered = sorted(times)
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        kind = role.rpartition("_")[0]
        most = MOST_SECONDS[kind]
        what = f"recovery of the {kind.replace('_', ' ')}, {len(times)} kills"
        figures += [
            Figure(f"{what}: median", statistics.median(times), most[0], "s"),
            Figure(f"{what}: p99", p99, most[1], "s"),
        ]
    return promises.result_of(figures, seconds=seconds)
