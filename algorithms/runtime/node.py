"""The workers that share a process, and how messages pass between them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from algorithms.runtime.messages import Address, Begin, Message, Stop


class Worker(Protocol):
    """A plain object that messages are given to and that has work in between."""

    def handle(self, message: Message) -> Iterator[Message]:
        """Note a message; quick."""
        ...

    def pending(self) -> bool:
        """Whether there is work."""
        ...

    def work(self) -> Iterator[Message]:
        """Do one unit of it."""
        ...


class Node:
    """Delivers messages among its workers, and hands the rest to `send`.

    Args:
        workers: in the order in which they get their turn.
        address_of: the receiver of a message.
        send: takes messages whose receiver lives elsewhere.
    """

    def __init__(
        self,
        workers: Mapping[Address, Worker],
        address_of: Callable[[Message], Address],
        send: Callable[[Message], None],
    ) -> None:
        self.workers, self.address_of, self.send = workers, address_of, send

    def deliver(self, message: Message) -> None:
        """Give a message to the worker it is for; `Begin` and `Stop` are for all."""
        if isinstance(message, Begin | Stop):
            for worker in self.workers.values():
                self._post_all(worker.handle(message))
            return
        worker_or_none = self.workers.get(self.address_of(message))
        if worker_or_none is None:
            self.send(message)
        else:
            self._post_all(worker_or_none.handle(message))

    def turn(self) -> bool:
        """Let every worker that has work do one unit of it; False when none had any."""
        busy = False
        for worker in self.workers.values():
            if worker.pending():
                busy = True
                self._post_all(worker.work())
        return busy

    def _post_all(self, messages: Iterator[Message]) -> None:
        for message in messages:
            self.deliver(message)
