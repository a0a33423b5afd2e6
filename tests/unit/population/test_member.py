from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appo.algorithms.population.member import PopulationMember
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.learning import learner_worker as module
from appo.algorithms.runtime.learning.column_batches import ColumnBatches
from appo.algorithms.runtime.learning.learner_worker import LearnerMemory, LearnerWorker, TrainingPlan
from appo.algorithms.runtime.learning.staging import Staging
from appo.algorithms.runtime.memory.learner_state import StateBlock
from appo.algorithms.runtime.memory.weights import WeightRing
from appo.algorithms.runtime.messages import (
    Address,
    CopyWeights,
    Message,
    PolicyTraits,
    SaveState,
    SetHyperparameters,
    TraitsSet,
)
from tests.states import stacked
from tests.unit.runtime.learning.test_learner_worker import LAYOUT, ROLLOUT, ROWS, WEIGHTS, CountingLearner
from tests.unit.runtime.worlds import World, hand_over, number_all, world_of

LAG = 20
FIRST = PolicyTraits({"rate": 0.1})


def world_of_two() -> World:
    more = [f for p in (0, 1) for f in (*WeightRing.declare(p, WEIGHTS), *StateBlock.declare(p, LAYOUT.vectors))]
    world = world_of(num_policies=2, more=tuple(more))
    number_all(world)
    return world


