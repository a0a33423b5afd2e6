"""The gradient worker: beside the policy worker of an actor, it differentiates what that has acted."""

from collections import deque
from collections.abc import Iterator

from appo.algorithms.a3c.learner import TrajectoryGradient
from appo.algorithms.runtime.learning.batches import Batch
from appo.algorithms.runtime.learning.gradients import GradientRing
from appo.algorithms.runtime.memory.ownership import LearnerLedger
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.messages import Address, Message, SlotReleased, TrajectoryReady, Wake
from appo.algorithms.runtime.roles import LEARNER
from appo.algorithms.runtime.sampling.weight_reader import WeightReader
from appo.utils.timing import FRAMEWORK, TRAINING, clock


class GradientWorker:
    """Commits the gradient of each trajectory of its actor, then releases the slot.

    The group has one slot. So it begins its next trajectory, for which its policy worker fetches weights, when this one
    is released: the weights that have acted are still there to be differentiated, and nobody copies them.
    """

    def __init__(
        self,
        address: Address,
        trajectories: Trajectories,
        weights: WeightReader,
        differentiate: TrajectoryGradient,
        ring: GradientRing,
    ) -> None:
        self.actor, self.policy = address.member, address.index
        self.trajectories, self.ledger = trajectories, LearnerLedger(trajectories, address.index)
        self.weights, self.differentiate, self.ring = weights, differentiate, ring
        self.queue: deque[TrajectoryReady] = deque()

    def handle(self, message: Message) -> Iterator[Message]:
        """Note a trajectory."""
        if isinstance(message, TrajectoryReady) and self.ledger.accept(message):
            self.queue.append(message)
        yield from ()

    def pending(self) -> bool:
        """Whether there is a trajectory, and room for its gradient."""
        return bool(self.queue) and self.ring.has_room(self.actor)

    def work(self) -> Iterator[Message]:
        """Differentiate a trajectory, unless one that died in this place has committed it; tell actor and learner."""
        message = self.queue.popleft()
        if not self.ring.holds(self.actor, message.slot, message.sequence):
            self._commit(message)
        self.ledger.release(release := SlotReleased(message.policy, message.slot, message.sequence))
        yield release
        yield Wake(Address(LEARNER.name, self.policy))

    def _commit(self, message: TrajectoryReady) -> None:
        batch = Batch.of_slot(self.trajectories, message.slot)
        if not batch.valid.any():  # nothing but resets, of which there is nothing to learn
            return
        clock.enter(TRAINING)
        # In place of a dead worker nothing has acted yet: what that has acted is of about the newest weights.
        version = self.weights.version or self.weights.refresh()
        figures = self.differentiate(batch)
        self.ring.commit(self.actor, self.differentiate.gradient.numpy(), figures, batch, message, version)
        clock.enter(FRAMEWORK)
