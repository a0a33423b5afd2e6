"""The only file that knows how messages travel between processes.

A process waits on exactly one thing, its doorbell. Whoever leaves it a message rings it; on waking it looks at its
mailboxes first, then at its queues, then at the pipe from main.

- Requests for actions and their replies: mailbox rows in the arena, one writer each, the sequence word written last.
- Trajectories and released slots: faster-fifo queues with one producer and one consumer, so that a process killed
  while it holds a queue's mutex can stop only the one at the other end, whose heartbeat says in which queue it is. They
  travel only at process start, so both then get a new one with a new life.
- Trajectories to an algorithm's own processes and slots released by them: notes in the slots, see `SlotBoard`.
- Everything to and from main: pipes. Main never touches a faster-fifo mutex: a thread stuck in one runs no signal
handler.
"""

import contextlib
import multiprocessing.heap
import os
import select
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd, ForkingPickler
from queue import Empty
from typing import Any

import faster_fifo
import numpy as np

from appo.algorithms.runtime.memory.arena import Arena, Array, Field
from appo.algorithms.runtime.memory.heartbeat import Heartbeat
from appo.algorithms.runtime.memory.slots import SlotBoard
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
from appo.algorithms.runtime.roles import ACTOR, LEARNER
from appo.algorithms.runtime.topology import Topology
from appo.utils.timing import FRAMEWORK, clock

