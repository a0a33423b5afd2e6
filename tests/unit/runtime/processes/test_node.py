from collections.abc import Callable, Iterator

from appo.algorithms.runtime.messages import Address, Begin, Message, SaveState, StateSaved, Stop
from appo.algorithms.runtime.processes.node import Node
from appo.algorithms.runtime.topology import Topology

BOOK = Topology("central", 1, 1, 1, num_policies=3, policy_workers_per_policy=1, rows=1, rollout=1).address_book()
FIRST, SECOND = Address("learner", 0), Address("learner", 1)


class Recorder:
    """A worker that notes what it was told; its turn and its answers are given."""

    def __init__(self, answer: Callable[[Message], list[Message]] = lambda message: []) -> None:
        self.heard: list[Message] = []
        self.todo: list[Message] = []
        self.answer = answer

    def handle(self, message: Message) -> Iterator[Message]:
        self.heard.append(message)
        yield from self.answer(message)

    def pending(self) -> bool:
        return bool(self.todo)

    def work(self) -> Iterator[Message]:
        yield self.todo.pop(0)


def node_of(first: Recorder, second: Recorder) -> tuple[Node, list[Message]]:
    sent: list[Message] = []
    return Node({FIRST: first, SECOND: second}, BOOK.address_of, sent.append), sent


def test_messages_go_to_their_worker_or_out() -> None:
    first, second = Recorder(), Recorder()
    node, sent = node_of(first, second)
    node.deliver(SaveState(1))
    node.deliver(SaveState(0))
    node.deliver(StateSaved(0))
    node.deliver(SaveState(2))  # lives elsewhere
    assert (first.heard, second.heard) == ([SaveState(0)], [SaveState(1)])
    assert sent == [StateSaved(0), SaveState(2)]


def test_begin_and_stop_are_for_all_in_order_and_not_sent_on() -> None:
    order: list[str] = []
    first = Recorder(lambda message: order.append("first") or [])  # type: ignore[func-returns-value]
    second = Recorder(lambda message: order.append("second") or [])  # type: ignore[func-returns-value]
    node, sent = node_of(first, second)
    node.deliver(Begin())
    node.deliver(Stop())
    assert order == ["first", "second"] * 2
    assert first.heard == second.heard == [Begin(), Stop()]
    assert sent == []


def test_answers_are_delivered_before_the_next_message() -> None:
    first = Recorder(lambda message: [SaveState(1), StateSaved(0)])
    second = Recorder(lambda message: [StateSaved(1)])
    node, sent = node_of(first, second)
    node.deliver(SaveState(0))
    assert second.heard == [SaveState(1)]
    assert sent == [StateSaved(1), StateSaved(0)]


def test_a_turn_gives_every_worker_one_unit_of_work() -> None:
    first, second = Recorder(), Recorder()
    node, sent = node_of(first, second)
    assert not node.turn()
    first.todo += [SaveState(1), StateSaved(0)]
    second.todo += [StateSaved(1)]
    assert node.turn()
    assert second.heard == [SaveState(1)]
    assert sent == [StateSaved(1)]
    assert node.turn()
    assert sent == [StateSaved(1), StateSaved(0)]
    assert not node.turn()
