import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np
import pytest

from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.heartbeat import Heartbeat
from appo.algorithms.runtime.messages import (
    ActionRequest,
    ActionsReady,
    Address,
    SaveState,
    SlotReleased,
    StateSaved,
    TrajectoryReady,
    Wake,
    WorkerReady,
)
from appo.algorithms.runtime.processes.channels import (
    Channels,
    Doorbell,
    Links,
    Mailbox,
    Mailboxes,
    Postbox,
    decode,
    encode,
)
from appo.algorithms.runtime.topology import Topology

CENTRAL = Topology(
    placement="central",
    num_actors=2,
    groups_per_actor=2,
    slots_per_group=2,
    num_policies=2,
    policy_workers_per_policy=1,
    rows=3,
    rollout=4,
)


class Run:
    """The channels of every process of a run, without the processes."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.arena = Arena.create([*Mailboxes.declare(topology), Heartbeat.declare(len(topology.processes()))])
        links = Links(topology)
        self.main: dict[str, Connection] = {}
        self.channels: dict[str, Channels] = {}
        for row, (name, workers) in enumerate(topology.processes().items()):
            self.main[name], theirs = Pipe()
            self.channels[name] = Channels(links.of(name, workers), self.arena, theirs, Heartbeat(self.arena, row))

    def received(self) -> dict[str, list[object]]:
        """What every process finds without waiting."""
        return {name: found for name, c in self.channels.items() if (found := list(c.receive(0.0)))}

    def close(self) -> None:
        for name, channel in self.channels.items():
            self.main[name].close()
            channel.pipe.close()


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run(CENTRAL)
    yield run
    run.close()


def test_a_bell_wakes_once_however_often_it_rang() -> None:
    bell = Doorbell()
    assert not bell.wait(0.0)
    bell.ring()
    bell.ring()
    assert bell.wait(0.0)
    assert not bell.wait(0.0)
    other_end = Doorbell(bell.descriptor)
    other_end.ring()
    assert bell.wait(60.0)


def test_hand_overs_keep_64_bit_numbers() -> None:
    fields = (3, 2**40, 2**62, -1)
    assert decode(encode(fields)) == fields
    assert decode(memoryview(encode(fields) + b"old bytes of the buffer")) == fields


def mailboxes() -> tuple[Mailbox, Mailbox]:
    arena = Arena.create(Mailboxes.declare(CENTRAL))
    boxes = Mailboxes(arena)
    return Mailbox(boxes.request), Mailbox(boxes.request)


def test_rows_of_different_writers_share_no_cache_line() -> None:
    writer, _ = mailboxes()
    assert writer.rows.shape[:2] == (2, 4)
    assert writer.rows.strides[1] == 128


def test_a_mailbox_delivers_once_and_only_the_latest() -> None:
    writer, reader = mailboxes()
    all_rows = np.ones((2, 4), bool)
    writer.post(1, 2, 5, 3, 0)
    assert list(reader.collect(ActionRequest, all_rows)) == [ActionRequest(1, 2, 5, 3, 0)]
    assert list(reader.collect(ActionRequest, all_rows)) == []
    writer.post(1, 2, 5, 3, 0)  # the same again is a new message
    assert list(reader.collect(ActionRequest, all_rows)) == [ActionRequest(1, 2, 5, 3, 0)]
    writer.post(0, 0, 1, 0, 0)
    writer.post(0, 0, 1, 1, 0)
    writer.post(1, 3, 6, 2, 4)
    assert list(reader.collect(ActionRequest, all_rows)) == [ActionRequest(0, 0, 1, 1, 0), ActionRequest(1, 3, 6, 2, 4)]


def test_a_mailbox_leaves_the_rows_of_others_alone() -> None:
    writer, reader = mailboxes()
    mine = np.zeros((2, 4), bool)
    mine[1, 2] = True
    writer.post(1, 2, 5, 3, 0)
    writer.post(0, 2, 5, 3, 0)
    assert list(reader.collect(ActionRequest, mine)) == [ActionRequest(1, 2, 5, 3, 0)]
    assert list(reader.collect(ActionRequest, ~mine)) == [ActionRequest(0, 2, 5, 3, 0)]


def test_every_message_reaches_its_process_and_no_other(run: Run) -> None:
    actor, learner = run.channels["actor_1"], run.channels["learner_1"]
    actor.send(ActionRequest(1, 3, 6, 2, 0))
    actor.send(ActionRequest(0, 2, 4, 0, 0))
    assert run.received() == {
        "policy_worker_1.0": [ActionRequest(1, 3, 6, 2, 0)],
        "policy_worker_0.0": [ActionRequest(0, 2, 4, 0, 0)],
    }
    run.channels["policy_worker_1.0"].send(ActionsReady(1, 3, 6, 2, 0))
    assert run.received() == {"actor_1": [ActionsReady(1, 3, 6, 2, 0)]}
    actor.send(TrajectoryReady(1, 6, 9, 2))
    actor.send(TrajectoryReady(0, 6, 9, 2))
    assert run.received() == {"learner_1": [TrajectoryReady(1, 6, 9, 2)], "learner_0": [TrajectoryReady(0, 6, 9, 2)]}
    learner.send(SlotReleased(1, 6, 9))
    learner.send(SlotReleased(1, 1, 4))
    assert run.received() == {"actor_1": [SlotReleased(1, 6, 9)], "actor_0": [SlotReleased(1, 1, 4)]}
    assert run.received() == {}


def test_replies_come_before_trajectories_and_those_before_the_pipe(run: Run) -> None:
    run.main["actor_0"].send(SaveState(0))
    run.channels["learner_0"].send(SlotReleased(0, 1, 1))
    run.channels["policy_worker_0.0"].send(ActionsReady(0, 1, 2, 3, 0))
    assert run.received() == {"actor_0": [ActionsReady(0, 1, 2, 3, 0), SlotReleased(0, 1, 1), SaveState(0)]}


def test_queues_keep_order(run: Run) -> None:
    sent = [TrajectoryReady(0, slot, sequence, 0) for sequence in range(1, 4) for slot in range(4)]
    for message in sent:
        run.channels["actor_0"].send(message)
    assert run.received() == {"learner_0": sent}


def test_reports_go_to_main_through_the_pipe_and_ring_nobody(run: Run) -> None:
    run.channels["learner_1"].send(StateSaved(1))
    run.channels["actor_0"].send(WorkerReady("actor_0"))
    assert run.main["learner_1"].recv() == StateSaved(1)
    assert run.main["actor_0"].recv() == WorkerReady("actor_0")
    assert run.received() == {}


def test_main_reaches_a_process_with_pipe_and_bell(run: Run) -> None:
    run.main["learner_0"].send(SaveState(0))
    assert run.received() == {}  # nobody wakes without the bell
    run.channels["learner_0"].bell.ring()
    assert run.received() == {"learner_0": [SaveState(0)]}


def test_a_process_gets_only_the_links_it_needs() -> None:
    links, processes = Links(CENTRAL), CENTRAL.processes()
    actor = links.of("actor_1", processes["actor_1"])
    assert set(actor.hand_overs) == {(1, 0), (1, 1)}
    assert set(actor.releases) == {(0, 1), (1, 1)}
    assert set(actor.bells) == {"actor_1", "learner_0", "learner_1", "policy_worker_0.0", "policy_worker_1.0"}
    learner = links.of("learner_1", processes["learner_1"])
    assert set(learner.hand_overs) == {(0, 1), (1, 1)}
    assert set(learner.releases) == {(1, 0), (1, 1)}
    policy_worker = links.of("policy_worker_1.0", processes["policy_worker_1.0"])
    assert policy_worker.hand_overs == policy_worker.releases == {}


def test_actors_with_their_own_policies_use_no_mailbox() -> None:
    run = Run(replace(CENTRAL, placement="local"))
    Mailbox(Mailboxes(run.arena).request).post(0, 0, 0, 0, 0)
    run.channels["learner_0"].send(SlotReleased(0, 1, 1))
    assert run.received() == {"actor_0": [SlotReleased(0, 1, 1)]}
    run.close()


def test_a_process_in_the_place_of_a_dead_one_finds_what_is_not_answered(run: Run) -> None:
    actor, server = run.channels["actor_0"], run.channels["policy_worker_0.0"]
    requests = [ActionRequest(0, group, group, 0, 0) for group in (0, 1)]
    for message in requests:
        actor.send(message)
    assert list(server.receive(0.0)) == requests
    server.send(ActionsReady(*requests[0]))
    actor.send(ActionRequest(1, 0, 0, 0, 0))  # of another policy
    for message, found in ((None, requests[1:]), (requests[0], requests)):  # the same again is another request
        if message:
            actor.send(message)
        successor = Channels(server.links, run.arena, server.pipe, server.heartbeat)
        successor.bell.ring()
        assert list(successor.receive(0.0)) == found


def test_a_process_says_in_which_queue_it_is(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    actor, learner = run.channels["actor_1"], run.channels["learner_0"]
    seen: list[int | None] = []
    queue = actor.links.hand_overs[1, 0]
    put = queue.put
    monkeypatch.setattr(queue, "put", lambda *a, **k: (seen.append(actor.heartbeat.read().peer), put(*a, **k)))
    actor.send(TrajectoryReady(0, 6, 1, 0))
    assert seen == [0]
    assert actor.heartbeat.read().peer is None
    assert list(learner.receive(0.0)) == [TrajectoryReady(0, 6, 1, 0)]
    assert learner.heartbeat.read().peer is None


def test_doorbells_are_given_back() -> None:
    links = Links(CENTRAL)
    numbers = [bell.descriptor for bell in links.bells.values()]
    links.close()
    for number in numbers:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
    links.close()


@pytest.fixture
def box() -> Iterator[tuple[Postbox, Connection]]:
    """Main's end of a pipe, and that of a process."""
    ours, theirs = Pipe()
    bell = Doorbell()
    with ours, theirs:
        yield Postbox(ours, bell), theirs
    bell.close()


