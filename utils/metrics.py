"""The metrics of a run in `metrics.jsonl`.

A full disk never stops training: lost records are counted, and writing resumes with free space.
"""

import contextlib
import json
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from appo.utils.errors import UsageError
from appo.utils.run_folder import append_to_own, is_named, names_in_own, open_own, remove_own, replace_own
from appo.utils.thinning import Thinning
from appo.utils.values import is_number

log = logging.getLogger(__name__)


class MetricsLog:
    """`metrics.jsonl`: one JSON object a line, appended by a single write.

    Opening cuts off a line that a crash left unfinished, so every line can be parsed. Numbers that are not finite are
    written as null, because JSON has no word for NaN.

    Args:
        path: path of the log.
        most_bytes: largest size. A longer log loses every second old record; a log longer than any run's keeps a
            sample. 0: no limit.

    Raises:
        OSError: the file cannot be opened, see `append_to_own`.
    """

    def __init__(self, path: Path, most_bytes: int = 0) -> None:
        self.dropped = 0  # records that could not be written
        self._path, self._most_bytes, self._thin_at = path, most_bytes, most_bytes
        self._descriptor = append_to_own(path)
        with contextlib.suppress(OSError):
            size = os.fstat(self._descriptor).st_size
            start = max(0, size - LONGEST_LINE)
            newline = os.pread(self._descriptor, size - start, start).rfind(b"\n")
            if newline < 0 and start:  # longer than any record
                os.write(self._descriptor, b"\n")
            else:
                os.ftruncate(self._descriptor, start + newline + 1)
            for name in names_in_own(path.parent):  # of a process that was killed while thinning
                if re.fullmatch(rf"\.{re.escape(path.name)}-\d+", name):
                    remove_own(path.with_name(name))

    def append(self, record: Mapping[str, object]) -> bool:
        """Add a line; return False, and count in `dropped`, if the disk does not take the line."""
        plain = {name: _plain(value) for name, value in record.items()}
        line = json.dumps(plain, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        if not is_named(self._descriptor, self._path):
            self._go_on_in_place()
        size = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, line)
        except OSError:
            written = 0
        if written == len(line):
            if self._most_bytes and size + written > self._thin_at:
                self._thin(size + written)
            return True
        self.dropped += 1
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, size)  # no half line in the middle of the file
        return False

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _go_on_in_place(self) -> None:
        """Write the open file to the path again, from which the file was removed or renamed, and continue there."""
        with contextlib.suppress(OSError):  # not yet possible: no folder, or a full disk
            if not os.path.lexists(self._path):
                with os.fdopen(os.dup(self._descriptor), "rb") as file:
                    file.seek(0)
                    replace_own(self._path, iter(lambda: file.read(BLOCK_BYTES), b""))
            self._reopen()
            log.warning("%s has gone away: it is made again", self._path)

    def _thin(self, size: int) -> None:
        """Replace the file by a file with fewer records, or try later if the disk is full."""
        step = self._most_bytes // 8
        self._thin_at = size + step
        with contextlib.suppress(OSError):
            with os.fdopen(os.dup(self._descriptor), "rb") as file:
                most = max(self._most_bytes, READ_BYTES)
                # Reading all of a file that is far too long would keep main busy for seconds.
                replace_own(self._path, thinned_lines(file, size) if size <= 4 * most else sampled_lines(file, most))
            self._reopen()
            self._thin_at = max(self._most_bytes, os.fstat(self._descriptor).st_size + step)

    def _reopen(self) -> None:
        former, self._descriptor = self._descriptor, append_to_own(self._path)
        os.close(former)


