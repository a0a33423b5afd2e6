"""Upkeep of the files of a run while others write them: logs without end, and a folder that goes away."""

import contextlib
import logging
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from appo.utils.errors import AppoError, DirectoryInUse
from appo.utils.lock import RunLock
from appo.utils.log_files import FULL, shorten
from appo.utils.run_folder import RunFolder, open_own, own_folder, replace_own
from appo.utils.values import shown

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
END_SECONDS = 3.0  # for the last look, on a disk that may not answer
KEPT_BYTES = 1 << 20  # of a file that is kept in memory, should it go away


class Upkeep:
    """Looks at the folder of a run in a thread of its own, while entered.

    A thread, because main has other things to do while processes start, and a program that trains in steps may do
    nothing for an hour; a daemon, because a disk that does not answer keeps it as long as it likes.

    Args:
        folder: of the run.
        lock: of the run, which is held.
        max_log_bytes: that each log may have.
    """

    def __init__(self, folder: RunFolder, lock: RunLock, max_log_bytes: int) -> None:
        self.folder, self.max_log_bytes = folder, max_log_bytes
        self.belongings = Belongings(folder, lock)
        self._is_said = self._has_failed = False
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
        """Shorten the logs that are too long, and say so of the first one; make the folder whole that has gone away."""
        self.belongings.look()
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
        """Return names of logs that are too long; of many logs a look at each is all that there is time for."""
        found = []
        with contextlib.suppress(OSError), own_folder(self.folder.logs) as logs:  # the folder has been removed
            for entry in os.scandir(logs):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_size > FULL * self.max_log_bytes:
                        found.append(entry.name)
        return found

    def _work(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self._try_to_look()
        self._try_to_look()

    def _try_to_look(self) -> None:
        """Go on after a look that failed: a disk may have an hour in which it refuses everything."""
        try:
            self.look()
        except (OSError, AppoError) as error:
            if not self._has_failed:
                self._has_failed = True
                log.warning("the files of the run cannot be looked after: %s", error)
        else:
            self._has_failed = False


class Belongings:
    """The files that make the folder of a run one: notices when it goes away, and makes it again.

    Files that are written once are kept in memory. Whoever writes to the others (figures, logs) goes on in new ones.

    Args:
        folder: of the run.
        lock: of the run.
    """

    def __init__(self, folder: RunFolder, lock: RunLock) -> None:
        self.folder, self.lock = folder, lock
        self._kept: dict[Path, tuple[tuple[int, ...], bytes]] = {}
        self._is_said = False
        self._losses = self._told = 0
        self._taken: DirectoryInUse | None = None

    def newly_lost(self) -> bool:
        """Return whether something was lost and made again since this was asked last: main has more to write there.

        Raises:
            DirectoryInUse: the folder was moved, and another run has begun in its place.
        """
        if self._taken is not None:
            raise self._taken
        told, self._told = self._told, self._losses
        return told != self._losses

    def look(self) -> None:
        """Remember what is new, make again what is gone, and say so."""
        gone = self._gone()
        if not gone:
            self._remember()
            self._is_said = False
            return
        try:
            self._make_again()
        except DirectoryInUse as error:
            self._taken = error
        except (OSError, AppoError) as error:
            if not self._is_said:
                log.warning("%s has gone away, and cannot be made again: %s", gone, error)
            self._is_said = True
        else:
            log.warning("%s has gone away: it is made again, and training goes on", gone)
            self._losses += 1

    def _gone(self) -> str:
        """Return, for people, the path that is not there any more; nothing while all is well."""
        if not self.lock.is_in_place() or os.path.islink(self.folder.path):  # moved, perhaps with a link in its place
            return f"the folder of the run ({shown(str(self.folder.path))})"
        lost = [path for path in (self.folder.logs, *self._kept) if not os.path.lexists(path)]
        return str(lost[0]) if lost else ""

    def _remember(self) -> None:
        folder = self.folder
        for path in (folder.config, folder.history, folder.page, folder.lineage):
            with contextlib.suppress(OSError):
                found = os.lstat(path)
                mark = (found.st_ino, found.st_mtime_ns, found.st_size)
                if found.st_size > KEPT_BYTES:
                    self._kept.pop(path, None)
                    continue
                if self._kept.get(path, ((), b""))[0] == mark:
                    continue
                with open_own(path) as file:
                    self._kept[path] = mark, file.read(KEPT_BYTES)

    def _make_again(self) -> None:
        with own_folder(self.folder.logs, make=True):
            pass
        self.lock.renew()  # before anything is written: the folder may be another run's by now
        for path, (_, content) in self._kept.items():
            if not os.path.lexists(path):
                replace_own(path, content)
