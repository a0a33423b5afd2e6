"""The contents of a report: runs, possibly of strangers, read from their folders in bounded memory.

Metrics are sampled, videos have a size limit, and lists have a maximal length.
"""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from appo.algorithms.population.lineage import Event, read_events
from appo.algorithms.run.directory.journal import count_starts
from appo.algorithms.run.folder import saved_flags
from appo.algorithms.run.summary import RETURN, RunSummary, last_records, summary
from appo.algorithms.runtime.monitor.curves import PLACE, Point
from appo.algorithms.runtime.monitor.panel import Snapshot
from appo.algorithms.tools.comparison.saved_runs import default_flags
from appo.algorithms.tools.top import ObservedRun
from appo.utils.command_line import complain
from appo.utils.errors import UsageError
from appo.utils.metrics import read_metrics, without_lost
from appo.utils.run_folder import RunFolder, names_in_own, open_own
from appo.utils.values import is_number, shown

FIGURES = {
    RETURN: "Mean return",
    "len/mean": "Episode length",
    "perf/env_steps_per_second": "Env steps per second",
    "perf/limit_ratio": "Share of the machine's limit",
    "train/entropy": "Entropy of the policy",
    "train/kl_divergence": "Divergence from what acted",
    "train/value_loss": "Value loss",
    "train/grad_norm": "Norm of the gradient",
    "train/policy_lag_mean": "Policy lag, in updates",
    "train/td_error": "Error of Q",
    "train/learning_rate": "Learning rate",
    "selfplay/rating": "Rating against past versions",
    "pbt/objective": "Objective of the population",
    "perf/memory_mib": "Memory, in MiB",
}
"""Tags of drawn figures, with their titles."""
OWN_FIGURE = re.compile(r"stats/[^/]{1,60}/mean")
MOST_OWN_FIGURES = 6  # reported by an environment
MOST_POINTS, MOST_POINTS_OF_SMALL = 500, 200  # of the large curve, and of others
MOST_POLICIES = 8  # of one run
MOST_EVENTS = 400  # of the end of a lineage
MOST_VIDEOS = 24
VIDEO_NAME = re.compile(r"p(\d{1,2})_(\d{1,15})\.mp4")
MIB = 1 << 20
Figures = Mapping[str, Sequence[Point]]


class Video(NamedTuple):
    """An MP4 file of a policy after a number of env steps."""

    policy: int
    env_steps: int
    content: bytes


@dataclass(frozen=True)
class ReportedRun:
    """The contents of the page for a run.

    Attributes:
        name: name of the folder.
        summary: state, progress and returns.
        snapshot: performance and warnings.
        flags: flags of the last start, defaults included.
        defaults: flag -> default.
        policies: policy -> curves by tag; the policy with the best last return first.
        processor: processor of the last start; empty if unknown.
        starts: number of starts.
        events: decisions of the lineage.
        videos: videos of evaluations.
    """

    name: str
    summary: RunSummary
    snapshot: Snapshot
    flags: Mapping[str, object]
    defaults: Mapping[str, object]
    policies: Mapping[int, Figures]
    processor: str
    starts: int
    events: Sequence[Event]
    videos: Sequence[Video]


def read(directory: Path, films: "Films") -> ReportedRun:
    """Read the folder of a run (UsageError: the run cannot be read)."""
    folder, found = RunFolder(directory), summary(directory)
    if found is None:
        raise UsageError(f"{shown(str(directory))} is no run any more")
    defaults = default_flags(directory)
    machine = folder.read_status().get("machine")
    processor = machine.get("processor") if isinstance(machine, dict) else None
    return ReportedRun(
        name=directory.name,
        summary=found,
        snapshot=ObservedRun(directory).look(),
        flags=defaults | saved_flags(directory),
        defaults=defaults,
        policies=curves(folder),
        processor=processor if isinstance(processor, str) else "",
        starts=count_starts(directory),
        events=_events(directory),
        videos=films.of(folder),
    )


def curves(folder: RunFolder) -> dict[int, Figures]:
    """Return the curves of a run by tag, without records lost in a crash; the best policy first."""
    own = (tag for record in last_records(folder.metrics) for tag in record if OWN_FIGURE.fullmatch(tag))
    tags = [*FIGURES, *sorted(dict.fromkeys(own))[:MOST_OWN_FIGURES]]
    found: dict[int, dict[str, list[Point]]] = {}
    for record in without_lost(read_metrics(folder.metrics, {*PLACE, *tags})):
        of_policy = found.setdefault(int(record["policy"]), {})
        for tag in tags:
            if is_number(value := record.get(tag)):
                of_policy.setdefault(tag, []).append(
                    Point(record["env_steps"], record["elapsed_seconds"] / 3600, value)
                )

    def last_return(policy: int) -> float:
        points = found[policy].get(RETURN)
        return points[-1].value if points else float("-inf")

    best_first = sorted(found, key=last_return, reverse=True)[:MOST_POLICIES]
    return {policy: {tag: thinned(points, tag) for tag, points in found[policy].items()} for policy in best_first}


def thinned(points: Sequence[Point], tag: str) -> list[Point]:
    """Return at most as many points as are drawn, at equal distances, the first and the last included."""
    most = MOST_POINTS if tag == RETURN else MOST_POINTS_OF_SMALL
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def _events(directory: Path) -> list[Event]:
    """Return the last decisions about the policies of a run; leave out an unreadable lineage with a warning."""
    # Numbers beyond 64 bits cannot be drawn.
    numbers = ("policy", "source", "env_steps", "source_env_steps")
    try:
        found = read_events(directory)
    except UsageError as error:
        complain(f"warning: the lineage of {shown(directory.name)} is left out: {error}\n")
        return []
    return [e for e in found if all(is_number(getattr(e, name)) for name in numbers)][-MOST_EVENTS:]


class Films:
    """Reads videos of evaluations up to the size limit of a page.

    Attributes:
        left_out: number of videos that did not fit.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._count = most_bytes, 0
        self.left_out = 0

    def of(self, folder: RunFolder) -> list[Video]:
        """Return the first and the last video of each policy."""
        named = [match for name in names_in_own(folder.videos) if (match := VIDEO_NAME.fullmatch(name))]
        by_policy: dict[int, list[tuple[int, str]]] = {}
        for match in named:
            by_policy.setdefault(int(match[1]), []).append((int(match[2]), match[0]))
        policies = sorted(by_policy.items())
        wanted = dict.fromkeys((policy, *pick(films)) for pick in (max, min) for policy, films in policies)
        return sorted(v for policy, steps, name in wanted if (v := self._read(folder.videos / name, policy, steps)))

    def _read(self, path: Path, policy: int, env_steps: int) -> Video | None:
        """Read a video; return None if the file is no video, unreadable or too large."""
        content = b""
        with contextlib.suppress(OSError), open_own(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= self._most_bytes and self._count < MOST_VIDEOS:
                content = file.read(size)
        if content[4:8] != b"ftyp":  # the signature of MP4
            self.left_out += 1
            return None
        self._most_bytes -= len(content)
        self._count += 1
        return Video(policy, env_steps, content)
