"""Training in a notebook: a bar and the curve of returns, updated in place.

Jupyter shows HTML and redraws an output under the same display id, so IPython is the only requirement. Without IPython
lines are printed.
"""

import html
import importlib
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any

from appo.algorithms.run.training import Report, Result, Training
from appo.utils.command_line import say
from appo.utils.metrics import duration, short_number

WIDTH, HEIGHT, MARGIN = 640, 180, 8
MOST_POINTS = 400  # of a curve; every other one is left out when there are more
ReturnPoint = tuple[int, tuple[float | None, ...]]
"""A point of the curves: env steps, and the mean return of each policy; None before its first episode has ended."""
LINE_SECONDS = 5.0  # between lines where nothing can be drawn
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")


def watch(run: Training) -> Result:
    """Train a run that is not entered yet to the end, show progress and returns meanwhile, and return the outcome.

        result = watch(Training(env=MyEnv, train_for_env_steps=50_000))

    Raises:
        AppoError: as `Training`.
        KeyboardInterrupt: the kernel was interrupted; progress is saved.
    """
    canvas, curve = canvas_of_process(), ReturnCurve()
    with run:
        for report in run:
            curve.add(report)
            canvas.show(curve.text(report, run.share), curve.picture(run.directory.name, report, run.share))
    name, end = run.directory.name, run.result
    canvas.show(f"{name}: {end.reason}", curve.picture(name, end.report, 1.0), is_last=True)
    return run.result


class ReturnCurve:
    """Returns of a run so far.

    Attributes:
        points: points in order of env steps, at most `MOST_POINTS`.
    """

    def __init__(self) -> None:
        self.points: list[ReturnPoint] = []

    def add(self, report: Report) -> None:
        """Add a report."""
        if any(value is not None for value in report.episode_returns):
            self.points.append((report.env_steps, report.episode_returns))
        if len(self.points) > MOST_POINTS:
            del self.points[1::2]  # the first and the last stay

    def text(self, report: Report, share: float | None) -> str:
        """Return the progress of the run in one line."""
        value = report.episode_return
        parts = [f"{short_number(report.env_steps)} env steps", duration(report.seconds)]
        parts += [f"{100 * share:.0f} %"] if share is not None else []
        parts += [f"return {value:.2f}" if value is not None else "no episode has ended"]
        return ", ".join(parts)

    def picture(self, name: str, report: Report, share: float | None) -> str:
        """Return the bar and the curves as HTML."""
        value = "" if share is None else f' value="{min(1.0, share):.4f}"'
        return (
            f'<div><b>{html.escape(name)}</b> <progress max="1"{value}></progress>'
            f" {html.escape(self.text(report, share))}</div>{self._drawing()}"
        )

    def _drawing(self) -> str:
        """Return the curves as SVG, labelled with the least and the largest return and the last env step."""
        if not (values := [value for _, returns in self.points for value in returns if value is not None]):
            return ""
        low, high, (last, returns) = min(values), max(values), self.points[-1]
        lines = "".join(_line(self.points, policy, (low, high), last) for policy in range(len(returns)))
        labels = (
            f'<text x="{MARGIN}" y="12">{high:.4g}</text>'
            f'<text x="{MARGIN}" y="{HEIGHT - MARGIN}">{low:.4g}</text>'
            f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - MARGIN}" text-anchor="end">{short_number(last)} env steps</text>'
        )
        size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
        style = 'style="background:#fff;border:1px solid #ccc" font-size="11" font-family="sans-serif" fill="#555"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{lines}{labels}</svg>'


def _line(points: Sequence[ReturnPoint], policy: int, bounds: tuple[float, float], last: int) -> str:
    low, high = bounds
    wide, tall = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    places = [
        f"{MARGIN + wide * env_steps / max(1, last):.1f},{MARGIN + tall * (high - value) / ((high - low) or 1.0):.1f}"
        for env_steps, returns in points
        if (value := returns[policy]) is not None
    ]
    colour = COLOURS[policy % len(COLOURS)]
    return f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{" ".join(places)}"/>'


class Lines:
    """Prints a line every `LINE_SECONDS`, where no picture can be drawn."""

    def __init__(self) -> None:
        self._due = time.monotonic() + LINE_SECONDS

    def show(self, text: str, picture: str, *, is_last: bool = False) -> None:
        """Print the text, unless a line is too recent; the last text is always printed."""
        if is_last or time.monotonic() >= self._due:
            self._due = time.monotonic() + LINE_SECONDS
            say(text)


class Display:
    """An output of a notebook cell, redrawn in place."""

    def __init__(self, ipython: Any) -> None:
        self._ipython, self._name, self._is_there = ipython, f"appo-{secrets.token_hex(8)}", False

    def show(self, text: str, picture: str, *, is_last: bool = False) -> None:
        """Draw the picture; a frontend without HTML shows the text."""
        self._ipython.display(
            {"text/plain": text, "text/html": picture}, raw=True, display_id=self._name, update=self._is_there
        )
        self._is_there = True


def canvas_of_process() -> Lines | Display:
    """Return the display of this process: an output of the notebook, or lines."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None or not hasattr(shell, "kernel"):
        return Lines()
    return Display(importlib.import_module("IPython.display"))