QUEUE_TIMEOUT_SECONDS = 5.0
LIVES = 8  # of one end of a queue, while the other does not read
READ_BYTES = 1 << 16
_HAND_OVER = struct.Struct("<qqqq")
_LENGTH, _LONG_LENGTH = struct.Struct("!i"), struct.Struct("!Q")  # of a message in a pipe; -1 comes before a long one


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
        """Return whether it rang before the time was up; forget the rings."""
        if not self._poll.poll(timeout_seconds * 1000):
            return False
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:  # the wake-up was spurious
            return False
        return True

    def close(self) -> None:
        """Give the descriptor back; nobody may ring or wait any more."""
        os.close(self.descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach_doorbell, (DupFd(self.descriptor),)


def _attach_doorbell(descriptor: Any) -> Doorbell:
    return Doorbell(descriptor.detach())


def encode(message: Sequence[int]) -> bytes:
    """Encode a hand-over as bytes; module-level because queues are pickled with their codec."""
    return _HAND_OVER.pack(*message)


def decode(view: Any) -> tuple[int, int, int, int]:
    """Decode the bytes of `encode`; copies out of the queue's reused buffer."""
    return _HAND_OVER.unpack_from(view)


class Mailboxes:
    """Mailboxes of requests and of replies: one row each per (policy, group), [P, G, 16].

    A row holds slot, step, generation and sequence; a reply also the sequence of the request that it answers.
    """

    def __init__(self, arena: Arena) -> None:
        self.request, self.reply = arena["mailbox.request"], arena["mailbox.reply"]

    def unanswered(self) -> Array:
        """Return where the last request has no reply, [P, G]: the work of a policy worker that replaces a dead one."""
        same = (self.request[:, :, :3] == self.reply[:, :, :3]).all(axis=2)
        answered: Array = same & (self.request[:, :, Mailbox.SEQUENCE] == self.reply[:, :, Mailbox.ANSWERS])
        return ~answered

    @staticmethod
    def declare(topology: Topology) -> list[Field]:
        """Return the arena fields; a row is 128 bytes long so that no two writers share a cache line."""
        shape = (topology.num_acting, topology.num_groups, 16)
        return [Field("mailbox.request", shape, "int64"), Field("mailbox.reply", shape, "int64")]


class Mailbox:
    """The rows this process reads or writes, by (policy, group)."""

    SEQUENCE, ANSWERS = 3, 4

    def __init__(self, rows: Array) -> None:
        self.rows = rows
        self.seen = rows[:, :, self.SEQUENCE].copy()

    def post(self, policy: int, group: int, slot: int, step: int, generation: int, answers: int = 0) -> None:
        """Write a message; its sequence comes last."""
        row = self.rows[policy, group]
        row[:3] = (slot, step, generation)
        row[self.ANSWERS] = answers
        row[self.SEQUENCE] += 1

    def collect(self, make: Callable[[int, int, int, int, int], Message], mine: Array) -> Iterator[Message]:
        """Yield messages that have arrived in the rows for which `mine` [P, G] holds."""
        sequence = self.rows[:, :, self.SEQUENCE]
        changed = (sequence != self.seen) & mine
        if changed.any():
            self.seen[changed] = sequence[changed]
            for policy, group in zip(*changed.nonzero(), strict=True):
                slot, step, generation = self.rows[policy, group, :3].tolist()
                yield make(int(policy), int(group), slot, step, generation)


def _keep_queues_off_what_cannot_be_written() -> None:
    """Put the memory of queues into a temporary file, soon unlinked, if /dev/shm is not writable."""
    arena: Any = multiprocessing.heap.Arena
    arena._dir_candidates = [place for place in arena._dir_candidates if os.access(place, os.W_OK)]


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
        _keep_queues_off_what_cannot_be_written()
        # A slot is in a queue at most once per policy, so a queue of this size is never full.
        # One that is started again repeats what may have been lost, hence room for some lives.
        slots = topology.slots_per_group * topology.groups_per_actor
        self._queue_bytes = max(4096, LIVES * slots * (_HAND_OVER.size + 16))
        self.hand_overs: dict[tuple[int, int], Any] = {}
        self.releases: dict[tuple[int, int], Any] = {}
        for actor in range(topology.num_actors):
            for policy in range(topology.num_policies):
                self.renew(actor, policy)

    def renew(self, actor: int, policy: int) -> None:
        """Make new queues between an actor and a learner, for their next lives; both must have ended theirs."""
        self.hand_overs[actor, policy], self.releases[policy, actor] = (
            faster_fifo.Queue(max_size_bytes=self._queue_bytes, loads=decode, dumps=encode) for _ in range(2)
        )

    def close(self) -> None:
        """Give the doorbells back, when all processes have ended."""
        while self.bells:
            self.bells.popitem()[1].close()

    def of(self, name: str, workers: Iterable[Address]) -> "ProcessLinks":
        """Return the part a process needs."""
        workers = list(workers)
        actors = {w.index for w in workers if w.role == ACTOR.name}
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


class ProcessLinks:
    """The links of one process to the others; picklable while the process is being started."""

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


class Postbox:
    """Main's end of the pipe to a process: waits neither for the rest of a message nor for room for one.

    A process that stands stopped may do so in the middle of a large message, and one that hangs reads nothing. If main
    waited for it, deaf to signals and to all others, nobody would be left to find that it hangs.

    Args:
        pipe: its other end is used with `send` and `recv`.
        bell: of the process.
    """

    def __init__(self, pipe: Connection, bell: Doorbell) -> None:
        self.pipe, self.bell = pipe, bell
        self._received, self._unsent = bytearray(), deque[Message]()
        self._room = select.poll()
        self._room.register(pipe.fileno(), select.POLLOUT)

    def take(self) -> list[Message]:
        """Return the messages that have arrived whole since."""
        # When the other end is gone there is nothing to be read, or an error; the sentinel of the process tells.
        with contextlib.suppress(OSError):
            while not self.pipe.closed and self.pipe.poll(0) and (read := os.read(self.pipe.fileno(), READ_BYTES)):
                self._received += read
        messages: list[Message] = []
        while (first := self._first()) and first.stop <= len(self._received):
            messages.append(ForkingPickler.loads(bytes(self._received[first])))
            del self._received[: first.stop]
        return messages

    def post(self, message: Message) -> None:
        """Send a message, small as all of main's are, now or as soon as `flush` finds room."""
        self._unsent.append(message)
        self.flush()

    def flush(self) -> None:
        """Send as much as there is room for."""
        if not self._unsent:
            return
        with contextlib.suppress(OSError):  # it is gone
            while self._unsent and not self.pipe.closed and self._room.poll(0):  # then a quarter is used at most
                self.pipe.send(self._unsent.popleft())
        self.bell.ring()

    def _first(self) -> slice | None:
        """Return where the first message stands, as `Connection.send` lays it out; None: its length is missing yet."""
        for header, offset in ((_LENGTH, 0), (_LONG_LENGTH, _LENGTH.size)):
            begin = offset + header.size
            if len(self._received) < begin:
                return None
            (length,) = header.unpack_from(self._received, offset)
            if length >= 0:
                return slice(begin, begin + length)
        return None


class Channels:
    """The messages of one process.

    Args:
        links: its doorbells and queues.
        arena: where the mailboxes lie.
        pipe: to and from main.
        heartbeat: of this process, in which it says in which queue it is.
    """

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
        # What a predecessor has not answered counts as not seen.
        self.requests.seen[self.serves & boxes.unanswered()] -= 1
        self.hand_overs = [(a, q) for (a, p), q in links.hand_overs.items() if Address(LEARNER.name, p) in workers]
        self.releases = [(p, q) for (p, a), q in links.releases.items() if Address(ACTOR.name, a) in workers]
        self.board = board_of(t, arena, workers) if t.num_takers else None

    def send(self, message: Message) -> None:
        """Bring a message to a worker in another process, and wake that process."""
        address = self.address_of(message)
        match message:
            case ActionRequest(policy, group, slot, step, generation):
                self.requests.post(policy, group, slot, step, generation)
            case ActionsReady(policy, group, slot, step, generation):
                answers = int(self.requests.seen[policy, group])
                self.replies.post(policy, group, slot, step, generation, answers)
            case Wake():
                pass  # the bell is all
            case TrajectoryReady() | SlotReleased() if self.board is not None:
                pass  # the slot says it
            case TrajectoryReady(policy, slot):
                self._put(policy, self.links.hand_overs[self.topology.actor_of_slot(slot), policy], message[:4])
            case SlotReleased(policy):
                self._put(address.index, self.links.releases[policy, address.index], (*message, 0))
            case _ if address is MAIN_ADDRESS:
                self.pipe.send(message)
            case _:
                raise TypeError(f"{type(message).__name__} cannot reach {address} in another process")
        if address is not MAIN_ADDRESS:
            self.links.bells[self.home[address]].ring()

    def receive(self, timeout_seconds: float) -> deque[Message]:
        """Return messages that have arrived, after waiting for the doorbell for at most this long."""
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
        """Put a message into a faster-fifo queue to that worker."""
        self.heartbeat.enter_queue(peer)
        queue.put(fields, timeout=QUEUE_TIMEOUT_SECONDS)
        self.heartbeat.leave_queue()

    def _drain(self, peer: int, queue: Any) -> list[tuple[int, int, int, int]]:
        """Return everything in a faster-fifo queue from that worker."""
        self.heartbeat.enter_queue(peer)
        try:
            return list(queue.get_many_nowait())
        except Empty:
            return []
        finally:
            self.heartbeat.leave_queue()


def board_of(topology: Topology, arena: Arena, workers: Set[Address]) -> SlotBoard:
    """Return the board of hand-overs and releases for these workers, if they take trajectories or are actors."""
    takers = [(w.index, w.member) for w in topology.workers_apart() if w in workers and w.facts.takes_trajectories]
    groups = [group for w in workers if w.role == ACTOR.name for group in topology.groups_of(w.index)]
    return SlotBoard(arena, takers, [slot for group in groups for slot in topology.slots_of(group)])
