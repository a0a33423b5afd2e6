"""The sections of a page, as HTML."""

import base64
import html
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from appo.algorithms.population.lineage import Event
from appo.algorithms.runtime.monitor.performance import Performance
from appo.algorithms.runtime.roles import ROLES
from appo.algorithms.tools.comparison.lineage import describe
from appo.algorithms.tools.comparison.plot import ASIDE
from appo.algorithms.tools.comparison.saved_runs import ComparedRun, differing_flags
from appo.algorithms.tools.comparison.settings import settings_of
from appo.algorithms.tools.report.contents import MIB, ReportedRun, Video
from appo.algorithms.tools.report.drawing import COLOURS
from appo.utils.command_line import words_of, words_of_flag
from appo.utils.metrics import duration, short_number
from appo.utils.timing import PHASES
from appo.utils.values import printable

PHASE_COLOURS = dict(zip(PHASES, (7, 2, 2, 0, 1, 6, None, None), strict=True))  # None: waiting, the ground of the bar
LONGEST = 300  # characters of a text of a run
LONGEST_COMMAND = 4000
LAST_SECOND = 253402300799.0  # of the year 9999
MOST_FLAGS = 200
MOST_LINES = 100  # of a lineage as text
MOST_LANES = 16
NAMED = 3  # runs in the heading
LANE, EDGE, WIDTH = 26, 78, 960  # pixels of a lineage


def body_of(runs: Sequence[ReportedRun], drawn: Mapping[str, Any]) -> str:
    """Return all sections that have contents."""
    sections = (
        _heading(runs),
        _summary(runs, drawn),
        _settings(runs),
        _charts(drawn),
        _videos(runs),
        _flags(runs),
        _commands(runs),
        _machine(runs),
        _lineage(runs),
        _warnings(runs),
    )
    return "\n".join(section for section in sections if section)


def safe(value: object) -> str:
    """Return a text of a run as HTML: escaped, bounded, without characters that change the direction of writing."""
    text = printable(str(value)[: LONGEST + 1]).replace("\n", " ")
    return html.escape(text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}...")


def _table(head: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]], kinds: Sequence[str]) -> str:
    """Return a table from titles and cells as HTML, and the CSS class of each column."""
    top = "".join(f'<th class="{kind}">{word}</th>' for word, kind in zip(head, kinds, strict=True))
    cells = ((f'<td class="{kind}">{cell}</td>' for cell, kind in zip(row, kinds, strict=True)) for row in rows)
    lines = "\n".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    return f'<div class="scroll"><table><tr>{top}</tr>\n{lines}\n</table></div>'


def _dot(colour: int) -> str:
    return f'<span class="dot c{colour}"></span>'


def title_of(runs: Sequence[ReportedRun]) -> str:
    """Return the title of the page: the names of the first runs."""
    names = ", ".join(run.name for run in runs[:NAMED])
    return names if len(runs) <= NAMED else f"{names} and {len(runs) - NAMED} more"


def _heading(runs: Sequence[ReportedRun]) -> str:
    envs = list(dict.fromkeys(f"{run.summary.algo or '?'} on {run.summary.env or '?'}" for run in runs))
    more = f" and {len(envs) - NAMED} more" if len(envs) > NAMED else ""
    said = "; ".join(envs[:NAMED])
    return f'<h1>{safe(title_of(runs))}</h1>\n<p class="sub">{safe(said)}{more}</p>'


def _summary(runs: Sequence[ReportedRun], drawn: Mapping[str, Any]) -> str:
    head = ("run", "state", "env steps", "time", "env steps/s", "best return", "last return", "of the limit")
    colours = [one["colour"] for one in drawn["series"]] if len(runs) > 1 else [0]
    rows = (_summary_row(run, colour) for run, colour in zip(runs, colours, strict=True))
    return _table(head, rows, ("", "", *["number"] * 6)).replace('class="scroll"', 'class="scroll wide"', 1)


