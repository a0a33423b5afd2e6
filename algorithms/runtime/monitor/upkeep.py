"""Upkeep of the folder of a running run: long logs are shortened, a removed folder is created again."""

import contextlib
import logging
import os
import threading
from pathlib import Path
from typing import Self

from appo.utils.errors import AppoError, DirectoryInUse
from appo.utils.lock import RunLock
from appo.utils.log_files import FULL, shorten
from appo.utils.run_folder import RunFolder, open_own, own_folder, replace_own
from appo.utils.values import shown

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
END_SECONDS = 3.0  # for the last check; a disk may hang
KEPT_BYTES = 1 << 20  # largest file kept in memory, to be written again after a loss


class Upkeep:
    """Checks the folder of a run in a thread, while entered.

    A thread, because main is busy while processes start, and a program that trains in steps may pause for an hour. The
    thread is a daemon, because a hung disk may block it for ever.
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

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join(END_SECONDS)

    def look(self) -> None:
        """Shorten long logs, with a warning for the first, and restore lost files."""
        self.belongings.look()
        too_long = []  # by size alone: a run may have many logs
        with contextlib.suppress(OSError), own_folder(self.folder.logs) as logs:  # the folder has been removed
            for entry in os.scandir(logs):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_size > FULL * self.max_log_bytes:
                        too_long.append(entry.name)
        for name in too_long:
            path = self.folder.logs / name
            with contextlib.suppress(OSError):  # removed meanwhile, or not a log of the run
                if shorten(path, self.max_log_bytes) and not self._is_said:
                    self._is_said = True
                    log.warning(
                        "%s grows beyond %d MiB, as much is printed there: of this and other logs the beginning and the"
                        " newest lines are kept (--max_log_mb)",
                        path,
                        self.max_log_bytes >> 20,
                    )

    def _work(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._over.wait(LOOK_SECONDS)
            try:
                self.look()
            except (OSError, AppoError) as error:  # a disk may refuse every access for an hour
                if not self._has_failed:
                    self._has_failed = True
                    log.warning("the files of the run cannot be looked after: %s", error)
            else:
                self._has_failed = False


class Belongings:
    """The files of a run's folder: finds a removed folder or file, and creates it again.

    Files that are written once are kept in memory. Writers of other files (figures, logs) continue in new files.
    """

    def __init__(self, folder: RunFolder, lock: RunLock) -> None:
        self.folder, self.lock = folder, lock
        self._kept: dict[Path, tuple[tuple[int, ...], bytes]] = {}
        self._is_said = False
        self._losses = self._told = 0
        self._taken: DirectoryInUse | None = None

    def newly_lost(self) -> bool:
        """Return whether a loss was repaired since the last call; main then writes further files again.

        Raises:
            DirectoryInUse: the folder was moved, and another run has begun in its place.
        """
        if self._taken is not None:
            raise self._taken
        told, self._told = self._told, self._losses
        return told != self._losses

    def look(self) -> None:
        """Keep new contents, or create lost files again with a warning."""
        gone = self._gone()
        if not gone:
            self._remember()
            self._is_said = False
            return
        try:
            with own_folder(self.folder.logs, make=True):
                pass
            self.lock.renew()  # before any write: the folder may belong to another run by now
            for path, (_, content) in self._kept.items():
                if not os.path.lexists(path):
                    replace_own(path, content)
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
        """Return a lost path, for messages; empty if nothing is lost."""
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
                elif self._kept.get(path, ((), b""))[0] != mark:
                    with open_own(path) as file:
                        self._kept[path] = mark, file.read(KEPT_BYTES)
