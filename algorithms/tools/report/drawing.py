"""The curves and bands of a page, as the script of the page reads them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from appo.algorithms.run.summary import RETURN
from appo.algorithms.runtime.monitor.curves import Axis, Point
from appo.algorithms.tools.comparison.plot import RunCurve, band_of, group_runs
from appo.algorithms.tools.report.contents import FIGURES, ReportedRun

COLOURS = 8  # of curves, in page.css


def drawing(runs: Sequence[ReportedRun], axis: Axis) -> dict[str, Any]:
    """Return curves, and bands over curves of runs that differ only in their seed.

    A single run has a curve per policy; of several runs, the policy with the best last return is drawn.
    """
    labels: dict[str, list[str]]
    if len(runs) == 1:
        run = runs[0]
        several = len(run.policies) > 1
        named = {f"policy {policy}" if several else run.name: f for policy, f in sorted(run.policies.items())}
        labels, bands = {name: [name] for name in named}, list[dict[str, Any]]()
    else:
        named = {name: next(iter(run.policies.values()), {}) for name, run in zip(_names(runs), runs, strict=True)}
        curves = [
            RunCurve(name, run.flags, figures.get(RETURN, ()))
            for run, (name, figures) in zip(runs, named.items(), strict=True)
        ]
        groups = group_runs(curves)
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
                "figures": {tag: _columns(points) for tag, points in figures.items()},
            }
            for name, figures in named.items()
        ],
        "bands": bands,
    }


def _names(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the names of runs, with a number for a repeated name."""
    seen: dict[str, int] = {}
    names = []
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        names.append(run.name if seen[run.name] == 1 else f"{run.name} ({seen[run.name]})")
    return names


def _bands(group: Sequence[RunCurve], number: int) -> dict[str, Any] | None:
    """Return the band of a group over env steps and over hours; None without a band."""
    points = [curve.points for curve in group if len(curve.points) > 1]
    if len(points) < 2:
        return None
    axes: Sequence[Axis] = ("env_steps", "hours")
    plain: dict[str, Any] = {
        axis: {name: [_rounded(v) for v in np.asarray(values)] for name, values in band._asdict().items()}
        for axis in axes
        if (band := band_of(points, axis)) is not None
    }
    return {"group": number, "colour": number % COLOURS, **plain} if plain else None


def _columns(points: Sequence[Point]) -> list[list[float]]:
    """Return env steps, hours and values."""
    return [[_rounded(point[column]) for point in points] for column in range(3)]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")  # as precise as a picture
