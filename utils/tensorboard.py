"""Figures of a run: the log that is the truth, and the TensorBoard files beside it.

Nothing here may stop training: a full disk costs figures, which are counted, and writing goes on when there is space.
"""

import contextlib
import importlib.util
import itertools
import json
import math
import os
import socket
import struct
import sys
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, SupportsFloat

from appo.utils.failpoints import failpoint
from appo.utils.run_folder import is_named, names_in_own, new_own, open_own, own_folder, remove_own, replace_own

# The flags of a run for TensorBoard's table of hyperparameters, as the messages of its plugin.


PLUGIN = "hparams"

PREFIX = "_hparams_"

METRICS = ("reward/mean", "len/mean", "perf/env_steps_per_second")
"""The columns of results."""

DIFFERS = b"\x38\x01"
"""Of a column that comes first: field 7 of TensorBoard's HParamInfo is true. tensorboardX does not know the field."""


class Messages(NamedTuple):
    """The modules of tensorboardX that define them."""

    api: Any
    plugin: Any
    summary: Any


def table_of_runs(
    messages: Messages, flags: Mapping[str, object], first: Collection[str] = (), metrics: Sequence[str] = METRICS
) -> list[Any]:
    """The values of a summary that declare the columns of a run and fill in its flags.

    Args:
        messages: of the plugin.
        flags: value by name.
        first: names of the columns to come first: TensorBoard shows five of them until it is asked for others.
        metrics: tags of the columns of results.
    """
    started = messages.plugin.SessionStartInfo()
    columns = []
    for name, value in flags.items():
        kind, field, plain = _typed(value)
        setattr(started.hparams[name], field, plain)
        columns.append(messages.api.HParamInfo(name=name, type=messages.api.DataType.Value(kind)))
        if name in first:
            columns[-1].MergeFromString(DIFFERS)
    results = [messages.api.MetricInfo(name=messages.api.MetricName(tag=tag)) for tag in metrics]
    declared = messages.api.Experiment(hparam_infos=columns, metric_infos=results)
    contents = {
        "experiment": messages.plugin.HParamsPluginData(experiment=declared),
        "session_start_info": messages.plugin.HParamsPluginData(session_start_info=started),
    }
    return [_value(messages.summary, name, content) for name, content in contents.items()]


def _typed(value: object) -> tuple[str, str, object]:
    """TensorBoard's type of a flag, the field that holds such a value, and the value."""
    if isinstance(value, bool):
        return "DATA_TYPE_BOOL", "bool_value", value
    if isinstance(value, int | float):
        return "DATA_TYPE_FLOAT64", "number_value", float(value)
    return "DATA_TYPE_STRING", "string_value", value if isinstance(value, str) else json.dumps(value)


def _value(module: Any, name: str, content: Any) -> Any:
    plugin = module.SummaryMetadata.PluginData(plugin_name=PLUGIN, content=content.SerializeToString())
    metadata = module.SummaryMetadata(plugin_data=plugin)
    return module.Summary.Value(tag=f"{PREFIX}/{name}", metadata=metadata)


_RETRY_SECONDS = 1.0  # first pause after a failed write; doubles up to the longest

_LONGEST_RETRY_SECONDS = 30.0


class _Event(NamedTuple):
    wall_time: float
    step: int
    values: dict[str, float]
    flags: Mapping[str, object] | None = None  # of the run
    first: Collection[str] = ()  # of these
    drawn: Mapping[str, Mapping[str, object]] = {}  # by tag, fields of TensorBoard's summaries that are no number


# Histograms and images of the user's.


BUCKETS = 30

PNG_COLOURS = {1: 0, 3: 2, 4: 6}
"""Channels of a picture -> colour type of PNG (ISO/IEC 15948): grey, RGB, RGBA."""


def histogram_of(values: Iterable[SupportsFloat]) -> dict[str, object] | None:
    """The fields of TensorBoard's HistogramProto: `BUCKETS` of one width; None without a finite value."""
    numbers = [number for value in values if math.isfinite(number := float(value))]
    if not numbers:
        return None
    low, high = min(numbers), max(numbers)
    width = (high - low) / BUCKETS or 1.0
    counts = [0] * BUCKETS
    for number in numbers:
        counts[min(int((number - low) / width), BUCKETS - 1)] += 1
    return {
        "min": low,
        "max": high,
        "num": len(numbers),
        "sum": sum(numbers),
        "sum_squares": sum(number * number for number in numbers),
        "bucket_limit": [low + width * (index + 1) for index in range(BUCKETS)],
        "bucket": counts,
    }


