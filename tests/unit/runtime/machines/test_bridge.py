"""The bridge and the uplink, joined by a wire without a network: ownership, back-pressure, counts and losses."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from appo.algorithms.runtime.machines.bridge import BridgePlan, BridgeWorker
from appo.algorithms.runtime.machines.packets import PackedSlot, Packet, decode, encode, encode_releases
from appo.algorithms.runtime.machines.packing import SlotPacking
from appo.algorithms.runtime.machines.uplink import Uplink
from appo.algorithms.runtime.memory.ownership import LearnerLedger
from appo.algorithms.runtime.memory.weights import WeightRing, checksum
from appo.algorithms.runtime.messages import (
    Address,
    Begin,
    EpisodesDone,
    Message,
    SlotReleased,
    Stop,
    TrajectoryReady,
    WorkerReport,
)
from appo.algorithms.runtime.processes.channels import Doorbell
from tests.unit.runtime.worlds import SPEC, World, number_all, world_of

WEIGHTS = np.arange(5, dtype=np.float32)
EPISODE = EpisodesDone(np.zeros(1, np.int32), np.array([2.0]), np.array([8]), ())


class FakeWire:
    """Keeps what the bridge asks for; the test is the machines."""

    def __init__(self) -> None:
        self.arrived: deque[tuple[int, bytes]] = deque()
        self.asked: list[int] = []
        self.released: list[tuple[int, int, int]] = []
        self.dropped: list[tuple[int, str]] = []
        self.last: list[tuple[int, bytes]] = []

    @property
    def ready(self) -> bool:
        return bool(self.arrived)

    def begin(self) -> None:
        self.asked.append(-1)

    def receive(self) -> Iterator[tuple[int, bytes]]:
        while self.arrived:
            yield self.arrived.popleft()

    def name(self, machine: int) -> str:
        return f"{machine} (10.0.0.{machine})"

    def ask(self, machine: int) -> None:
        self.asked.append(machine)

    def release(self, machine: int, slot: int, sequence: int) -> None:
        self.released.append((machine, slot, sequence))

    def drop(self, machine: int, why: str) -> None:
        self.dropped.append((machine, why))

    def work(self) -> None:
        pass

    def close(self) -> Iterator[tuple[int, bytes]]:
        yield from self.last


def ring_in(world: World) -> WeightRing:
    ring = WeightRing(world.arena, 0)
    ring.publish(WEIGHTS, 3)
    return ring


def head(world: World, **plan: Any) -> tuple[BridgeWorker, FakeWire]:
    """A bridge with the two groups of two slots behind the only actor's."""
    wire, t = FakeWire(), world.topology
    groups = t.groups_of(1)
    slots = range(t.slots_of(groups.start).start, t.num_slots)
    address = t.fillers[1]
    packing = SlotPacking(world.trajectories, SPEC.action)
    return BridgeWorker(BridgePlan(address, groups, slots, **plan), packing, wire, ring_in(world)), wire


def world(**counts: Any) -> World:
    return world_of(more=tuple(WeightRing.declare(0, 5)), groups_per_actor=1, **counts)


def on_head() -> World:
    return world(bridged=2)


def content(number: int, valid: int = 12) -> bytes:
    """A slot of another machine: its rewards are the number, and so many of 12 steps are valid."""
    other = world()
    number_all(other)
    t = other.trajectories
    t.action[:], t.reward[:] = 1, number
    t.valid[:] = (np.arange(12) < valid).reshape(4, 3)
    return SlotPacking(t, SPEC.action).pack(0)


def packet(*slots: tuple[int, int, int], **more: Any) -> bytes:
    """A packet of slots, each as number there, sequence there, and the content's number."""
    return encode(Packet(tuple(PackedSlot(slot, sequence, content(n)) for slot, sequence, n in slots), **more))


def turn(bridge: BridgeWorker) -> list[Message]:
    return list(bridge.work())


