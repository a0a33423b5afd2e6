"""Training without supervision, checks and recovery: the baseline for the cost of supervision.

Not for use: dead processes are not noticed, and damaged data are trained on. Every process runs without heartbeats,
checksums of weights, checks for non-finite numbers, journals of environments, leak watches, counts for a successor, and
the state saved every second; main runs without the watch for stalls and hangs. Messages with generations, and queues
with one producer, remain.
"""

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from appo.algorithms.cli import run_command
from appo.algorithms.run.config import parse_train
from appo.algorithms.run.main import Run, train
from appo.algorithms.run.workers import blueprint
from appo.algorithms.run.workers.blueprint import Blueprint
from appo.algorithms.runtime.memory.heartbeat import Heartbeat
from appo.algorithms.runtime.memory.ownership import LearnerLedger
from appo.algorithms.runtime.messages import Address, Worker
from appo.algorithms.runtime.processes import crash_recorder
from appo.algorithms.runtime.processes.process import ProcessPlan
from appo.algorithms.runtime.processes.restarts import Limits
from appo.algorithms.runtime.processes.stalls import StallWatch
from appo.algorithms.runtime.sampling.env_group import EnvGroup
from appo.envs.finite import FiniteCheck

PROGRAM = "from benchmarks.promises.bare import main; main()"

Replacement = tuple[object, str, object]
"""A class or module, the name of an attribute, and the value that replaces the attribute."""


def _nothing(*arguments: object, **more: object) -> None:
    """Replace a function that is switched off."""


IN_WORKERS: tuple[Replacement, ...] = (
    *((Heartbeat, name, _nothing) for name in ("beat", "alive", "enter_queue", "leave_queue")),
    (FiniteCheck, "__call__", lambda self, obs, reward: {}),
    (EnvGroup, "note_counts", _nothing),
    (LearnerLedger, "note", _nothing),
    (blueprint, "IncidentFolder", _nothing),
    (blueprint, "_leak_watch", _nothing),
    (crash_recorder, "memory_of", _nothing),
)
IN_MAIN: tuple[Replacement, ...] = ((StallWatch, "look", _nothing),)


def in_networks() -> tuple[Replacement, ...]:
    """Return the replacements in processes with a network, which load torch anyway."""
    from appo.algorithms.runtime.learning import learner_worker
    from appo.algorithms.runtime.memory import weights
    from appo.algorithms.runtime.sampling import weight_reader

    return (
        (weights, "checksum", lambda vector: 0),
        (weight_reader, "checksum", lambda vector: 0),
        (weight_reader.WeightReader, "_checksum_loaded", lambda self: 0),
        (learner_worker, "STATE_SECONDS", math.inf),
    )


def replace_all(replacements: Iterable[Replacement]) -> None:
    """Replace attributes in this process.

    Raises:
        AttributeError: an attribute does not exist, so its part of supervision would stay on.
    """
    for owner, name, value in replacements:
        if name not in vars(owner):
            raise AttributeError(f"{owner} has no {name} to switch off")
        setattr(owner, name, value)


class BareBlueprint(Blueprint):
    """Builds workers with all supervision switched off."""

    def __call__(self, plan: ProcessPlan, heartbeat: Heartbeat) -> Mapping[Address, Worker]:
        replace_all(IN_WORKERS)
        if any(address.role != "actor" for address in plan.workers):
            replace_all(in_networks())
        return super().__call__(plan, heartbeat)


class BareRun(Run):
    """A run of bare workers."""

    blueprint = BareBlueprint

    def _workers(self, *arguments: Any) -> Any:
        workers = super()._workers(*arguments)
        workers.supervisor.limits = Limits(False, math.inf, math.inf, math.inf)
        return workers


def main() -> None:
    """Train with the flags of train_appo.py."""
    replace_all(IN_MAIN)
    sys.exit(run_command(lambda: train(parse_train(sys.argv[1:]), BareRun)))
