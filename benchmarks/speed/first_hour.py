"""The first hour of a new user: seconds from a command to the first sign of learning, lines typed and pages read.

    python -m benchmarks.speed.first_hour [--repeat=3] [--skip_clone] [--markdown=FILE] [--json=FILE]

Three ways begin in an empty folder and follow the commands of the pages:

- `clone`: `git clone`, `make train`, `appo plot`, until the picture of the learning curve exists. Installation is
  included, so the figure depends on the machine's downloads, or on pip's cache.
- `environment`: a new file (a copy of `examples/custom_env.py`) and `appo train --env=walk:GridWalk`, until the first
  line about training.
- `loss`: a new file (a copy of `examples/spo.py`) and `appo train --algo=my_loss:SPO`, until the first line about
  training.

Blank lines, comments and docstrings of a file do not count.
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from appo.algorithms.cli import run_command
from appo.algorithms.runtime.processes.prctl import bound_to_us
from benchmarks.shared import markdown, measuring
from benchmarks.shared.measuring import ROOT
from benchmarks.shared.runs import RunError

BENCHMARK = "first_hour"
TRAINING_LINE = "env steps "
END_SECONDS = 60


class Way(NamedTuple):
    """A way to begin: commands to type, a file to write, pages to read."""

    name: str
    commands: tuple[str, ...]
    written: str | None
    pages: tuple[str, ...]


WAYS = (
    Way(
        "clone",
        ("git clone {root} appo && cd appo", "make train", ".venv/bin/appo plot {run} -o curve.png"),
        None,
        ("README.md",),
    ),
    Way("environment", ("appo train --env=walk:GridWalk",), "examples/custom_env.py", ("README.md", "docs/own_env.md")),
    Way(
        "loss",
        ("appo train --algo=my_loss:SPO --env=CartPole-v1",),
        "examples/spo.py",
        ("README.md", "docs/own_algorithm.md"),
    ),
)
COPIES = {"environment": "walk.py", "loss": "my_loss.py"}


def lines_of_code(source: str) -> int:
    """Return the number of lines that contain a part of a statement; docstrings and comments do not count."""
    tree = ast.parse(source)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    statements = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt | ast.expr | ast.arg | ast.keyword)
        for line in (node.lineno, node.end_lineno or node.lineno)
    }
    return len(statements - docstrings)


def seconds_of_clone(folder: Path) -> float:
    """Return seconds from `git clone` to the picture of the curve."""
    begin = time.monotonic()
    _run(["git", "clone", "--quiet", str(ROOT), "appo"], folder)
    clone = folder / "appo"
    _run(["make", "train"], clone)
    (run,) = (clone / "train_dir").iterdir()
    _run([".venv/bin/appo", "plot", run.name, "-o", "curve.png"], clone)
    if not (clone / "curve.png").stat().st_size:
        raise RunError("the picture of the curve is empty", "")
    return time.monotonic() - begin


def seconds_to_training(way: Way, folder: Path) -> float:
    """Return seconds from the command to the first line about training.

    Raises:
        RunError: the command ended before the line.
    """
    assert way.written is not None
    (folder / COPIES[way.name]).write_text((ROOT / way.written).read_text(encoding="utf-8"), encoding="utf-8")
    words = way.commands[0].split()[1:]
    begin, said = time.monotonic(), []
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("appo")), *words],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=bound_to_us(),  # noqa: PLW1509 (it calls the system alone)
    )  # fmt: skip
    assert process.stdout is not None
    with process:
        try:
            for line in process.stdout:
                said.append(line)
                if TRAINING_LINE in line:
                    return time.monotonic() - begin
        finally:
            process.terminate()
            process.stdout.read()  # drain the pipe: a full pipe would block the command
            process.wait(END_SECONDS)
    raise RunError(f"{' '.join(words)} ended before it trained", "".join(said))


def measure(way: Way, repeat: int) -> dict[str, Any]:
    """Measure one way in new folders; return the entry of a result file."""
    seconds: list[float] = []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory(prefix="appo-first-hour-") as folder:
            look: Callable[[Path], float] = (
                seconds_of_clone if way.written is None else lambda path: seconds_to_training(way, path)
            )
            seconds.append(look(Path(folder)))
            print(f"{way.name}: {seconds[-1]:.1f} s", flush=True)
    written = lines_of_code((ROOT / way.written).read_text(encoding="utf-8")) if way.written else 0
    return {
        "seconds": measuring.spread(seconds)._asdict(),
        "commands": len(way.commands),
        "lines_written": written,
        "pages": list(way.pages),
    }


def table(results: dict[str, Any]) -> str:
    """Return the results as a Markdown table, a row per way."""
    return markdown.table(
        ["from", "seconds: median (lowest to highest)", "commands typed", "lines of one's own", "pages read"],
        [
            [
                name,
                "{median:.0f} ({lowest:.0f} to {highest:.0f})".format(**of["seconds"]),
                of["commands"],
                of["lines_written"],
                ", ".join(of["pages"]),
            ]
            for name, of in results.items()
        ],
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.speed.first_hour", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--repeat", type=int, default=3, help="repeats of each way")
    parser.add_argument("--skip_clone", action="store_true", help="skip the way `clone`, which installs everything")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args(argv)
    ways = [way for way in WAYS if way.written or not arguments.skip_clone]
    results = {way.name: measure(way, arguments.repeat) for way in ways}
    print(table(results))
    if arguments.markdown:
        arguments.markdown.write_text(table(results), encoding="utf-8")
    if arguments.json:
        measuring.save(arguments.json, BENCHMARK, results)
    return 0


def _run(command: Sequence[str], folder: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    done = subprocess.run(
        command, cwd=folder, env=clean, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RunError(f"{' '.join(command)} failed", done.stdout + done.stderr)


if __name__ == "__main__":
    sys.exit(run_command(main))