def test_the_bridge_owns_the_groups_behind_the_actors() -> None:
    bridge, _ = head(on_head())
    assert bridge.plan.address == Address("bridge", 1)
    assert (list(bridge.plan.groups), list(bridge.plan.slots)) == ([1, 2], [2, 3, 4, 5])


def test_slots_are_handed_over_as_an_actor_does() -> None:
    here = on_head()
    bridge, wire = head(here)
    list(bridge.handle(Begin()))
    assert wire.asked == [-1]
    wire.arrived += [(7, packet((0, 1, 41), (1, 5, 42)))]
    assert turn(bridge) == [TrajectoryReady(0, 2, 1, 0, 0), TrajectoryReady(0, 3, 1, 0, 0)]
    t = here.trajectories
    assert (t.owner.tolist(), t.sequence.tolist()) == ([0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0])
    assert (t.reward[2] == 41).all()
    assert (t.reward[3] == 42).all()
    assert t.continues[[2, 3]].tolist() == [-1, -1]
    assert wire.asked == [-1, 7]  # once for the packet
    assert list(bridge.handle(SlotReleased(0, 3, 1))) == []
    assert (wire.released, t.owner.tolist()) == ([(7, 1, 5)], [0, 0, 1, 0, 0, 0])
    list(bridge.handle(SlotReleased(0, 3, 1)))  # again
    assert wire.released == [(7, 1, 5)]


def test_a_slot_goes_on_from_the_copy_of_the_slot_before() -> None:
    here = on_head()
    bridge, wire = head(here)
    list(bridge.handle(Begin()))
    before, after = PackedSlot(0, 5, content(1)), PackedSlot(1, 3, content(2), 0, 5)
    wire.arrived += [(1, encode(Packet((before, after)))), (2, encode(Packet((PackedSlot(1, 3, content(3), 0, 5),))))]
    assert [m.slot for m in turn(bridge)] == [2, 3, 4]  # type: ignore[union-attr]
    t = here.trajectories
    assert (t.continues[2:5].tolist(), t.follows[2:5].tolist()) == ([-1, 2, -1], [0, 1, 0])
    list(bridge.handle(SlotReleased(0, 2, 1)))
    wire.arrived += [(1, encode(Packet((PackedSlot(0, 6, content(4), 1, 2), PackedSlot(1, 4, content(5), 0, 6)))))]
    assert [m.slot for m in turn(bridge)] == [5, 2]  # type: ignore[union-attr]
    # Hand-over 2 of slot 1 never came; the last slot goes on from the one that did.
    assert (t.continues[[5, 2]].tolist(), t.follows[[5, 2]].tolist()) == ([-1, 5], [0, 1])


def test_no_packet_is_asked_for_while_a_slot_waits() -> None:
    bridge, wire = head(on_head())
    list(bridge.handle(Begin()))
    wire.arrived += [(1, packet((0, 1, 1), (1, 1, 2), (2, 1, 3))), (2, packet((0, 1, 4), (1, 1, 5)))]
    assert [m.slot for m in turn(bridge)] == [2, 3, 4, 5]  # type: ignore[union-attr]
    assert wire.asked == [-1, 1]  # machine 2 has a slot that waits
    assert not bridge.pending()
    assert turn(bridge) == []
    list(bridge.handle(SlotReleased(0, 4, 1)))
    assert bridge.pending()
    assert turn(bridge) == [TrajectoryReady(0, 4, 2, 0, 0)]
    assert wire.asked == [-1, 1, 2]
    assert bridge.trajectories.reward[4, 0, 0] == 5


