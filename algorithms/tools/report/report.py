"""`appo report` writes a page about runs: a single HTML file that needs no other file and no network.

Texts of a run may come from strangers. Every text is escaped as HTML, and every curve is JSON that cannot close the
enclosing element. The content security policy of the page allows only the page's own script and forbids fetching.
"""

import base64
import hashlib
import html
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, cast

from appo.algorithms.population.lineage import Event
from appo.algorithms.run.algorithms import ALGORITHMS, find_algorithm
from appo.algorithms.run.defaults import flags_by_preset
from appo.algorithms.run.folder import find_runs
from appo.algorithms.runtime.monitor.curves import Axis
from appo.algorithms.runtime.monitor.performance import Performance
from appo.algorithms.runtime.roles import ROLES
from appo.algorithms.tools.comparison.lineage import describe
from appo.algorithms.tools.comparison.plot import ASIDE
from appo.algorithms.tools.comparison.saved_runs import ComparedRun, differing_flags, read_each, settings_of
from appo.algorithms.tools.flags import ReportConfig
from appo.algorithms.tools.report.contents import COLOURS, Films, ReportedRun, Video, drawing, read
from appo.utils.command_line import say, words_of, words_of_flag
from appo.utils.errors import UsageError
from appo.utils.files import replaced_when_whole
from appo.utils.metrics import duration, short_number
from appo.utils.run_folder import MIB
from appo.utils.timing import PHASES
from appo.utils.values import printable, shown

PHASE_COLOURS = dict(zip(PHASES, (7, 2, 2, 0, 1, 6, None, None), strict=True))  # None: waiting, the ground of the bar
LONGEST = 300  # characters of a text of a run
LONGEST_COMMAND = 4000
LAST_SECOND = 253402300799.0  # of the year 9999
MOST_FLAGS = 200
MOST_LINES = 100  # of a lineage as text
MOST_LANES = 16
NAMED = 3  # runs in the heading
LANE, EDGE, WIDTH = 26, 78, 960  # pixels of a lineage


def report(config: ReportConfig) -> int:
    """Write the page; return the exit code (UsageError: a run is missing or unreadable, or the file not writable)."""
    path = Path(config.output)
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--output={shown(config.output)}: the page is HTML, and its name ends in .html")
    directories = find_runs(config.runs, Path(config.train_dir, config.experiments_root))
    films = Films(config.video_mb * MIB)
    # Links above the folder of a run belong to the user; links inside the folder are not followed.
    found = read_each(directories, lambda _, directory: read(directory.resolve(), films))
    content = page(found, cast(Axis, config.x)).encode()
    with replaced_when_whole(path) as temporary:
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
    left_out = f"; {films.left_out} videos are left out (--video_mb={config.video_mb})" if films.left_out else ""
    size = f"{len(content) / MIB:.1f} MiB" if len(content) >= MIB else f"{len(content) / 1024:.0f} KiB"
    say(f"{len(found)} run{'s' * (len(found) > 1)}, {size}: {config.output}{left_out}")
    return 0


