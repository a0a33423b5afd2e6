"""Packets: what a machine sends arrives, and no other bytes raise anything but `BadPacket`."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appo.algorithms.runtime.machines.packets import (
    MAGIC,
    PackedSlot,
    Packet,
    decode,
    decode_releases,
    encode,
    encode_releases,
)
from appo.algorithms.runtime.machines.packing import BadPacket
from appo.algorithms.runtime.messages import EpisodesDone

EPISODES = EpisodesDone(
    np.array([0, 0], np.int32),
    np.array([1.5, -1e300]),
    np.array([7, 2**40]),
    ((0, {"score": 0.1}), (0, {})),
    np.array([True, False]),
)
FULL = Packet((PackedSlot(3, 9, b"abc"), PackedSlot(0, 1, b"")), (EPISODES,), {"episodes": 2}, ("a warning",), "why")


def header_of(data: bytes) -> dict[str, object]:
    start = len(MAGIC) + 4
    return json.loads(data[start : start + int.from_bytes(data[len(MAGIC) : start], "little")])


def with_header(header: object, rest: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return MAGIC + len(text).to_bytes(4, "little") + text + rest


def test_a_packet_arrives_as_it_was_sent() -> None:
    found = decode(encode(FULL))
    assert [(s.slot, s.sequence, bytes(s.content)) for s in found.slots] == [(3, 9, b"abc"), (0, 1, b"")]
    assert (found.counts, found.warnings, found.failure) == (FULL.counts, FULL.warnings, FULL.failure)
    (done,) = found.episodes
    for name in ("policy", "episode_return", "length", "exploring"):
        ours, theirs = getattr(EPISODES, name), getattr(done, name)
        assert (theirs.dtype, theirs.tolist()) == (ours.dtype, ours.tolist())
    assert done.stats == EPISODES.stats
    assert decode(encode(Packet())) == Packet()


def test_releases_arrive_as_they_were_sent() -> None:
    assert decode_releases(encode_releases([(1, 2), (3, 2**60)])) == [(1, 2), (3, 2**60)]
    assert decode_releases(encode_releases([])) == []


GOOD = header_of(encode(Packet()))
DONE = {"policy": [0], "episode_return": [1.0], "length": [1], "stats": [], "exploring": None}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 100,
        encode(FULL)[:-1],
        encode(FULL) + b"x",
        MAGIC + (2**31).to_bytes(4, "little"),
        with_header([]),
        with_header({}),
        with_header({**GOOD, "slots": [[0, 1, -1]]}),
        with_header({**GOOD, "slots": [[0, 1, 2**70]]}),
        with_header({**GOOD, "slots": [[0, True, 0]]}),
        with_header({**GOOD, "slots": [[0, 1]]}),
        with_header({**GOOD, "slots": [[0, 1, 2]]}, b"x"),
        with_header({**GOOD, "counts": [1]}),
        with_header({**GOOD, "counts": {"episodes": 1.5}}),
        with_header({**GOOD, "warnings": 3}),
        with_header({**GOOD, "episodes": [{**DONE, "length": [1, 2]}]}),
        with_header({**GOOD, "episodes": [{**DONE, "policy": ["0.5x"]}]}),
        with_header({**GOOD, "episodes": [{**DONE, "policy": [2**40]}]}),
        with_header({**GOOD, "episodes": [{**DONE, "stats": [[0, {"score": "much"}]]}]}),
        MAGIC + (60000).to_bytes(4, "little") + b"[" * 60000,
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BadPacket):
        decode(data)


@given(st.integers(0, len(encode(FULL)) - 1), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_changes_a_value(place: int, value: int) -> None:
    data = bytearray(encode(FULL))
    data[place] = value
    try:
        found = decode(bytes(data))
    except BadPacket:
        return
    assert sum(len(slot.content) for slot in found.slots) == 3
