"""Keeps the logs of a run within their bounds while others write them: what an environment prints has no end."""

import contextlib
import logging
import os
import threading
from types import TracebackType
from typing import Self

from utils.logging import FULL, shorten
from utils.run_folder import RunFolder, own_folder

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
END_SECONDS = 3.0  # for the last look, on a disk that may not answer


class Upkeep:
    """Looks at the logs of a run in a thread of its own, as long as this is entered.

    A thread, because main has other things to do while processes start, and a program that trains in steps may do
    nothing for an hour; a daemon, because a disk that does not answer keeps it as long as it likes.

    Args:
        folder: of the run.
        max_log_bytes: that each log may have.
    """

    def __init__(self, folder: RunFolder, max_log_bytes: int) -> None:
        self.folder, self.max_log_bytes = folder, max_log_bytes
        self._is_said = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="upkeep", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(END_SECONDS)

    def look(self) -> None:
        """Shorten the logs that are too long, and say so of the first one."""
        for name in self._too_long():
            path, shortened = self.folder.logs / name, False
            with contextlib.suppress(OSError):  # removed meanwhile, or no log of ours
                shortened = shorten(path, self.max_log_bytes)
            if shortened and not self._is_said:
                self._is_said = True
                log.warning(
                    "%s grows beyond %d MiB, as much is printed there: of this and other logs the beginning and the"
                    " newest lines are kept (--max_log_mb)",
                    path,
                    self.max_log_bytes >> 20,
                )

    def _too_long(self) -> list[str]:
        """Names of the logs that are; of many logs a look at each is all that there is time for."""
        found = []
        with contextlib.suppress(OSError), own_folder(self.folder.logs) as logs:  # the folder has been removed
            for entry in os.scandir(logs):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_size > FULL * self.max_log_bytes:
                        found.append(entry.name)
        return found

    def _work(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self.look()
        self.look()
