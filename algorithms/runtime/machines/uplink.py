"""The uplink of an actor machine: takes whole slots in place of a learner, and writes releases and weights back."""

import logging
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from appo.algorithms.runtime.machines.packets import PackedSlot, Packet, decode_releases, encode
from appo.algorithms.runtime.machines.packing import SlotPacking
from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.ownership import LearnerLedger, SlotBoard
from appo.algorithms.runtime.memory.weights import WeightRing, checksum
from appo.algorithms.runtime.messages import EpisodesDone, Message, SlotReleased, WorkerReport, WorkerRestarted
from appo.algorithms.runtime.processes.channels import Doorbell

log = logging.getLogger(__name__)

PACKET_BYTES = 4 << 20
"""Size of a packet from which no further slot is added."""


class Reports:
    """Reports of the actors of a machine, collected by the supervising thread until the next packet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._episodes: deque[EpisodesDone] = deque()
        self._totals: dict[str, dict[str, int]] = {}
        self._warnings: list[str] = []
        self.failure = ""

    def add(self, message: Message) -> None:
        """Add a report; further kinds of messages have no meaning for the head."""
        with self._lock:
            match message:
                case EpisodesDone():
                    self._episodes.append(message)
                case WorkerReport(worker, totals, raised):
                    self._totals[worker] = self._totals.get(worker, {}) | totals
                    self._warnings += [f"{worker}: {text}" for text in raised]
                case WorkerRestarted(retired=False):
                    self._warnings.append(f"{message.cause}; started again")

    def take(self, slots: tuple[PackedSlot, ...]) -> Packet:
        """Return a packet of slots, with all reports since the last packet."""
        with self._lock:
            sums = {n: sum(t.get(n, 0) for t in self._totals.values()) for n in ("episodes", "rebuilds")}
            packet = Packet(slots, tuple(self._episodes), sums, tuple(self._warnings), self.failure)
            self._episodes.clear()
            self._warnings = []
            return packet


class Uplink:
    """The place of the learner in a remote run, with a single policy.

    Args:
        packing: packing of the slots in the arena.
        bell: doorbell of the learner; actors ring after a hand-over.
        wake: function from a slot; wakes the actor of the slot.
    """

    def __init__(self, arena: Arena, packing: SlotPacking, bell: Doorbell, wake: Callable[[int], None]) -> None:
        self.packing, self.bell, self.wake, self.reports = packing, bell, wake, Reports()
        self.board = SlotBoard(arena, [(0, 0)], ())
        self.ledger, self.ring = LearnerLedger(packing.trajectories, 0), WeightRing(arena, 0)
        self._waiting: deque[tuple[int, int]] = deque()

    def take(self, patience_seconds: float) -> bytes:
        """Return a packet with the slots handed over; without a slot, wait a while."""
        self._look()
        if not self._waiting and patience_seconds and self.bell.wait(patience_seconds):
            self._look()
        t, nbytes = self.packing.trajectories, 0
        slots: list[PackedSlot] = []
        while self._waiting and nbytes < PACKET_BYTES:
            slot, sequence = self._waiting.popleft()
            before = int(t.continues[slot]), int(t.follows[slot])
            slots.append(PackedSlot(slot, sequence, self.packing.pack(slot), *before))
            nbytes += len(slots[-1].content)
        return encode(self.reports.take(tuple(slots)))

    def give(self, released: bytes, samples: int, version: int, expected: int, weights: bytes) -> None:
        """Publish weights newer than the present ones, then release slots; actors go on with the new weights.

        Args:
            released: slots and sequences, see `encode_releases`.
            samples: agent steps that the learner has counted, see `Follows`.
            version: version of the weights; 0: no weights are sent.
            expected: checksum of the weights.
            weights: [P] float32.
        """
        self.ledger.note({**self.ledger.noted(), "samples": samples})
        if version > self.ring.published:
            vector = np.frombuffer(weights, np.float32)
            if checksum(vector) == expected:
                self.ring.publish(vector, version)
            else:
                log.warning("the weights of version %d arrived damaged; the version before acts on", version)
        for slot, sequence in decode_releases(released):
            self.ledger.release(SlotReleased(0, slot, sequence))
            self.wake(slot)

    def _look(self) -> None:
        self._waiting.extend((message.slot, message.sequence) for message in self.board.handed_over())
