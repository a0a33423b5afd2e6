"""The roles of a run's workers: a row each, with every fact that depends on the role alone.

A further role of the runtime needs a row in `ROLES`, and a worker that `run/workers/blueprint.py` makes. An algorithm
registers the rows of its own roles by declaring workers, see `Algorithm.workers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Role:
    """A kind of worker. The process of a worker has the role of the first one in it.

    Attributes:
        name: in addresses, in the names of processes and log files and in figures (`perf/<name>/...`).
        singular, plural: for people.
        console: begins its part of the console's line about time.
        panel: one of them and several, in the 12 columns that the live panel has for that and a number.
        worker: pattern of the name of a worker: `{index}` tells apart those of the role, `{member}` those of a policy.
        runs_environments: whether foreign code runs here, which may raise, hang or start processes of its own.
        has_network: whether it needs torch and a device.
        cpu_placements: placements in which its network stays on the CPU whatever the device of the run.
        trains: whether its work is counted in samples trained, and has the threads that are meant for that.
        takes_trajectories: whether slots are handed over to it and not to the learner.
        when_full: advice for when one of them is busy all the time; empty: there is none.
        extra_niceness: added to `--default_niceness`.
        long_turns: whether it keeps its core longer at a time than the kernel's default.
        oom_score: added to the score by which the kernel chooses whom to kill when memory is short, 0 to 1000.
        stop_share: of the time that a run has for stopping, when each must have ended.
    """

    name: str
    singular: str
    plural: str
    console: str
    panel: tuple[str, str]
    worker: str
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
        """Travel to another process as a row that is in its table from then on."""
        return _in_table, (vars(self),)

    def variant(self, name: str, panel: tuple[str, str], **facts: Any) -> Role:
        """Return the role of an algorithm's own workers, which are as those of this one but for these facts."""
        words = name.replace("_", " ")
        worker = name + self.worker.removeprefix(self.name)
        return replace(
            self,
            name=name,
            singular=words,
            plural=f"{words}s",
            console=f"{words}s",
            panel=panel,
            worker=worker,
            **facts,
        )

    def worker_name(self, index: int, member: int) -> str:
        """Return the name of a worker: `main`, `actor_3`, `policy_worker_0.1`."""
        return self.worker.format(index=index, member=member)

    def full(self, processes: int) -> str:
        """Return in words that one of that many processes is busy all the time."""
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
    runs_environments=True,
    extra_niceness=10,
    long_turns=True,
    oom_score=500,  # it is replaced at the smallest cost
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
    cpu_placements=("local",),  # what acts inside an actor: a CUDA context in each would cost more than it saves
    extra_niceness=2,
    oom_score=200,
    stop_share=0.5,
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
    stop_share=0.75,  # it writes the rest of what actors have left
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

ROLES = {role.name: role for role in (MAIN, ACTOR, POLICY_WORKER, WRITER, LEARNER)}
"""Every role by its name, in the order in which they are shown; a run stops them in that of `Role.stop_share`."""

OF_RUNTIME = tuple(ROLES)
"""Names of the roles that are the runtime's own, whatever algorithms register."""


def register(role: Role) -> Role:
    """Add a row to the table, unless it is there already.

    Raises:
        ValueError: another role has this name.
    """
    known = ROLES.setdefault(role.name, role)
    if known != role:
        raise ValueError(f"there is another role named {role.name}")
    return known


def _in_table(facts: Mapping[str, Any]) -> Role:
    return register(Role(**facts))
