"""Slots change hands while actors and learners die between any two of their messages."""

import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.learning.column_batches import ColumnBatches
from appo.algorithms.runtime.learning.learner_worker import LearnerMemory, LearnerWorker, TrainingPlan
from appo.algorithms.runtime.learning.staging import Staging
from appo.algorithms.runtime.memory.learner_state import StateBlock
from appo.algorithms.runtime.memory.ownership import (
    LearnerLedger,
    columns_used,
    handed_over,
    note_columns_used,
    policies_in,
    take_back,
)
from appo.algorithms.runtime.memory.weights import WeightRing
from appo.algorithms.runtime.messages import Address, Begin, Message, SlotReleased, TrajectoryReady
from appo.algorithms.runtime.sampling.env_group import EnvGroup, GroupPlan
from appo.envs.config import EnvConfig
from appo.envs.make import make_group
from tests.states import adam_layout
from tests.unit.runtime.learning.test_learner_worker import WEIGHTS, CountingLearner
from tests.unit.runtime.worlds import hand_over, world_of

ROWS, ROLLOUT, SLOTS = 3, 4, 3


def test_policies_are_bits() -> None:
    assert [policies_in(owner) for owner in (0, 1, 2, 5, 2**40)] == [[], [0], [1], [0, 2], [40]]


def test_a_group_takes_back_what_all_learners_have_released() -> None:
    t = world_of(num_policies=2).trajectories
    t.sequence[:], t.owner[:] = 5, (0, 3, 3, 2)
    t.released[1], t.released[2] = (5, 5), (5, 4)
    assert take_back(t, range(4)) == [0, 1]
    assert t.owner.tolist() == [0, 0, 2, 2]
    again = [TrajectoryReady(1, 2, 5, 9), TrajectoryReady(1, 3, 5, 9)]
    assert list(handed_over(t, range(4), 9)) == again


def test_columns_used_are_those_of_the_present_hand_over() -> None:
    world = world_of()
    first = hand_over(world, 1)
    assert columns_used(world.trajectories, first) == 0
    for columns in (2, 3):
        note_columns_used(world.trajectories, first, columns)
        assert columns_used(world.trajectories, first) == columns
    assert columns_used(world.trajectories, hand_over(world, 1)) == 0


def test_a_learner_accepts_a_hand_over_once() -> None:
    world = world_of()
    ledger = LearnerLedger(world.trajectories, 0)
    first = hand_over(world, 0)
    assert [ledger.accept(first), ledger.accept(first)] == [True, False]
    assert LearnerLedger(world.trajectories, 0).accept(first)  # of a learner in its place, who knows nothing of it
    ledger.release(SlotReleased(0, 0, 1))
    assert not LearnerLedger(world.trajectories, 0).accept(first)
    second = hand_over(world, 0)
    assert [ledger.accept(first), ledger.accept(second)] == [False, True]


class Died(Exception):
    """A process was killed."""


class Run:
    """A group and a learner that can die after any message; queues outlive them, what they hold in hand does not.

    Args:
        columns: of a batch.
        seed: of who dies when.
    """

    def __init__(self, columns: int, seed: int) -> None:
        more = (*WeightRing.declare(0, WEIGHTS), *StateBlock.declare(0, adam_layout(WEIGHTS, 1).vectors))
        self.rng, self.columns = random.Random(seed), columns
        self.world = world_of(
            make_group(EnvConfig(env="toy/Counter-v0"), ROWS).spec, groups_per_actor=1, slots_per_group=SLOTS, more=more
        )
        self.hand_overs: deque[TrajectoryReady] = deque()
        self.releases: deque[SlotReleased] = deque()
        self.generation = -1
        self.dying = 0.0
        self.new_group()
        self.new_learner()

    def new_group(self) -> None:
        self.generation += 1
        envs = make_group(EnvConfig(env="toy/Counter-v0"), ROWS)
        plan = GroupPlan(index=0, slots=range(SLOTS), start=0, generation=self.generation)
        seeds = np.random.SeedSequence(self.generation)
        self.group = EnvGroup(plan, envs, self.world.trajectories, self.world.finals, seeds)
        self.group.reset()
        self.send(self.group.begin())

    def new_learner(self) -> None:
        batches = ColumnBatches(Staging(self.world.trajectories), 0, self.columns, 20, False, 1)
        arena, plan = self.world.arena, TrainingPlan(Budget(10**9), 20, "cpu", 50, Path("unused"))
        memory = LearnerMemory.attach(arena, self.world.trajectories, 0)
        self.learner = LearnerWorker(Address("learner", 0), plan, CountingLearner(), batches, memory)
        self.send(self.learner.handle(Begin()))

    def send(self, messages: Iterator[Message]) -> None:
        for message in messages:
            if self.rng.random() < self.dying:
                raise Died  # with the message in its hand
            if isinstance(message, TrajectoryReady):
                self.hand_overs.append(message)
            elif isinstance(message, SlotReleased):
                self.releases.append(message)

    def act(self) -> None:
        """One turn of the actor: what has arrived, then a step."""
        arrived, self.releases = self.releases, deque()
        for message in arrived:
            self.send(self.group.release(message))
            if self.rng.random() < self.dying:
                raise Died  # with the others in its hand
        group, t = self.group, self.world.trajectories
        if group.slot >= 0:
            t.action[group.slot, group.step] = 0
            t.policy_version[group.slot, group.step] = self.learner.learner.version
            self.send(group.advance())

    def learn(self) -> None:
        """One turn of the learner."""
        arrived, self.hand_overs = self.hand_overs, deque()
        for message in arrived:
            self.send(self.learner.handle(message))
        if self.rng.random() < self.dying:
            raise Died
        if self.learner.pending():
            self.send(self.learner.work())

    def turn(self) -> None:
        for role, again in ((self.act, self.new_group), (self.learn, self.new_learner)):
            try:
                role()
            except Died:
                self.reborn(again)

    def reborn(self, again: object) -> None:
        assert callable(again)
        dying, self.dying = self.dying, 0.0
        again()
        self.dying = dying


def totals_of(run: Run) -> dict[str, int]:
    return run.learner._report().totals


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("columns", [2, 3, 7])
def test_whoever_dies_every_step_is_trained_discarded_or_in_flight(columns: int, seed: int) -> None:
    run = Run(columns, seed)
    run.dying = 0.03
    before: dict[str, int] = {}
    for _ in range(400):
        run.turn()
        totals = totals_of(run)
        assert all(totals[name] >= before.get(name, 0) for name in ("samples", "env_steps", "discarded", "released"))
        before = totals
    run.dying = 0.0
    trained = before["samples"]
    for _ in range(100):
        run.turn()
    totals, group = totals_of(run), run.group
    assert totals["samples"] > trained  # nothing is stuck
    assert totals["samples"] + totals["discarded"] + totals["in_flight"] == group.totals["collected"]
    assert totals["trajectories"] == group.totals["sent"] - len(run.hand_overs)
    assert run.generation > 3
    assert totals["lost"] > 0
    waiting = totals["held"] + len(run.hand_overs) + len(run.releases)
    assert len(group.free) + (group.slot >= 0) + waiting == SLOTS
