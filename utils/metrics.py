"""Figures of a run: the log that is the truth, and the TensorBoard files beside it.

Nothing here may stop training: a full disk costs figures, which are counted, and writing goes on when there is space.
"""

import contextlib
import importlib.util
import json
import math
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

from utils.errors import UsageError
from utils.failpoints import failpoint
from utils.files import open_own
from utils.hyperparameters import Messages, table_of_runs
from utils.values import is_number

_RETRY_SECONDS = 1.0  # first pause after a failed write; doubles up to the longest
_LONGEST_RETRY_SECONDS = 30.0


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


class _Event(NamedTuple):
    wall_time: float
    step: int
    values: dict[str, float]
    flags: Mapping[str, object] | None = None  # of the run
    first: Collection[str] = ()  # of these


class EventWriter:
    """TensorBoard event files, written by a daemon thread of its own behind a bounded queue that drops the oldest.

    `add` never waits for the disk: tensorboardX's own queue does, for ever, once its thread has died of a full one.
    After a failed write the file is given up, as readers stop at a torn record, and a new one is begun after a pause.
    """

    def __init__(self, directory: Path, *, purge_step: int | None = None, capacity: int = 1000) -> None:
        """Start the thread.

        Args:
            directory: of the event files; made by the thread.
            purge_step: on resume: TensorBoard hides what earlier files hold from this step on.
            capacity: events that may wait.
        """
        self._records = _tensorboardx()
        self._directory = directory.absolute()
        self._purge_step, self._first_step = purge_step, purge_step or 0
        self._queue: deque[_Event] = deque(maxlen=capacity)
        self._changed = threading.Condition()
        self._closing = False
        self._dropped = 0
        self._written = 0
        self._thread = threading.Thread(target=self._run, name="event-writer", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Events that were lost, by a full queue or a failed write."""
        return self._dropped

    @property
    def written(self) -> int:
        """Events that are on disk."""
        return self._written

    def add(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Queue the values of tags at a step; returns at once.

        Args:
            step: position on TensorBoard's axis (env steps).
            values: number by tag.
        """
        self._queue_up(_Event(time.time(), int(step), {tag: float(value) for tag, value in values.items()}))

    def describe(self, flags: Mapping[str, object], first: Collection[str] = ()) -> None:
        """Queue the flags of a run for TensorBoard's table of runs, and which of them come first; returns at once."""
        self._queue_up(_Event(time.time(), self._first_step, {}, flags, first))

    def _queue_up(self, event: _Event) -> None:
        with self._changed:
            if self._closing or len(self._queue) == self._queue.maxlen:
                self._dropped += 1
            if not self._closing:
                self._queue.append(event)
                self._changed.notify()

    def close(self, timeout: float = 5.0) -> bool:
        """Write what is queued and stop; False when that took longer than `timeout` seconds and was given up."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        file: Any = None
        pause = _RETRY_SECONDS
        while events := self._take():
            try:
                failpoint("events.write")
                file = file or self._open()
                for event in events:
                    file.write(self._encode(event))
                file.flush()  # fsync included
                self._written += len(events)
                self._purge_step, pause = None, _RETRY_SECONDS
            except (OSError, ValueError):
                self._lose(len(events))
                _abandon(file)
                file = None
                self._sleep(pause)
                pause = min(2 * pause, _LONGEST_RETRY_SECONDS)
        _abandon(file)

    def _take(self) -> list[_Event]:
        """All that is queued, as soon as there is something; nothing when closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            events = list(self._queue)
            self._queue.clear()
            return events

    def _lose(self, count: int) -> None:
        with self._changed:
            self._dropped += count

    def _sleep(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, timeout=seconds)

    def _open(self) -> Any:
        """A new event file, with the version record that readers expect first."""
        self._directory.mkdir(parents=True, exist_ok=True)
        now = time.time_ns()
        name = f"events.out.tfevents.{now // 10**9}.{socket.gethostname()}.{os.getpid()}.{now % 10**9:09d}"
        file = self._records.RecordWriter(str(self._directory / name))
        try:
            file.write(self._records.Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
            if self._purge_step is not None:
                start = self._records.SessionLog(status=self._records.SessionLog.START)
                event = self._records.Event(wall_time=time.time(), step=self._purge_step, session_log=start)
                file.write(event.SerializeToString())
            file.flush()
        except OSError:
            _abandon(file)
            (self._directory / name).unlink(missing_ok=True)
            raise
        return file

    def _encode(self, event: _Event) -> Any:
        values = [self._records.Summary.Value(tag=tag, simple_value=value) for tag, value in event.values.items()]
        if event.flags is not None:
            values = table_of_runs(self._records.messages, event.flags, event.first)
        summary = self._records.Summary(value=values)
        return self._records.Event(wall_time=event.wall_time, step=event.step, summary=summary).SerializeToString()


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


class _Records(NamedTuple):
    RecordWriter: Any
    Event: Any
    SessionLog: Any
    Summary: Any
    messages: Messages


def _tensorboardx() -> _Records:
    """The record file and messages of tensorboardX, without running its package module.

    That module imports torch: 1.7 seconds and 200 MB in the main process, which has no other use for it. So the
    submodules are imported under a package that was found but not executed; a later `import tensorboardX` is ordinary.
    """
    present = sys.modules.get("tensorboardX")
    spec = importlib.util.find_spec("tensorboardX")
    if spec is None:
        raise ModuleNotFoundError("tensorboardX is not installed")
    try:
        if present is None:
            sys.modules["tensorboardX"] = importlib.util.module_from_spec(spec)
        from tensorboardX.proto import api_pb2, plugin_hparams_pb2, summary_pb2
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import RecordWriter
    finally:
        if present is None:
            del sys.modules["tensorboardX"]
    messages = Messages(api_pb2, plugin_hparams_pb2, summary_pb2)
    return _Records(RecordWriter, Event, SessionLog, summary_pb2.Summary, messages)


def _abandon(file: Any) -> None:
    """Close a record file whatever state it is in."""
    if file is not None:
        with contextlib.suppress(OSError):
            file.close()


def _plain(value: object) -> object:
    """A value as JSON knows it: numpy and torch scalars as numbers, what is not finite as null."""
    item = getattr(value, "item", None)
    plain: object = item() if callable(item) else value
    if isinstance(plain, float) and not math.isfinite(plain):
        return None
    return plain


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
