"""`appo report` writes one page about one or several runs, to be sent to somebody: no file beside it, no network.

What runs say may come from strangers. All of it is escaped: text as HTML, curves as JSON in which nothing can end their
element. Beside that the page forbids itself every script but its own and everything that would have to be fetched.
"""

import base64
import hashlib
import html
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from appo.algorithms.population.lineage import Event
from appo.algorithms.run.folder import find_runs
from appo.algorithms.run.summary import RETURN
from appo.algorithms.runtime.monitor.curves import Axis, Point
from appo.algorithms.runtime.monitor.performance import Performance
from appo.algorithms.runtime.roles import ROLES
from appo.algorithms.tools.compare import Run, differing_flags, read_each, settings_of
from appo.algorithms.tools.flags import ReportConfig
from appo.algorithms.tools.lineage import describe
from appo.algorithms.tools.plot import ASIDE, Band, Curve, band_of, group_runs
from appo.algorithms.tools.report.contents import FIGURES, MIB, Films, Found, Video, read
from appo.utils.command_line import say, words_of, words_of_flag
from appo.utils.errors import UsageError
from appo.utils.files import replaced_when_whole
from appo.utils.metrics import duration, short_number
from appo.utils.timing import PHASES
from appo.utils.values import printable, shown

HERE = Path(__file__).parent
COLOURS = 8  # of curves, in page.css
PHASE_COLOURS = dict(zip(PHASES, (7, 2, 2, 0, 1, 6, None, None), strict=True))  # None: waiting, as the bar's ground
LONGEST = 300  # characters of anything that a run says
LONGEST_COMMAND = 4000
LAST_SECOND = 253402300799.0  # of the years that have four digits
MOST_FLAGS = 200
MOST_LINES = 100  # of a lineage in words
MOST_LANES = 16
NAMED = 3  # runs that the heading names
LANE, EDGE, WIDTH = 26, 78, 960  # of the picture of a lineage


def report(config: ReportConfig) -> int:
    """Write the page; return the exit code.

    Raises:
        UsageError: there is no such run, it cannot be read, or the file cannot be written.
    """
    path = Path(config.output)
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--output={shown(config.output)}: the page is HTML, and its name ends in .html")
    directories = find_runs(config.runs, Path(config.train_dir, config.experiments_root))
    films = Films(config.video_mb * MIB)
    # Above the folder of a run links are the user's own; from there on none is followed.
    found = read_each(directories, lambda _, directory: read(directory.resolve(), films))
    content = page(found, cast(Axis, config.x)).encode()
    with replaced_when_whole(path) as temporary:
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
    left_out = f"; {films.left_out} videos are left out (--video_mb={config.video_mb})" if films.left_out else ""
    runs = f"{len(found)} run{'s' * (len(found) > 1)}"
    size = f"{len(content) / MIB:.1f} MiB" if len(content) >= MIB else f"{len(content) / 1024:.0f} KiB"
    say(f"{runs}, {size}: {config.output}{left_out}")
    return 0


def page(runs: Sequence[Found], axis: Axis) -> str:
    """Return the page, with everything that it needs in it."""
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    drawn = drawing(runs, axis)
    body = "\n".join(
        part
        for part in (
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
        if part
    )
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; media-src data:"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{_text(_title(runs))}</title>
<style>{style}</style>
</head>
<body>
{body}
<footer>Written by <code>appo report</code>. Nothing is fetched: the page works without a network.</footer>
<script type="application/json" id="data">{_json(drawn)}</script>
<script>{script}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    """Return the word by which a content security policy allows this text, and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _text(value: object) -> str:
    """Return a text of a run, as HTML shows it: bounded, without signs that turn the direction of writing."""
    text = printable(str(value)[: LONGEST + 1]).replace("\n", " ")
    return html.escape(text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}...")


def _json(value: object) -> str:
    """Return JSON in which nothing can end the element that holds it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _table(head: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]], kinds: Sequence[str]) -> str:
    """Return a table of cells that are HTML already.

    Args:
        head: of every column.
        rows: below it.
        kinds: class of the cells of every column.
    """
    top = "".join(f'<th class="{kind}">{word}</th>' for word, kind in zip(head, kinds, strict=True))
    cells = ((f'<td class="{kind}">{cell}</td>' for cell, kind in zip(row, kinds, strict=True)) for row in rows)
    lines = "\n".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    return f'<div class="scroll"><table><tr>{top}</tr>\n{lines}\n</table></div>'


