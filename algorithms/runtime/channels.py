"""The only file that knows how messages travel between processes.

A process waits on exactly one thing, its doorbell. Whoever leaves it a message rings it; on waking it looks at its
mailboxes first, then at its queues, then at the pipe from main.

- Requests for actions and their replies: mailbox rows in the arena, one writer each, the sequence word written last.
- Trajectories and released slots: faster-fifo queues with one producer and one consumer, so that a process killed
  while it holds a queue's mutex can stop only the one at the other end. They travel only at process start.
- Everything to and from main: pipes. Main never touches a faster-fifo mutex: a thread stuck in one runs no signal
handler.
"""

import os
import select
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from queue import Empty
from typing import Any

import faster_fifo
import numpy as np

from algorithms.runtime.arena import Arena, Array, Field
from algorithms.runtime.messages import (
    MAIN,
    ActionRequest,
    ActionsReady,
    Address,
    Message,
    SlotReleased,
    TrajectoryReady,
)
from algorithms.runtime.topology import Topology
from utils.timing import FRAMEWORK, clock

QUEUE_TIMEOUT_SECONDS = 5.0
_HAND_OVER = struct.Struct("<qqqq")


class Doorbell:
    """An eventfd that wakes one process; ringing it twice before it wakes is one ring."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if descriptor is None else descriptor
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLIN)

    def ring(self) -> None:
        """Wake the owner."""
        os.eventfd_write(self.descriptor, 1)

    def wait(self, timeout_seconds: float) -> bool:
        """Whether it rang before the time was up; forgets the rings."""
        if not self._poll.poll(timeout_seconds * 1000):
            return False
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:  # the wake-up was spurious
            return False
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach_doorbell, (DupFd(self.descriptor),)


def _attach_doorbell(descriptor: Any) -> Doorbell:
    return Doorbell(descriptor.detach())


def encode(message: tuple[int, int, int, int]) -> bytes:
    """A hand-over as bytes; module-level because queues are pickled with their codec."""
    return _HAND_OVER.pack(*message)


def decode(view: Any) -> tuple[int, int, int, int]:
    """The inverse of `encode`; copies out of the queue's reused buffer."""
    return _HAND_OVER.unpack_from(view)


class Mailboxes:
    """One request row and one reply row per (policy, group): [P, G, 4] of slot, step, generation, sequence."""

    def __init__(self, arena: Arena) -> None:
        self.request, self.reply = arena["mailbox.request"], arena["mailbox.reply"]

    @staticmethod
    def declare(topology: Topology) -> list[Field]:
        """The arena fields; a row is 128 bytes long so that no two writers share a cache line."""
        shape = (topology.num_policies, topology.num_groups, 16)
        return [Field("mailbox.request", shape, "int64"), Field("mailbox.reply", shape, "int64")]


class Mailbox:
    """The rows this process reads or writes, by (policy, group)."""

    SEQUENCE = 3

    def __init__(self, rows: Array) -> None:
        self.rows = rows
        self.seen = rows[:, :, self.SEQUENCE].copy()

    def post(self, policy: int, group: int, slot: int, step: int, generation: int) -> None:
        """Write a message; its sequence comes last."""
        row = self.rows[policy, group]
        row[:3] = (slot, step, generation)
        row[self.SEQUENCE] += 1

    def collect(self, make: Callable[[int, int, int, int, int], Message], mine: Array) -> Iterator[Message]:
        """What has arrived in the rows for which `mine` [P, G] holds."""
        sequence = self.rows[:, :, self.SEQUENCE]
        changed = (sequence != self.seen) & mine
        if changed.any():
            self.seen[changed] = sequence[changed]
            for policy, group in zip(*changed.nonzero(), strict=True):
                slot, step, generation = self.rows[policy, group, :3].tolist()
                yield make(int(policy), int(group), slot, step, generation)