def test_counts_are_of_steps_that_are_handed_over() -> None:
    here = on_head()
    bridge, wire = head(here)
    list(bridge.handle(Begin()))
    slots = tuple(PackedSlot(slot, 1, content(slot, valid=5)) for slot in range(6))
    wire.arrived += [(1, encode(Packet(slots, (EPISODE,), {"episodes": 1, "rebuilds": 2})))]
    messages = turn(bridge)
    assert [type(m) for m in messages] == [EpisodesDone] + [TrajectoryReady] * 4
    list(bridge.handle(SlotReleased(0, 2, 1)))
    (report,) = bridge.handle(Stop())
    expected = {"collected": 20, "reset_rows": 28, "trajectories": 4, "sent": 4, "released": 1, "rebuilds": 2}
    assert report == WorkerReport("bridge", {**expected, "episodes": 1})
    assert here.trajectories.group_counts[1, :7].tolist() == [20, 28, 4, 4, 1, 2, 1]
    assert not here.trajectories.group_counts[[0, 2]].any()


def test_another_bridge_goes_on_from_the_memory_of_a_dead_one() -> None:
    here = on_head()
    bridge, wire = head(here)
    list(bridge.handle(Begin()))
    wire.arrived += [(1, packet((0, 1, 1), (1, 1, 2)))]
    turn(bridge)
    LearnerLedger(here.trajectories, 0).release(SlotReleased(0, 3, 1))  # the message is lost with the bridge
    again, wire = head(here, generation=1)
    assert list(again.handle(Begin())) == [TrajectoryReady(0, 2, 1, 1, 0)]
    assert again.totals == bridge.totals | {"released": 1}
    list(again.handle(SlotReleased(0, 2, 1)))
    assert (wire.released, sorted(again.free)) == ([], [2, 3, 4, 5])  # the machine is lost with the bridge


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"junk", "not a packet"),
        (encode(Packet((PackedSlot(0, 1, b"junk"), PackedSlot(1, 1, content(1))))), "4 bytes in place of"),
        (encode(Packet(failure="the environment failed")), "the environment failed"),
    ],
)
def test_a_machine_that_sends_nonsense_is_dropped(data: bytes, why: str) -> None:
    here = on_head()
    bridge, wire = head(here)
    list(bridge.handle(Begin()))
    wire.arrived += [(1, data), (2, packet((0, 1, 9)))]
    assert turn(bridge) == [TrajectoryReady(0, 2, 1, 0, 0)]
    assert [machine for machine, _ in wire.dropped] == [1]
    assert why in wire.dropped[0][1]
    assert here.trajectories.reward[2, 0, 0] == 9
    assert (wire.asked, sorted(bridge.free)) == ([-1, 2], [3, 4, 5])


def test_takers_are_drawn_as_actors_draw_them() -> None:
    here = on_head()
    bridge, wire = head(here, num_takers=3, seed=1)
    list(bridge.handle(Begin()))
    wire.arrived += [(1, packet(*((slot, 1, slot) for slot in range(4))))]
    takers = [m.taker for m in turn(bridge)]  # type: ignore[union-attr]
    assert takers == here.trajectories.taker[2:].tolist() == np.random.default_rng(1).integers(3, size=4).tolist()


# The machine's side.


def machine() -> tuple[Uplink, World, list[int]]:
    there, woken = world(num_actors=2), list[int]()
    packing = SlotPacking(there.trajectories, SPEC.action)
    return Uplink(there.arena, packing, Doorbell(), woken.append), there, woken


def fill(there: World, slot: int) -> None:
    t = there.trajectories
    t.sequence[slot] += 1
    t.owner[slot] = 1


def test_the_uplink_takes_each_hand_over_once_and_releases_what_the_head_has_released() -> None:
    uplink, there, woken = machine()
    fill(there, 2)
    assert [(s.slot, s.sequence) for s in decode(uplink.take(0.0)).slots] == [(2, 1)]
    assert decode(uplink.take(0.0)).slots == ()
    assert there.trajectories.owner[2] == 1  # the group writes nothing until the head has released it
    uplink.give(encode_releases([(2, 1)]), 0, 0, 0, b"")
    assert (there.trajectories.released[2, 0], woken) == (1, [2])
    fill(there, 2)
    assert [(s.slot, s.sequence) for s in decode(uplink.take(0.0)).slots] == [(2, 2)]


