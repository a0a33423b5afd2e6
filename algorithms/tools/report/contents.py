"""The contents of a report: runs, possibly of strangers, read from their folders in bounded memory, and their curves.

Metrics are sampled, videos have a size limit, and lists have a maximal length.
"""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from appo.algorithms.population.lineage import Event, read_events
from appo.algorithms.run.folder import count_starts, saved_flags
from appo.algorithms.run.summary import RunSummary, last_records, summary
from appo.algorithms.runtime.monitor.curves import RETURN, Axis, Point, read_curves
from appo.algorithms.runtime.monitor.panel import Snapshot
from appo.algorithms.tools.comparison.plot import band_of, group_runs
from appo.algorithms.tools.comparison.saved_runs import ComparedRun, default_flags
from appo.algorithms.tools.top import ObservedRun
from appo.utils.command_line import complain
from appo.utils.errors import UsageError
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
COLOURS = 8  # of curves, in page.css
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
    own = {tag for record in last_records(folder.metrics) for tag in record if OWN_FIGURE.fullmatch(tag)}
    tags = [*FIGURES, *sorted(own)[:MOST_OWN_FIGURES]]
    found = read_curves(folder.metrics, tags)
    last = {policy: tags[RETURN][-1] for policy, tags in found.items() if RETURN in tags}
    ranked = {p: (last[p].env_steps > 0, last[p].value) if p in last else (False, 0.0) for p in found}  # frozen last
    best_first = sorted(found, key=ranked.__getitem__, reverse=True)[:MOST_POLICIES]
    return {policy: {tag: thinned(points, tag) for tag, points in found[policy].items()} for policy in best_first}


def thinned(points: Sequence[Point], tag: str) -> list[Point]:
    """Return at most as many points as are drawn, at equal distances, the first and the last included."""
    most = MOST_POINTS if tag == RETURN else MOST_POINTS_OF_SMALL
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def _events(directory: Path) -> list[Event]:
    """Return the last decisions about the policies of a run; leave out an unreadable lineage with a warning."""
    try:
        found = read_events(directory)
    except UsageError as error:
        complain(f"warning: the lineage of {shown(directory.name)} is left out: {error}\n")
        return []
    # Numbers beyond 64 bits cannot be drawn.
    drawn = (e for e in found if all(map(is_number, (e.policy, e.source, e.env_steps, e.source_env_steps))))
    return list(drawn)[-MOST_EVENTS:]


class Films:
    """Reads videos of evaluations up to the size limit of a page."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._count = most_bytes, 0
        self.left_out = 0

    def of(self, folder: RunFolder) -> list[Video]:
        """Return the first and the last video of each policy."""
        by_policy: dict[int, list[tuple[int, str]]] = {}
        for match in filter(None, map(VIDEO_NAME.fullmatch, names_in_own(folder.videos))):
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


def drawing(runs: Sequence[ReportedRun], axis: Axis) -> dict[str, Any]:
    """Return curves, and bands over curves of runs that differ only in their seed.

    A single run has a curve per policy; of several runs, the policy with the best last return is drawn.
    """
    labels: dict[str, list[str]]
    if len(runs) == 1:
        (run,) = runs
        policies = sorted(run.policies.items())
        named = {f"policy {policy}" if len(policies) > 1 else run.name: figures for policy, figures in policies}
        labels, bands = {name: [name] for name in named}, list[dict[str, Any]]()
    else:
        named = {name: next(iter(run.policies.values()), {}) for name, run in zip(_names(runs), runs, strict=True)}
        groups = group_runs(
            [
                ComparedRun(name, run.flags, figures.get(RETURN, ()))
                for run, (name, figures) in zip(runs, named.items(), strict=True)
            ]
        )
        labels = {label: [curve.name for curve in group] for label, group in groups.items()}
        bands = [band for number, group in enumerate(groups.values()) if (band := _bands(group, number))]
    group_of = {name: number for number, names in enumerate(labels.values()) for name in names}
    tags = list(dict.fromkeys(tag for tag in FIGURES if any(tag in f for f in named.values())))
    tags += sorted({tag for figures in named.values() for tag in figures} - set(FIGURES))
    return {
        "axis": axis,
        "figures": [{"tag": tag, "title": FIGURES.get(tag, tag.removesuffix("/mean"))} for tag in tags],
        "groups": [
            {"label": label, "colour": number % COLOURS, "runs": len(names)}
            for number, (label, names) in enumerate(labels.items())
        ],
        "series": [
            {
                "name": name,
                "group": group_of[name],
                "colour": group_of[name] % COLOURS,
                "figures": {  # env steps, hours and values
                    tag: [[_rounded(point[column]) for point in points] for column in range(3)]
                    for tag, points in figures.items()
                },
            }
            for name, figures in named.items()
        ],
        "bands": bands,
    }


def _names(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the names of runs, with a number for a repeated name."""
    names = [run.name for run in runs]
    return [f"{name} ({n})" if (n := names[: i + 1].count(name)) > 1 else name for i, name in enumerate(names)]


def _bands(group: Sequence[ComparedRun], number: int) -> dict[str, Any] | None:
    """Return the band of a group over env steps and over hours; None without a band."""
    points = [run.curve for run in group if len(run.curve) > 1]
    if len(points) < 2:
        return None
    axes: Sequence[Axis] = ("env_steps", "hours")
    plain: dict[str, Any] = {
        axis: {name: [_rounded(v) for v in np.asarray(values)] for name, values in band._asdict().items()}
        for axis in axes
        if (band := band_of(points, axis)) is not None
    }
    return {"group": number, "colour": number % COLOURS, **plain} if plain else None


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")  # as precise as a picture