class Links:
    """All doorbells and queues of a run, made by main before any process starts.

    Attributes:
        bells: by process name.
        hand_overs: (actor, policy) -> queue of trajectories to that policy's learner.
        releases: (policy, actor) -> queue of slots back to the actor.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.bells = {name: Doorbell() for name in topology.processes()}
        # A slot is in a queue at most once per policy, so a queue of this size is never full.
        slots = topology.slots_per_group * topology.groups_per_actor
        size = max(4096, 4 * slots * (_HAND_OVER.size + 16))
        pairs = [(a, p) for a in range(topology.num_actors) for p in range(topology.num_policies)]
        make = self._queue
        self.hand_overs = {(a, p): make(size) for a, p in pairs}
        self.releases = {(p, a): make(size) for a, p in pairs}

    @staticmethod
    def _queue(size: int) -> Any:
        return faster_fifo.Queue(max_size_bytes=size, loads=decode, dumps=encode)

    def of(self, name: str, workers: Iterable[Address]) -> "ProcessLinks":
        """The part a process needs."""
        workers = list(workers)
        actors = {w.index for w in workers if w.role == "actor"}
        learners = {w.index for w in workers if w.role == "learner"}
        hand_overs = {k: q for k, q in self.hand_overs.items() if k[0] in actors or k[1] in learners}
        releases = {k: q for k, q in self.releases.items() if k[1] in actors or k[0] in learners}
        roles = {w.role for w in workers}
        bells = {n: b for n, b in self.bells.items() if n == name or not roles <= _roles(self.topology, n)}
        return ProcessLinks(self.topology, name, bells, hand_overs, releases)


def _roles(topology: Topology, name: str) -> set[str]:
    return {worker.role for worker in topology.processes()[name]}


class ProcessLinks:
    """What one process needs to talk to the others; picklable while the process is being started."""

    def __init__(
        self,
        topology: Topology,
        name: str,
        bells: dict[str, Doorbell],
        hand_overs: dict[Any, Any],
        releases: dict[Any, Any],
    ) -> None:
        self.topology, self.name, self.bells = topology, name, bells
        self.hand_overs, self.releases = hand_overs, releases


class Channels:
    """The messages of one process.

    Args:
        links: its doorbells and queues.
        arena: where the mailboxes lie.
        pipe: to and from main.
        workers: the workers that live in this process.
    """

    def __init__(self, links: ProcessLinks, arena: Arena, pipe: Connection, workers: Iterable[Address]) -> None:
        self.topology, self.links, self.pipe = links.topology, links, pipe
        self.bell = links.bells[links.name]
        boxes = Mailboxes(arena)
        self.requests, self.replies = Mailbox(boxes.request), Mailbox(boxes.reply)
        workers = set(workers)
        t = self.topology
        self.home = {w: name for name, members in t.processes().items() for w in members}
        shape = boxes.request.shape[:2]
        self.serves, self.awaits = np.zeros(shape, bool), np.zeros(shape, bool)
        for policy in range(t.num_policies):
            for group in range(t.num_groups):
                self.serves[policy, group] = t.policy_worker_of(policy, group) in workers
                self.awaits[policy, group] = t.address_of(ActionsReady(policy, group, 0, 0, 0)) in workers
        self.remote_policies = t.placement == "central"
        self.hand_overs = [q for (_, p), q in links.hand_overs.items() if Address("learner", p) in workers]
        self.releases = [q for (_, a), q in links.releases.items() if Address("actor", a) in workers]

    def send(self, message: Message) -> None:
        """Bring a message to a worker in another process, and wake that process."""
        address = self.topology.address_of(message)
        match message:
            case ActionRequest(policy, group, slot, step, generation):
                self.requests.post(policy, group, slot, step, generation)
            case ActionsReady(policy, group, slot, step, generation):
                self.replies.post(policy, group, slot, step, generation)
            case TrajectoryReady(policy, slot, sequence, generation):
                queue = self.links.hand_overs[self.topology.actor_of_slot(slot), policy]
                queue.put((policy, slot, sequence, generation), timeout=QUEUE_TIMEOUT_SECONDS)
            case SlotReleased(policy, slot, sequence):
                queue = self.links.releases[policy, address.index]
                queue.put((policy, slot, sequence, 0), timeout=QUEUE_TIMEOUT_SECONDS)
            case _:
                self.pipe.send(message)
        if address != MAIN:
            self.links.bells[self.home[address]].ring()

    def receive(self, timeout_seconds: float) -> deque[Message]:
        """What has arrived, after waiting for the doorbell for at most this long."""
        messages: deque[Message] = deque()
        if timeout_seconds:
            clock.wait()
        rang = self.bell.wait(timeout_seconds)
        if timeout_seconds:
            clock.enter(FRAMEWORK)
        if not rang:
            return messages
        if self.remote_policies:
            messages.extend(self.requests.collect(ActionRequest, self.serves))
            messages.extend(self.replies.collect(ActionsReady, self.awaits))
        messages.extend(TrajectoryReady(*fields) for queue in self.hand_overs for fields in _drain(queue))
        messages.extend(SlotReleased(*fields[:3]) for queue in self.releases for fields in _drain(queue))
        while self.pipe.poll(0):
            messages.append(self.pipe.recv())
        return messages


def _drain(queue: Any) -> list[tuple[int, int, int, int]]:
    """Everything in a faster-fifo queue."""
    try:
        return list(queue.get_many_nowait())
    except Empty:
        return []
