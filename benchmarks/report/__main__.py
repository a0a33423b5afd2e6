"""docs/performance.md, docs/results.md and pictures, from the result files.

    python -m benchmarks.report [--results=DIR] [--docs=DIR]

The texts depend on the result files alone. A test compares the texts with the committed pages. The pictures need
matplotlib (`pip install "appo[bench]"`).
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from appo.algorithms.cli import run_command
from benchmarks.report import performance_page, results_page
from benchmarks.report.picture import draw, draw_seconds
from benchmarks.scores import trials
from benchmarks.shared import measuring
from benchmarks.shared.measuring import ROOT

RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"


def read_all(folder: Path) -> list[dict[str, Any]]:
    """Read all result files of a folder."""
    return [measuring.read(path) for path in sorted(folder.glob("*.json"))]


def pages(files: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the text of each generated page by file name."""
    reached = [content for content in files if content["benchmark"] == trials.BENCHMARK]
    others = [content for content in files if content["benchmark"] != trials.BENCHMARK]
    return {"performance.md": performance_page.render(others), "results.md": results_page.render(reached)}


def main() -> int:
    """Write the pages, then the pictures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description="Write docs/performance.md and docs/results.md from the result files.",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files (benchmarks/results)")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder to write to (docs)")
    arguments = parser.parse_args()
    files = read_all(arguments.results)
    for name, text in pages(files).items():
        (arguments.docs / name).write_text(text, encoding="utf-8")
    draw(files, arguments.docs / "performance.png")
    draw_seconds(files, arguments.docs / "seconds.png")
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