def _settings(runs: Sequence[ReportedRun]) -> str:
    """Return the table of settings; empty if no two runs differ only in their seed."""
    settings = settings_of([ComparedRun(run.name, run.flags, "", (), run.summary.last_return) for run in runs])
    if len(settings) == len(runs):
        return ""
    names = list(settings[0].flags)
    rows = ([*(safe(words_of(value)) for value in one.flags.values()), str(one.runs), one.text] for one in settings)
    kinds = [*["flag"] * len(names), "number", "number"]
    said = '<p class="soft">Runs that differ in their seed only as one: the mean with its 95 % interval.</p>'
    return f"<h2>Settings</h2>\n{said}{_table([*map(safe, names), 'runs', 'last return'], rows, kinds)}"


def _summary_row(run: ReportedRun, colour: int) -> Sequence[str]:
    found, overview = run.summary, run.snapshot.overview
    seconds, performance = overview.elapsed_seconds, overview.performance
    reason = f'<br><span class="soft">{safe(found.reason)}</span>' if found.reason else ""
    steps = found.env_steps
    return (
        _dot(colour) + safe(run.name),
        safe(found.state) + reason,
        "-" if steps is None else short_number(steps),
        duration(seconds) if seconds else "-",
        short_number(steps / seconds) if steps and seconds > 0 else "-",
        _number(found.best_return),
        _number(found.last_return),
        safe(f"{performance.limit_ratio:.0%}") if performance and performance.limit_ratio else "-",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _charts(drawn: Mapping[str, Any]) -> str:
    if not drawn["figures"]:
        return '<h2>Curves</h2>\n<p class="soft">No figures have been written yet.</p>'
    axes = "".join(
        f'<button data-axis="{axis}" aria-pressed="{str(axis == drawn["axis"]).lower()}">{words}</button>'
        for axis, words in (("env_steps", "over env steps"), ("hours", "over time"))
    )
    groups = drawn["groups"] if len(drawn["groups"]) > 1 else ()
    legend = "".join(
        f'<button data-group="{number}" aria-pressed="true">{_dot(group["colour"])}{safe(group["label"])}</button>'
        for number, group in enumerate(groups)
    )
    first, *others = (
        f'<div class="card"><h3>{safe(figure["title"])}</h3>\n<div class="chart{" large" * (number == 0)}"'
        f' data-tag="{safe(figure["tag"])}" data-title="{safe(figure["title"])}"></div></div>'
        for number, figure in enumerate(drawn["figures"])
    )
    small = f'<div class="grid">\n{chr(10).join(others)}\n</div>' if others else ""
    return (
        f'<h2>Curves</h2>\n<div class="controls">{axes}<span class="gap"></span>{legend}</div>\n{first}\n{small}'
        "<noscript><p>The curves need JavaScript, of this page alone.</p></noscript>"
    )


def _videos(runs: Sequence[ReportedRun]) -> str:
    cards = [
        f'<div class="card"><h3>{safe(_caption(run, video, several=len(runs) > 1))}</h3>'
        f'<video controls loop muted playsinline preload="metadata" src="data:video/mp4;base64,'
        f'{base64.b64encode(video.content).decode()}"></video></div>'
        for run in runs
        for video in run.videos
    ]
    return f'<h2>Videos</h2>\n<div class="grid">\n{chr(10).join(cards)}\n</div>' if cards else ""


def _caption(run: ReportedRun, video: Video, *, several: bool) -> str:
    policy = f"policy {video.policy} " if len({one.policy for one in run.videos}) > 1 else ""
    return f"{f'{run.name}: ' * several}{policy}after {short_number(video.env_steps)} env steps"


def _flags(runs: Sequence[ReportedRun]) -> str:
    """Return the differing flags of several runs, or the flags of one run that differ from the defaults."""
    if len(runs) > 1:
        title, columns = "Flags that differ", [run.flags for run in runs]
        heads = [safe(run.name) for run in runs]
        none = "Between these runs no flag differs."
    else:
        (run,) = runs
        title, columns, heads = "Flags that are not as by default", [run.flags, run.defaults], ["value", "default"]
        none = "All flags are as by default."
    if not (names := [name for name in differing_flags(columns) if name != "seed" or len(runs) > 1]):
        return f'<h2>{title}</h2>\n<p class="soft">{none}</p>'
    rows = ([safe(name), *(safe(words_of(flags.get(name))) for flags in columns)] for name in names[:MOST_FLAGS])
    more = f'<p class="soft">and {len(names) - MOST_FLAGS} more</p>' if len(names) > MOST_FLAGS else ""
    seeds = set(names) <= ASIDE
    same = '<p class="soft">They are the same but for seeds and reports.</p>' if len(runs) > 1 and seeds else ""
    return f"<h2>{title}</h2>\n{same}{_table(['flag', *heads], rows, ['flag'] * (1 + len(columns)))}{more}"


def _commands(runs: Sequence[ReportedRun]) -> str:
    """Return how each run was started last, with its seed, and when it was active last."""
    cards = []
    for run in runs:
        names = [name for name in differing_flags([run.flags, run.defaults]) if name in run.flags]
        words = [word for name in names for word in words_of_flag(name, run.flags[name])]
        active = datetime.fromtimestamp(min(max(run.summary.active, 0.0), LAST_SECOND), UTC)
        said = f"{run.name}: seed {words_of(run.flags.get('seed'))}, last active {active:%Y-%m-%d %H:%M} UTC"
        command = printable(shlex.join(["appo", "train", *words])[:LONGEST_COMMAND])
        cards.append(f'<p class="soft">{safe(said)}</p><pre>{html.escape(command)}</pre>')
    return f"<h2>Commands</h2>\n{chr(10).join(cards)}"


def _machine(runs: Sequence[ReportedRun]) -> str:
    if not (cards := [card for run in runs if (card := _machine_of(run, several=len(runs) > 1))]):
        return ""
    return f'<h2>Machine and limit</h2>\n<div class="{"grid" if len(runs) > 1 else ""}">\n{chr(10).join(cards)}\n</div>'


def _machine_of(run: ReportedRun, *, several: bool) -> str:
    """Describe the time of a run, the distance to the limit, and the bottleneck."""
    found, memory = run.snapshot.overview.performance, run.snapshot.overview.memory_bytes
    if found is None:
        return ""
    limit, cores = found.limit_samples_per_second, f"{found.cores:g} core{'s' * (found.cores != 1)}"
    words = [f"{run.processor}, {cores}" if run.processor else cores]
    words += [f"{found.busy_cores:.1f} of them busy"] if found.cores != 1 else []
    words += [f"{memory / MIB:,.0f} MiB of memory"] if memory is not None else []
    reached = f"{short_number(found.samples_per_second)} samples/s"
    reached += f", {found.limit_ratio:.0%} of the {short_number(limit)} that this machine could do" if limit else ""
    roles = "\n".join(_role(found, role) for role in found.shown_roles())
    name = f"<h3>{safe(run.name)}</h3>" if several else ""
    return (
        f'<div class="card">{name}<p class="soft">{safe(", ".join(words))}</p><p>{safe(reached)}</p>'
        f"<p><b>{safe(found.bottleneck)}</b></p>\n{roles}</div>"
    )


def _role(found: Performance, role: str) -> str:
    """Return a bar of the work of a role's processes; the ground of the bar is waiting."""
    times = found.roles[role]
    parts, at = [], 0.0
    for phase in sorted(times.shares, key=PHASES.index):
        width = 100 * min(1.0 - at / 100, max(0.0, times.shares[phase]))
        colour = PHASE_COLOURS[phase]
        if colour is not None and width > 0:
            parts.append(f'<rect class="c{colour}" x="{at:.2f}" width="{width:.2f}" height="12"/>')
            at += width
    largest = sorted(times.shares, key=times.shares.__getitem__, reverse=True)
    words = [
        f"{phase.replace('_', ' ')} {times.shares[phase]:.0%}" for phase in largest[:4] if times.shares[phase] >= 0.005
    ]
    one, many = ROLES[role].singular, ROLES[role].plural
    name = one if times.processes == 1 else f"{short_number(times.processes)} {many}"
    return (
        f'<div class="role"><span>{safe(name)}</span><svg class="bar" viewBox="0 0 100 12" preserveAspectRatio="none">'
        f'<rect class="rest" width="100" height="12"/>{"".join(parts)}</svg>'
        f'<span class="words">{safe(", ".join(words))}</span></div>'
    )


def _lineage(runs: Sequence[ReportedRun]) -> str:
    """Describe the origin of weights: another run, earlier starts, copies within a population."""
    parts = []
    for run in runs:
        lines = []
        if source := run.flags.get("init_from"):
            lines.append(f"It began with the weights of {safe(source)}.")
        if run.starts > 1:
            lines.append(f"It was started {run.starts} times, and went on from its checkpoints.")
        drawn = _drawn_events(run.events) if run.events else ""
        if lines or drawn:
            name = f"<h3>{safe(run.name)}</h3>" if len(runs) > 1 else ""
            parts.append(f'<div class="card">{name}{"".join(f"<p>{line}</p>" for line in lines)}{drawn}</div>')
    return f"<h2>Lineage</h2>\n{chr(10).join(parts)}" if parts else ""


def _drawn_events(events: Sequence[Event]) -> str:
    """Draw lanes of policies over env steps, a line per copy, a dot per mutation."""
    done = [event for event in events if event.state != "taken back"]
    policies = sorted({event.policy for event in done} | {event.source for event in done})[:MOST_LANES]
    lanes = {policy: 16 + LANE * i for i, policy in enumerate(policies)}
    end = max((max(event.env_steps, event.source_env_steps) for event in done), default=0) or 1
    height, radius = LANE * len(lanes) + 26, {"copy": 4.5, "mutation": 3}

    def x(env_steps: float) -> float:
        return EDGE + (WIDTH - EDGE - 20) * env_steps / end

    parts = [
        f'<text x="0" y="{y + 4}">policy {policy}</text>'
        f'<line class="lane c{i % COLOURS}" x1="{EDGE}" x2="{WIDTH - 20}" y1="{y}" y2="{y}"/>'
        for i, (policy, y) in enumerate(lanes.items())
    ]
    for event in done:
        if event.policy not in lanes or event.source not in lanes:
            continue
        at, lane, number = x(event.env_steps), lanes[event.policy], policies.index(event.source) % COLOURS
        if event.kind == "copy":
            start = f"M{x(event.source_env_steps):.1f} {lanes[event.source]}"
            parts.append(f'<path class="copy c{number}" d="{start}L{at:.1f} {lane}"/>')
        if event.kind in radius:
            parts.append(f'<circle class="event c{number}" cx="{at:.1f}" cy="{lane}" r="{radius[event.kind]}"/>')
    parts += [
        f'<text x="{EDGE}" y="{height - 4}">0</text>',
        f'<text x="{WIDTH - 20}" y="{height - 4}" text-anchor="end">{short_number(end)} env steps of the policy</text>',
    ]
    said = "\n".join(safe(line) for line in islice(reversed(describe(events)), MOST_LINES))
    return (
        f'<p class="soft">Who copied whom (a line to the copier, with a large dot), and who mutated (small dots).</p>'
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="lineage">{"".join(parts)}</svg>'
        f"<details><summary>in words, the last first</summary><pre>{said}</pre></details>"
    )


def _warnings(runs: Sequence[ReportedRun]) -> str:
    parts = []
    for run in runs:
        overview = run.snapshot.overview
        lines = [*overview.warnings]
        if overview.restarts or overview.env_rebuilds:
            lines.append(f"{overview.restarts} restarts of processes, {overview.env_rebuilds} rebuilds of environments")
        if lines:
            name = f"<h3>{safe(run.name)}</h3>" if len(runs) > 1 else ""
            parts.append(f'<div class="card">{name}<pre>{"".join(safe(line) + chr(10) for line in lines)}</pre></div>')
    return f"<h2>Warnings</h2>\n{chr(10).join(parts)}" if parts else ""
