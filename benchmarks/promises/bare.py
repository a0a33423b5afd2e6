"""Training without supervision, checks and recovery: the baseline for the cost of supervision.

Not for use: dead processes are not noticed, and damaged data are trained on. Every process runs without heartbeats,
checksums of weights, checks for non-finite numbers, journals of environments, leak watches, counts for a successor, and
the state saved every second; main runs without the watch for stalls and hangs. Messages with generations, and queues
with one producer, remain.
"""

import math
import sys
from collections.abc import Mapping
from typing import Any

from appo.algorithms.cli import run_command
from appo.algorithms.run.config import Config, parse_train
from appo.algorithms.run.main import Run, train
from appo.algorithms.run.workers import blueprint
from appo.algorithms.run.workers.blueprint import Blueprint
from appo.algorithms.runtime.memory.heartbeat import Heartbeat
from appo.algorithms.runtime.memory.ownership import LearnerLedger
from appo.algorithms.runtime.messages import Address, Worker
from appo.algorithms.runtime.processes import crash_recorder, stalls
from appo.algorithms.runtime.processes.process import ProcessPlan
from appo.algorithms.runtime.processes.restarts import Limits
from appo.algorithms.runtime.sampling.env_group import EnvGroup
from appo.envs.finite import FiniteCheck
from appo.envs.loop.env_set import OnFailure

PROGRAM = "from benchmarks.promises.bare import main; main()"


def _nothing(*arguments: object, **more: object) -> None:
    """Replace a function that is switched off."""


class BareBlueprint(Blueprint):
    """Builds workers with all supervision switched off."""

    def __call__(self, plan: ProcessPlan, heartbeat: Heartbeat) -> Mapping[Address, Worker]:
        for name in ("beat", "enter_queue", "leave_queue"):
            setattr(heartbeat, name, _nothing)
        FiniteCheck.__call__ = lambda self, obs, reward: {}  # type: ignore[method-assign]
        EnvGroup.note_counts = LearnerLedger.note = _nothing  # type: ignore[method-assign]
        blueprint._on_failure = lambda config, worker: _without_incidents(config)  # type: ignore[assignment]
        blueprint._leak_watch = _nothing  # type: ignore[assignment]
        crash_recorder.memory_of = _nothing  # type: ignore[assignment]
        if any(address.role != "actor" for address in plan.workers):
            from appo.algorithms.runtime.learning import learner_worker
            from appo.algorithms.runtime.memory import weights
            from appo.algorithms.runtime.sampling import policy_worker

            weights.checksum = policy_worker.checksum = lambda vector: 0
            learner_worker.STATE_SECONDS = math.inf
        return super().__call__(plan, heartbeat)


def _without_incidents(config: Config) -> OnFailure:
    return OnFailure(config.env.max_env_rebuilds)


class BareRun(Run):
    """A run of bare workers."""

    blueprint = BareBlueprint

    def _workers(self, *arguments: Any) -> Any:
        workers = super()._workers(*arguments)
        workers.supervisor.limits = Limits(False, math.inf, math.inf, math.inf)
        return workers


def main() -> None:
    """Train with the flags of train_appo.py."""
    stalls.StallWatch.look = _nothing  # type: ignore[method-assign]
    sys.exit(run_command(lambda: train(parse_train(sys.argv[1:]), BareRun)))
