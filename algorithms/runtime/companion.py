"""A command of ours that runs beside training; whatever becomes of it, training does not notice."""

import logging
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from algorithms.runtime.janitor import Janitor, kill_group
from utils.command_line import own_command

log = logging.getLogger(__name__)

JOIN_SECONDS = 1.0


class Companion:
    """A process that lives while this is entered.

    Args:
        words: of its command line, after `appo`.
        log_path: what it prints goes there.
        janitor: ends it should main be killed.
    """

    def __init__(self, words: Sequence[str], log_path: Path, janitor: Janitor) -> None:
        self.words, self.log_path, self.janitor = words, log_path, janitor

    def __enter__(self) -> Self:
        with self.log_path.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 (our own program)
                own_command(self.words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,  # no session: the scheduler may share the cores between sessions first
            )
        self.janitor.watch(self._process.pid)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if code := self._process.poll():
            log.warning("appo %s ended before its time with exit code %d; see %s", self.words[0], code, self.log_path)
        kill_group(self._process.pid)
        try:
            self._process.wait(JOIN_SECONDS)
        except subprocess.TimeoutExpired:  # the kernel does not let it go
            log.warning("appo %s does not end", self.words[0])
        self.janitor.forget(self._process.pid)
