"""`appo` commands that run beside main, each in a process group of its own."""

import contextlib
import logging
import multiprocessing.process
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Self

from appo.algorithms.runtime.processes.janitor import Janitor, kill_group
from appo.algorithms.runtime.processes.restarts import Revival
from appo.utils.command_line import own_command
from appo.utils.errors import UsageError
from appo.utils.run_folder import append_to_own

log = logging.getLogger(__name__)

JOIN_SECONDS = 1.0
WAIT_SECONDS = 0.1  # for a command, while main has nothing else to do


class CommandBeside:
    """A command, by words after `appo`, in a process group of its own, which the janitor kills if main is killed."""

    def __init__(self, words: Sequence[str], janitor: Janitor, output: BinaryIO, errors: BinaryIO) -> None:
        self._name, self._janitor = words[0], janitor
        # Temporary files go to main's folder, which the janitor removes if the command is killed.
        folder = multiprocessing.process.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
        self._process = subprocess.Popen(  # noqa: S603 (our own program)
            own_command(words, sys.path),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env={**os.environ, "TMPDIR": folder} if folder else None,
            process_group=0,  # no session: the scheduler may share the cores between sessions first
        )
        janitor.watch(self._process.pid)

    def exit_code(self, timeout_seconds: float = 0.0) -> int | None:
        """Return the exit code; None: the command still runs after the timeout."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_seconds)
        return None

    def end(self) -> int | None:
        """Kill the rest of the group; return the exit code, None if the kernel does not release the process."""
        kill_group(self._process.pid)
        if (code := self.exit_code(JOIN_SECONDS)) is None:
            log.warning("appo %s does not end", self._name)
        self._janitor.forget(self._process.pid)
        return code


class RestartedCommand:
    """A command, by words after `appo`, that runs while entered. `look` restarts the command after an exit."""

    def __init__(self, words: Sequence[str], log_path: Path, janitor: Janitor) -> None:
        self.words, self.log_path, self.janitor = words, log_path, janitor
        self.revival = Revival(f"appo {words[0]}", log_path)
        self._command: CommandBeside | None = None

    def __enter__(self) -> Self:
        self._start(time.monotonic())
        return self

    def _start(self, now: float) -> None:
        with os.fdopen(append_to_own(self.log_path, make=True), "ab") as output:
            self._command = CommandBeside(self.words, self.janitor, output, output)
        self.revival.began(now)

    def look(self, now: float) -> None:
        """Log an exit of the command; restart the command when the restart is due at this monotonic time."""
        if self._command is not None and (code := self._command.exit_code()) is not None:
            self._command.end()
            self._command = None
            log.warning("%s", self.revival.ended(now, code))
        elif self.revival.is_due(now):
            try:
                self._start(now)
            except OSError as error:
                log.warning("%s", self.revival.not_started(now, error))

    def plain(self) -> dict[str, object]:
        """Return the entry of the command in status.json."""
        return self.revival.plain()

    def __exit__(self, *exception: object) -> None:
        if self._command is None:
            return
        if code := self._command.exit_code():
            log.warning("appo %s ended before its time with exit code %d; see %s", self.words[0], code, self.log_path)
        self._command.end()


def answer_of(words: Sequence[str], janitor: Janitor, meanwhile: Callable[[], bool]) -> str:
    """Run a command to the end; return the text on its standard output.

    Args:
        words: words of the command line after `appo`.
        janitor: janitor of main.
        meanwhile: work of main, called while the command runs; returns whether more work waits.

    Raises:
        UsageError: the command failed; with the last line of its standard error.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        command = CommandBeside(words, janitor, output, errors)
        try:
            while command.exit_code(0.0 if meanwhile() else WAIT_SECONDS) is None:
                pass
        finally:
            code = command.end()
        output.seek(0)
        errors.seek(0)
        if code:
            lines = errors.read().decode(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), f"exit code {code}")
            raise UsageError(f"appo {words[0]} failed: {last.removeprefix('error: ')}")
        return output.read().decode(errors="replace")
