"""TensorBoard's files beside `metrics.jsonl`. A full disk costs events, never training."""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

from appo.utils.failpoints import failpoint
from appo.utils.run_folder import remove_own
from appo.utils.tensorboard.event_files import EVENTS, EventFile, EventFolder, load_records
from appo.utils.tensorboard.summaries import histogram_of, image_of, table_of_runs

_RETRY_SECONDS = 1.0  # first pause after a failed write; doubles up to 30 s


class _Event(NamedTuple):
    wall_time: float
    step: int
    values: Mapping[str, Mapping[str, object]]  # tag -> fields of a summary's value
    flags: Mapping[str, object] | None = None  # all flags of the run
    first: Collection[str] = ()  # names of the flags to come first


def _check_tag(method: str, tag: object) -> None:
    """Refuse arguments in another order (TypeError)."""
    if not isinstance(tag, str):
        raise TypeError(f"{method}: the tag comes first, got {tag!r}")


class EventWriter:
    """TensorBoard event files, written by a daemon thread behind a bounded queue that drops the oldest events.

    `add` never waits for the disk. The queue of tensorboardX blocks for ever after a full disk has ended its thread.
    After a failed write the writer abandons the file, because readers stop at a torn record, and begins a new file
    after a pause.

    Attributes:
        dropped: number of events lost to a full queue or a failed write.
        written: number of events on disk.
    """

    def __init__(
        self, directory: Path, *, purge_step: int | None = None, capacity: int = 1000, most_bytes: int = 0
    ) -> None:
        """Start the thread.

        Args:
            directory: directory of the event files; the thread makes it, and no other process writes there.
            purge_step: first step of earlier files that TensorBoard hides, on resume.
            capacity: number of events that may wait.
            most_bytes: size of all files together above which all but the newest lose half of their events; 0: no
                limit.
        """
        self._most_bytes = most_bytes
        self._records = load_records()
        self._directory = directory.absolute()
        self._purge_step, self._first_step = purge_step, purge_step or 0
        self._queue: deque[_Event] = deque(maxlen=capacity)
        self._changed = threading.Condition()
        self._closing = False
        self.dropped = self.written = 0
        self._file: EventFile | None = None
        self._thread = threading.Thread(target=self._run, name="event-writer", daemon=True)
        self._thread.start()

    def add(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Queue numbers at a step; return at once."""
        self._queue_up(step, {tag: {"simple_value": float(value)} for tag, value in values.items()})

    # Arguments have the order and the names of torch.utils.tensorboard and tensorboardX.

    def add_scalar(self, tag: str, scalar_value: SupportsFloat, global_step: int) -> None:
        """Queue a number at a step; return at once."""
        _check_tag("add_scalar(tag, scalar_value, global_step)", tag)
        self.add(global_step, {tag: scalar_value})

    def add_histogram(self, tag: str, values: Iterable[SupportsFloat], global_step: int) -> None:
        """Queue a histogram of the finite values at a step, if any; return at once."""
        _check_tag("add_histogram(tag, values, global_step)", tag)
        if (found := histogram_of(values)) is not None:
            self._queue_up(global_step, {tag: {"histo": found}})

    def add_image(self, tag: str, img_tensor: Any, global_step: int, *, dataformats: str = "HWC") -> None:
        """Queue an image of uint8 with 1, 3 or 4 channels, in the order of `dataformats`, at a step; return at once.

        Raises:
            ValueError: the array is no image.
        """
        _check_tag("add_image(tag, img_tensor, global_step)", tag)
        if dataformats not in ("HWC", "CHW"):
            raise ValueError(f"dataformats={dataformats!r} is not one of HWC, CHW")
        pixels = img_tensor.cpu().numpy() if hasattr(img_tensor, "cpu") else img_tensor  # of torch, or of numpy
        if dataformats == "CHW" and pixels.ndim == 3:
            pixels = pixels.transpose(1, 2, 0)
        self._queue_up(global_step, {tag: {"image": image_of(pixels)}})

    def describe(self, flags: Mapping[str, object], first: Collection[str] = ()) -> None:
        """Queue the flags of a run, the `first` ones first, for TensorBoard's table of runs; return at once."""
        self._queue_up(self._first_step, {}, flags, first)

    def _queue_up(self, step: int, values: Mapping[str, Mapping[str, object]], *described: Any) -> None:
        event = _Event(time.time(), int(step), values, *described)
        with self._changed:
            self.dropped += self._closing or len(self._queue) == self._queue.maxlen
            if not self._closing:
                self._queue.append(event)
                self._changed.notify()

    def close(self, timeout: float = 5.0) -> bool:
        """Write all queued events and stop; return False if that took longer than `timeout` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause = _RETRY_SECONDS
        while events := self._take():
            try:
                self._write(events)
                pause = _RETRY_SECONDS
            except (OSError, ValueError):
                self._abandon()
                with self._changed:
                    self.dropped += len(events)
                    self._changed.wait_for(lambda: self._closing, timeout=pause)
                pause = min(2 * pause, 30.0)
        self._abandon()

    def _write(self, events: list[_Event]) -> None:
        failpoint("events.write")
        if self._file is not None and not self._file.is_in_place():  # removed or renamed
            self._abandon()
        file = self._file = self._file or self._open()
        summaries = self._records.summary.Summary
        for event in events:
            values = [summaries.Value(tag=tag, **fields) for tag, fields in event.values.items()]
            if event.flags is not None:
                values = table_of_runs(self._records, event.flags, event.first)
            file.write(self._records.Event(wall_time=event.wall_time, step=event.step, summary=summaries(value=values)))
        file.flush()
        self.written += len(events)
        self._purge_step = None
        if self._most_bytes and file.size > self._most_bytes // 4:
            self._abandon()  # a reader goes on in the next file
            EventFolder(self._directory, self._records).thin(self._most_bytes)

    def _abandon(self) -> None:
        if self._file is not None:
            self._file.abandon()
        self._file = None

    def _take(self) -> list[_Event]:
        """Wait for events and return all of the queue; [] when closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            events = list(self._queue)
            self._queue.clear()
            return events

    def _open(self) -> EventFile:
        """Return a new event file that begins with the version, which readers expect first."""
        now = time.time_ns()
        path = self._directory / f"{EVENTS}{now // 10**9}.{socket.gethostname()}.{os.getpid()}.{now % 10**9:09d}"
        file = EventFile(path, self._records)
        try:
            file.write(self._records.Event(wall_time=time.time(), file_version="brain.Event:2"))
            if self._purge_step is not None:
                start = self._records.SessionLog(status=self._records.SessionLog.START)
                file.write(self._records.Event(wall_time=time.time(), step=self._purge_step, session_log=start))
            file.flush()
        except OSError:
            file.abandon()
            remove_own(path)
            raise
        return file