def page(runs: Sequence[ReportedRun], axis: Axis) -> str:
    """Return the page with style, script, curves and videos."""
    style, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    drawn = drawing(runs, axis)
    script_hash, style_hash = (
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in (script, style)
    )
    policy = f"default-src 'none'; script-src {script_hash}; style-src {style_hash}; img-src data:; media-src data:"
    # Nothing in the JSON can close its element.
    data = json.dumps(drawn, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    sections = (
        _heading(runs),
        _summary(runs, drawn),
        _settings(runs),
        _charts(drawn),
        _videos(runs),
        _flags(runs),
        _commands(runs),
        _per_run("Machine and limit", runs, _machine, in_grid=True),
        _per_run("Lineage", runs, _lineage),
        _per_run("Warnings", runs, _warnings),
    )
    body = "\n".join(filter(None, sections))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{safe(title_of(runs))}</title>
<style>{style}</style>
</head>
<body>
{body}
<footer>Written by <code>appo report</code>. Nothing is fetched: the page works without a network.</footer>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def safe(value: object) -> str:
    """Return a text of a run as HTML: escaped, bounded, without characters that change the direction of writing."""
    text = printable(str(value)[: LONGEST + 1]).replace("\n", " ")
    return html.escape(text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}...")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], kinds: Sequence[str]) -> str:
    """Return a table from titles and cells as HTML, and the CSS class of each column."""
    top = "".join(f'<th class="{kind}">{word}</th>' for word, kind in zip(head, kinds, strict=True))
    cells = ((f'<td class="{kind}">{cell}</td>' for cell, kind in zip(row, kinds, strict=True)) for row in rows)
    lines = "\n".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    return f'<div class="scroll"><table><tr>{top}</tr>\n{lines}\n</table></div>'


def title_of(runs: Sequence[ReportedRun]) -> str:
    """Return the title of the page: the names of the first runs."""
    names = ", ".join(run.name for run in runs[:NAMED])
    return names if len(runs) <= NAMED else f"{names} and {len(runs) - NAMED} more"


def _per_run(title: str, runs: Sequence[ReportedRun], body: Callable[[ReportedRun], str], in_grid: bool = False) -> str:
    """Return a section with a card for every run with a body; without cards nothing."""
    several = len(runs) > 1
    cards = "\n".join(
        f'<div class="card">{f"<h3>{safe(run.name)}</h3>" * several}{found}</div>'
        for run in runs
        if (found := body(run))
    )
    framed = f'<div class="{"grid" * several}">\n{cards}\n</div>' if in_grid else cards
    return f"<h2>{title}</h2>\n{framed}" if cards else ""


def _heading(runs: Sequence[ReportedRun]) -> str:
    envs = list(dict.fromkeys(f"{run.summary.algo or '?'} on {run.summary.env or '?'}" for run in runs))
    more = f" and {len(envs) - NAMED} more" if len(envs) > NAMED else ""
    return f'<h1>{safe(title_of(runs))}</h1>\n<p class="sub">{safe("; ".join(envs[:NAMED]))}{more}</p>'


def _summary(runs: Sequence[ReportedRun], drawn: Mapping[str, Any]) -> str:
    head = ("run", "state", "env steps", "time", "env steps/s", "best return", "last return", "of the limit")
    rows = map(_summary_row, runs, [one["colour"] for one in drawn["series"]] if len(runs) > 1 else [0])
    return _table(head, rows, ("", "", *["number"] * 6)).replace('class="scroll"', 'class="scroll wide"', 1)


def _settings(runs: Sequence[ReportedRun]) -> str:
    """Return the table of settings; empty if no two runs differ only in their seed."""
    settings = settings_of([ComparedRun(run.name, run.flags, last_return=run.summary.last_return) for run in runs])
    if len(settings) == len(runs):
        return ""
    names = list(settings[0].flags)
    rows = ([*(safe(words_of(value)) for value in one.flags.values()), str(one.runs), one.text] for one in settings)
    table = _table([*map(safe, names), "runs", "last return"], rows, [*["flag"] * len(names), "number", "number"])
    said = "Runs that differ in their seed only as one: the mean with its 95 % interval."
    return f'<h2>Settings</h2>\n<p class="soft">{said}</p>{table}'


def _summary_row(run: ReportedRun, colour: int) -> Sequence[str]:
    found, overview = run.summary, run.snapshot.overview
    steps, seconds, performance = found.env_steps, overview.elapsed_seconds, overview.performance
    return (
        f'<span class="dot c{colour}"></span>{safe(run.name)}',
        safe(found.state) + (f'<br><span class="soft">{safe(found.reason)}</span>' if found.reason else ""),
        "-" if steps is None else short_number(steps),
        duration(seconds) if seconds else "-",
        short_number(steps / seconds) if steps and seconds > 0 else "-",
        *("-" if value is None else f"{value:.5g}" for value in (found.best_return, found.last_return)),
        safe(f"{performance.limit_ratio:.0%}") if performance and performance.limit_ratio else "-",
    )


def _charts(drawn: Mapping[str, Any]) -> str:
    if not drawn["figures"]:
        return '<h2>Curves</h2>\n<p class="soft">No figures have been written yet.</p>'
    axes = "".join(
        f'<button data-axis="{axis}" aria-pressed="{str(axis == drawn["axis"]).lower()}">{words}</button>'
        for axis, words in (("env_steps", "over env steps"), ("hours", "over time"))
    )
    legend = "".join(
        f'<button data-group="{number}" aria-pressed="true"><span class="dot c{group["colour"]}"></span>'
        f"{safe(group['label'])}</button>"
        for number, group in enumerate(drawn["groups"] if len(drawn["groups"]) > 1 else ())
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
    policy = f"policy {video.policy} " * (len({one.policy for one in run.videos}) > 1)
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
    same = '<p class="soft">They are the same but for seeds and reports.</p>' * (len(runs) > 1 and set(names) <= ASIDE)
    return f"<h2>{title}</h2>\n{same}{_table(['flag', *heads], rows, ['flag'] * (1 + len(columns)))}{more}"


def _commands(runs: Sequence[ReportedRun]) -> str:
    """Return how each run was started last, with its seed, and when it was active last."""
    cards = []
    for run in runs:
        names = {name for name in differing_flags([run.flags, run.defaults]) if name in run.flags}
        if (algo := str(run.flags.get("algo"))) in ALGORITHMS:  # a preset gives flags other values than the defaults
            env, preset = (str(run.flags.get(name, "")) for name in ("env", "preset"))
            names |= flags_by_preset(env, find_algorithm(algo), preset) & run.flags.keys()
        words = [word for name in run.flags if name in names for word in words_of_flag(name, run.flags[name])]
        active = datetime.fromtimestamp(min(max(run.summary.active, 0.0), LAST_SECOND), UTC)
        said = f"{run.name}: seed {words_of(run.flags.get('seed'))}, last active {active:%Y-%m-%d %H:%M} UTC"
        command = printable(shlex.join(["appo", "train", *words])[:LONGEST_COMMAND])
        cards.append(f'<p class="soft">{safe(said)}</p><pre>{html.escape(command)}</pre>')
    return f"<h2>Commands</h2>\n{chr(10).join(cards)}"


def _machine(run: ReportedRun) -> str:
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
    return (
        f'<p class="soft">{safe(", ".join(words))}</p><p>{safe(reached)}</p>'
        f"<p><b>{safe(found.bottleneck)}</b></p>\n{roles}"
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
    largest = sorted(times.shares.items(), key=lambda item: item[1], reverse=True)[:4]
    words = [f"{phase.replace('_', ' ')} {share:.0%}" for phase, share in largest if share >= 0.005]
    name = ROLES[role].singular if times.processes == 1 else f"{short_number(times.processes)} {ROLES[role].plural}"
    return (
        f'<div class="role"><span>{safe(name)}</span><svg class="bar" viewBox="0 0 100 12" preserveAspectRatio="none">'
        f'<rect class="rest" width="100" height="12"/>{"".join(parts)}</svg>'
        f'<span class="words">{safe(", ".join(words))}</span></div>'
    )


def _lineage(run: ReportedRun) -> str:
    """Describe the origin of weights: another run, earlier starts, copies within a population."""
    source = run.flags.get("init_from")
    begun = f"<p>It began with the weights of {safe(source)}.</p>" if source else ""
    if run.starts > 1:
        begun += f"<p>It was started {run.starts} times, and went on from its checkpoints.</p>"
    return begun + (_drawn_events(run.events) if run.events else "")


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
            x_start, start = x(event.source_env_steps), lanes[event.source]
            parts.append(f'<path class="copy c{number}" d="M{x_start:.1f} {start}L{at:.1f} {lane}"/>')
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


def _warnings(run: ReportedRun) -> str:
    overview = run.snapshot.overview
    lines = [*overview.warnings]
    if overview.restarts or overview.env_rebuilds:
        lines.append(f"{overview.restarts} restarts of processes, {overview.env_rebuilds} rebuilds of environments")
    return f"<pre>{''.join(safe(line) + chr(10) for line in lines)}</pre>" if lines else ""
