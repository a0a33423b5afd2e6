"""Transport of messages between processes.

A process waits at exactly one place, its doorbell. A sender rings the doorbell after writing a message; the woken
process reads mailboxes first, then queues, then the pipe from main.

- Requests for actions and replies: mailbox rows in the arena, one writer each, the sequence word written last.
- Trajectories and released slots: faster-fifo queues with one producer and one consumer. A process killed with the
  mutex of a queue locked can stop only the peer, whose heartbeat contains the queue. Queues are passed only at the
  start of a process, so both ends then restart with a new queue.
- Trajectories to an algorithm's own processes, and slots released there: notes in the slots, see `SlotBoard`.
- Messages to and from main: pipes. Main never locks a faster-fifo mutex, because a thread stuck in a mutex runs no
  signal handler.
"""

import contextlib
import multiprocessing.heap
import os
import select
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd, ForkingPickler
from queue import Empty
from typing import Any, NamedTuple

import faster_fifo
import numpy as np

from appo.algorithms.runtime.memory.arena import Arena, Array, Field
from appo.algorithms.runtime.memory.heartbeat import Heartbeat
from appo.algorithms.runtime.memory.ownership import SlotBoard
from appo.algorithms.runtime.messages import (
    MAIN_ADDRESS,
    ActionRequest,
    ActionsReady,
    Address,
    Message,
    SlotReleased,
    TrajectoryReady,
    Wake,
)
from appo.algorithms.runtime.roles import LEARNER
from appo.algorithms.runtime.topology import Topology
from appo.utils.timing import FRAMEWORK, clock

READ_BYTES = 1 << 16
_HAND_OVER = struct.Struct("<qqqq")
_LENGTH, _LONG_LENGTH = struct.Struct("!i"), struct.Struct("!Q")  # of a message in a pipe; -1 precedes a long length


