"""The workers that share a process, and the messages between them."""

from collections.abc import Callable, Iterator, Mapping

from appo.algorithms.runtime.messages import ALL, Address, Message, Worker


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
        """Give a message to the worker it is for, or to all."""
        address = self.address_of(message)
        if address is ALL:
            for worker in self.workers.values():
                self._post_all(worker.handle(message))
            return
        worker_or_none = self.workers.get(address)
        if worker_or_none is None:
            self.send(message)
        else:
            self._post_all(worker_or_none.handle(message))

    def turn(self) -> bool:
        """Let every worker that has work do one unit of it; return False when none had any."""
        busy = False
        for worker in self.workers.values():
            if worker.pending():
                busy = True
                self._post_all(worker.work())
        return busy

    def _post_all(self, messages: Iterator[Message]) -> None:
        for message in messages:
            self.deliver(message)
