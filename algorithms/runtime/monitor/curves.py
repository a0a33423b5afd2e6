"""Learning curves of a run: the mean return of its last episodes over env steps and hours."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from appo.utils.metrics import read_metrics, without_lost
from appo.utils.run_folder import RunFolder
from appo.utils.values import is_number

RETURN, EPISODES = "reward/mean", "reward/episodes"
PLACE = ("policy", "env_steps", "elapsed_seconds")
"""Names of the numbers that place a record."""
LONGEST_TRACE = 4096  # points; a longer trace drops every second point
Axis = Literal["env_steps", "hours"]


class Point(NamedTuple):
    """The mean return in one report, over so many episodes (0: unknown)."""

    env_steps: float
    hours: float
    value: float
    episodes: float = 0.0

    def at(self, axis: Axis) -> float:
        """Return the place of the point on an axis."""
        return self.env_steps if axis == "env_steps" else self.hours


def read_curves(metrics: Path, tags: Sequence[str]) -> dict[int, dict[str, list[Point]]]:
    """Read curves by policy and tag, without training that a crash lost (UsageError: the metrics cannot be read)."""
    found: dict[int, dict[str, list[Point]]] = {}
    for record in without_lost(read_metrics(metrics, {*PLACE, EPISODES, *tags})):
        of_policy = found.setdefault(int(record["policy"]), {})
        for tag in tags:
            if is_number(value := record.get(tag)):
                place = record["env_steps"], record["elapsed_seconds"] / 3600
                point = Point(*place, value, number if is_number(number := record.get(EPISODES)) else 0.0)
                of_policy.setdefault(tag, []).append(point)
    return found


def read_curve(directory: Path) -> list[Point]:
    """Read the curve of a run; of policies that learn the curve with the best end (UsageError: as `read_curves`)."""
    found = read_curves(RunFolder(directory).metrics, [RETURN]).values()
    curves = (tags[RETURN] for tags in found if RETURN in tags)
    return max(curves, key=lambda curve: (curve[-1].env_steps > 0, curve[-1].value), default=[])


def value_at(curve: Sequence[Point], axis: Axis, x: float) -> float | None:
    """Return the value at a place of the axis, interpolated linearly; None outside of the curve."""
    after = bisect_right(curve, x, key=lambda point: point.at(axis))
    if after == 0 or (after == len(curve) and curve[-1].at(axis) < x):
        return None
    left = curve[after - 1]
    if after == len(curve) or left.at(axis) == x:
        return left.value
    right = curve[after]
    share = (x - left.at(axis)) / (right.at(axis) - left.at(axis))
    return left.value + share * (right.value - left.value)


class Trace:
    """A figure over time, in bounded memory."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._values: list[float] = []

    def add(self, seconds: float, value: float) -> None:
        """Add a value and drop values of equal or later times, because a resumed run repeats some time."""
        at = len(self._seconds)
        while at and self._seconds[at - 1] >= seconds:
            at -= 1
        self._seconds[at:], self._values[at:] = [seconds], [value]
        if len(self._seconds) > LONGEST_TRACE:
            del self._seconds[::2], self._values[::2]

    def __len__(self) -> int:
        return len(self._values)

    @property
    def last(self) -> float:
        """Return the newest value; -inf for an empty trace."""
        return self._values[-1] if self._values else -math.inf

    def resample(self, count: int) -> list[float]:
        """Return means over `count` equal parts of the time; a part without a value repeats the part before."""
        if not self._values or count < 1:
            return []
        start = self._seconds[0]
        width = (self._seconds[-1] - start) / count or 1.0
        sums, counts = [0.0] * count, [0] * count
        for seconds, value in zip(self._seconds, self._values, strict=True):
            part = min(count - 1, int((seconds - start) / width))
            sums[part] += value
            counts[part] += 1
        means = [self._values[0]]
        for total, number in zip(sums, counts, strict=True):
            means.append(total / number if number else means[-1])
        return means[1:]


TRACED = ("policy", "elapsed_seconds", RETURN, "env_steps")
"""Names that `ReturnTraces` reads from a record."""


class ReturnTraces:
    """The mean return of every policy over time."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._traces: dict[object, Trace] = {}
        self._learning = set[object]()
        for record in records:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record of metrics.jsonl, which may be damaged."""
        policy, seconds, value, env_steps = (record.get(name) for name in TRACED)
        if is_number(policy) and is_number(seconds) and is_number(value):
            self._traces.setdefault(policy, Trace()).add(seconds, value)
            if is_number(env_steps) and env_steps > 0:
                self._learning.add(policy)

    def best(self) -> Trace:
        """Return the trace of the policy with the best newest value, a frozen one only if none learns."""
        learning = [trace for policy, trace in self._traces.items() if policy in self._learning]
        return max(learning or self._traces.values(), key=lambda trace: trace.last, default=Trace())