@pytest.mark.parametrize("size", [0, 16_000, 100_000])
def test_main_does_not_wait_for_the_rest_of_a_message(box: tuple[Postbox, Connection], size: int) -> None:
    """Whoever sends it may have been stopped anywhere in it."""
    sent = [WorkerReady("a" * size), StateSaved(1)]
    ours, theirs = Pipe()
    with ours, theirs:
        for message in sent:
            ours.send(message)
        laid_out = os.read(theirs.fileno(), 1 << 20)
        while theirs.poll(0):
            laid_out += os.read(theirs.fileno(), 1 << 20)
    postbox, their_end = box
    begin, heard = 0, []
    for cut in (3, 4, 100, len(laid_out) - 3, len(laid_out)):
        os.write(their_end.fileno(), laid_out[begin:cut])
        begin = cut
        heard.append(postbox.take())
    assert heard == [[], [], [], [sent[0]], [sent[1]]] if size else [[], [], [sent[0]], [], [sent[1]]]
    assert postbox.take() == []
    their_end.close()
    assert postbox.take() == []


def test_what_a_process_sent_before_its_end_is_heard(box: tuple[Postbox, Connection]) -> None:
    postbox, theirs = box
    theirs.send(StateSaved(0))
    theirs.close()
    postbox.post(SaveState(0))
    assert postbox.take() == [StateSaved(0)]
    postbox.pipe.close()
    assert postbox.take() == []
    postbox.post(SaveState(0))


