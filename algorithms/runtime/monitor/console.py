"""The displays of a training run: plain lines, JSON lines or a live panel."""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from appo.algorithms.runtime.config import ENDLESS, LoggingConfig
from appo.algorithms.runtime.monitor.curves import TRACED, ReturnTraces
from appo.algorithms.runtime.monitor.overview import Overview
from appo.algorithms.runtime.monitor.terminal import Screen
from appo.utils.metrics import duration, read_metrics, short_number
from appo.utils.run_folder import RunFolder

log = logging.getLogger(__name__)

SMALLEST = os.terminal_size((60, 12))  # smallest terminal with room for a panel
Look = Callable[[float], Overview]
"""Function from a monotonic time to the overview; called only before a display."""


class Title(NamedTuple):
    """The title of a run in its display.

    Attributes:
        env: name of the environment.
        aim: end of the run, in words.
        losses: metrics in the panel's line of losses, metric -> word.
    """

    run: Path
    env: str
    aim: str
    losses: Mapping[str, str]


class PlainLines:
    """A few lines in the log every few seconds."""

    def __init__(self, interval_seconds: float, first_seconds: float = 2.0) -> None:
        self._interval_seconds, self._first_seconds = interval_seconds, first_seconds
        self._due: float | None = None

    def tick(self, now: float, look: Look) -> None:
        """Log a report of the run if due at monotonic time `now`."""
        if self._due is None:
            self._due = now + min(self._interval_seconds, self._first_seconds)
        if now >= self._due:
            self._due = now + self._interval_seconds
            self._report(look(now))

    def close(self) -> None:
        """Do nothing: there is no display to end."""

    def _report(self, overview: Overview) -> None:
        log.info("%s", overview.line)
        if found := overview.performance:
            for line in found.lines():
                log.info("%s", line)


class JsonReports(PlainLines):
    """A JSON object every few seconds, in a log of JSON lines."""

    def _report(self, overview: Overview) -> None:
        log.info("report", extra={"report": overview.plain()})


class LivePanel:
    """A panel at the bottom of the terminal; plain lines in a small terminal, and after any error."""

    def __init__(self, open_screen: Callable[[], Screen], title: Title, colour: bool, otherwise: PlainLines) -> None:
        self._open_screen = open_screen
        self._screen: Screen | None = None
        self._title, self._colour, self._otherwise = title, colour, otherwise
        self._traces: ReturnTraces | None = None
        self._is_over, self._due = False, 0.0

    def tick(self, now: float, look: Look) -> None:
        """Draw a frame if due; no error of the panel reaches training."""
        if self._is_over:
            self._otherwise.tick(now, look)
        elif now >= self._due:
            began = time.perf_counter()
            try:
                self._frame(now, look)
            except Exception as error:  # no picture is worth a run
                self.close()
                log.warning("the panel is turned off: %s: %s", type(error).__name__, error)
            self._due = now + min(max(1.0, 200 * (time.perf_counter() - began)), 5.0)

    def close(self) -> None:
        """Leave the last frame on the terminal."""
        self._is_over = True
        if self._screen is not None:
            self._screen.close()
            self._screen = None

    def _frame(self, now: float, look: Look) -> None:
        from appo.algorithms.runtime.monitor.panel import Snapshot, draw, render

        if self._screen is None or self._traces is None:
            self._traces = ReturnTraces(read_metrics(RunFolder(self._title.run).metrics, TRACED))
            self._screen = self._open_screen()
        overview, title = look(now), self._title
        for record in overview.policies:
            self._traces.add(record)
        size = self._screen.size()
        if size.columns < SMALLEST.columns or size.lines < SMALLEST.lines:
            self._screen.show([])
            self._otherwise.tick(now, look)
            return
        snapshot = Snapshot(
            title.run.name, title.env, "training", title.aim, overview, self._traces.best(), title.losses
        )
        columns = size.columns - 1  # terminals disagree on the place of the cursor after the last column
        self._screen.show(render(draw(snapshot, columns, size.lines - 2), columns, colour=self._colour))


Console = PlainLines | LivePanel


def console_for(config: LoggingConfig, title: Title) -> Console:
    """Return the display of `--log_format`, or the nearest display that stdout permits."""
    if config.log_format == "json":
        return JsonReports(config.report_interval_seconds)
    if config.log_format != "plain":
        why_not = obstacle(sys.stdout, os.environ)
        if why_not is None:
            at_once = PlainLines(config.report_interval_seconds, 0.0)
            return LivePanel(lambda: Screen(sys.stdout.fileno()), title, wants_colour(os.environ), at_once)
        if config.log_format == "panel":
            log.warning("--log_format=panel: %s; plain lines instead", why_not)
    return PlainLines(config.report_interval_seconds)


def obstacle(stream: TextIO, environment: Mapping[str, str]) -> str | None:
    """Return the reason why no panel can be drawn on a stream; None if a panel can be drawn."""
    if not stream.isatty():
        return "stdout is no terminal"
    if environment.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return f"TERM={environment.get('TERM', '')} is a terminal without a cursor to move"
    if "utf" not in (stream.encoding or "").lower():
        return f"the terminal's encoding is {stream.encoding}, not UTF-8"
    return "rich is not installed (pip install rich)" if find_spec("rich") is None else None


def wants_colour(environment: Mapping[str, str]) -> bool:
    """Return whether NO_COLOR is unset: https://no-color.org."""
    return not environment.get("NO_COLOR")


def aim_of(budget: Mapping[str, Any]) -> str:
    """Return the end of a run in words, from the budget of status.json."""
    limits = {name: budget.get(name) for name in (*ENDLESS, "episode_return")}
    parts = []
    if (seconds := limits["seconds"]) is not None and seconds < ENDLESS["seconds"]:
        parts.append(duration(seconds))
    if (goal := limits["episode_return"]) is not None:
        parts.append(f"a mean return of {goal:g}")
    for name in ("samples", "env_steps"):
        limit = limits[name]
        if limit is not None and (limit < ENDLESS[name] or (name == "env_steps" and not parts)):
            parts.insert(0, f"{short_number(limit)} {name.replace('_', ' ')}")
    return " or ".join(parts) or "an endless run"
