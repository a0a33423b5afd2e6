"""`appo plot` draws learning curves; runs that differ only in their seed become a line with a band.

The line of a group is the mean. From four runs on, the line is the interquartile mean, the mean of the middle half, not
moved by a single lucky or failed seed (Agarwal et al. 2021, arXiv:2108.13264). The band is the range of the runs, from
four runs on the range of the middle half. Both end with the shortest run.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from appo.algorithms.population.lineage import read_events
from appo.algorithms.run.config import FLAGS_BY_PART
from appo.algorithms.run.folder import LOCATION, find_run, find_runs
from appo.algorithms.runtime.monitor.curves import Axis, Point, read_curve
from appo.algorithms.tools.comparison.lineage import describe, draw_lineage
from appo.algorithms.tools.comparison.saved_runs import (
    ComparedRun,
    differing_flags,
    flags_of_run,
    read_each,
)
from appo.algorithms.tools.flags import PlotConfig
from appo.utils.command_line import say, words_of
from appo.utils.errors import UsageError
from appo.utils.files import replaced_when_whole
from appo.utils.run_folder import LINEAGE_FILE, RunFolder
from appo.utils.values import printable, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ASIDE = {
    *LOCATION,
    "train_for_seconds",
    "train_until_return",
    "keep_checkpoints",
    "seed",
    *FLAGS_BY_PART["logging"],
    *(n for n in FLAGS_BY_PART["run"] if n.startswith("save_")),
}
"""Flags in which runs of one group may differ."""
GRID = 200  # points of a drawn group
IQM_RUNS = 4
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
)  # distinguishable for colour-blind readers
MOST_IN_LABEL = 2
Array = NDArray[np.float64]


class Band(NamedTuple):
    """The middle and the spread of several curves over their common range: [GRID] each."""

    x: Array
    middle: Array
    low: Array
    high: Array


def plot(config: PlotConfig) -> int:
    """Draw the curves of runs, or with `--lineage` the decisions about policies; return the exit code.

    Raises:
        UsageError: a run is missing, no run has a curve, matplotlib is missing, or the file cannot be written.
    """
    root = Path(config.train_dir, config.experiments_root)
    if config.lineage:
        return _plot_lineage(config, root)
    directories = find_runs(config.runs, root)
    curves = read_each(directories, lambda _, d: ComparedRun(d.resolve().name, flags_of_run(d), read_curve(d)))
    known = [curve for curve in curves if len(curve.curve) > 1]
    for curve in curves:
        if curve not in known:
            say(f"{shown(curve.name)} has reported too few returns for a curve")
    if not known:
        raise UsageError("there is nothing to draw")
    output = config.output or "learning_curve.png"
    draw(group_runs(known), cast(Axis, config.x), Path(output))
    say(f"{len(known)} of {len(directories)} runs drawn: {output}")
    return 0


def _plot_lineage(config: PlotConfig, root: Path) -> int:
    if len(config.runs) > 1:
        raise UsageError(f"--lineage draws one run, not {len(config.runs)}")
    if config.x != "env_steps":
        raise UsageError(f"--lineage draws over env steps, not --x={config.x}")
    run = find_run(config.runs[0], root)
    if not (events := read_events(run)):
        raise UsageError(f"{run} has no {LINEAGE_FILE}: it was not trained with --with_pbt or --per_policy")
    for line in describe(events):
        say(line)
    path = Path(config.output) if config.output else RunFolder(run).lineage_picture
    require_matplotlib()
    save_figure(draw_lineage(events), path)
    say(f"drawn: {path}")
    return 0


def group_runs(curves: Sequence[ComparedRun]) -> dict[str, list[ComparedRun]]:
    """Group runs with equal flags except the seed; label each group with its differing flags."""
    groups: list[list[ComparedRun]] = []
    for curve in curves:
        for group in groups:
            if not set(differing_flags([group[0].flags, curve.flags])) - ASIDE:
                group.append(curve)
                break
        else:
            groups.append([curve])
    names = [name for name in differing_flags([group[0].flags for group in groups]) if name not in ASIDE]
    labels: dict[str, list[ComparedRun]] = {}
    for group in groups:
        label, name = _label(group, names), group[0].name
        more = (f"{label} ({name}, {number})" for number in count(2))
        labels[next(text for text in chain((label, f"{label} ({name})"), more) if text not in labels)] = group
    return labels


def band_of(curves: Sequence[Sequence[Point]], axis: Axis) -> Band | None:
    """Return the middle and the spread of several curves; None without a common range."""
    start = max(curve[0].at(axis) for curve in curves)
    end = min(curve[-1].at(axis) for curve in curves)
    if not start < end:
        return None
    x = np.linspace(start, end, GRID)
    values = np.sort([np.interp(x, [p.at(axis) for p in curve], [p.value for p in curve]) for curve in curves], axis=0)
    if len(curves) < IQM_RUNS:
        return Band(x, values.mean(axis=0), values[0], values[-1])
    low, high = np.quantile(values, [0.25, 0.75], axis=0)
    return Band(x, interquartile_mean(values), low, high)


def interquartile_mean(values: Array) -> Array:
    """Return the mean of the middle half of sorted values [N, X] for each X; values at the edges count in part."""
    count = len(values)
    edges = np.arange(count + 1)
    weight = np.clip(np.minimum(edges[1:], 0.75 * count) - np.maximum(edges[:-1], 0.25 * count), 0, None)
    mean: Array = weight @ values / weight.sum()
    return mean


def draw(groups: Mapping[str, Sequence[ComparedRun]], axis: Axis, path: Path) -> None:
    """Write the picture (UsageError: matplotlib is missing, or the file cannot be written)."""
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(7.2, 4.2), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    for number, (name, curves) in enumerate(groups.items()):
        label = f" {name}" if name.startswith("_") else name  # matplotlib omits labels that begin with an underscore
        _draw_group(axes, [curve.curve for curve in curves], axis, label, COLOURS[number % len(COLOURS)])
    envs = {str(curve.flags.get("env", "?")) for curves in groups.values() for curve in curves}
    axes.set_title(", ".join(shown(env) for env in sorted(envs)), loc="left", fontsize=11, parse_math=False)
    axes.set_xlabel(axis.replace("_", " "))
    axes.set_ylabel("mean return")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    if axis == "env_steps":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    for text in figure.legend(frameon=False, fontsize=8, loc="outside lower left").get_texts():
        text.set_parse_math(False)
    save_figure(figure, path)


def require_matplotlib() -> None:
    """Refuse to draw without matplotlib (UsageError)."""
    if find_spec("matplotlib") is None:
        raise UsageError('drawing needs matplotlib: pip install "appo[plots]"')


def _draw_group(axes: "Axes", curves: Sequence[Sequence[Point]], axis: Axis, label: str, colour: str) -> None:
    band = band_of(curves, axis) if len(curves) > 1 else None
    width, alpha = (1.8, 1.0) if band is None else (0.6, 0.35)
    for number, curve in enumerate(curves):
        shown_as = label if band is None and number == 0 else "_nolegend_"
        x, y = [point.at(axis) for point in curve], [point.value for point in curve]
        axes.plot(x, y, color=colour, linewidth=width, alpha=alpha, label=shown_as)
    if band is not None:
        axes.plot(band.x, band.middle, color=colour, linewidth=1.8, label=label)
        axes.fill_between(band.x, band.low, band.high, color=colour, alpha=0.18, linewidth=0)


def _label(group: Sequence[ComparedRun], names: Sequence[str]) -> str:
    """Return the differing flags of a group, and the meaning of the line."""
    parts = [f"{name}={words_of(group[0].flags.get(name))}" for name in names[:MOST_IN_LABEL]]
    if len(names) > MOST_IN_LABEL:
        parts.append(f"+ {len(names) - MOST_IN_LABEL} more")
    if len(group) == 1:
        return printable(" ".join(parts) or group[0].name)
    middle = "IQM and middle half" if len(group) >= IQM_RUNS else "mean and range"
    return printable(f"{' '.join(parts)}{': ' if parts else ''}{middle} of {len(group)} runs")


def save_figure(figure: Any, path: Path) -> None:
    """Write a picture in the format of its suffix (UsageError: no such format, or the file cannot be written)."""
    with replaced_when_whole(path) as temporary:
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            figure.savefig(temporary, format=path.suffix[1:] or "png")
        except (ValueError, RuntimeError) as error:  # an unknown format, or its program is missing
            raise UsageError(f"cannot write {shown(str(path))}: {error}") from None
