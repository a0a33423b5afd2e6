"""Figures of a run: the log that is the truth, and the TensorBoard files beside it.

Nothing here may stop training: a full disk costs figures, which are counted, and writing goes on when there is space.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.errors import UsageError
from utils.files import open_own
from utils.tensorboard import _plain
from utils.values import is_number


class MetricsLog:
    """`metrics.jsonl`: one JSON object a line, each added by one write at the end of the file.

    Opening it cuts off a line that a crash left unfinished, so that every line of the file can be parsed. Numbers that
    are not finite are written as null, as JSON has no word for them.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.dropped = 0  # records that could not be written
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, _end_of_last_line(self._descriptor))

    def append(self, record: Mapping[str, object]) -> bool:
        """Add a line; False, and counted in `dropped`, when the disk does not take it."""
        plain = {name: _plain(value) for name, value in record.items()}
        line = json.dumps(plain, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        size = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, line)
        except OSError:
            written = 0
        if written == len(line):
            return True
        self.dropped += 1
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, size)  # no half line in the middle of the file
        return False

    def close(self) -> None:
        """Close the file; the log cannot be used afterwards."""
        os.close(self._descriptor)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics log; [] without a file. Lines that are no JSON object (a torn last one) are skipped.

    Raises:
        UsageError: it cannot be read, or is no plain file.
    """
    try:
        with open_own(path) as file:
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    records = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records


def without_lost(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out what a crash took back: records of env steps and seconds that a later start has done again.

    A start that resumes writes first where it goes on from, so that what lies beyond is known to be lost.
    """
    kept: list[dict[str, Any]] = []
    reached: dict[object, tuple[float, float]] = {}
    for record in reversed(records):
        policy, env_steps, seconds = (record.get(name) for name in ("policy", "env_steps", "elapsed_seconds"))
        if not (is_number(policy) and is_number(env_steps) and is_number(seconds)):
            continue  # nothing that we write
        most_env_steps, most_seconds = reached.get(policy, (math.inf, math.inf))
        if env_steps <= most_env_steps and seconds <= most_seconds:
            reached[policy] = env_steps, seconds
            kept.append(record)
    return kept[::-1]


def last_values(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Of every name in any of the records, its last known number."""
    return {name: value for record in records for name, value in record.items() if is_number(value)}


def short_number(number: float) -> str:
    """12.3k, 4.56M."""
    for limit, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if number >= limit:
            return f"{number / divisor:.3g}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """40 s, 12 min, 3.4 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _end_of_last_line(descriptor: int) -> int:
    """Size of a file without a last line that has no end."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - (1 << 16))
        block = os.pread(descriptor, end - start, start)
        if (newline := block.rfind(b"\n")) >= 0:
            return start + newline + 1
        end = start
    return 0
