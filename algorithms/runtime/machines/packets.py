"""Packets from an actor machine: whole slots, and reports of the machine's actors. No pickle: bytes and JSON."""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from appo.algorithms.runtime.machines.packing import BadPacket
from appo.algorithms.runtime.messages import EpisodesDone

MAGIC = b"APPO\x00slots2"
_HEAD = struct.Struct(f"<{len(MAGIC)}sI")
LARGEST_HEADER = 16 << 20
MOST_TEXTS, LONGEST_TEXT = 20, 4000


class PackedSlot(NamedTuple):
    """A slot on the way.

    Attributes:
        slot, sequence: number and hand-over of the slot on the machine, for the release.
        content: result of `SlotPacking.pack`.
        continues, follows: slot on the machine that the slot continues, and that slot's hand-over; -1: new episodes.
    """

    slot: int
    sequence: int
    content: bytes | memoryview
    continues: int = -1
    follows: int = 0


class Packet(NamedTuple):
    """The contents of a packet.

    Attributes:
        slots: whole slots.
        episodes: reports about episodes since the last packet.
        counts: totals of the machine's actors: episodes, rebuilds.
        warnings: texts for the log.
        failure: cause of the machine's end; empty for a working machine.
    """

    slots: tuple[PackedSlot, ...] = ()
    episodes: tuple[EpisodesDone, ...] = ()
    counts: Mapping[str, int] = {}
    warnings: tuple[str, ...] = ()
    failure: str = ""


def encode(packet: Packet) -> bytes:
    """Return a packet as bytes: magic, length of the header, header, slots one after the other."""
    header = {
        "slots": [(one.slot, one.sequence, one.continues + 1, one.follows, len(one.content)) for one in packet.slots],
        "episodes": [_plain(done) for done in packet.episodes],
        "counts": dict(packet.counts),
        "warnings": packet.warnings,
        "failure": packet.failure,
    }
    text = json.dumps(header).encode()
    return b"".join([_HEAD.pack(MAGIC, len(text)), text, *(one.content for one in packet.slots)])


def decode(data: bytes) -> Packet:
    """Return the packet in the bytes (BadPacket: no packet)."""
    try:
        magic, length = _HEAD.unpack_from(data)
        if magic != MAGIC or length > LARGEST_HEADER:
            raise BadPacket("not a packet of appo")
        start = _HEAD.size + length
        header = json.loads(data[_HEAD.size : start])
        slots, view = [], memoryview(data)
        for numbers in header["slots"]:
            slot, sequence, continues, follows, nbytes = map(_natural, numbers)
            slots.append(PackedSlot(slot, sequence, view[start : start + nbytes], continues - 1, follows))
            start += nbytes
        if start != len(data):
            raise BadPacket(f"a packet has {len(data)} bytes in place of {start}")
        return Packet(
            slots=tuple(slots),
            episodes=tuple(_episodes(plain) for plain in header["episodes"]),
            counts={str(name): _natural(count) for name, count in header["counts"].items()},
            warnings=tuple(str(text)[:LONGEST_TEXT] for text in header["warnings"][:MOST_TEXTS]),
            failure=str(header["failure"])[:LONGEST_TEXT],
        )
    except (struct.error, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise BadPacket(f"not a packet of appo: {type(error).__name__}") from None


def encode_releases(releases: Sequence[tuple[int, int]]) -> bytes:
    """Return pairs of slot and sequence as bytes."""
    return np.array(releases, "<i8").reshape(-1, 2).tobytes()


def decode_releases(data: bytes) -> list[tuple[int, int]]:
    """Return the pairs of slot and sequence."""
    return [(slot, sequence) for slot, sequence in np.frombuffer(data, "<i8").reshape(-1, 2).tolist()]


def _natural(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise ValueError
    return value


def _plain(done: EpisodesDone) -> dict[str, Any]:
    lists = {name: getattr(done, name).tolist() for name in ("policy", "episode_return", "length")}
    return {**lists, "stats": done.stats, "exploring": None if done.exploring is None else done.exploring.tolist()}


def _episodes(plain: Mapping[str, Any]) -> EpisodesDone:
    policy = np.array(plain["policy"], np.int32)
    returns, length = np.array(plain["episode_return"], np.float64), np.array(plain["length"], np.int64)
    exploring = None if plain["exploring"] is None else np.array(plain["exploring"], np.bool_)
    if {array.shape for array in (policy, returns, length, exploring) if array is not None} != {(len(policy),)}:
        raise ValueError
    stats = tuple(
        (_natural(owner), {str(name): float(value) for name, value in values.items()})
        for owner, values in plain["stats"]
    )
    return EpisodesDone(policy, returns, length, stats, exploring)