def thinned_lines(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the lines of a metrics log without half of each policy's records, except in the newest quarter.

    The remaining records are even in time. Records at which a resumed run goes back stay, for `without_lost`.
    """
    thinning = Thinning()
    for line in _lines_between(file, 0, size * 3 // 4, whole=True):
        thinning.see(*_place_of(line))
    at = 0
    for line in _lines_between(file, 0, size, whole=True):
        is_old, at = at < size * 3 // 4, at + len(line)
        if not is_old or thinning.keeps(*_place_of(line)):
            yield line


_SECONDS = re.compile(rb'"elapsed_seconds": ?([0-9.eE+-]{1,30})[,}]')
_POLICY = re.compile(rb'"policy": ?([0-9]{1,4})[,}]')  # at most 10,000 curves in memory


def _place_of(line: bytes) -> tuple[bytes, float]:
    """Return policy and seconds of a record by searching the text: parsing a long log would take seconds."""
    seconds, policy = _SECONDS.search(line), _POLICY.search(line)
    if seconds is None or policy is None:
        return b"", 0.0  # not a record of a run
    try:
        return policy[1], float(seconds[1])
    except ValueError:
        return b"", 0.0


READ_BYTES = 64 << 20
"""Bytes read of a file of lines; a larger file is sampled evenly."""
BLOCK_BYTES = 1 << 18
LONGEST_LINE = 1 << 20
"""Bytes of the longest record of a run; longer lines are skipped."""
MOST_RECORDS = 50_000


def read_metrics(path: Path, names: Collection[str] | None = None) -> list[dict[str, Any]]:
    """Return the records of a metrics log, in bounded memory; [] without a file.

    Lines without a JSON object (a torn last line) are skipped. A file of more than `READ_BYTES` is sampled. Above
    `MOST_RECORDS`, every second record of each policy is dropped, repeatedly.

    Args:
        path: path of the log.
        names: names to keep of each record; None: all names, with an eighth of both bounds.

    Raises:
        UsageError: the file cannot be read, or is no plain file.
    """
    share = 8 if names is None else 1
    records: list[dict[str, Any]] = []
    skipped, every = Counter[object](), 1
    try:
        with open_own(path) as file:
            for record in map(parse_record, sampled_lines(file, READ_BYTES // share)):
                if record is None:
                    continue
                policy = _policy_of(record)
                if len(skipped) > MOST_RECORDS:  # no run has so many policies
                    skipped.clear()
                skipped[policy] = (skipped[policy] + 1) % every
                if skipped[policy]:
                    continue
                records.append(record if names is None else {n: record[n] for n in names if n in record})
                if len(records) > MOST_RECORDS // share:
                    records, every = _thinned(records), 2 * every
                    skipped.clear()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    return records


def _policy_of(record: Mapping[str, Any]) -> float | None:
    policy = record.get("policy")
    return policy if is_number(policy) else None


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None for other lines, such as a line torn by a crash."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _thinned(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every second record of each policy, or of all records if policies with one record prevail."""
    kept, found = [], Counter[object]()
    for record in records:
        found[_policy_of(record)] += 1
        if found[_policy_of(record)] % 2:
            kept.append(record)
    return kept if len(kept) < 0.75 * len(records) else records[::2]


def sampled_lines(file: BinaryIO, most_bytes: int = READ_BYTES, start: int = 0) -> Iterator[bytes]:
    """Yield the lines of a file in order, without lines longer than `LONGEST_LINE`.

    Args:
        file: file of lines.
        most_bytes: largest size to read whole; of a larger file, blocks at equal distances are read, with the beginning
            and the end.
        start: first byte, the start of a line.
    """
    end = file.seek(0, os.SEEK_END)
    blocks = most_bytes // BLOCK_BYTES
    if end - start <= max(most_bytes, BLOCK_BYTES):
        yield from _lines_between(file, start, end, whole=True)
        return
    for number in range(blocks):
        place = start + (end - start - BLOCK_BYTES) * number // max(1, blocks - 1)
        yield from _lines_between(file, place, place + BLOCK_BYTES, whole=place == start)


def _lines_between(file: BinaryIO, start: int, end: int, *, whole: bool) -> Iterator[bytes]:
    """Yield the lines that begin between two places; the first line only if `whole`."""
    file.seek(start)
    at, passing = start, not whole
    while at < end and (line := file.readline(LONGEST_LINE)):
        at += len(line)
        is_end = line.endswith(b"\n") or len(line) < LONGEST_LINE  # of the line, or of the file
        if is_end and not passing:
            yield line
        passing = not is_end


def without_lost(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop the records that a crash undid: env steps and seconds that a later start repeats.

    A resuming start first writes the step from which training continues; records of later steps are lost.
    """
    kept: list[dict[str, Any]] = []
    reached: dict[object, tuple[float, float]] = {}
    for record in reversed(records):
        policy, env_steps, seconds = (record.get(name) for name in ("policy", "env_steps", "elapsed_seconds"))
        if not (is_number(policy) and is_number(env_steps) and is_number(seconds)):
            continue  # not written by a run
        most_env_steps, most_seconds = reached.get(policy, (math.inf, math.inf))
        if env_steps <= most_env_steps and seconds <= most_seconds:
            reached[policy] = env_steps, seconds
            kept.append(record)
    return kept[::-1]


def last_values(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last number of every name in the records."""
    return {name: value for record in records for name, value in record.items() if is_number(value)}


def short_number(number: float) -> str:
    """12.3k, 4.56M."""
    for limit, divisor, unit in ((999.5e6, 1e9, "G"), (999.5e3, 1e6, "M"), (1e4, 1e3, "k")):
        if number >= limit:
            return f"{number / divisor:.3g}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """40 s, 12 min, 3.4 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _plain(value: object) -> object:
    """Return a value as JSON has it: numpy and torch scalars as numbers, a number that is not finite as null."""
    item = getattr(value, "item", None)
    plain: object = item() if callable(item) else value
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain
