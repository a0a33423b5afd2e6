"""Figures with a promise in docs/reliability.md: storage and presentation.

An entry of a result file is `{"figures": [...], ...}` with each `Figure` as a JSON object.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


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