class TrainedMember:
    """A member of a population of two, in a world."""

    def __init__(self, world: World, policy: int = 0, columns: int = ROWS, traits: PolicyTraits = FIRST) -> None:
        self.world, self.policy = world, policy
        world.trajectories.policy_id[:] = policy
        memory = LearnerMemory.attach(world.arena, world.trajectories, policy)
        self.ring, self.block = memory.ring, memory.block
        self.learner, self.tuned = CountingLearner(), []
        self.columns = columns
        self.batches = ColumnBatches(Staging(world.trajectories), policy, columns, LAG, False, 2)
        plan = TrainingPlan(Budget(10**9), LAG, "cpu", 4, Path("unused"), alone=False)
        self.member = PopulationMember(traits, self.tune, self.batches, self.block)
        self.worker = LearnerWorker(Address("learner", policy), plan, self.learner, self.batches, memory, self.member)

    def tune(self, values: Mapping[str, Any]) -> int:
        self.tuned.append(dict(values))
        return values.get("columns", self.columns)

    def told(self, message: Message) -> list[Message]:
        return list(self.worker.handle(message))

    def train(self, slot: int = 0, version: int | None = None) -> None:
        self.world.trajectories.policy_version[slot] = self.learner.version if version is None else version
        self.told(hand_over(self.world, slot, self.policy))
        list(self.worker.work())

    def saved(self) -> dict[str, Any]:
        state = self.block.read()
        assert state is not None
        return {"weight": state.weights[0], **state.meta}


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes, so that only what is asked for is saved."""
    monkeypatch.setattr(module.time, "monotonic", lambda: 1000.0)


def test_traits_are_saved_with_the_weights() -> None:
    member = TrainedMember(world_of_two())
    member.train()
    member.told(SaveState(0))
    assert member.saved()["traits"] == FIRST.plain()
    assert member.tuned == []  # it was made with them


def test_hyperparameters_are_set_between_batches_and_saved_at_once() -> None:
    member = TrainedMember(world_of_two())
    member.train()
    traits = PolicyTraits({"rate": 0.2}, {"health": 1.0}, changes=1, decided_env_steps=48)
    assert member.told(SetHyperparameters(0, traits)) == [TraitsSet(0, traits, 3)]
    assert member.tuned == [{"rate": 0.2}]
    saved = member.saved()
    assert (saved["traits"], saved["weight"], saved["version"]) == (traits.plain(), 2.0, 3)


def test_an_order_that_is_known_changes_nothing() -> None:
    member = TrainedMember(world_of_two())
    traits = PolicyTraits({"rate": 0.2}, changes=2)
    member.told(SetHyperparameters(0, traits))
    assert member.told(SetHyperparameters(0, traits)) == [TraitsSet(0, traits, 1)]
    assert member.told(CopyWeights(0, PolicyTraits({"rate": 0.3}, changes=1, adoptions=1), 1)) == [
        TraitsSet(0, traits, 1)
    ]
    assert member.tuned == [{"rate": 0.2}]
    kept = PolicyTraits({"rate": 0.2}, changes=3, decided_env_steps=9)
    assert member.told(SetHyperparameters(0, kept)) == [TraitsSet(0, kept, 1)]
    assert member.tuned == [{"rate": 0.2}]  # the same values: only the clock has moved
    assert member.saved()["traits"]["decided_env_steps"] == 9


def test_weights_of_another_are_adopted_with_its_moments_and_statistics() -> None:
    world = world_of_two()
    source = TrainedMember(world, 1)
    for _ in range(3):
        source.train()
    source.told(SaveState(1))
    member = TrainedMember(world, 0)
    member.train()
    traits = PolicyTraits({"rate": 0.7}, changes=1, adoptions=1)
    assert member.told(CopyWeights(0, traits, 1)) == [TraitsSet(0, traits, 3 + LAG + 1, taken_env_steps=3 * 48)]
    state, other = member.block.read(), source.block.read()
    assert state is not None
    assert other is not None
    assert np.array_equal(stacked(state), stacked(other))
    assert member.learner.flat.flat.tolist() == [6.0] * WEIGHTS
    saved = member.saved()
    assert (saved["env_steps"], saved["samples"], saved["updates"]) == (48, 12, 2)  # its own
    assert (saved["version"], saved["traits"]) == (24, traits.plain())
    version, weights = member.ring.fetch(0)
    assert version == 24
    assert weights is not None
    assert weights.tolist() == [6.0] * WEIGHTS


def test_nothing_that_other_weights_have_acted_is_trained_on() -> None:
    world = world_of_two()
    source = TrainedMember(world, 1)
    source.train()
    member = TrainedMember(world, 0, columns=2 * ROWS)
    member.train(0)  # half of a batch
    assert member.batches.staged_samples == ROWS * ROLLOUT
    member.told(hand_over(world, 1))
    member.told(CopyWeights(0, PolicyTraits(changes=1, adoptions=1), 1))
    assert member.batches.staged_samples == 0
    list(member.worker.work())  # the slot that was waiting
    assert member.batches.filled == 0
    assert member.batches.counts().discarded == 2 * ROWS * ROLLOUT
    assert member.learner.samples == []
    for slot in (2, 3):
        member.train(slot)
    assert member.learner.samples == [2 * ROWS * ROLLOUT]


def test_batches_change_their_size_with_the_next_one() -> None:
    member = TrainedMember(world_of_two(), columns=2 * ROWS)
    member.train(0)
    member.told(SetHyperparameters(0, PolicyTraits({"columns": ROWS}, changes=1)))
    member.train(1)
    member.train(2)
    assert member.learner.samples == [2 * ROWS * ROLLOUT, ROWS * ROLLOUT]
    assert member.worker._report().totals["samples"] == 3 * ROWS * ROLLOUT


def test_the_next_learner_in_the_place_goes_on_with_the_traits_of_the_block() -> None:
    world = world_of_two()
    traits = PolicyTraits({"rate": 0.2, "columns": 1}, changes=1)
    TrainedMember(world).told(SetHyperparameters(0, traits))
    successor = TrainedMember(world)
    assert (successor.member.traits, successor.tuned) == (traits, [{"rate": 0.2, "columns": 1}])
    list(successor.batches.fill(1))
    assert successor.batches.num_columns == 1
    later = PolicyTraits({"rate": 0.9}, changes=1)  # of a start that knows better, as its flags have changed
    assert TrainedMember(world, traits=later).member.traits == later
