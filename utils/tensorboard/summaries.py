"""Contents of TensorBoard's summaries: a run's flags in the table of hyperparameters, histograms, images."""

import json
import math
import struct
import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, SupportsFloat

from appo.utils.tensorboard.event_files import Records

METRICS = ("reward/mean", "len/mean", "perf/env_steps_per_second")
"""Columns of results."""

DIFFERS = b"\x38\x01"
"""Field 7 of TensorBoard's HParamInfo, which puts a column first, as true. tensorboardX does not have the field."""

BUCKETS = 30

PNG_COLOURS = {1: 0, 3: 2, 4: 6}
"""Channels of a picture -> colour type of PNG (ISO/IEC 15948): grey, RGB, RGBA."""


def table_of_runs(records: Records, flags: Mapping[str, object], first: Collection[str]) -> list[Any]:
    """Return the summary values that declare the columns of a run and contain its flags.

    Args:
        records: modules of tensorboardX.
        flags: value of each flag by name.
        first: names of the columns to come first; TensorBoard shows only five columns at the start.
    """
    plain = {name: v if isinstance(v, bool | int | float | str) else json.dumps(v) for name, v in flags.items()}
    declared, started, _ = records.summary.hparams(plain, dict.fromkeys(METRICS))
    plugin = declared.value[0].metadata.plugin_data
    columns = records.HParamsPluginData.FromString(plugin.content)
    for column in columns.experiment.hparam_infos:
        if column.name in first:
            column.MergeFromString(DIFFERS)
    plugin.content = columns.SerializeToString()
    return [*declared.value, *started.value]


def histogram_of(values: Iterable[SupportsFloat]) -> dict[str, object] | None:
    """Return the fields of TensorBoard's HistogramProto, `BUCKETS` of one width; None without a finite value."""
    numbers = [number for value in values if math.isfinite(number := float(value))]
    if not numbers:
        return None
    low, high, counts = min(numbers), max(numbers), [0] * BUCKETS
    width = (high - low) / BUCKETS or 1.0
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
    """Return the fields of TensorBoard's Image, with the pixels [H, W, C] as PNG; tensorboardX needs Pillow for that.

    Raises:
        ValueError: the array is not of uint8, or has other axes.
    """
    if pixels.ndim != 3 or pixels.dtype.name != "uint8" or pixels.shape[2] not in PNG_COLOURS:
        turned = pixels.ndim == 3 and pixels.shape[0] in PNG_COLOURS and pixels.shape[2] not in PNG_COLOURS
        hint = "; dataformats='CHW' is for channels first" if turned else ""
        raise ValueError(f"an image is an array of uint8 [H, W, 1, 3 or 4], got {pixels.dtype} {pixels.shape}{hint}")
    height, width, channels = pixels.shape
    lines, length = pixels.tobytes(), width * channels
    raw = b"".join(b"\0" + lines[start : start + length] for start in range(0, len(lines), length))
    head = struct.pack(">IIBBBBB", width, height, 8, PNG_COLOURS[channels], 0, 0, 0)
    encoded = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in ((b"IHDR", head), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    )
    return {"height": height, "width": width, "colorspace": channels, "encoded_image_string": encoded}