class Doorbell:
    """An eventfd that wakes one process; two rings before the wake-up count as one."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if descriptor is None else descriptor
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLIN)

    def ring(self) -> None:
        """Wake the owner."""
        os.eventfd_write(self.descriptor, 1)

    def wait(self, timeout_seconds: float) -> bool:
        """Return whether the doorbell rang in time; reset the rings."""
        if not self._poll.poll(timeout_seconds * 1000):
            return False
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:  # the wake-up was spurious
            return False
        return True

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach_doorbell, (DupFd(self.descriptor),)


def _attach_doorbell(descriptor: Any) -> Doorbell:
    return Doorbell(descriptor.detach())


def encode(message: Sequence[int]) -> bytes:
    """Encode a hand-over as bytes; a function of the module, because a queue is pickled with its codec."""
    return _HAND_OVER.pack(*message)


def decode(view: Any) -> tuple[int, int, int, int]:
    """Decode the bytes of `encode`, copied from the reused buffer of the queue."""
    return _HAND_OVER.unpack_from(view)


class Mailboxes:
    """Mailboxes of requests and of replies: one row each per (policy, group), [P, G, 16].

    A row contains slot, step, generation and sequence; a reply also the sequence of the answered request.
    """

    def __init__(self, arena: Arena) -> None:
        self.request, self.reply = arena["mailbox.request"], arena["mailbox.reply"]

    def unanswered(self) -> Array:
        """Return where the last request has no reply, [P, G]: work for the replacement of a dead policy worker."""
        same = (self.request[:, :, :3] == self.reply[:, :, :3]).all(axis=2)
        answered: Array = same & (self.request[:, :, Mailbox.SEQUENCE] == self.reply[:, :, Mailbox.ANSWERS])
        return ~answered

    @staticmethod
    def declare(topology: Topology) -> list[Field]:
        """Return the arena fields; a row has 128 bytes, so writers share no cache line."""
        shape = (topology.num_acting, topology.num_groups, 16)
        return [Field("mailbox.request", shape, "int64"), Field("mailbox.reply", shape, "int64")]


class Mailbox:
    """The rows of one direction, read or written by one process.

    Args:
        rows: rows of all (policy, group), [P, G, 16].
    """

    SEQUENCE, ANSWERS = 3, 4

    def __init__(self, rows: Array) -> None:
        self.rows = rows
        self.seen = rows[:, :, self.SEQUENCE].copy()

    def post(self, policy: int, group: int, slot: int, step: int, generation: int, answers: int = 0) -> None:
        """Write a message, the sequence last."""
        row = self.rows[policy, group]
        row[:3] = (slot, step, generation)
        row[self.ANSWERS] = answers
        row[self.SEQUENCE] += 1

    def collect(self, make: Callable[[int, int, int, int, int], Message], mine: Array) -> Iterator[Message]:
        """Yield new messages of the rows selected by `mine` [P, G]."""
        sequence = self.rows[:, :, self.SEQUENCE]
        changed = (sequence != self.seen) & mine
        if changed.any():
            self.seen[changed] = sequence[changed]
            for policy, group in zip(*changed.nonzero(), strict=True):
                slot, step, generation = self.rows[policy, group, :3].tolist()
                yield make(int(policy), int(group), slot, step, generation)


class Links:
    """All doorbells and queues of a run, created by main before the first process.

    Attributes:
        bells: doorbells by process name.
        hand_overs: (actor or bridge, policy) -> queue of trajectories to the learner of the policy.
        releases: (policy, actor or bridge) -> queue of slots back.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.bells = {name: Doorbell() for name in topology.processes()}
        # Queues allocate memory in /dev/shm, or in a temporary file, soon unlinked, if /dev/shm is not writable.
        heap: Any = multiprocessing.heap.Arena
        heap._dir_candidates = [place for place in heap._dir_candidates if os.access(place, os.W_OK)]
        # A slot is in a queue at most once per policy, so a queue of `slots` messages is never full.
        # A restarted process sends messages again that may be lost, hence room for eight lives.
        slots = topology.slots_per_group * max(topology.groups_per_actor, topology.bridged)
        self._queue_bytes = max(4096, 8 * slots * (_HAND_OVER.size + 16))
        self.hand_overs: dict[tuple[int, int], Any] = {}
        self.releases: dict[tuple[int, int], Any] = {}
        for actor in range(len(topology.fillers)):
            for policy in range(topology.num_policies):
                self.renew(actor, policy)

    def renew(self, actor: int, policy: int) -> None:
        """Create new queues between an actor and a learner, after both processes have ended."""
        self.hand_overs[actor, policy], self.releases[policy, actor] = (
            faster_fifo.Queue(max_size_bytes=self._queue_bytes, loads=decode, dumps=encode) for _ in range(2)
        )

    def close(self) -> None:
        """Close the doorbells, after all processes have ended."""
        while self.bells:
            self.bells.popitem()[1].close()

    def of(self, name: str, workers: Iterable[Address]) -> "ProcessLinks":
        """Return the doorbells and queues of one process."""
        workers = list(workers)
        actors = {w.index for w in workers if w.facts.fills_slots}
        learners = {w.index for w in workers if w.role == LEARNER.name}
        hand_overs = {k: q for k, q in self.hand_overs.items() if k[0] in actors or k[1] in learners}
        releases = {k: q for k, q in self.releases.items() if k[1] in actors or k[0] in learners}
        roles = {w.role for w in workers}
        bells = {
            n: b
            for n, b in self.bells.items()
            if n == name or not roles <= {worker.role for worker in self.topology.processes()[n]}
        }
        return ProcessLinks(self.topology, name, bells, hand_overs, releases)


class ProcessLinks(NamedTuple):
    """The doorbells and queues of one process, as in `Links`; picklable while the process is being started."""

    topology: Topology
    name: str
    bells: dict[str, Doorbell]
    hand_overs: dict[tuple[int, int], Any]
    releases: dict[tuple[int, int], Any]


class Postbox:
    """Main's end of the pipe to a process, read and written without blocking.

    A process may be stopped in the middle of a large message, and a hung process reads nothing. A waiting main would
    handle no signal and could not detect the hang.

    Args:
        pipe: pipe, whose far end is used with `send` and `recv`.
        bell: doorbell of the process.
    """

    def __init__(self, pipe: Connection, bell: Doorbell) -> None:
        self.pipe, self.bell = pipe, bell
        self._received, self._unsent = bytearray(), deque[Message]()
        self._room = select.poll()
        self._room.register(pipe.fileno(), select.POLLOUT)

    def take(self) -> list[Message]:
        """Return the complete messages that arrived."""
        # After the end of the process a read returns nothing or fails; the sentinel of the process reports the end.
        with contextlib.suppress(OSError):
            while not self.pipe.closed and self.pipe.poll(0) and (read := os.read(self.pipe.fileno(), READ_BYTES)):
                self._received += read
        messages: list[Message] = []
        while (first := self._first()) and first.stop <= len(self._received):
            messages.append(ForkingPickler.loads(bytes(self._received[first])))
            del self._received[: first.stop]
        return messages

    def post(self, message: Message) -> None:
        """Send a message, now or as soon as `flush` finds room; all messages of main are small."""
        self._unsent.append(message)
        self.flush()

    def flush(self) -> None:
        """Send as many messages as fit."""
        if not self._unsent:
            return
        with contextlib.suppress(OSError):  # the process has ended
            while self._unsent and not self.pipe.closed and self._room.poll(0):  # true while a quarter is used at most
                self.pipe.send(self._unsent.popleft())
        self.bell.ring()

    def _first(self) -> slice | None:
        """Return the place of the first message, in the layout of `Connection.send`; None before its length arrived."""
        for header, offset in ((_LENGTH, 0), (_LONG_LENGTH, _LENGTH.size)):
            begin = offset + header.size
            if len(self._received) < begin:
                return None
            (length,) = header.unpack_from(self._received, offset)
            if length >= 0:
                return slice(begin, begin + length)
        return None


