"""The live panel: a pure function from a snapshot of a run to lines of text with styles."""

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from appo.algorithms.runtime.monitor.curves import RETURN, Trace
from appo.algorithms.runtime.monitor.overview import Overview
from appo.algorithms.runtime.monitor.performance import WAITING, RoleTimes
from appo.algorithms.runtime.roles import ROLES
from appo.utils.metrics import duration, short_number

SMALLEST_COLUMNS, SMALLEST_ROWS = 60, 10
GAP = 3
LABEL = 12  # width of the labels
BAR = 16
BLOCKS = " ▁▂▃▄▅▆▇█"
MOST_POLICIES = 8
SIZE = "replay/size"
Record = Mapping[str, Any]
Spans = Sequence[tuple[str, str]]
"""Texts with styles."""


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment: title, figures and curve.

    Attributes:
        env: name of the environment.
        state: training, finished, ...
        aim: end of the run, in words.
        trace: mean return of the best policy so far.
        losses: metrics in the line of losses, metric -> word, from the algorithm; {}: the first of all metrics.
    """

    name: str
    env: str
    state: str
    aim: str
    overview: Overview
    trace: Trace
    losses: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        """Return whether the run has ended."""
        return self.state not in ("starting", "training")


class Section(NamedTuple):
    """Lines that are shown together or not at all; sections of the largest `rank` are dropped first."""

    rank: int
    lines: list[Text]


def draw(snapshot: Snapshot, columns: int, rows: int) -> RenderableType:
    """Draw the panel of a run, exactly `columns` wide and at most `rows` high; a small panel has no frame."""
    if columns < SMALLEST_COLUMNS or rows < SMALLEST_ROWS:
        return Group(*_fit(_small(snapshot, columns), max(1, rows)))
    title = f"{snapshot.name} · {snapshot.env} · {snapshot.state}"
    inner = columns - 4
    if columns >= 132:
        left_width = (inner - GAP) // 2
        right_width = inner - GAP - left_width
        left = _fit(_of_learning(snapshot, left_width, chart_rows=6), rows - 2)
        right = _fit(_of_machine(snapshot.overview, right_width), rows - 2)
        body: RenderableType = _side_by_side((left, left_width), (right, right_width))
    else:
        sections = [*_of_learning(snapshot, inner, chart_rows=3), *_of_machine(snapshot.overview, inner)]
        body = Group(*_fit(sections, rows - 2))
    return Panel(
        body,
        box=box.ROUNDED,
        title=Text(_cut(title, columns - 6), "bold"),
        title_align="left",
        subtitle=Text(_clock(snapshot.overview.elapsed_seconds)),
        subtitle_align="right",
        width=columns,
        border_style="blue",
    )


def _small(snapshot: Snapshot, width: int) -> list[Section]:
    """Return sections of one line, at most `width` wide, for a small terminal."""
    overview = snapshot.overview
    several = len(overview.policies) > 1
    learning = [record for record in overview.policies if record.get("env_steps")] or overview.policies
    best = max(learning, key=lambda record: record.get(RETURN, -math.inf), default={})
    rate = _rate(overview, "env_steps")
    share = "" if overview.share is None else f"{_percent(overview.share)} "
    left = None if snapshot.has_ended else overview.seconds_left
    words = share + (_clock(overview.elapsed_seconds) if left is None else f"{duration(left)} left")
    bar = _bar(overview.share or 0.0, max(0, width - 1 - len(words)), "green")
    mean = best.get(RETURN)
    spread = f" ({_figure(best.get('reward/min'))} to {_figure(best.get('reward/max'))})"
    per_second = "" if rate is None else f", {short_number(rate)}/s"
    lines: list[tuple[int, Spans]] = [
        (3, [(f"{snapshot.name} · {snapshot.env} · {snapshot.state}", "bold")]),
        (0, [*bar, (f" {words}" if len(words) < width - 1 else words, "")]),
        (1, [(f"return {_figure(mean)}", "bold"), ("" if mean is None else spread, "")]),
        (2, [(f"{short_number(overview.env_steps)} env steps", "bold"), (per_second, "")]),
        (5, [("best policy ", ""), (f"{best.get('policy', '?')} of {len(overview.policies)}", "")] if several else []),
    ]
    if found := overview.performance:
        limit = f"{found.limit_ratio:.0%} of the limit" if found.limit_samples_per_second else "limit not known yet"
        lines += [(6, [(limit, "")]), (4, [(found.bottleneck, "")])]
    if overview.warnings:
        lines.append((7, [(f"! {overview.warnings[-1]}", "yellow")]))
    if len(snapshot.trace) > 1:
        lines.insert(3, (8, [(chart(snapshot.trace.resample(width), 1)[0], "green")]))
    return [Section(rank, [_line("", [(_clean(w), style) for w, style in spans], 0)]) for rank, spans in lines if spans]


def _rate(overview: Overview, name: str) -> float | None:
    """Return a speed, summed over policies; None while unknown."""
    known = [r[tag] for r in overview.policies if r.get(tag := f"perf/{name}_per_second") is not None]
    return sum(known) if known else None


def render(drawn: RenderableType, columns: int, *, colour: bool, terminal: bool = True) -> list[str]:
    """Return the lines of a drawing.

    Without `terminal`, no escape sequences; without `colour`, only bold and dim ones.
    """
    console = Console(
        file=io.StringIO(),
        width=columns,
        force_terminal=terminal,
        color_system="standard" if terminal else None,
        no_color=not colour,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    with console.capture() as captured:
        console.print(drawn)
    return captured.get().splitlines()


def _side_by_side(*columns: tuple[Sequence[Text], int]) -> Table:
    """Return columns of lines with widths, side by side."""
    table = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    for _, width in columns:
        table.add_column(width=width, no_wrap=True)
    table.add_row(*(Group(*lines) for lines, _ in columns))
    return table


def _fit(sections: Iterable[Section], rows: int) -> list[Text]:
    """Return as many lines as fit: the least important sections are dropped, then the lowest lines."""
    kept = list(sections)
    while len(kept) > 1 and sum(len(section.lines) for section in kept) > rows:
        kept.remove(max(kept, key=lambda section: section.rank))
    return [line for section in kept for line in section.lines][: max(1, rows)]


def _of_learning(snapshot: Snapshot, width: int, chart_rows: int) -> list[Section]:
    overview, trace = snapshot.overview, snapshot.trace
    sections = [Section(0, [_progress(snapshot, width)]), Section(0, _speed(overview, width))]
    if len(overview.policies) == 1:
        (record,) = overview.policies
        lag = _lag(record, overview)
        sections += [
            Section(0, _wrap("return", _returns(record), width)),
            Section(4, _chart(trace, width, chart_rows)),
            Section(3, _wrap("losses", _losses(record, snapshot.losses), width)),
            Section(2, _wrap("replay", _replay(record), width) if SIZE in record else _wrap("lag", lag, width)),
        ]
    else:
        sections += [Section(0, _policies(overview.policies, width)), Section(4, _chart(trace, width, chart_rows))]
    return sections


def _of_machine(overview: Overview, width: int) -> list[Section]:
    sections = []
    if found := overview.performance:
        limit = found.limit_samples_per_second
        reached = f"{short_number(limit)} samples/s, at {found.limit_ratio:.0%}" if limit else "not known yet"
        sections += [
            Section(1, [_role(role, times, width) for role, times in found.shown_roles().items()]),
            Section(2, _wrap("limit", [(reached, "")], width)),
            Section(0, _wrap("bottleneck", [(found.bottleneck, "bold")], width)),
        ]
    sections.append(Section(2, _wrap("machine", _machine(overview), width)))
    if overview.warnings:
        lines = [_line("", [(_cut(f"! {text}", width), "yellow")], 0) for text in overview.warnings[-3:]]
        sections.append(Section(3, lines))
    return sections


def _progress(snapshot: Snapshot, width: int) -> Text:
    overview = snapshot.overview
    seconds_left = None if snapshot.has_ended else overview.seconds_left
    left = "" if seconds_left is None else f", {duration(seconds_left)} left"
    reached = " until " if overview.share is None else f" {_percent(overview.share)} of "
    room = width - LABEL - len(reached + left)  # for the bar and the aim
    aim = _cut(snapshot.aim, room - 8)  # of the shortest bar
    return _line("progress", [*_bar(overview.share or 0.0, room - len(aim), "green"), (reached + aim + left, "")])


def _speed(overview: Overview, width: int) -> list[Text]:
    env_steps, samples = _rate(overview, "env_steps"), _rate(overview, "samples")
    if samples is None and overview.performance:
        samples = overview.performance.samples_per_second
    rates = {"env steps/s": env_steps, "samples/s": samples}
    words = [(f"{short_number(rate)} {unit}", "") for unit, rate in rates.items() if rate is not None]
    return _wrap("speed", [(f"{short_number(overview.env_steps)} env steps", "bold"), *words], width)


def _returns(record: Record) -> Spans:
    mean, least, most, length = (record.get(tag) for tag in (RETURN, "reward/min", "reward/max", "len/mean"))
    if mean is None:
        return [("no episode has ended yet", "dim")]
    spread = f"from {_figure(least)} to {_figure(most)}"
    return [(_figure(mean), "bold"), (spread, ""), (f"episodes of {_known(length, short_number)} steps", "")]


def _losses(record: Record, losses: Mapping[str, str]) -> Spans:
    names = losses or {tag.removeprefix("train/"): tag[6:] for tag in record if tag.startswith("train/")}
    tags = {f"train/{name}": word for name, word in list(names.items())[:6]}
    known = [(f"{word} {record[tag]:.3g}", "") for tag, word in tags.items() if tag in record]
    return known or [("nothing is trained yet", "dim")]


def _lag(record: Record, overview: Overview) -> Spans:
    mean, most = record.get("train/policy_lag_mean"), record.get("train/policy_lag_max")
    words = [] if mean is None else [(f"{mean:.1f} versions", "")]
    words += [] if most is None else [(f"{most:.0f} at most", "")]
    return [*words, (f"{overview.discarded:,} samples discarded", "yellow" if overview.discarded else "")]


def _replay(record: Record) -> Spans:
    forms: dict[str, Callable[[float], str]] = {
        SIZE: lambda steps: f"{short_number(steps)} steps",
        "replay/uses_per_step": "{:.3g} uses a step".format,
        "replay/mean_priority": "priority {:.3g}".format,
        "replay/age_samples": lambda steps: f"{short_number(steps)} steps old",
    }
    return [(form(record[tag]), "") for tag, form in forms.items() if tag in record]


def _machine(overview: Overview) -> Spans:
    words: list[tuple[str, str]] = []
    if found := overview.performance:
        words.append((f"{found.busy_cores:.1f} of {found.cores:g} cores busy", ""))
    if overview.memory_bytes is not None:
        words.append((f"{_bytes(overview.memory_bytes)} of memory", ""))
    words.append((_count(overview.restarts, "restart"), "yellow" if overview.restarts else ""))
    if overview.env_rebuilds:
        words.append((_count(overview.env_rebuilds, "env rebuild"), "yellow"))
    return words


def _role(role: str, times: RoleTimes, width: int) -> Text:
    """Show the busy share of a role as a bar, and the largest phases."""
    phases = sorted(times.shares.items(), key=lambda pair: -pair[1])
    one, many = ROLES[role].panel
    name = one if times.processes == 1 else f"{times.processes} {many}"
    bar = _bar(times.busy, BAR, "cyan")
    spans: list[tuple[str, str]] = []
    room = width - LABEL - BAR
    for phase, share in phases:
        word = f"  {phase.replace('_', ' ')} {share:.0%}"
        if share < 0.005 or len(word) > room:
            break
        room -= len(word)
        spans.append((word, "dim" if phase in WAITING else ""))
    return _line(name, [*bar, *spans])


def _policies(records: Sequence[Record], width: int) -> list[Text]:
    best_first = sorted(records, key=lambda record: -record.get(RETURN, -math.inf))
    heads = ("policy", "env steps", "env steps/s", "return", "lag", "entropy")
    rows = [
        (
            f"{record.get('policy', '?')}",
            short_number(record.get("env_steps", 0)),
            _known(record.get("perf/env_steps_per_second"), short_number),
            _known(record.get(RETURN), _figure),
            _known(record.get("train/policy_lag_mean"), lambda value: f"{value:.1f}"),
            _known(record.get("train/entropy"), lambda value: f"{value:.3g}"),
        )
        for record in best_first[:MOST_POLICIES]
    ]
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = [
        Text(_cut("  ".join(cell.rjust(widths[i]) for i, cell in enumerate(row)), width), "" if number else "dim")
        for number, row in enumerate([heads, *rows])
    ]
    if len(records) > MOST_POLICIES:
        lines.append(Text(f"and {len(records) - MOST_POLICIES} more", "dim"))
    return lines


def _chart(trace: Trace, width: int, rows: int) -> list[Text]:
    """Draw the mean return over time, scaled from the lowest to the highest value."""
    values = trace.resample(width - LABEL)
    if len(trace) < 2:
        return []
    low, high = min(values), max(values)
    return [
        Text.assemble((mark.rjust(LABEL - 1) + " ", "dim"), (line, "green"))
        for mark, line in zip([_figure(high), *[""] * (rows - 2), _figure(low)], chart(values, rows), strict=True)
    ]


def chart(values: Sequence[float], rows: int) -> list[str]:
    """Draw columns of blocks; the lowest value is an eighth of a row high, the highest value `rows` rows."""
    low, high = min(values), max(values)
    steps = len(BLOCKS) - 1
    scale = (rows * steps - 1) / (high - low) if high > low else 0.0
    heights = [1 + round((value - low) * scale) for value in values]
    return [
        "".join(BLOCKS[min(steps, max(0, height - row * steps))] for height in heights) for row in reversed(range(rows))
    ]


def _wrap(label: str, spans: Spans, width: int) -> list[Text]:
    """Return a label and spans with separators, in as many lines as necessary; long spans are wrapped."""
    lines: list[list[tuple[str, str]]] = [[]]
    room = width - LABEL
    left = room
    for words, style in spans:
        if lines[-1] and len(words) + 3 > left:
            lines.append([])
            left = room
        pieces = textwrap.wrap(_clean(words), room) or [""]
        if lines[-1]:
            lines[-1].append((" · ", "dim"))
            left -= 3
        for number, piece in enumerate(pieces):
            if number:
                lines.append([])
                left = room
            lines[-1].append((piece, style))
            left -= len(piece)
    return [_line(label if number == 0 else "", line) for number, line in enumerate(lines)]


def _line(label: str, spans: Spans, indent: int = LABEL) -> Text:
    return Text.assemble((label.ljust(indent), "dim"), *spans, no_wrap=True, overflow="ellipsis")


def _bar(share: float, width: int, style: str) -> Spans:
    """Draw a bar, heavy for the full part, light for the rest: readable without colours."""
    full = round(min(1.0, max(0.0, share)) * width)
    return [("━" * full, style), ("─" * (width - full), "dim")]


def _clean(text: str) -> str:
    """Return the text without signs that could move the cursor."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def _cut(text: str, width: int) -> str:
    text = _clean(text)
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _known(value: float | None, form: Any) -> str:
    return "-" if value is None else str(form(value))


def _figure(value: float | None) -> str:
    """Write a return, with two decimals if small, and shorter than a label."""
    if value is None:
        return "-"
    form = ".2f" if abs(value) < 1000 else ",.0f" if abs(value) < 99_999_999.5 else ".3g"
    return f"{value:{form}}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 or not share else f"{share:.1%}" if share >= 0.001 else "<0.1%"


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def _bytes(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


def _clock(seconds: float) -> str:
    """Write seconds as on a stopwatch: 1:02:03."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
