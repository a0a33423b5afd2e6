"""A slot as one buffer: every byte comes back, and bytes that no actor writes are refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from appo.algorithms.runtime.machines.packing import BadPacket, SlotPacking
from appo.envs.spec import ActionPart, ActionSpec, EnvSpec, ObservationSpec
from tests.unit.runtime.worlds import BOOKKEEPING, SPEC, World, arrays_of, number_all, world_of

IMAGES = EnvSpec(
    {"image": ObservationSpec((3, 4, 5), "uint8"), "speed": ObservationSpec((2,), "float32")},
    ActionSpec((ActionPart("categorical", 4), ActionPart("bernoulli", 1), ActionPart("gaussian", 2)), (-1, -1), (1, 1)),
    same_step=True,
)


def filled(spec: EnvSpec = SPEC, **counts: object) -> World:
    """A world of slots in which actors could have written all numbers."""
    world = world_of(spec, **counts)
    number_all(world)
    t = world.trajectories
    t.action[:] = 1
    return world


def random_bytes(world: World) -> None:
    """Fill all fields that travel, invalid steps included, with random bytes; flags stay flags."""
    random = np.random.default_rng(1)
    for name, array in arrays_of(world.trajectories).items():
        if name not in BOOKKEEPING and array.size:
            high = 2 if array.dtype == np.bool_ else 256
            array.reshape(-1).view(np.uint8)[:] = random.integers(0, high, array.nbytes)
    t = world.trajectories
    t.valid[:], t.policy_id[:] = False, 0


@pytest.mark.parametrize("compression", ["off", "lz4"])
@pytest.mark.parametrize(("spec", "rnn"), [(SPEC, 0), (IMAGES, 6)])
def test_all_bytes_of_a_slot_come_back_in_another_slot(spec: EnvSpec, rnn: int, compression: str) -> None:
    here, there = (world_of(spec, rnn_state_size=rnn, recurrence=2) for _ in range(2))
    random_bytes(here)
    pack, unpack = (SlotPacking(w.trajectories, spec.action, compression=compression) for w in (here, there))
    data = pack.pack(1)
    assert compression == "lz4" or len(data) == pack.nbytes
    unpack.unpack(data, 2, version=1)
    ours, theirs = arrays_of(here.trajectories), arrays_of(there.trajectories)
    sent = [name for name in ours if name not in BOOKKEEPING]
    assert {name: theirs[name][2].tobytes() for name in sent} == {name: ours[name][1].tobytes() for name in sent}
    assert not any(theirs[name].any() for name in BOOKKEEPING)
    others = np.arange(len(there.trajectories.owner)) != 2
    assert not any(theirs[name][others].any() for name in sent)


def test_a_buffer_holds_each_byte_of_a_slot_once() -> None:
    world = filled(IMAGES, rollout=5)
    packing = SlotPacking(world.trajectories, IMAGES.action)
    fields = {name: a for name, a in arrays_of(world.trajectories).items() if name not in BOOKKEEPING}
    assert packing.nbytes == sum(array[0].nbytes for array in fields.values())


def test_layouts_differ_with_the_environment_and_the_rollout() -> None:
    worlds = [(world_of(), SPEC), (world_of(rollout=5), SPEC), (world_of(IMAGES), IMAGES)]
    assert len({SlotPacking(w.trajectories, spec.action).layout for w, spec in worlds}) == 3
    assert SlotPacking(world_of(num_actors=7).trajectories, SPEC.action).layout == (
        SlotPacking(world_of().trajectories, SPEC.action).layout
    )


HOSTILE: dict[str, Callable[[Any], Any]] = {
    "policy_id": lambda t: t.policy_id.fill(1),
    "num_frames": lambda t: t.num_frames.fill(-1),
    "policy_version": lambda t: t.policy_version.fill(8),
    "action": lambda t: t.action.fill(4),
    "valid": lambda t: t.valid.view(np.uint8).fill(2),
    "first": lambda t: t.first.view(np.uint8).fill(255),
}


@pytest.mark.parametrize("field", HOSTILE)
def test_numbers_that_no_actor_writes_are_refused(field: str) -> None:
    here, there = filled(), world_of()
    there_packing = SlotPacking(there.trajectories, SPEC.action)
    packing = SlotPacking(here.trajectories, SPEC.action)
    there_packing.unpack(packing.pack(0), 0, version=7)
    HOSTILE[field](here.trajectories)
    with pytest.raises(BadPacket, match=field):
        there_packing.unpack(packing.pack(0), 0, version=7)


@pytest.mark.parametrize("compression", ["off", "lz4"])
@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d + b"x", lambda d: b"", lambda d: b"\xff" * len(d)])
def test_buffers_of_another_size_are_refused(change: Callable[[bytes], bytes], compression: str) -> None:
    world = filled()
    packing = SlotPacking(world.trajectories, SPEC.action, compression=compression)
    with pytest.raises(BadPacket):
        packing.unpack(change(packing.pack(0)), 1, version=7)
