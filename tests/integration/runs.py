"""Training runs for tests: as a command, or started from this process so that every report can be looked at."""

import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from appo.algorithms.run import main, observers
from appo.algorithms.run.config import Config, parse_train
from appo.algorithms.run.workers.blueprint import Blueprint
from appo.algorithms.runtime import runner
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.heartbeat import Heartbeat
from appo.algorithms.runtime.messages import (
    Address,
    Begin,
    EpisodesDone,
    LearnerReport,
    Message,
    Stop,
    Worker,
    WorkerReport,
)
from appo.algorithms.runtime.monitor.monitor import Monitor
from appo.algorithms.runtime.processes.node import Node
from appo.algorithms.runtime.processes.process import ProcessPlan
from appo.algorithms.runtime.runner import run_to_end
from appo.algorithms.runtime.topology import Topology
from appo.utils import checkpoint_files
from appo.utils.metrics import read_metrics
from tests.patience import HANG_SECONDS, patient

ROOT = Path(__file__).parents[2]
LINGERING = Path(__file__).with_name("lingering.py")
SMALL: Mapping[str, Any] = {
    "env": "toy/Counter-v0",
    "inference": "serial",
    "use_rnn": False,
    "encoder_mlp_layers": (16,),
    "rollout": 8,
    "batch_size": 64,
    "num_envs_per_worker": 8,
    "num_workers": 1,
    "tensorboard": False,
    "seed": 1,
}
"""Flags of a run that takes moments, for `train` in this process."""


def command_line(directory: Path, **flags: object) -> list[str]:
    """The words that train the run of that directory."""
    given = {"seed": 1, "tensorboard": False, "plot": False} | flags
    words = [f"--{name}={value}" for name, value in given.items()]
    return [f"--train_dir={directory.parent}", f"--experiment={directory.name}", *words]


@dataclass(frozen=True)
class Run:
    """A run directory, read."""

    directory: Path

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.directory / "config.json").read_text())

    @property
    def status(self) -> dict[str, Any]:
        return json.loads((self.directory / "status.json").read_text())

    @property
    def totals(self) -> dict[str, int]:
        return self.status["totals"]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.directory / "metrics.jsonl")

    def series(self, key: str, policy: int = 0) -> list[Any]:
        """All values of one key of metrics.jsonl, in order."""
        return [record[key] for record in self.metrics if record["policy"] == policy and key in record]

    @property
    def reached_return(self) -> float:
        """The mean return that ended the run; what is still played while the workers stop may lower the last one."""
        reached = re.fullmatch(r"the mean return has reached (-?\d+\.\d\d)", self.status["reason"])
        assert reached, self.status["reason"]
        return float(reached[1])

    def checkpoint(self, policy: int = 0) -> dict[str, bytes]:
        """The files of the newest checkpoint, verified."""
        loaded = checkpoint_files.load(self.directory / f"checkpoint_p{policy}")
        assert loaded is not None
        assert not loaded.found.damaged
        return loaded.files

    def state(self, policy: int = 0) -> dict[str, Any]:
        return json.loads(self.checkpoint(policy)["state.json"])

    def weights(self, policy: int = 0) -> dict[str, np.ndarray]:
        return load(self.checkpoint(policy)["model.safetensors"])

    def statistics(self, policy: int = 0) -> np.ndarray:
        """Count, mean and second moment of every normalized observation, then of the returns."""
        return load(self.checkpoint(policy)["optimizer.safetensors"])["statistics"]


@dataclass(frozen=True)
class Command(Run):
    """A run that was trained by the command."""

    returncode: int
    stdout: str
    stderr: str


