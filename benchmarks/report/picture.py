"""The picture of docs/performance.md: speed beside peers, a row per machine and a panel per workload."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from appo.utils.errors import UsageError
from benchmarks.peers.__main__ import OURS
from benchmarks.shared import measuring, runs
from benchmarks.speed import end_to_end

LABELS = {
    OURS: "appo",
    "sample_factory": "Sample Factory 2",
    "sample_factory_malloc": "Sample Factory 2,\nallocator tuned",
    "cleanrl_envpool": "CleanRL-style\n+ EnvPool",
    "pufferlib": "PufferLib 3",
}


def draw(files: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw bars of median samples per second with the range of the runs, and a line at the limit if known.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise UsageError('the picture needs matplotlib: pip install "appo[bench]"') from None
    mpl.use("agg")
    from matplotlib import pyplot

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
    names = list(speeds)[::-1]
    medians = [speeds[name].median for name in names]
    errors = [
        [speeds[name].median - speeds[name].lowest for name in names],
        [speeds[name].highest - speeds[name].median for name in names],
    ]
    colors = ["tab:blue" if name == OURS else "0.7" for name in names]
    axis.barh([LABELS[name] for name in names], medians, xerr=errors, color=colors, height=0.6, ecolor="0.3")
    if limit is not None:
        axis.axvline(limit, color="tab:red", linestyle="--", linewidth=1)
    axis.tick_params(labelsize=8)
    axis.locator_params(axis="x", nbins=4)
    axis.spines[["top", "right"]].set_visible(False)
