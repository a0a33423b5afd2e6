"""Detection of memory leaks: an actor that grows too much is replaced, because some environments leak."""

import logging
import time

from appo.utils.system import limits
from appo.utils.system.memory import held_bytes

log = logging.getLogger(__name__)

MIB = 1 << 20
SHARE_OF_LIMIT, SHARE_OF_LIFE = 1 / 8, 1 / 4


class LeakWatch:
    """Compares the memory of a process, child processes included, with the memory at the first look.

    An environment that loads something late grows once; a replacement would grow again. A process beyond the limit is
    therefore observed for a quarter of its life so far. Growth by an eighth of the limit meanwhile is a leak. Otherwise
    the growth counts as a warm-up, and later growth is measured from there. A leak may grow in steps that large. The
    first life may therefore warm up once, and each later life once more, with an observation longer by the same factor,
    up to eight times. Environments that warm up in several steps, or slowly, are replaced more and more rarely.
    """

    def __init__(self, most_bytes: int, flag: str, lives_before: int = 0) -> None:
        self.most_bytes, self.flag = most_bytes, flag
        self.patience = min(1 + lives_before, 8)
        self._warm_ups = 0
        self._bytes_before: int | None = None
        self._begun = 0.0  # growing, monotonic seconds
        self._passed: tuple[float, int] | None = None  # when and with what growth it passed the limit

    def reason(self) -> str | None:
        """Return why the process should be replaced, or None."""
        held, now = held_bytes(), time.monotonic()
        if self._bytes_before is None:
            self._bytes_before, self._begun = held, now
        grown = held - self._bytes_before
        if self._leaks(grown, now):
            return f"its memory has grown by {grown // MIB} MiB ({self.flag})"
        open_files, limit = limits.num_open(), limits.limit()
        too_many = limit is not None and 2 * open_files > limit
        return f"it has {open_files} open files of {limit}" if too_many else None

    def _leaks(self, grown: int, now: float) -> bool:
        """Return whether the process has grown too much and continues to grow."""
        if grown <= self.most_bytes:
            self._passed = None
            return False
        if self._warm_ups >= self.patience:
            return True
        if self._passed is None:
            self._passed = now, grown
        since, grown_then = self._passed
        if grown - grown_then > SHARE_OF_LIMIT * self.patience * self.most_bytes:
            return True
        # Looks once a second may miss the end of an episode.
        if now - since >= max(5.0, SHARE_OF_LIFE * self.patience * (since - self._begun)):
            self._warm_ups += 1
            self._bytes_before, self._begun, self._passed = (self._bytes_before or 0) + grown, now, None
            log.info("its memory has grown by %d MiB (%s) and grows no more: no leak", grown // MIB, self.flag)
        return False
