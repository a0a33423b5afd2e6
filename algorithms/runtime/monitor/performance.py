"""The performance of a run: use of time, bottleneck and nearness to the limit. Pure arithmetic.

The limit is the speed of the machine, with the environment and network of the run, if no core were ever idle: the
smaller of cores divided by the CPU time of a sample, and the speed of the learner's thread. CPU time counts because
processes share the cores; on a GPU the learner's wall time counts, because the CPU only starts the work.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from appo.algorithms.runtime.messages import TimeReport
from appo.algorithms.runtime.roles import ACTOR, LEARNER, MAIN, ROLES
from appo.utils import timing
from appo.utils.metrics import short_number
from appo.utils.timing import PHASES

FULL = 0.9  # smallest busy share of a full process or machine
MUCH = 0.3  # smallest share of waiting worth a word
WAITING = PHASES[timing.WAITING :]
TAKEN = "other programs or hidden waits slow it down"
WORDS = {"env": "environment", "reset": "environment resets"}


@dataclass(frozen=True)
class Machine:
    """The cores and devices of a run, and their use.

    Attributes:
        cores: number of usable cores; with a quota perhaps a fraction.
        gpu: whether networks are on a GPU.
        takes_turns: whether flags forbid acting while the learner trains.
        has_actors: whether environments are played; else the run only trains.
        replays: whether the learner draws from a replay, and the uses of every step hold actors or the learner.
    """

    cores: float
    gpu: bool = False
    takes_turns: bool = False
    has_actors: bool = True
    replays: bool = False


class WorkWindow(NamedTuple):
    """The work of one process in some seconds, with the fields of `TimeReport`."""

    role: str
    seconds: dict[str, float]
    cpu_seconds: dict[str, float]
    collected: int
    trained: int

    @property
    def length(self) -> float:
        """Return the length in seconds."""
        return sum(self.seconds.values())


class ProcessTimes:
    """The reports of one process for the last ten seconds, or longer if units of work take longer."""

    def __init__(self) -> None:
        self._reports: deque[TimeReport] = deque()

    def add(self, report: TimeReport) -> None:
        """Add a report; the first report after a restart deletes all earlier reports."""
        reports = self._reports
        if not reports or reports[0].started != report.started:
            reports.clear()
            reports.append(report._replace(seconds={}, cpu_seconds={}, collected=0, trained=0))
        reports.append(report)
        end = _elapsed(report) - 10.0
        while len(reports) > 2 and _elapsed(reports[1]) <= end:
            if _work(reports[1]) == _work(report) > _work(reports[0]):
                break  # without the oldest report the window would contain no unit of work
            reports.popleft()

    @property
    def collected(self) -> int:
        """Return the steps of the process, with steps of incomplete trajectories."""
        return self._reports[-1].collected

    def window(self) -> WorkWindow:
        """Return the work from the oldest to the newest report."""
        first, last = self._reports[0], self._reports[-1]
        return WorkWindow(
            last.role,
            _difference(first.seconds, last.seconds),
            _difference(first.cpu_seconds, last.cpu_seconds),
            last.collected - first.collected,
            last.trained - first.trained,
        )


@dataclass(frozen=True)
class RoleTimes:
    """The shares of time of all processes of a role, by phase.

    Attributes:
        processes: number of processes.
        shares: phase -> share of wall time; shares add up to 1.
        busy_cores: CPU time per second of all processes.
    """

    processes: int
    shares: dict[str, float]
    busy_cores: float

    @property
    def busy(self) -> float:
        """Return the share of the time without waiting."""
        return _without_waiting(self.shares)

    @property
    def starved(self) -> bool:
        """Return whether the processes are short of cores."""
        return self.busy_cores < 0.8 * self.busy * self.processes

    def most(self) -> str:
        """Return the phase with the largest share, apart from waiting, and the share."""
        phase = max((p for p in self.shares if p not in WAITING), key=self.shares.__getitem__)
        return f"{self.shares[phase]:.0%} {WORDS.get(phase, phase)}"


NO_PROCESS = RoleTimes(0, {}, 0.0)


@dataclass(frozen=True)
class Performance:
    """The use of time in a run by all processes.

    Attributes:
        roles: role -> shares of time.
        cpu_us: phase -> CPU time of a sample in microseconds, over all processes.
        busy_cores: CPU time per second.
        cores: number of usable cores.
        samples_per_second: valid steps that are both taken and trained; before training steps taken, without actors
            steps trained.
        limit_samples_per_second: limit of the machine; 0 while nothing is trained.
    """

    roles: dict[str, RoleTimes]
    cpu_us: dict[str, float]
    busy_cores: float
    cores: float
    samples_per_second: float
    limit_samples_per_second: float
    bottleneck: str

    @property
    def limit_ratio(self) -> float:
        """Return the speed as a share of the limit; 0 while the limit is unknown."""
        return self.samples_per_second / self.limit_samples_per_second if self.limit_samples_per_second else 0.0

    def plain(self) -> dict[str, Any]:
        """Return the performance as JSON values."""
        return asdict(self) | {"limit_ratio": self.limit_ratio}

    def tags(self) -> dict[str, float]:
        """Return TensorBoard tag -> value."""
        tags = {f"perf/{role}/{phase}": s for role, times in self.roles.items() for phase, s in times.shares.items()}
        tags |= {f"perf/cpu_us/{phase}": microseconds for phase, microseconds in self.cpu_us.items()}
        tags["perf/busy_cores"] = self.busy_cores
        if self.limit_samples_per_second:
            tags["perf/limit_samples_per_second"] = self.limit_samples_per_second
            tags["perf/limit_ratio"] = self.limit_ratio
        return tags

    def shown_roles(self) -> dict[str, RoleTimes]:
        """Return the roles to show: without main, unless all workers are in main."""
        return {role: times for role, times in self.roles.items() if role != MAIN.name or len(self.roles) == 1}

    def lines(self) -> tuple[str, str]:
        """Return two lines for the console: the largest phases of each role, and the limit with the bottleneck."""
        roles = self.shown_roles()
        parts = []
        for role, times in roles.items():
            largest = sorted(times.shares.items(), key=lambda pair: -pair[1])[: 6 // len(roles)]
            shown = [f"{phase.replace('_', ' ')} {share:.0%}" for phase, share in largest]
            parts.append(f"{ROLES[role].console} {' '.join(shown)}")
        limit = self.limit_samples_per_second
        reached = f"{short_number(limit)} samples/s, at {self.limit_ratio:.0%}" if limit else "not known yet"
        return f"time: {' | '.join(parts)}", f"limit: {reached}; {self.bottleneck}"


def performance(windows: Iterable[WorkWindow], machine: Machine, discarded: float = 0.0) -> Performance | None:
    """Return the performance; None before the first environment or learner step."""
    seen = [window for window in windows if window.length > 0]
    collected = sum(w.collected / w.length for w in seen)
    trained = sum(w.trained / w.length for w in seen)
    if not machine.has_actors:
        collected = trained  # steps read from datasets
    if not collected:
        return None
    of_roles = {role: of_role for role in ROLES if (of_role := [w for w in seen if w.role == role])}
    roles = {role: _role_times(of_role) for role, of_role in of_roles.items()}
    fullest = {
        role: max((_role_times([w]) for w in of_role), key=lambda times: times.busy)
        for role, of_role in of_roles.items()
    }
    cpu_us = _cpu_us(seen, collected, trained)
    return Performance(
        roles=roles,
        cpu_us=cpu_us,
        busy_cores=sum(times.busy_cores for times in roles.values()),
        cores=machine.cores,
        samples_per_second=min(collected, trained) if trained else collected,
        limit_samples_per_second=_limit(seen, cpu_us, machine) if trained else 0.0,
        bottleneck=too_old(discarded) or bottleneck(roles, fullest, cpu_us, machine),
    )


def too_old(discarded: float) -> str:
    """Return advice for a share of discarded samples; empty for a small share."""
    if discarded < 0.05:
        return ""
    return f"{discarded:.0%} of the samples are too old: fewer environments or a larger --max_policy_lag"


def bottleneck(
    roles: Mapping[str, RoleTimes], fullest: Mapping[str, RoleTimes], cpu_us: Mapping[str, float], machine: Machine
) -> str:
    """Return the bottleneck of a run in words: the learner's thread, the cores, another role, or mutual waiting.

    Args:
        roles: role -> shares of time.
        fullest: role -> shares of time of the busiest process, for which the run waits.
        cpu_us: phase -> CPU time of a sample in microseconds.
        machine: machine of the run.
    """
    if roles.keys() == {MAIN.name}:
        return _of_one_thread(roles[MAIN.name], machine)
    busy_cores = sum(times.busy_cores for times in roles.values())
    crowded = busy_cores >= FULL * machine.cores
    learner = fullest.get(LEARNER.name, NO_PROCESS)
    has_core = machine.gpu or not learner.starved
    if learner.busy >= FULL and (has_core or not crowded):
        of_core = f", but gets {learner.busy_cores:.0%} of a core; {TAKEN}"
        held = ": updates per step hold the actors" if machine.replays else ": more sampling would not help"
        of_work = f", {learner.most()}" + held * machine.has_actors
        return LEARNER.full(roles[LEARNER.name].processes) + (of_work if has_core else of_core)
    if crowded:
        phase = max(cpu_us, key=cpu_us.__getitem__)
        cores = "the core is" if machine.cores == 1 else f"all {machine.cores:g} cores are"
        return f"{cores} full, {cpu_us[phase] / sum(cpu_us.values()):.0%} of it {WORDS.get(phase, phase)}"
    if learner.processes and machine.takes_turns:
        return f"actors and learner take turns, it is busy {learner.busy:.0%} of the time: nobody acts meanwhile"
    busy = f"{busy_cores:.1f} of {machine.cores:g} cores are busy"
    for role in (ROLES[name] for name in fullest):
        if role.when_full and fullest[role.name].busy >= FULL:
            return f"{role.full(roles[role.name].processes)}, {fullest[role.name].most()}: {role.when_full}"
    return _of_actors(roles.get(ACTOR.name, NO_PROCESS), roles.get(LEARNER.name), busy, replays=machine.replays)


def _of_actors(actors: RoleTimes, learner: RoleTimes | None, busy: str, *, replays: bool) -> str:
    if actors.busy >= FULL:
        waiting = f", the learner waits {1 - learner.busy:.0%} for the replay" if learner and replays else ""
        more = TAKEN if actors.starved else f"{busy}: raise --num_workers"
        return f"actors are full, {actors.most()}{waiting}; {more}"
    for_actions, for_slots = (actors.shares.get(phase, 0.0) for phase in WAITING)
    if for_slots >= max(MUCH, for_actions):
        if learner and replays:
            idle = f"{1 - learner.busy:.0%}"
            return f"nothing is full: updates per step hold actors {for_slots:.0%}, the learner waits {idle}"
        waiting = f", the learner {1 - learner.busy:.0%} for trajectories" if learner else ""
        return f"nothing is full: actors wait {for_slots:.0%} for free slots{waiting}"
    if for_actions >= MUCH:
        return f"actors wait {for_actions:.0%} for actions; {busy}: more or larger groups would help"
    return f"nothing is full, {busy}"


def _of_one_thread(main: RoleTimes, machine: Machine) -> str:
    said = f"one thread does it all, {main.most()}"
    if main.starved:
        return f"{said}; {TAKEN}"
    others = machine.has_actors and machine.cores > 1
    return f"{said}; other placements use all {machine.cores:g} cores" if others else said


def _role_times(windows: list[WorkWindow]) -> RoleTimes:
    phases = dict.fromkeys(phase for w in windows for phase in w.seconds)
    shares = {p: sum(w.seconds.get(p, 0.0) / w.length for w in windows) / len(windows) for p in phases}
    return RoleTimes(len(windows), shares, sum(sum(w.cpu_seconds.values()) / w.length for w in windows))


def _cpu_us(windows: list[WorkWindow], collected: float, trained: float) -> dict[str, float]:
    """Return microseconds of CPU time per sample by phase; CPU time while waiting counts as the framework's."""
    costs: dict[str, float] = {}
    for w in windows:
        for phase, seconds in w.cpu_seconds.items():
            # Learners train whole batches, so in a short time collected and trained steps differ.
            rate = trained if ROLES[w.role].trains or phase == "training" else collected
            if rate:
                name = "framework" if phase in WAITING else phase
                costs[name] = costs.get(name, 0.0) + 1e6 * seconds / w.length / rate
    return costs


def _limit(windows: list[WorkWindow], cpu_us: Mapping[str, float], machine: Machine) -> float:
    """Return samples per second without idle cores or waiting learners."""
    limit = 1e6 * machine.cores / sum(cpu_us.values())
    learners = [w for w in windows if ROLES[w.role].trains]
    if not learners:
        return limit
    # Wall time grows on a busy core; with several threads CPU time exceeds wall time.
    wall = [_without_waiting(w.seconds) for w in learners]
    cpu = wall if machine.gpu else [_without_waiting(w.cpu_seconds) for w in learners]
    busy = map(min, wall, cpu)
    return min(limit, sum(w.trained / seconds for w, seconds in zip(learners, busy, strict=True) if seconds))


def _without_waiting(times: Mapping[str, float]) -> float:
    return sum(time for phase, time in times.items() if phase not in WAITING)


def _work(report: TimeReport) -> int:
    return report.collected + report.trained


def _elapsed(report: TimeReport) -> float:
    return sum(report.seconds.values())


def _difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {phase: value - before.get(phase, 0.0) for phase, value in after.items()}
