"""The parts of a parallel run that repeats itself bit by bit, whenever its processes get their turn (--lockstep).

Groups have one slot each. A learner waits until it has all of them, and no group goes on before all that this round
fills has been trained and published: nobody acts while somebody trains. What is left to chance in other runs, which
weights act in a step and which trajectories meet in a batch, follows from counting then.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from algorithms.runtime.batches import ColumnBatches
from algorithms.runtime.flat_module import FlatModule
from algorithms.runtime.messages import ActionRequest, ActionsReady, Address, SlotReleased, TrajectoryReady
from algorithms.runtime.policy_worker import ActingPlan, PolicyWorker, Sampling
from algorithms.runtime.trajectories import FinalObservations, Trajectories
from algorithms.runtime.weights import WeightRing


class LockstepBatches(ColumnBatches):
    """Batches of rounds: one trajectory of every group, in the order of the groups.

    Args:
        trajectories: the shared arrays, with one slot for each group.
        policy, columns, max_policy_lag: as `ColumnBatches`.
    """

    def __init__(self, trajectories: Trajectories, policy: int, columns: int, max_policy_lag: int) -> None:
        super().__init__(trajectories, policy, columns, max_policy_lag, hold=True, num_policies=1)

    @property
    def waiting(self) -> int:
        """Slots that are not used up, once the round is complete."""
        complete = len(self.queue) + len(self.held) == len(self.trajectories.owner)
        return len(self.queue) if complete else 0

    def add(self, message: TrajectoryReady) -> None:
        """Note a slot of the round."""
        super().add(message)
        self.queue = deque(sorted(self.queue))

    def trained(self) -> Iterator[SlotReleased]:
        """Release all slots when the round is used up, and none before."""
        if not self.queue:
            yield from super().trained()


class LockstepPolicyWorker(PolicyWorker):
    """Acts group by group, each with random numbers of its own, so that it makes no difference who asks first.

    Args:
        address, plan, flat, ring, trajectories, finals: as `PolicyWorker`.
        seeds: of the sampling of actions in each group of the run.
    """

    def __init__(
        self,
        address: Address,
        plan: ActingPlan,
        flat: FlatModule,
        ring: WeightRing,
        trajectories: Trajectories,
        finals: FinalObservations,
        seeds: Sequence[int],
    ) -> None:
        super().__init__(address, plan, flat, ring, trajectories, finals)
        self._seeds = seeds
        self._of_group: dict[int, Sampling] = {}

    def answer(self, requests: list[ActionRequest]) -> Iterator[ActionsReady]:
        """Answer the requests one by one: sums of floats can depend on how many rows are computed together."""
        for request in requests:
            if request.group not in self._of_group:
                self._of_group[request.group] = self._sampling(self._seeds[request.group])
            self.sampling = self._of_group[request.group]
            yield from super().answer([request])