def image_of(pixels: Any) -> dict[str, object]:
    """The fields of TensorBoard's Image of an array of bytes [H, W, C], as PNG.

    Raises:
        ValueError: it is no such array.
    """
    if pixels.ndim != 3 or pixels.dtype.name != "uint8" or pixels.shape[2] not in PNG_COLOURS:
        turned = pixels.ndim == 3 and pixels.shape[0] in PNG_COLOURS and pixels.shape[2] not in PNG_COLOURS
        hint = "; dataformats='CHW' is for channels first" if turned else ""
        raise ValueError(f"an image is an array of uint8 [H, W, 1, 3 or 4], got {pixels.dtype} {pixels.shape}{hint}")
    height, width, channels = pixels.shape
    lines, length = pixels.tobytes(), width * channels
    raw = b"".join(b"\0" + lines[start : start + length] for start in range(0, len(lines), length))
    head = struct.pack(">IIBBBBB", width, height, 8, PNG_COLOURS[channels], 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    encoded = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )
    return {"height": height, "width": width, "colorspace": channels, "encoded_image_string": encoded}


def _check_tag(method: str, tag: object) -> None:
    """Refuse arguments in another order: the step used to come first (TypeError)."""
    if not isinstance(tag, str):
        raise TypeError(f"{method}: the tag comes first, got {tag!r}")


