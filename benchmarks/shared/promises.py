"""Figures that docs/reliability.md promises something about: how they are kept, and how people read them.

A result that holds some is `{"figures": [...], ...}`, each of them a `Figure` as a JSON object.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """One number, and what is promised of it."""

    what: str
    value: float
    most: float
    unit: str = ""

    @property
    def kept(self) -> bool:
        """Whether the promise is."""
        return self.value <= self.most

    def cells(self) -> tuple[str, str, str]:
        """Return the cells of a row: the thing, how much, and how much it may be."""
        unit = f" {self.unit}" if self.unit else ""
        mark = "" if self.kept else " **not kept**"
        return self.what, f"{self.value:.3g}{unit}{mark}", f"{self.most:g}{unit}"

    def line(self) -> str:
        """For the terminal."""
        what, value, most = self.cells()
        return f"{'ok  ' if self.kept else 'FAIL'}  {what}: {value.replace(' **not kept**', '')} (at most {most})"


def result_of(figures: Iterable[Figure], **more: Any) -> dict[str, Any]:
    """The entry of a result file."""
    return {"figures": [figure._asdict() for figure in figures], **more}


def figures_of(result: Mapping[str, Any]) -> list[Figure]:
    """Those of an entry."""
    return [Figure(**of) for of in result["figures"]]


def show(results: Mapping[str, Mapping[str, Any]]) -> int:
    """Print a line for every figure; an exit code: 1 if a promise is not kept."""
    figures = [figure for result in results.values() for figure in figures_of(result)]
    print("\n".join(figure.line() for figure in figures))
    return int(not all(figure.kept for figure in figures))
