"""The bridge: owns slots on the head as an actor does, and fills the slots with trajectories of machines."""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from appo.algorithms.runtime.machines.packets import PackedSlot, decode
from appo.algorithms.runtime.machines.packing import BadPacket, SlotPacking
from appo.algorithms.runtime.memory.ownership import handed_over, take_back
from appo.algorithms.runtime.memory.weights import WeightRing, barrier
from appo.algorithms.runtime.messages import Address, Begin, Message, SlotReleased, Stop, TrajectoryReady, WorkerReport
from appo.algorithms.runtime.sampling.env_group import NOTED
from appo.utils.logging import take_raised
from appo.utils.timing import COPYING, FRAMEWORK, clock

REPORT_SECONDS = 1.0


class Wire(Protocol):
    """The connection to all actor machines. A machine that comes again has a new number."""

    @property
    def ready(self) -> bool:
        """Return whether `receive` has a packet, or `work` something to send."""

    def begin(self) -> None:
        """Ask every machine for packets, from now on also joining machines."""

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """Yield arrived packets, each with the number of the machine."""

    def name(self, machine: int) -> str:
        """Return the name of the machine of a packet, for people."""

    def ask(self, machine: int) -> None:
        """Ask a machine for another packet, after all slots of a packet have been copied."""

    def release(self, machine: int, slot: int, sequence: int) -> None:
        """Note the release of a slot; the machine may be lost."""

    def drop(self, machine: int, why: str) -> None:
        """End a failing machine."""

    def work(self) -> None:
        """Send releases and the newest weights, and look for joining machines."""

    def close(self) -> Iterator[tuple[int, bytes]]:
        """End all machines; yield their last packets."""


class Arrival(NamedTuple):
    """A packed slot, waiting for a free slot of the bridge.

    Attributes:
        is_last: whether the slot is the last of the packet.
    """

    machine: int
    packed: PackedSlot
    is_last: bool


@dataclass(frozen=True)
class BridgePlan:
    """The settings of a bridge.

    Attributes:
        address: address of the worker.
        groups, slots: groups and slots of the bridge in the arena of the head.
        num_takers: see `GroupPlan.num_takers`.
        seed: seed of the draw of takers.
        generation: number of earlier bridges in the run; the machines of earlier bridges are lost.
    """

    address: Address
    groups: range
    slots: range
    num_takers: int = 0
    seed: int = 0
    generation: int = 0