def _dot(colour: int) -> str:
    return f'<span class="dot c{colour}"></span>'


# What is drawn: curves with their colours, as the script of the page reads them.


def drawing(runs: Sequence[Found], axis: Axis) -> dict[str, Any]:
    """Return curves, and bands over those of runs that differ in their seed only.

    Of a single run every policy has a curve, of several runs the policy that ends best.
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
            Curve(name, run.flags, figures.get(RETURN, ()))
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


def _names(runs: Sequence[Found]) -> list[str]:
    """Return the names of runs, with a number where another folder's has the same."""
    seen: dict[str, int] = {}
    names = []
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        names.append(run.name if seen[run.name] == 1 else f"{run.name} ({seen[run.name]})")
    return names


def _bands(group: Sequence[Curve], number: int) -> dict[str, Any] | None:
    """Return the band of a group over env steps and over hours; None where there is none."""
    points = [curve.points for curve in group if len(curve.points) > 1]
    if len(points) < 2:
        return None
    found = {axis: band_of(points, axis) for axis in ("env_steps", "hours")}
    plain = {axis: _plain_band(band) for axis, band in found.items() if band is not None}
    return {"group": number, "colour": number % COLOURS, **plain} if plain else None


def _plain_band(band: Band) -> dict[str, list[float]]:
    return {name: [_rounded(v) for v in np.asarray(values)] for name, values in band._asdict().items()}


def _columns(points: Sequence[Point]) -> list[list[float]]:
    """Return env steps, hours and values."""
    return [[_rounded(point[column]) for point in points] for column in range(3)]


def _rounded(value: float) -> float:
    """Round to six places, as many as a picture can show."""
    return float(f"{value:.6g}")


# Sections of the page.


def _title(runs: Sequence[Found]) -> str:
    names = ", ".join(run.name for run in runs[:NAMED])
    return names if len(runs) <= NAMED else f"{names} and {len(runs) - NAMED} more"


def _heading(runs: Sequence[Found]) -> str:
    envs = list(dict.fromkeys(f"{run.summary.algo or '?'} on {run.summary.env or '?'}" for run in runs))
    more = f" and {len(envs) - NAMED} more" if len(envs) > NAMED else ""
    said = "; ".join(envs[:NAMED])
    return f'<h1>{_text(_title(runs))}</h1>\n<p class="sub">{_text(said)}{more}</p>'


def _summary(runs: Sequence[Found], drawn: Mapping[str, Any]) -> str:
    head = ("run", "state", "env steps", "time", "env steps/s", "best return", "last return", "of the limit")
    colours = [one["colour"] for one in drawn["series"]] if len(runs) > 1 else [0]
    rows = (_summary_row(run, colour) for run, colour in zip(runs, colours, strict=True))
    return _table(head, rows, ("", "", *["number"] * 6)).replace('class="scroll"', 'class="scroll wide"', 1)


def _settings(runs: Sequence[Found]) -> str:
    """Return the table of a sweep: runs that differ in their seed only as one; nothing where no two do."""
    settings = settings_of([Run(run.name, run.flags, "", (), run.summary.last_return) for run in runs])
    if len(settings) == len(runs):
        return ""
    names = list(settings[0].flags)
    rows = ([*(_text(words_of(value)) for value in one.flags.values()), str(one.runs), one.text] for one in settings)
    kinds = [*["flag"] * len(names), "number", "number"]
    said = '<p class="soft">Runs that differ in their seed only as one: the mean with its 95 % interval.</p>'
    return f"<h2>Settings</h2>\n{said}{_table([*map(_text, names), 'runs', 'last return'], rows, kinds)}"


