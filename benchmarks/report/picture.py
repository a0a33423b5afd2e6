"""Pictures: speed beside peers (docs/performance.md), and seconds to a return beside peers (README)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from appo.utils.errors import UsageError
from benchmarks.peers.__main__ import OURS
from benchmarks.scores.learning import CONTENDERS, Task
from benchmarks.shared import measuring, runs
from benchmarks.speed import end_to_end

LABELS = {
    OURS: "appo",
    "sample_factory": "Sample Factory 2",
    "sample_factory_malloc": "Sample Factory 2,\nallocator tuned",
    "cleanrl_envpool": "CleanRL-style\n+ EnvPool",
    "pufferlib": "PufferLib 3",
    "stable_baselines3": "Stable-Baselines3",
}


def _pyplot() -> Any:
    """Return matplotlib's module, which draws without a screen (UsageError: not installed)."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise UsageError('the pictures need matplotlib: pip install "appo[bench]"') from None
    mpl.use("agg")
    from matplotlib import pyplot

    return pyplot


def draw_seconds(files: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw median seconds to a return with the range of the seeds, a row per machine and a panel per environment.

    Contenders are the presets and the peers, on machines that have run Stable-Baselines3. A contender with a missed
    goal has a pale bar, as long as its runs took.

    Raises:
        UsageError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    tables = [
        (content["machine"], _by_task(content["results"]))
        for content in files
        if content["benchmark"] == "learning" and "stable_baselines3" in content["results"]
    ]
    if not tables:
        return
    columns = max(len(tasks) for _, tasks in tables)
    figure, axes = pyplot.subplots(len(tables), columns, figsize=(3.6 * columns, 1.9 * len(tables)), squeeze=False)
    for row, (machine, tasks) in zip(axes, tables, strict=True):
        for axis in row[len(tasks) :]:
            axis.set_axis_off()
        for axis, (task, outcomes) in zip(row, tasks.items(), strict=False):
            seconds = {name: [one["seconds"] for one in of_one] for name, of_one in outcomes.items()}
            bars = _bars(axis, {name: (min(each), median(each), max(each)) for name, each in seconds.items()})
            for name, bar in bars.items():
                if not all(one["reached"] for one in outcomes[name]):
                    bar.set_alpha(0.4)
                    axis.annotate(" not reached", (0, bar.get_y() + 0.3), va="center", fontsize=8)
            axis.set_title(f"{task.env}: return {task.goal:g}, {machine['cores']} cores", fontsize=9)
    figure.suptitle("seconds until the mean of the last 100 episodes reaches the return", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _by_task(results: Mapping[str, Any]) -> dict[Task, dict[str, list[Mapping[str, Any]]]]:
    """Return the outcomes of presets and peers by task and contender; tasks without a peer are left out."""
    tasks: dict[Task, dict[str, list[Mapping[str, Any]]]] = {}
    for name, contender in CONTENDERS.items():
        if name in results and (contender.peer or name.endswith("preset")):
            of_task = tasks.setdefault(contender.task, {})
            of_task[contender.peer or OURS] = list(results[name]["seeds"].values())
    return {task: of_task for task, of_task in tasks.items() if of_task.keys() > {OURS}}


def draw(files: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw bars of median samples per second with the range of the runs, and a line at the limit if known.

    Raises:
        UsageError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    compared = [content for content in files if content["benchmark"] == "peers"]
    if not compared:
        return
    columns = max(len(content["results"]) for content in compared)
    size = (3.4 * columns, 2.6 * len(compared))
    figure, axes = pyplot.subplots(len(compared), columns, figsize=size, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for row, content in zip(axes, compared, strict=True):
        limits = _limits(files, content["machine"])
        for axis, (workload, result) in zip(row, content["results"].items(), strict=False):
            axis.set_axis_on()
            _panel(axis, result["contenders"], limits.get(workload))
            axis.set_title(f"{workload.replace('_', ' ')}, {content['machine']['cores']} cores", fontsize=9)
    figure.suptitle("samples per second; dashed: limit of the machine", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _limits(files: Sequence[Mapping[str, Any]], machine: Mapping[str, Any]) -> dict[str, float]:
    """Return limits by workload, from runs on the same machine."""
    here = measuring.identity(machine)
    runs_of = (content for content in files if content["benchmark"] == "end_to_end")
    same = [content for content in runs_of if measuring.identity(content["machine"]) == here]
    return {workload: end_to_end.limit(result) for content in same for workload, result in content["results"].items()}


def _panel(axis: Any, contenders: Mapping[str, Any], limit: float | None) -> None:
    speeds = {name: runs.summary(of_one)["samples_per_second"] for name, of_one in contenders.items()}
    _bars(axis, {name: (speed.lowest, speed.median, speed.highest) for name, speed in speeds.items()})
    if limit is not None:
        axis.axvline(limit, color="tab:red", linestyle="--", linewidth=1)


def _bars(axis: Any, ranges: Mapping[str, tuple[float, float, float]]) -> dict[str, Any]:
    """Draw a bar per contender with lowest, median and highest figure, the first on top; return the bars by name."""
    names = list(ranges)[::-1]
    medians = [ranges[name][1] for name in names]
    errors = [[abs(ranges[name][end] - ranges[name][1]) for name in names] for end in (0, 2)]
    colors = ["tab:blue" if name == OURS else "0.7" for name in names]
    labels = [LABELS[name] for name in names]
    bars = axis.barh(labels, medians, xerr=errors, color=colors, height=0.6, ecolor="0.3")
    axis.tick_params(labelsize=8)
    axis.locator_params(axis="x", nbins=4)
    axis.spines[["top", "right"]].set_visible(False)
    return dict(zip(names, bars, strict=True))