class BridgeWorker:
    """Copies slots of machines into slots of the bridge's groups, in a run with a single policy.

    A slot on a machine is released when the learner has released the copy. A machine therefore never fills more slots
    than exist there, and a slow learner makes all machines wait. No packet is requested while a slot of the last one
    waits for a free slot.

    Args:
        packing: packing of the slots of the head.
        ring: weights of the learner; the newest version bounds the versions of steps.
    """

    def __init__(self, plan: BridgePlan, packing: SlotPacking, wire: Wire, ring: WeightRing) -> None:
        self.plan, self.packing, self.wire, self.ring = plan, packing, wire, ring
        slots, groups = plan.slots, plan.groups
        self.trajectories = packing.trajectories
        self.free = deque(take_back(self.trajectories, slots))
        self.arrived: deque[Arrival] = deque()
        self.origins: dict[int, tuple[int, int, int]] = {}  # slot here -> machine, slot and sequence there
        self._copies: dict[
            tuple[int, int], tuple[int, int, int]
        ] = {}  # slot there -> its hand-over, and slot and hand-over here
        self._draw = np.random.default_rng(plan.seed) if plan.num_takers > 1 else None
        self._noted = self.trajectories.group_counts[groups.start]  # 0, unless a bridge died in this place
        self.totals = dict(zip(NOTED, self._noted[: len(NOTED)].tolist(), strict=True))
        self.totals["released"] = self.totals["sent"] - sum(1 for _ in handed_over(self.trajectories, slots, 0))
        self._before = dict(self.totals)
        self._of_machines: dict[int, Mapping[str, int]] = {}
        self._warnings: list[str] = []
        self._begun, self._reported = False, time.monotonic()

    def handle(self, message: Message) -> Iterator[Message]:
        """Note a message."""
        match message:
            case SlotReleased():
                self._release(message)
            case Begin():
                self._begun = True
                yield from handed_over(self.trajectories, self.plan.slots, self.plan.generation)
                self.wire.begin()
            case Stop():
                for machine, data in self.wire.close():
                    yield from self._note(machine, data)
                yield self._report()

    def pending(self) -> bool:
        """Return whether packets, slots, weights or a report wait."""
        due = time.monotonic() - self._reported >= REPORT_SECONDS
        return self._begun and (due or self.wire.ready or bool(self.free and self.arrived))

    def work(self) -> Iterator[Message]:
        """Take packets, fill free slots, and let the wire send."""
        clock.enter(COPYING)
        for machine, data in self.wire.receive():
            yield from self._note(machine, data)
        while self.free and self.arrived:
            yield from self._hand_over(self.arrived.popleft())
        self.wire.work()
        clock.enter(FRAMEWORK)
        if time.monotonic() - self._reported >= REPORT_SECONDS:
            yield self._report()

    def _note(self, machine: int, data: bytes) -> Iterator[Message]:
        """Queue the slots of a packet, and pass the reports on."""
        try:
            packet = decode(data)
        except BadPacket as error:
            self.wire.drop(machine, str(error))
            return
        self._of_machines[machine] = packet.counts
        self._warnings += [f"machine {self.wire.name(machine)}: {text}" for text in packet.warnings]
        yield from packet.episodes
        if packet.failure:
            self.wire.drop(machine, packet.failure)
        elif not packet.slots:
            self.wire.ask(machine)
        last = len(packet.slots) - 1
        self.arrived.extend(Arrival(machine, packed, number == last) for number, packed in enumerate(packet.slots))

    def _hand_over(self, arrival: Arrival) -> Iterator[Message]:
        machine, packed, is_last = arrival
        slot, t = self.free[0], self.trajectories
        try:
            self.packing.unpack(packed.content, slot, self.ring.published)
        except BadPacket as error:
            self.arrived = deque(other for other in self.arrived if other.machine != machine)
            self.wire.drop(machine, str(error))
            return
        self.free.popleft()
        self.origins[slot] = machine, packed.slot, packed.sequence
        valid = int(np.count_nonzero(t.valid[slot]))
        clock.collected += valid
        for name, count in (("collected", valid), ("reset_rows", t.valid[slot].size - valid)):
            self.totals[name] += count
        self.totals["trajectories"] += 1
        self.totals["sent"] += 1
        taker = 0 if self._draw is None else int(self._draw.integers(self.plan.num_takers))
        followed, here, hand_over = self._copies.get((machine, packed.continues), (-1, -1, 0))
        t.continues[slot], t.follows[slot] = (here, hand_over) if followed == packed.follows else (-1, 0)
        t.taker[slot] = taker
        t.sequence[slot] += 1
        self._copies[machine, packed.slot] = packed.sequence, slot, int(t.sequence[slot])
        barrier()  # readers of the owner see all of the slot
        t.owner[slot] = 1
        self._store()
        yield TrajectoryReady(0, slot, int(t.sequence[slot]), self.plan.generation, taker)
        if is_last:
            self.wire.ask(machine)

    def _release(self, message: SlotReleased) -> None:
        slot, t = message.slot, self.trajectories
        if message.sequence != t.sequence[slot] or not t.owner[slot]:
            return
        t.owner[slot] = 0
        self.totals["released"] += 1
        self.free.append(slot)
        if origin := self.origins.pop(slot, None):  # None: of an earlier bridge, whose machines are lost
            self.wire.release(*origin)

    def _store(self) -> None:
        self._noted[: len(NOTED)] = list(self.totals.values())

    def _report(self) -> WorkerReport:
        self._reported = time.monotonic()
        for name in ("rebuilds", "episodes"):
            counts = (counts.get(name, 0) for counts in self._of_machines.values())
            self.totals[name] = self._before[name] + sum(counts)
        self._store()  # reported totals never decrease
        warnings, self._warnings = (*take_raised(), *self._warnings), []
        return WorkerReport(str(self.plan.address), dict(self.totals), warnings)