def _summary_row(run: Found, colour: int) -> Sequence[str]:
    found, overview = run.summary, run.snapshot.overview
    seconds, performance = overview.elapsed_seconds, overview.performance
    reason = f'<br><span class="soft">{_text(found.reason)}</span>' if found.reason else ""
    steps = found.env_steps
    return (
        _dot(colour) + _text(run.name),
        _text(found.state) + reason,
        "-" if steps is None else short_number(steps),
        duration(seconds) if seconds else "-",
        short_number(steps / seconds) if steps and seconds > 0 else "-",
        _number(found.best_return),
        _number(found.last_return),
        _text(f"{performance.limit_ratio:.0%}") if performance and performance.limit_ratio else "-",
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
        f'<button data-group="{number}" aria-pressed="true">{_dot(group["colour"])}{_text(group["label"])}</button>'
        for number, group in enumerate(groups)
    )
    first, *others = (
        f'<div class="card"><h3>{_text(figure["title"])}</h3>\n<div class="chart{" large" * (number == 0)}"'
        f' data-tag="{_text(figure["tag"])}" data-title="{_text(figure["title"])}"></div></div>'
        for number, figure in enumerate(drawn["figures"])
    )
    small = f'<div class="grid">\n{chr(10).join(others)}\n</div>' if others else ""
    return (
        f'<h2>Curves</h2>\n<div class="controls">{axes}<span class="gap"></span>{legend}</div>\n{first}\n{small}'
        "<noscript><p>The curves need JavaScript, of this page alone.</p></noscript>"
    )


def _videos(runs: Sequence[Found]) -> str:
    cards = [
        f'<div class="card"><h3>{_text(_caption(run, video, several=len(runs) > 1))}</h3>'
        f'<video controls loop muted playsinline preload="metadata" src="data:video/mp4;base64,'
        f'{base64.b64encode(video.content).decode()}"></video></div>'
        for run in runs
        for video in run.videos
    ]
    return f'<h2>Videos</h2>\n<div class="grid">\n{chr(10).join(cards)}\n</div>' if cards else ""


def _caption(run: Found, video: Video, *, several: bool) -> str:
    policy = f"policy {video.policy} " if len({one.policy for one in run.videos}) > 1 else ""
    return f"{f'{run.name}: ' * several}{policy}after {short_number(video.env_steps)} env steps"


def _flags(runs: Sequence[Found]) -> str:
    """Return, of several runs, the flags that differ, of one those that are not as by default."""
    if len(runs) > 1:
        title, columns = "Flags that differ", [run.flags for run in runs]
        heads = [_text(run.name) for run in runs]
        none = "Between these runs no flag differs."
    else:
        (run,) = runs
        title, columns, heads = "Flags that are not as by default", [run.flags, run.defaults], ["value", "default"]
        none = "All flags are as by default."
    names = [name for name in differing_flags(columns) if name != "seed" or len(runs) > 1]
    if not names:
        return f'<h2>{title}</h2>\n<p class="soft">{none}</p>'
    rows = ([_text(name), *(_text(words_of(flags.get(name))) for flags in columns)] for name in names[:MOST_FLAGS])
    more = f'<p class="soft">and {len(names) - MOST_FLAGS} more</p>' if len(names) > MOST_FLAGS else ""
    seeds = set(names) <= ASIDE
    same = '<p class="soft">They are the same but for seeds and reports.</p>' if len(runs) > 1 and seeds else ""
    return f"<h2>{title}</h2>\n{same}{_table(['flag', *heads], rows, ['flag'] * (1 + len(columns)))}{more}"


def _commands(runs: Sequence[Found]) -> str:
    """Return how each run was started last, with its seed, and when it was active last."""
    cards = []
    for run in runs:
        names = [name for name in differing_flags([run.flags, run.defaults]) if name in run.flags]
        words = [word for name in names for word in words_of_flag(name, run.flags[name])]
        active = datetime.fromtimestamp(min(max(run.summary.active, 0.0), LAST_SECOND), UTC)
        said = f"{run.name}: seed {words_of(run.flags.get('seed'))}, last active {active:%Y-%m-%d %H:%M} UTC"
        command = printable(shlex.join(["appo", "train", *words])[:LONGEST_COMMAND])
        cards.append(f'<p class="soft">{_text(said)}</p><pre>{html.escape(command)}</pre>')
    return f"<h2>Commands</h2>\n{chr(10).join(cards)}"


def _machine(runs: Sequence[Found]) -> str:
    cards = [card for run in runs if (card := _machine_of(run, several=len(runs) > 1))]
    if not cards:
        return ""
    beside = chr(10).join(cards)
    return f'<h2>Machine and limit</h2>\n<div class="{"grid" if len(runs) > 1 else ""}">\n{beside}\n</div>'


def _machine_of(run: Found, *, several: bool) -> str:
    """Describe where the time of a run goes, how near it is to the limit, and what it waits for."""
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
    name = f"<h3>{_text(run.name)}</h3>" if several else ""
    return (
        f'<div class="card">{name}<p class="soft">{_text(", ".join(words))}</p><p>{_text(reached)}</p>'
        f"<p><b>{_text(found.bottleneck)}</b></p>\n{roles}</div>"
    )


def _role(found: Performance, role: str) -> str:
    """Return a bar of the work of a role's processes; their waiting is its ground."""
    times = found.roles[role]
    parts, at = [], 0.0
    for phase in sorted(times.shares, key=PHASES.index):
        width = 100 * min(1.0 - at / 100, max(0.0, times.shares[phase]))
        colour = PHASE_COLOURS[phase]
        if colour is not None and width > 0:
            parts.append(f'<rect class="c{colour}" x="{at:.2f}" width="{width:.2f}" height="12"/>')
            at += width
    words = [f"{phase.replace('_', ' ')} {times.shares[phase]:.0%}" for phase in _largest(times.shares)]
    one, many = ROLES[role].singular, ROLES[role].plural
    name = one if times.processes == 1 else f"{short_number(times.processes)} {many}"
    return (
        f'<div class="role"><span>{_text(name)}</span><svg class="bar" viewBox="0 0 100 12" preserveAspectRatio="none">'
        f'<rect class="rest" width="100" height="12"/>{"".join(parts)}</svg>'
        f'<span class="words">{_text(", ".join(words))}</span></div>'
    )


def _largest(shares: Mapping[str, float]) -> list[str]:
    return [phase for phase in sorted(shares, key=shares.__getitem__, reverse=True) if shares[phase] >= 0.005][:4]


def _lineage(runs: Sequence[Found]) -> str:
    """Describe the origin of weights: another run, earlier starts, and in a population each other."""
    parts = []
    for run in runs:
        lines = []
        if source := run.flags.get("init_from"):
            lines.append(f"It began with the weights of {_text(source)}.")
        if run.starts > 1:
            lines.append(f"It was started {run.starts} times, and went on from its checkpoints.")
        drawn = _drawn_events(run.events) if run.events else ""
        if lines or drawn:
            name = f"<h3>{_text(run.name)}</h3>" if len(runs) > 1 else ""
            parts.append(f'<div class="card">{name}{"".join(f"<p>{line}</p>" for line in lines)}{drawn}</div>')
    return f"<h2>Lineage</h2>\n{chr(10).join(parts)}" if parts else ""


def _drawn_events(events: Sequence[Event]) -> str:
    """Draw lanes of policies over their env steps, a line where one is copied, a dot where one mutates."""
    done = [event for event in events if event.state != "taken back"]
    policies = sorted({event.policy for event in done} | {event.source for event in done})[:MOST_LANES]
    lanes = {policy: 16 + LANE * i for i, policy in enumerate(policies)}
    end = max((max(event.env_steps, event.source_env_steps) for event in done), default=0) or 1
    height = LANE * len(lanes) + 26

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
            parts.append(f'<circle class="event c{number}" cx="{at:.1f}" cy="{lane}" r="4.5"/>')
        elif event.kind == "mutation":
            parts.append(f'<circle class="event c{number}" cx="{at:.1f}" cy="{lane}" r="3"/>')
    parts.append(f'<text x="{EDGE}" y="{height - 4}">0</text>')
    parts.append(
        f'<text x="{WIDTH - 20}" y="{height - 4}" text-anchor="end">{short_number(end)} env steps of the policy</text>'
    )
    said = "\n".join(_text(line) for line in islice(reversed(describe(events)), MOST_LINES))
    return (
        f'<p class="soft">Who copied whom (a line to the copier, with a large dot), and who mutated (small dots).</p>'
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="lineage">{"".join(parts)}</svg>'
        f"<details><summary>in words, the last first</summary><pre>{said}</pre></details>"
    )


def _warnings(runs: Sequence[Found]) -> str:
    parts = []
    for run in runs:
        overview = run.snapshot.overview
        lines = [*overview.warnings]
        if overview.restarts or overview.env_rebuilds:
            lines.append(f"{overview.restarts} restarts of processes, {overview.env_rebuilds} rebuilds of environments")
        if lines:
            name = f"<h3>{_text(run.name)}</h3>" if len(runs) > 1 else ""
            parts.append(f'<div class="card">{name}<pre>{"".join(_text(line) + chr(10) for line in lines)}</pre></div>')
    return f"<h2>Warnings</h2>\n{chr(10).join(parts)}" if parts else ""
