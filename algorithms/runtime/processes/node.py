"""The workers that share a process, and the messages between them."""

from collections.abc import Callable, Iterator, Mapping

from appo.algorithms.runtime.messages import ALL, Address, Message, Worker


class Node:
    """Delivers messages among the workers of a process, and passes all others to `send`.

    Args:
        workers: workers by address, in the order of turns.
        address_of: function from a message to the receiver.
        send: function for messages to workers in other processes.
    """

    def __init__(
        self,
        workers: Mapping[Address, Worker],
        address_of: Callable[[Message], Address],
        send: Callable[[Message], None],
    ) -> None:
        self.workers, self.address_of, self.send = workers, address_of, send

    def deliver(self, message: Message) -> None:
        """Deliver a message to its receiver, or to all workers."""
        address = self.address_of(message)
        if address is ALL:
            for worker in self.workers.values():
                self._deliver_all(worker.handle(message))
        elif (receiver := self.workers.get(address)) is not None:
            self._deliver_all(receiver.handle(message))
        else:
            self.send(message)

    def turn(self) -> bool:
        """Run one unit of work of every worker with work; return whether there was work."""
        busy = False
        for worker in self.workers.values():
            if worker.pending():
                busy = True
                self._deliver_all(worker.work())
        return busy

    def _deliver_all(self, messages: Iterator[Message]) -> None:
        for message in messages:
            self.deliver(message)
