"""The roles of a run's workers: one row per role, with every fact that depends on the role alone.

A further role of the runtime needs a row in `ROLES`, and a worker made by `run/workers/blueprint.py`. An algorithm
registers its own roles by declaring workers, see `Algorithm.workers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Role:
    """A kind of worker. A process has the role of its first worker.

    Attributes:
        name: name in addresses, process names, log files and figures (`perf/<name>/...`).
        singular, plural: names for people.
        console: name in the console's line about time.
        panel: names of one worker and of several in the live panel, which has 12 columns for name and number.
        worker: pattern of a worker's name: `{index}` numbers the workers of the role, `{member}` the workers of a
            policy.
        fills_slots: whether the worker owns slots of groups, and hands them over.
        runs_environments: whether foreign code runs here, which may raise, hang or start processes.
        has_network: whether the worker needs torch and a device.
        cpu_placements: placements in which the network stays on the CPU whatever the device of the run.
        trains: whether work is counted in trained samples, with the threads meant for training.
        takes_trajectories: whether slots are handed over to the worker instead of the learner.
        when_full: advice for a worker that is always busy; empty: none.
        extra_niceness: addition to `--default_niceness`.
        long_turns: whether the worker keeps its core for longer than the kernel's default.
        oom_score: addition to the kernel's score for the choice of a victim when memory is short, 0 to 1000.
        stop_share: share of the run's stopping time by which each process must have ended.
    """

    name: str
    singular: str
    plural: str
    console: str
    panel: tuple[str, str]
    worker: str
    fills_slots: bool = False
    runs_environments: bool = False
    has_network: bool = False
    cpu_placements: tuple[str, ...] = ()
    trains: bool = False
    takes_trajectories: bool = False
    when_full: str = ""
    extra_niceness: int
    long_turns: bool = False
    oom_score: int
    stop_share: float

    def __reduce__(self) -> tuple[Callable[[Mapping[str, Any]], Role], tuple[Mapping[str, Any]]]:
        """Reach another process as a registered row."""
        return _in_table, (vars(self),)

    def variant(self, name: str, panel: tuple[str, str], **facts: Any) -> Role:
        """Return the role of an algorithm's own workers, with the facts of this role except for these."""
        words = name.replace("_", " ")
        return replace(
            self,
            name=name,
            singular=words,
            plural=f"{words}s",
            console=f"{words}s",
            panel=panel,
            worker=name + self.worker.removeprefix(self.name),
            **facts,
        )

    def full(self, processes: int) -> str:
        """Return the words for one of that many processes being always busy."""
        return f"one of {processes} {self.plural} is full" if processes > 1 else f"the {self.singular} is full"


MAIN = Role(
    name="main",
    singular="main",
    plural="main",
    console="main",
    panel=("main", "main"),
    worker="main",
    extra_niceness=0,
    oom_score=0,
    stop_share=1.0,
)
ACTOR = Role(
    name="actor",
    singular="actor",
    plural="actors",
    console="actors",
    panel=("actor", "actors"),
    worker="actor_{index}",
    fills_slots=True,
    runs_environments=True,
    extra_niceness=10,
    long_turns=True,
    oom_score=500,  # an actor is replaced at the smallest cost
    stop_share=0.4,
)
POLICY_WORKER = Role(
    name="policy_worker",
    singular="policy worker",
    plural="policy workers",
    console="policy workers",
    panel=("acting", "acting"),
    worker="policy_worker_{index}.{member}",
    has_network=True,
    when_full="raise --policy_workers_per_policy",
    cpu_placements=("local",),  # inside actors: a CUDA context in each would cost more than it saves
    extra_niceness=2,
    oom_score=200,
    stop_share=0.5,
)
BRIDGE = Role(
    name="bridge",
    singular="bridge",
    plural="bridges",
    console="bridge",
    panel=("bridge", "bridges"),
    worker="bridge",
    fills_slots=True,
    extra_niceness=2,
    oom_score=300,
    stop_share=0.4,  # with the actors: the bridge hands over trajectories too
)
WRITER = Role(
    name="writer",
    singular="writer",
    plural="writers",
    console="writer",
    panel=("writing", "writing"),
    worker="writer",
    extra_niceness=15,
    oom_score=300,
    stop_share=0.75,  # the writer writes the last trajectories of actors
)
LEARNER = Role(
    name="learner",
    singular="learner",
    plural="learners",
    console="learner",
    panel=("learner", "learners"),
    worker="learner_{index}",
    has_network=True,
    trains=True,
    extra_niceness=0,
    long_turns=True,
    oom_score=0,
    stop_share=1.0,
)
ROLES = {role.name: role for role in (MAIN, ACTOR, BRIDGE, POLICY_WORKER, WRITER, LEARNER)}
"""Every role by its name, in the order of display; a run stops roles in the order of `Role.stop_share`."""

OF_RUNTIME = tuple(ROLES)
"""Names of the roles of the runtime itself."""


def register(role: Role) -> Role:
    """Add a row to the table, unless present (ValueError: another role has this name)."""
    known = ROLES.setdefault(role.name, role)
    if known != role:
        raise ValueError(f"there is another role named {role.name}")
    return known


def _in_table(facts: Mapping[str, Any]) -> Role:
    return register(Role(**facts))