class Channels:
    """The messages of one process."""

    def __init__(self, links: ProcessLinks, arena: Arena, pipe: Connection, heartbeat: Heartbeat) -> None:
        self.topology, self.links, self.pipe, self.heartbeat = links.topology, links, pipe, heartbeat
        self.bell = links.bells[links.name]
        boxes = Mailboxes(arena)
        self.requests, self.replies = Mailbox(boxes.request), Mailbox(boxes.reply)
        t, addresses = self.topology, self.topology.address_book()
        self.address_of = addresses.address_of
        workers = set(t.processes()[links.name])
        self.home = {w: name for name, members in t.processes().items() for w in members}
        shape = boxes.request.shape[:2]
        self.serves, self.awaits = np.zeros(shape, bool), np.zeros(shape, bool)
        for policy in range(t.num_acting):
            for group in range(t.num_groups):
                self.serves[policy, group] = addresses.policy_workers[policy][group] in workers
                self.awaits[policy, group] = addresses.actors_of_groups[group] in workers
        self.remote_policies = t.placement == "central"
        # Requests that the predecessor did not answer count as not seen.
        self.requests.seen[self.serves & boxes.unanswered()] -= 1
        self.hand_overs = [(a, q) for (a, p), q in links.hand_overs.items() if Address(LEARNER.name, p) in workers]
        fillers = {w.index for w in workers if w.facts.fills_slots}
        self.releases = [(p, q) for (p, a), q in links.releases.items() if a in fillers]
        takers = [(w.index, w.member) for w in t.workers_apart() if w in workers and w.facts.takes_trajectories]
        groups = [group for filler in fillers for group in t.groups_of(filler)]
        slots = [slot for group in groups for slot in t.slots_of(group)]
        self.board = SlotBoard(arena, takers, slots) if t.num_takers else None

    def send(self, message: Message) -> None:
        """Send a message to a worker in another process, and wake the process."""
        address = self.address_of(message)
        match message:
            case ActionRequest(policy, group, slot, step, generation):
                self.requests.post(policy, group, slot, step, generation)
            case ActionsReady(policy, group, slot, step, generation):
                self.replies.post(policy, group, slot, step, generation, int(self.requests.seen[policy, group]))
            case Wake():
                pass  # ringing is enough
            case TrajectoryReady() | SlotReleased() if self.board is not None:
                pass  # the note is in the slot already
            case TrajectoryReady(policy, slot):
                self._put(policy, self.links.hand_overs[self.topology.filler_of_slot(slot), policy], message[:4])
            case SlotReleased(policy):
                self._put(address.index, self.links.releases[policy, address.index], (*message, 0))
            case _ if address is MAIN_ADDRESS:
                self.pipe.send(message)
            case _:
                raise TypeError(f"{type(message).__name__} cannot reach {address} in another process")
        if address is not MAIN_ADDRESS:
            self.links.bells[self.home[address]].ring()

    def receive(self, timeout_seconds: float) -> deque[Message]:
        """Wait at most `timeout_seconds` for the doorbell, and return the messages that arrived."""
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
        messages.extend(TrajectoryReady(*fields) for peer, q in self.hand_overs for fields in self._drain(peer, q))
        messages.extend(SlotReleased(*fields[:3]) for peer, q in self.releases for fields in self._drain(peer, q))
        if self.board is not None:
            messages.extend([*self.board.handed_over(), *self.board.released()])
        while self.pipe.poll(0):
            messages.append(self.pipe.recv())
        return messages

    def _put(self, peer: int, queue: Any, fields: tuple[int, ...]) -> None:
        self.heartbeat.enter_queue(peer)
        queue.put(fields, timeout=5.0)
        self.heartbeat.leave_queue()

    def _drain(self, peer: int, queue: Any) -> list[tuple[int, int, int, int]]:
        self.heartbeat.enter_queue(peer)
        try:
            return list(queue.get_many_nowait())
        except Empty:
            return []
        finally:
            self.heartbeat.leave_queue()
