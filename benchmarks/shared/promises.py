"""Figures with a promise in docs/reliability.md: storage and presentation.

An entry of a result file is `{"figures": [...], ...}` with each `Figure` as a JSON object.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from appo.utils.errors import UsageError
from benchmarks.shared import measuring
from benchmarks.shared.runs import RunError


class Figure(NamedTuple):
    """A number with a promised upper limit."""

    what: str
    value: float
    most: float
    unit: str = ""

    @property
    def kept(self) -> bool:
        return self.value <= self.most

    def cells(self) -> tuple[str, str, str]:
        """Return the cells of a table row: name, value, limit."""
        unit = f" {self.unit}" if self.unit else ""
        mark = "" if self.kept else " **not kept**"
        return self.what, f"{self.value:.3g}{unit}{mark}", f"{self.most:g}{unit}"

    def line(self) -> str:
        what, value, most = self.cells()
        return f"{'ok  ' if self.kept else 'FAIL'}  {what}: {value.replace(' **not kept**', '')} (at most {most})"


def result_of(figures: Iterable[Figure], **more: Any) -> dict[str, Any]:
    """Return an entry of a result file."""
    return {"figures": [figure._asdict() for figure in figures], **more}


def figures_of(result: Mapping[str, Any]) -> list[Figure]:
    return [Figure(**of) for of in result["figures"]]


def show(results: Mapping[str, Mapping[str, Any]]) -> int:
    """Print a line per figure; return the exit code, 1 after a broken promise."""
    figures = [figure for result in results.values() for figure in figures_of(result)]
    print("\n".join(figure.line() for figure in figures))
    return int(not all(figure.kept for figure in figures))


Parts = Mapping[str, Callable[[argparse.Namespace], dict[str, Any]]]
"""Function for each name, from the command line to an entry of a result file."""


def ask(
    benchmark: str, about: str, parts: Parts, add: Callable[[argparse.ArgumentParser], object] = lambda parser: None
) -> int:
    """Measure the parts that the command line selects, save and print each; return the exit code.

    A part that cannot be measured is a broken promise.

    Args:
        benchmark: name in result files.
        about: subject of the benchmark.
        parts: parts of the benchmark.
        add: function that adds further flags.
    """
    parser = argparse.ArgumentParser(description=about)
    names = ", ".join(parts)
    parser.add_argument("--only", nargs="*", choices=parts, metavar="PART", help=f"of {names} (default: all)")
    parser.add_argument("--quick", action="store_true", help="a trial of each part in less than a minute, not saved")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3], help="seeds (default 1 2 3)")
    parser.add_argument("--json", type=Path, help="file for the results")
    add(parser)
    given = parser.parse_args()
    if given.quick and given.json:
        raise UsageError("--quick is a trial: --json would keep the figures")
    measuring.check(given.json, benchmark)
    codes = []
    for name in given.only or parts:
        try:
            result = parts[name](given)
        except (AssertionError, RunError) as error:
            print(f"{name}: {error}\n{getattr(error, 'traceback', '')}", flush=True)
            result = result_of([Figure(f"{name}: parts that could not be measured", 1, 0)], error=str(error)[:1000])
        measuring.save(given.json, benchmark, {name: result})
        codes.append(show({name: result}))
    return max(codes)
