"""`appo top` shows the panel of runs that other processes train or have trained; `top` only reads files of the runs."""

import contextlib
import io
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group as Together

from appo.algorithms.run.algorithms import ALGORITHMS, DEFAULT, find_algorithm
from appo.algorithms.run.folder import find_runs, runs_in
from appo.algorithms.run.summary import LIVING_STATES, SAMPLED_BYTES, RunSummary, last_records, number_of, summary
from appo.algorithms.runtime.monitor.console import SMALLEST, aim_of, obstacle, wants_colour
from appo.algorithms.runtime.monitor.curves import ReturnTraces
from appo.algorithms.runtime.monitor.overview import Overview
from appo.algorithms.runtime.monitor.panel import Snapshot, draw, render
from appo.algorithms.runtime.monitor.performance import Performance, RoleTimes
from appo.algorithms.runtime.monitor.terminal import Screen
from appo.algorithms.runtime.roles import ROLES
from appo.algorithms.tools.comparison.saved_runs import read_each
from appo.algorithms.tools.flags import TopConfig
from appo.algorithms.tools.runs import age
from appo.utils.command_line import say
from appo.utils.errors import UsageError
from appo.utils.metrics import LONGEST_LINE, parse_record, sampled_lines
from appo.utils.run_folder import RunFolder, open_own
from appo.utils.timing import PHASES
from appo.utils.values import is_number, shown

PAGE = os.terminal_size((100, 40))  # without a terminal
BETWEEN_RUNS_SECONDS = 30.0  # at most, between two runs of a launch
LEAST = os.terminal_size((12, 2))  # smallest terminal that shows anything


def top(config: TopConfig) -> int:
    """Show runs until their end or Ctrl-C; return the exit code (UsageError: a run is missing)."""
    watched = read_each(_directories(config), lambda _, directory: ObservedRun(directory))
    if config.once or obstacle(sys.stdout, os.environ):
        columns = max(LEAST.columns, shutil.get_terminal_size(PAGE).columns)
        for one in watched:
            lines = render(draw(one.look(), columns, PAGE.lines), columns, colour=False, terminal=False)
            say("\n".join([*lines, one.verdict()]))
    else:
        _follow(watched, config)
        for one in watched:
            say(f"{shown(one.directory.name)}: {one.verdict()}" if len(watched) > 1 else one.verdict())
    return 0