def run_command(
    directory: Path,
    *,
    failpoints: str = "",
    deadline_seconds: float = HANG_SECONDS,
    program: Path = ROOT / "train_appo.py",
    **flags: object,
) -> Command:
    """Train as a person does."""
    environment = {name: value for name, value in os.environ.items() if name != "APPO_FAILPOINTS"}
    environment |= {"OMP_NUM_THREADS": "1"} | ({"APPO_FAILPOINTS": failpoints} if failpoints else {})
    done = subprocess.run(
        [sys.executable, str(program), *command_line(directory, **flags)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=deadline_seconds,
        check=False,
    )
    return Command(directory, done.returncode, done.stdout, done.stderr)


def train(directory: Path, **flags: Any) -> Command:
    """Train as a person does, to a good end; arguments as those of `run_command`."""
    run = run_command(directory, **flags)
    assert run.returncode == 0, run.stdout + run.stderr
    return run


@dataclass(frozen=True)
class Recorded(Run):
    """A run started from this process, with all that its workers reported."""

    reason: str
    reports: list[Message]

    @property
    def episodes(self) -> list[EpisodesDone]:
        return [m for m in self.reports if isinstance(m, EpisodesDone)]

    @property
    def workers(self) -> dict[str, dict[str, int]]:
        """The last totals of every actor."""
        return {m.worker: m.totals for m in self.reports if isinstance(m, WorkerReport)}

    @property
    def learners(self) -> dict[int, dict[str, int]]:
        """The last totals of every learner."""
        return {m.policy: m.totals for m in self.reports if isinstance(m, LearnerReport)}

    def reported(self, tag: str) -> list[float]:
        """Every value of a tag that a learner reported."""
        return [m.metrics[tag] for m in self.reports if isinstance(m, LearnerReport) and tag in m.metrics]


def record(directory: Path, **flags: object) -> Recorded:
    """Train with workers in real processes, but main in this one.

    All these runs of a test session share one fork server, so all but the first start in a fraction of a second.
    """
    config = parse_train(command_line(directory, **flags))
    reports: list[Message] = []

    class RecordingMonitor(Monitor):
        def handle(self, message: Message) -> None:
            reports.append(message)
            super().handle(message)

    with pytest.MonkeyPatch.context() as patch, main.Run(config) as run:
        patch.setattr(observers, "Monitor", RecordingMonitor)
        # An actor that is killed at the end has counted episodes that it has not reported.
        patch.setattr(runner, "STOP_SECONDS", patient(4.0))
        reason = run_to_end(run.turns())
    assert not multiprocessing.active_children()
    return Recorded(directory, reason, reports)


class SerialRun:
    """The workers of a serial run, taken turn by turn by the test.

    Args:
        directory: is named by the flags, but nothing is written.
        num_groups: groups of environments, an actor each.
        rows: environments of a group.
        slots: of a group.
    """

    def __init__(self, directory: Path, *, num_groups: int = 1, rows: int = 8, slots: int = 3, **flags: object) -> None:
        from appo.algorithms.run.tuning.network import probe

        self.config: Config = parse_train(command_line(directory, inference="serial", **flags))
        found = probe(self.config)
        c = found.config
        topology = Topology("serial", num_groups, 1, slots, c.sampling.num_policies, 1, rows, c.learning.rollout)
        budget = Budget.of(c.run, c.sampling, found.spec.frames_per_step)
        self.blueprint = Blueprint(
            c, found.spec, found.models, topology, budget, "cpu", c.run.seed or 0, directory=directory
        )
        self.arena = Arena.create(self.blueprint.fields())
        addresses = topology.processes()["main"]
        plan = ProcessPlan("main", 0, addresses, None, self.arena, directory / "main.log", 0, 0, frozenset(), 1)
        self.workers: dict[Address, Worker] = dict(self.blueprint(plan, Heartbeat(self.arena, 0)))
        self.reports: list[Message] = []
        self.node = Node(self.workers, topology.address_book().address_of, self.reports.append)

    def turns(self, limit: int = 10_000) -> Iterable[int]:
        """Take turns while there is work, to a limit that is no test's intention."""
        self.node.deliver(Begin())
        for turn in range(limit):
            if not self.node.turn():
                break
            yield turn
        else:
            raise AssertionError(f"the budget is not spent after {limit} turns")
        self.node.deliver(Stop())

    def worker(self, role: str, index: int = 0) -> Any:
        return self.workers[Address(role, index)]
