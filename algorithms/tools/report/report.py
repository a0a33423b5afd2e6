"""`appo report` writes a page about runs: a single HTML file that needs no other file and no network.

Texts of a run may come from strangers. Every text is escaped as HTML, and every curve is JSON that cannot close the
enclosing element. The content security policy of the page allows only the page's own script and forbids fetching.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from appo.algorithms.run.folder import find_runs
from appo.algorithms.runtime.monitor.curves import Axis
from appo.algorithms.tools.comparison.saved_runs import read_each
from appo.algorithms.tools.flags import ReportConfig
from appo.algorithms.tools.report.contents import MIB, Films, ReportedRun, read
from appo.algorithms.tools.report.drawing import drawing
from appo.algorithms.tools.report.sections import body_of, safe, title_of
from appo.utils.command_line import say
from appo.utils.errors import UsageError
from appo.utils.files import replaced_when_whole
from appo.utils.values import shown


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
    runs = f"{len(found)} run{'s' * (len(found) > 1)}"
    size = f"{len(content) / MIB:.1f} MiB" if len(content) >= MIB else f"{len(content) / 1024:.0f} KiB"
    say(f"{runs}, {size}: {config.output}{left_out}")
    return 0


def page(runs: Sequence[ReportedRun], axis: Axis) -> str:
    """Return the page with style, script, curves and videos."""
    style, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    drawn = drawing(runs, axis)
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; media-src data:"
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
{body_of(runs, drawn)}
<footer>Written by <code>appo report</code>. Nothing is fetched: the page works without a network.</footer>
<script type="application/json" id="data">{_json(drawn)}</script>
<script>{script}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    """Return the word that allows exactly this text in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(value: object) -> str:
    """Return JSON that cannot close the enclosing element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
