"""The decisions about the policies of a run, in words and as a picture: who copied whom, and who mutated."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from appo.algorithms.population.lineage import Event, numbers_of
from appo.utils.values import is_number, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def describe(events: Sequence[Event]) -> list[str]:
    """Return a line for every copy and mutation, and a summary."""
    lines = [_line(event) for event in events if event.kind in ("copy", "mutation")]
    counts = [sum(event.kind == kind for event in events) for kind in ("copy", "mutation")]
    back = sum(event.state == "taken back" for event in events)
    summary = f"{len({event.policy for event in events})} policies, {counts[0]} copies, {counts[1]} mutations"
    return [*lines, summary + (f", {back} decisions taken back by crashes" if back else "")]


def _line(event: Event) -> str:
    what = f"copies policy {event.source}" if event.kind == "copy" else "mutates"
    changed = [
        f"{name} {_short(event.before.get(name))} -> {_short(value)}"
        for name, value in event.after.items()
        if value != event.before.get(name)
    ]
    scores = event.scores.get(str(event.policy)), event.scores.get(str(event.source))
    score = f" ({_short(scores[0])}" + (f" against {_short(scores[1])})" if event.kind == "copy" else ")")
    back = "" if event.state == "applied" else f", {event.state}"
    return f"policy {event.policy} at {event.env_steps} env steps{score}: {', '.join([what, *changed])}{back}"


def _short(value: object) -> str:
    return f"{value:.4g}" if is_number(value) else shown(value)


def draw_lineage(events: Sequence[Event]) -> "Figure":
    """Draw a lane per policy over env steps, arrows for copies, and below each number that changed."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    done = [event for event in events if event.state != "taken back"]
    policies = sorted({event.policy for event in done} | {event.source for event in done})
    values = [pair for event in done for pair in numbers_of(event.after).items()]
    names = [name for name in dict(values) if len({value for own, value in values if own == name}) > 1]  # that change
    heights = [0.45 * len(policies) + 0.8, *(1.2 for _ in names)]  # inches
    figure = Figure(figsize=(9, sum(heights) + 0.6), dpi=110)
    axes = figure.subplots(len(heights), 1, height_ratios=heights, sharex=True, squeeze=False)
    colors = {policy: f"C{i % 10}" for i, policy in enumerate(policies)}
    _lanes(axes[0][0], done, policies, colors)
    for axis, name in zip(axes[1:, 0], names, strict=True):
        _curves(axis, done, name, colors)
    for axis in axes[:, 0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.01)
    axes[-1][0].set_xlabel("env steps of the policy")
    axes[-1][0].xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.tight_layout()
    return figure


def _lanes(axis: Any, events: Sequence[Event], policies: Sequence[int], colors: Mapping[int, str]) -> None:
    """Draw a lane per policy, a dot per mutation, and an arrow per copy with the score of the source."""
    lanes = {policy: -i for i, policy in enumerate(policies)}
    for policy, lane in lanes.items():
        end = max((event.env_steps for event in events if event.policy == policy), default=0)
        axis.plot([0, end], [lane, lane], color=colors[policy], linewidth=2)
    for event in events:
        lane = lanes[event.policy]
        if event.kind == "mutation":
            axis.plot(event.env_steps, lane, "o", color=colors[event.policy], markersize=4)
        elif event.kind == "copy":
            source = (event.source_env_steps, lanes[event.source])
            arrow = {"arrowstyle": "->", "color": colors[event.source]}
            axis.annotate("", xy=(event.env_steps, lane), xytext=source, arrowprops=arrow)
            score = event.scores.get(str(event.source))
            text = "" if score is None else f"{score:.3g}"
            head = (event.env_steps, lane)  # at the head: several arrows may leave the same source
            axis.annotate(text, head, fontsize=7, xytext=(4, 4), textcoords="offset points", color=colors[event.source])
    axis.set_yticks(list(lanes.values()), [f"policy {policy}" for policy in lanes])
    axis.set_ylim(-len(lanes) + 0.4, 0.6)
    axis.set_title("who copied whom (arrows, with the score of the copied), and who mutated (dots)", fontsize=9)


def _curves(axis: Any, events: Sequence[Event], name: str, colors: Mapping[int, str]) -> None:
    """Draw a number over env steps for each policy; on a log scale if the range exceeds a factor of ten."""
    everything: list[float] = []
    for policy, color in colors.items():
        points = [
            (event.env_steps, value)
            for event in events
            if event.policy == policy and (value := numbers_of(event.after).get(name)) is not None
        ]
        if points:
            axis.step(*zip(*points, strict=True), where="post", color=color, marker=".", markersize=4)
            everything += [value for _, value in points]
    if everything and min(everything) > 0 and math.log10(max(everything) / min(everything)) > 1:
        axis.set_yscale("log")
    axis.set_ylabel(name, fontsize=8)
    axis.tick_params(labelsize=8)