class _RecordFile:
    """A file of records as TensorFlow frames them: length, its checksum, content, its checksum.

    Args:
        file: to which they are appended.
        checksum: CRC-32C of bytes, masked as TensorFlow does.
        path: of the file.
    """

    def __init__(self, file: BinaryIO, checksum: Callable[[bytes], int], path: Path) -> None:
        self._file, self._checksum, self._path = file, checksum, path

    def is_in_place(self) -> bool:
        return is_named(self._file.fileno(), self._path)

    def write(self, content: bytes) -> None:
        self._file.write(framed(content, self._checksum))

    @property
    def size(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def framed(content: bytes, checksum: Callable[[bytes], int]) -> bytes:
    """A record as it stands in a file, see `_RecordFile`."""
    length = struct.pack("<Q", len(content))
    return b"".join((length, struct.pack("<I", checksum(length)), content, struct.pack("<I", checksum(content))))


def contents(file: BinaryIO) -> Iterator[bytes]:
    """The contents of all whole records of a file."""
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        length, _ = _HEAD.unpack(head)
        if length > _LONGEST_RECORD or len(content := file.read(length)) < length or len(file.read(4)) < 4:
            return
        yield content


_HEAD = struct.Struct("<QI")  # length and its checksum
_FRAME_BYTES = _HEAD.size + 4
_LONGEST_RECORD = 64 << 20
_EVENTS = "events.out.tfevents."
_EMPTY_BYTES = 64
"""Of a file that has nothing but its version."""


# What is left out of long curves.


class Thinning:
    """Chooses about half of what was written along curves, so that what stays is even along each of them.

    Leaving out every second one each time would forget the beginning of a long curve. First every point is shown to
    `see`, then, in the same order, to `keeps`.
    """

    def __init__(self) -> None:
        self._ends: dict[Hashable, tuple[float, float]] = {}
        self._counts = Counter[Hashable]()
        self._kept: dict[Hashable, float] = {}
        self._asked = Counter[Hashable]()

    def see(self, curve: Hashable, place: float) -> None:
        """Take note of a point of a curve at a place on its axis."""
        low, high = self._ends.get(curve, (place, place))
        self._ends[curve] = min(low, place), max(high, place)
        self._counts[curve] += 1

    def keeps(self, curve: Hashable, place: float) -> bool:
        """Whether a point stays: the next one in twice the mean distance, and each at which the curve goes back."""
        low, high = self._ends[curve]
        self._asked[curve] += 1
        last = self._kept.get(curve)
        if low == high:  # it stands still
            return self._asked[curve] % 2 == 1
        if last is not None and 0 <= place - last < 2 * (high - low) / self._counts[curve]:
            return False
        self._kept[curve] = place
        return True


class EventWriter:
    """TensorBoard event files, written by a daemon thread of its own behind a bounded queue that drops the oldest.

    `add` never waits for the disk: tensorboardX's own queue does, for ever, once its thread has died of a full one.
    After a failed write the file is given up, as readers stop at a torn record, and a new one is begun after a pause.
    """

    def __init__(
        self, directory: Path, *, purge_step: int | None = None, capacity: int = 1000, most_bytes: int = 0
    ) -> None:
        """Start the thread.

        Args:
            directory: of the event files; made by the thread. Nobody else writes there.
            purge_step: on resume: TensorBoard hides what earlier files hold from this step on.
            capacity: events that may wait.
            most_bytes: that all files may have; when they have more, about half of the events of all but the newest are
                left out. 0: there is no end.
        """
        self._most_bytes = most_bytes
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

    # Arguments in the order and with the names of torch.utils.tensorboard and tensorboardX.

    def add_scalar(self, tag: str, scalar_value: SupportsFloat, global_step: int) -> None:
        """Queue a number at a step; returns at once."""
        _check_tag("add_scalar(tag, scalar_value, global_step)", tag)
        self.add(global_step, {tag: scalar_value})

    def add_histogram(self, tag: str, values: Iterable[SupportsFloat], global_step: int) -> None:
        """Queue a histogram of values at a step, if any of them is finite; returns at once."""
        _check_tag("add_histogram(tag, values, global_step)", tag)
        if (found := histogram_of(values)) is not None:
            self._queue_up(_Event(time.time(), int(global_step), {}, drawn={tag: {"histo": found}}))

    def add_image(self, tag: str, img_tensor: Any, global_step: int, *, dataformats: str = "HWC") -> None:
        """Queue an image at a step; returns at once.

        Args:
            tag: of the image.
            img_tensor: bytes, of 1, 3 or 4 channels.
            global_step: as of `add`.
            dataformats: order of the axes, `HWC` or `CHW`.

        Raises:
            ValueError: it is no such array.
        """
        _check_tag("add_image(tag, img_tensor, global_step)", tag)
        if dataformats not in ("HWC", "CHW"):
            raise ValueError(f"dataformats={dataformats!r} is not one of HWC, CHW")
        pixels = img_tensor.cpu().numpy() if hasattr(img_tensor, "cpu") else img_tensor  # of torch, or of numpy
        if dataformats == "CHW" and pixels.ndim == 3:
            pixels = pixels.transpose(1, 2, 0)
        self._queue_up(_Event(time.time(), int(global_step), {}, drawn={tag: {"image": image_of(pixels)}}))

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
        file: _RecordFile | None = None
        pause = _RETRY_SECONDS
        while events := self._take():
            try:
                failpoint("events.write")
                if file is not None and not file.is_in_place():  # somebody has removed or renamed it
                    _abandon(file)
                    file = None
                file = file or self._open()
                for event in events:
                    file.write(self._encode(event))
                file.flush()  # fsync included
                self._written += len(events)
                self._purge_step, pause = None, _RETRY_SECONDS
                if self._most_bytes and file.size > self._most_bytes // 4:
                    _abandon(file)
                    file = None  # whoever looks at it meanwhile goes on in the next one
                    self._thin()
            except (OSError, ValueError):
                with self._changed:
                    self._dropped += len(events)
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

    def _sleep(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, timeout=seconds)

    def _thin(self) -> None:
        """Leave out events of all files but the newest while all of them are too large together."""
        with contextlib.suppress(OSError):  # on a full disk they stay as they are
            self._remove_temporaries()
            before = math.inf
            while 0.75 * self._most_bytes < (now := sum(self._sizes().values())) < 0.9 * before:
                before = now
                self._thin_once()

    def _thin_once(self) -> None:
        old = [path for name in list(self._sizes())[:-1] if self._is_sound(path := self._directory / name)]
        thinning = Thinning()
        for curve, event, _ in self._events_of(old):
            if curve:
                thinning.see(curve, event.step)
        before = sum(path.lstat().st_size for path in old)
        left = sum([self._rewrite(path, lambda curve, event: thinning.keeps(curve, event.step)) for path in old])
        if left > 0.75 * before:  # curves of a single point
            turn = itertools.count()
            for path in old:
                if os.path.lexists(path):  # one without events is gone
                    self._rewrite(path, lambda curve, event: next(turn) % 2 == 0)

    def _is_sound(self, path: Path) -> bool:
        """Whether a file has events and at most a torn one at its end; one that is damaged before is left as it is."""
        size = 0
        try:
            with open_own(path) as file:
                for content in contents(file):
                    self._records.Event.FromString(content)
                    size += _FRAME_BYTES + len(content)
                file.seek(size)
                head = file.read(_HEAD.size)
        except self._records.DecodeError:
            return False
        if len(head) < _HEAD.size:
            return True
        length, checksum = _HEAD.unpack(head)
        return bool(length <= _LONGEST_RECORD and checksum == self._records.checksum(head[:8]))

    def _remove_temporaries(self) -> None:
        """Remove what a process has left that was killed while it rewrote a file."""
        for name in names_in_own(self._directory):
            if name.startswith(f".{_EVENTS}"):
                remove_own(self._directory / name)

    def _sizes(self) -> dict[str, int]:
        """Of all event files, the oldest first."""
        with own_folder(self._directory) as folder:
            names = sorted(name for name in os.listdir(folder) if name.startswith(_EVENTS))
            return {name: os.lstat(name, dir_fd=folder).st_size for name in names}

    def _events_of(self, paths: Iterable[Path]) -> Iterator[tuple[str, Any, bytes]]:
        """Every event of files, with the name of its curve; none for what tells how to read others."""
        for path in paths:
            with open_own(path) as file:
                for content in contents(file):
                    event = self._records.Event.FromString(content)
                    tags = [value.tag for value in event.summary.value]
                    yield ("" if not tags or any(tag.startswith(PREFIX) for tag in tags) else tags[0]), event, content

    def _rewrite(self, path: Path, keeps: Callable[[str, Any], bool]) -> int:
        """Leave out events of a file; its size then. One without events is removed."""
        size = 0

        def kept() -> Iterator[bytes]:
            nonlocal size
            for curve, event, content in self._events_of([path]):
                if not curve or keeps(curve, event):
                    record = framed(content, self._records.checksum)
                    size += len(record)
                    yield record

        replace_own(path, kept())
        if size <= _EMPTY_BYTES:
            remove_own(path)
        return size

    def _open(self) -> _RecordFile:
        """A new event file, with the version record that readers expect first."""
        now = time.time_ns()
        name = f"{_EVENTS}{now // 10**9}.{socket.gethostname()}.{os.getpid()}.{now % 10**9:09d}"
        path = self._directory / name
        file = _RecordFile(os.fdopen(new_own(path, make=True), "wb"), self._records.checksum, path)
        try:
            file.write(self._records.Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
            if self._purge_step is not None:
                start = self._records.SessionLog(status=self._records.SessionLog.START)
                event = self._records.Event(wall_time=time.time(), step=self._purge_step, session_log=start)
                file.write(event.SerializeToString())
            file.flush()
        except OSError:
            _abandon(file)
            remove_own(path)
            raise
        return file

    def _encode(self, event: _Event) -> Any:
        values = [self._records.Summary.Value(tag=tag, simple_value=value) for tag, value in event.values.items()]
        values += [self._records.Summary.Value(tag=tag, **fields) for tag, fields in event.drawn.items()]
        if event.flags is not None:
            values = table_of_runs(self._records.messages, event.flags, event.first)
        summary = self._records.Summary(value=values)
        return self._records.Event(wall_time=event.wall_time, step=event.step, summary=summary).SerializeToString()


class _Records(NamedTuple):
    checksum: Callable[[bytes], int]
    DecodeError: type[Exception]
    Event: Any
    SessionLog: Any
    Summary: Any
    messages: Messages


def _tensorboardx() -> _Records:
    """The checksum and messages of tensorboardX, without running its package module.

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
        from tensorboardX.record_writer import masked_crc32c
    finally:
        if present is None:
            del sys.modules["tensorboardX"]
    messages = Messages(api_pb2, plugin_hparams_pb2, summary_pb2)
    damaged = importlib.import_module("google.protobuf.message").DecodeError
    return _Records(masked_crc32c, damaged, Event, SessionLog, summary_pb2.Summary, messages)


def _abandon(file: _RecordFile | None) -> None:
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