def test_main_does_not_wait_for_room(box: tuple[Postbox, Connection]) -> None:
    """A process that hangs reads nothing, and yet is asked for its state again and again."""
    postbox, theirs = box
    for policy in range(1000):
        postbox.post(SaveState(policy))
    heard, rings = [], 0
    while theirs.poll(0):
        heard.append(theirs.recv())
        postbox.flush()
        rings += postbox.bell.wait(0.0)
    assert heard == [SaveState(policy) for policy in range(1000)]
    assert 1 < rings < 1000


def test_a_message_longer_than_two_gibibytes_is_waited_for_too(box: tuple[Postbox, Connection]) -> None:
    postbox, theirs = box
    os.write(theirs.fileno(), struct.pack("!iQ", -1, 1 << 32) + b"only its beginning")
    assert postbox.take() == []
    assert postbox._first() == slice(12, 12 + (1 << 32))


def test_a_wake_rings_the_bell_of_a_process_and_leaves_nothing_there(run: Run) -> None:
    run.channels["actor_0"].send(Wake(Address("learner", 1)))
    assert not run.channels["learner_0"].bell.wait(0.0)
    assert run.channels["learner_1"].bell.wait(0.0)
    run.channels["actor_0"].send(Wake(Address("learner", 1)))
    assert run.received() == {}
    assert not any(pipe.poll(0) for pipe in run.main.values())


def test_what_cannot_travel_between_two_workers_is_refused(run: Run) -> None:
    with pytest.raises(TypeError, match=r"^SaveState cannot reach learner_1 in another process$"):
        run.channels["actor_0"].send(SaveState(1))
    assert not run.main["actor_0"].poll(0)