class ObservedRun:
    """A run as seen in the run's files, whatever the files contain (UsageError: the flags cannot be read)."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.folder = directory, RunFolder(directory)
        self._traces, self._read_bytes = ReturnTraces(), 0
        self._found: RunSummary | None = None
        self.folder.read_config()

    def look(self) -> Snapshot:
        """Return the overview of the run now."""
        self._found = found = summary(self.directory)
        status = self.folder.read_status()
        self._read_new_records()
        numbers = _numbers(status.get("budget"))
        overview = _overview(status, last_records(self.folder.metrics), found)
        env, state = (found.env or "?", found.state) if found else ("?", "gone")
        algo = self.folder.read_config().get("algo", DEFAULT)
        # A stranger's module is not imported.
        losses = find_algorithm(algo).panel if isinstance(algo, str) and algo in ALGORITHMS else {}
        return Snapshot(self.directory.name, env, state, aim_of(numbers), overview, self._traces.best(), losses)

    @property
    def is_alive(self) -> bool:
        """Return whether the run was training at the last look."""
        return self._found is not None and self._found.state in LIVING_STATES

    def verdict(self) -> str:
        """Return a line with the state of the run at the last look, and the age of the state."""
        found = self._found
        if found is None:
            return f"{shown(str(self.directory))} is gone"
        ago = f"{age(time.time() - found.active)} ago"
        if found.state == "crashed":
            return f"crashed: it ended without a word, last heard of {ago}; the command that began it goes on with it"
        reason = f": {shown(found.reason)}" if found.reason else ""
        return f"{shown(found.state)}{reason}; {'last heard of' if self.is_alive else 'ended'} {ago}"

    def _read_new_records(self) -> None:
        """Add the complete lines of the metrics written since the last look."""
        with contextlib.suppress(OSError), open_own(self.folder.metrics) as file:
            size = file.seek(0, os.SEEK_END)
            if size < self._read_bytes:  # the folder now belongs to another run
                self._traces, self._read_bytes = ReturnTraces(), 0
            for line in sampled_lines(file, SAMPLED_BYTES, self._read_bytes):
                if line.endswith(b"\n"):
                    self._read_bytes = max(self._read_bytes, file.tell())
                    if (record := parse_record(line)) is not None:
                        self._traces.add(record)
            if size - self._read_bytes > LONGEST_LINE:  # no record is so long: skip the line
                self._read_bytes = size


def _directories(config: TopConfig) -> dict[str, Path]:
    """Return the runs on the command line, else the last active run, groups included."""
    group = Path(config.train_dir, config.experiments_root)
    if config.experiment:
        return find_runs(config.experiment, group)
    if not (found := [(run.active, path) for path in runs_in(group) if (run := summary(path)) is not None]):
        raise UsageError(f"there is no run in {shown(str(group))}: --train_dir names the folder of all runs")
    _, path = max(found)
    return {path.name: path}


def _follow(watched: list[ObservedRun], config: TopConfig) -> None:
    """Draw runs repeatedly until all have ended, the terminal is closed or Ctrl-C arrives; add new runs of a group.

    Between two runs of a launch no run trains, so several runs count as ended only after `BETWEEN_RUNS_SECONDS`.
    """
    screen, colour = Screen(sys.stdout.fileno()), wants_colour(os.environ)
    lived = time.monotonic()
    try:
        while True:
            if len(watched) > 1:
                known = {one.directory for one in watched}
                # Warnings were printed at the start; a run that is gone or damaged hides no others.
                with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(UsageError):
                    new = {name: path for name, path in _directories(config).items() if path not in known}
                    watched += read_each(new, lambda _, directory: ObservedRun(directory)) if new else []
            snapshots, size = [(one.look(), one.is_alive) for one in watched], screen.size()
            living = [snapshot for snapshot, is_alive in snapshots if is_alive]
            if size.columns >= LEAST.columns and size.lines >= LEAST.lines:
                # One line below the frame is for the cursor; a large terminal also keeps one older line.
                lines = size.lines - (2 if size.lines >= SMALLEST.lines else 1)
                seen = (living or [snapshot for snapshot, _ in snapshots])[: max(1, lines // SMALLEST.lines)]
                drawn = [draw(one, size.columns - 1, lines // len(seen)) for one in seen]
                screen.show(render(Together(*drawn), size.columns - 1, colour=colour))
            else:
                screen.show([])
            lived = time.monotonic() if living else lived
            if not living and (len(watched) == 1 or time.monotonic() - lived > BETWEEN_RUNS_SECONDS):
                return
            time.sleep(config.interval_seconds)
    except (OSError, KeyboardInterrupt):
        return
    finally:
        screen.close()


def _overview(status: Mapping[str, Any], records: Sequence[Mapping[str, Any]], found: RunSummary | None) -> Overview:
    """Make an overview of a status; records of the policies replace fields that the status lacks."""
    counts = {name: int(value) for name, value in _numbers(status.get("totals")).items()}
    policies, warnings = status.get("policies"), status.get("warnings")
    current = [record for record in policies if isinstance(record, dict)] if isinstance(policies, list) else []
    return Overview(
        elapsed_seconds=number_of(status.get("elapsed_seconds")) or 0.0,
        seconds_left=number_of(status.get("seconds_left")),
        share=found.share if found else None,
        # Of the same moment as the share: a record may be newer.
        env_steps=counts.get("env_steps") or (found.env_steps if found else None) or 0,
        samples=counts.get("samples", 0),
        discarded=counts.get("discarded", 0),
        restarts=counts.get("restarts", 0),
        env_rebuilds=counts.get("actors_rebuilds", 0),
        memory_bytes=int(memory) if (memory := number_of(status.get("memory_bytes"))) is not None else None,
        performance=_performance(status.get("performance")),
        policies=tuple(_numbers(record) for record in current or records),
        warnings=tuple(str(text) for text in warnings) if isinstance(warnings, list) else (),
    )


def _performance(plain: object) -> Performance | None:
    """Read the mapping written by `Performance.plain`; return None for any other value."""
    try:
        assert isinstance(plain, dict)
        roles = {name: _role(plain["roles"][name]) for name in ROLES if name in plain["roles"]}
        numbers = {
            name: _sure(plain[name])
            for name in ("busy_cores", "cores", "samples_per_second", "limit_samples_per_second")
        }
        return Performance(roles=roles, cpu_us={}, bottleneck=str(plain["bottleneck"]), **numbers)
    except (AssertionError, KeyError, TypeError, ValueError):
        return None


def _role(plain: Any) -> RoleTimes:
    shares = {phase: _sure(plain["shares"][phase]) for phase in PHASES if phase in plain["shares"]}
    return RoleTimes(int(_sure(plain["processes"])), shares, _sure(plain["busy_cores"]))


def _sure(value: object) -> float:
    if not is_number(value):
        raise TypeError(f"{value!r} is no number")
    return value


def _numbers(plain: object) -> dict[str, float]:
    return {name: value for name, value in plain.items() if is_number(value)} if isinstance(plain, Mapping) else {}
