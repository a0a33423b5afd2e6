"""Reads a record batch of Arrow after comparing the sizes of its buffers with the allowed sizes.

The buffers of a record batch are listed in front of the batch, with their sizes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from appo.algorithms.datasets.episodes import Unfit
from appo.algorithms.datasets.stored import MOST_FIELDS, SLACK_BYTES, require_stored

BUFFERS = {"null": 0, "struct": 1, "fixed_size_list": 1} | dict.fromkeys(
    ["list", "large_list", "map", "fixed_size_binary", "decimal32", "decimal64", "decimal128", "decimal256"], 2
)
BUFFERS |= dict.fromkeys(("binary", "large_binary", "string", "large_string"), 3)
"""Number of buffers of the types that are read or can be left out; of those that are primitive two."""


def record_batch(pa: Any, content: bytes, most_bytes: Mapping[str, int]) -> Any:
    """Return the needed columns of an Arrow file as one record batch.

    Args:
        pa: module pyarrow.
        content: content of the file.
        most_bytes: largest size of each needed column; -1: optional column, checked by `require_stored`.

    Raises:
        ValueError, KeyError: a column is missing, too large, or of an unreadable type.
    """
    if content[:8] != b"ARROW1\0\0" or content[-6:] != b"ARROW1":
        raise ValueError("it is no whole file of Arrow")
    stream = pa.py_buffer(content).slice(8)
    messages = pa.ipc.MessageReader.open_stream(stream)
    schema = pa.ipc.read_schema(messages.read_next_message())
    left = [MOST_FIELDS]
    counts = [sum(_buffers(pa, field, left)) for field in schema]
    sizes = dict.fromkeys(schema.names, 0)
    for message in messages:
        if message.type != "record batch":
            raise ValueError(f"a {message.type}, which is not read")
        buffers = list(_buffer_bytes(message))
        if len(buffers) != sum(counts):
            raise ValueError("its buffers are not those of its columns")
        for name, count in zip(schema.names, counts, strict=True):
            sizes[name] += sum(buffers[:count])
            del buffers[:count]
    for name, most in most_bytes.items():
        if most >= 0 and name not in sizes:
            raise KeyError(f"no column {name}")
        if most >= 0 and sizes[name] > most + SLACK_BYTES:
            raise Unfit(f"{name} would take {sizes[name]} bytes, where the steps and the space allow {most}")
        require_stored(name, sizes.get(name, 0) if most < 0 else 0, len(content))
    included = [schema.names.index(name) for name in most_bytes if name in sizes]
    options = pa.ipc.IpcReadOptions(included_fields=included, use_threads=False)
    (batch,) = pa.ipc.open_stream(stream, options=options).read_all().combine_chunks().to_batches()
    batch.validate(full=True)
    return batch


def _buffers(pa: Any, field: Any, left: list[int]) -> Iterator[int]:
    """Yield the number of buffers of a field and of each inner field (ValueError: values lie elsewhere)."""
    kind = field.type
    left[0] -= 1
    if left[0] < 0:
        raise ValueError(f"it has more than {MOST_FIELDS} columns")
    if b"ARROW:extension:name" in (field.metadata or {}) or isinstance(kind, pa.BaseExtensionType):
        raise ValueError("a column of an extension type, which a pickle could stand for, is not read")
    name = re.split(r"\W", str(kind), maxsplit=1)[0]
    if name not in BUFFERS and not pa.types.is_primitive(kind):
        raise Unfit(f"a column of the type {name}, which is not read")
    yield BUFFERS.get(name, 2)
    for index in range(kind.num_fields):
        yield from _buffers(pa, kind.field(index), left)


def _buffer_bytes(message: Any) -> Iterator[int]:
    """Yield the size of each buffer of a record batch in memory (Message.fbs and Schema.fbs of Arrow)."""
    plain, body = message.metadata.to_pybytes(), memoryview(message.body)
    (root,) = struct.unpack_from("<I", plain)
    header = _offset(plain, _field(plain, root, 2))
    is_compressed = _field(plain, header, 3) > 0
    if not (place := _field(plain, header, 2)):
        return
    begin = _offset(plain, place)
    (count,) = struct.unpack_from("<I", plain, begin)
    for offset, length in struct.iter_unpack("<qq", plain[begin + 4 : begin + 4 + 16 * count]):
        if not 0 <= offset <= offset + length <= len(body):
            raise ValueError("a buffer outside of its file")
        said = struct.unpack_from("<q", body, offset)[0] if is_compressed and length else -1
        yield length if said < 0 else said


def _field(plain: bytes, table: int, number: int) -> int:
    """Return the position of a field in a table of flatbuffers; 0: missing."""
    vtable = table - struct.unpack_from("<i", plain, table)[0]
    size, place = struct.unpack_from("<H", plain, vtable)[0], 4 + 2 * number
    found = struct.unpack_from("<H", plain, vtable + place)[0] if place < size else 0
    return table + found if found else 0


def _offset(plain: bytes, place: int) -> int:
    found: int = place + struct.unpack_from("<I", plain, place)[0]
    return found