def test_weights_are_published_before_slots_are_released() -> None:
    uplink, there, _ = machine()
    seen: list[int] = []
    uplink.wake = lambda slot: seen.append(uplink.ring.published)
    uplink.give(encode_releases([(0, 1)]), 0, 4, checksum(WEIGHTS), WEIGHTS.tobytes())
    assert seen == [4]
    version, weights = WeightRing(there.arena, 0).fetch(0)
    assert version == 4
    assert weights is not None
    assert weights.tolist() == WEIGHTS.tolist()


def test_damaged_and_old_weights_are_not_published() -> None:
    uplink, _, _ = machine()
    uplink.give(b"", 0, 4, checksum(WEIGHTS), WEIGHTS.tobytes())
    uplink.give(b"", 0, 5, checksum(WEIGHTS) + 1, WEIGHTS.tobytes())
    uplink.give(b"", 0, 3, checksum(WEIGHTS), WEIGHTS.tobytes())
    assert uplink.ring.published == 4


@pytest.mark.parametrize("counts", [(0,), (7, 12), (12, 12, 40)])
def test_policies_of_a_machine_see_the_agent_steps_that_the_learner_has_counted(counts: tuple[int, ...]) -> None:
    uplink, there, _ = machine()
    for agent_steps in counts:
        uplink.give(b"", agent_steps, 0, 0, b"")
    noted = LearnerLedger(there.trajectories, 0).noted()
    assert noted == dict.fromkeys(noted, 0) | {"samples": counts[-1]}


def test_reports_of_actors_travel_with_the_next_packet() -> None:
    uplink, _, _ = machine()
    uplink.reports.add(EPISODE)
    uplink.reports.add(WorkerReport("actor_0", {"episodes": 1, "rebuilds": 0, "collected": 9}, ("odd",)))
    uplink.reports.add(WorkerReport("actor_1", {"episodes": 2, "rebuilds": 3}))
    found = decode(uplink.take(0.0))
    assert found.counts == {"episodes": 3, "rebuilds": 3}
    assert (len(found.episodes), found.warnings) == (1, ("actor_0: odd",))
    assert decode(uplink.take(0.0))._replace(counts={}) == Packet()


def test_a_machine_fills_no_more_slots_than_it_has_while_the_head_releases_none() -> None:
    here = on_head()
    bridge, wire = head(here)
    uplink, there, _ = machine()
    list(bridge.handle(Begin()))
    number_all(there)
    there.trajectories.action[:] = 1
    for slot in range(4):  # all there are
        fill(there, slot)
    wire.arrived += [(0, uplink.take(0.0))]
    handed = [m for m in turn(bridge) if isinstance(m, TrajectoryReady)]
    assert len(handed) == 4
    assert not any(there.trajectories.released.reshape(-1))
    list(bridge.handle(SlotReleased(0, handed[1].slot, 1)))
    uplink.give(encode_releases([(slot, sequence) for _, slot, sequence in wire.released]), 0, 0, 0, b"")
    assert there.trajectories.released[:, 0].tolist() == [0, 1, 0, 0]


def test_topology_of_a_remote_run_starts_no_learner() -> None:
    remote = replace(world().topology, placement="local", is_remote=True)
    assert list(remote.processes()) == ["learner_0", "actor_0"]
    assert (list(remote.started()), remote.num_takers) == (["actor_0"], 1)


def test_a_warning_names_its_machine() -> None:
    bridge, wire = head(on_head())
    list(bridge.handle(Begin()))
    wire.arrived += [(7, encode(Packet(warnings=("actor_0: odd",))))]
    turn(bridge)
    (report,) = (m for m in bridge.handle(Stop()) if isinstance(m, WorkerReport))
    assert report.raised == ("machine 7 (10.0.0.7): actor_0: odd",)
