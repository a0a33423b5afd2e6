"""Small worlds with a replay, whose slots hold random trajectories as an environment writes them."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from appo.algorithms.models.config import ModelConfig
from appo.algorithms.replay.source import ReplaySource
from appo.algorithms.replay.storage import ReplayPlan, replay_fields
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.learning.batches import Entered
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.learner_state import StateBlock
from appo.algorithms.runtime.memory.ownership import LearnerLedger
from appo.algorithms.runtime.memory.slots import Recorded, Trajectories
from appo.algorithms.runtime.messages import SlotReleased, TrajectoryReady
from appo.envs.spec import ActionPart, ActionSpec, EnvSpec, ObservationSpec
from tests.unit.runtime.worlds import TOPOLOGY, World, hand_over, world_of

ROWS, ROLLOUT = 3, 8
SPEC = EnvSpec(
    {"obs": ObservationSpec((2,), "float32"), "image": ObservationSpec((3, 4, 5), "uint8")},
    ActionSpec((ActionPart("categorical", 4), ActionPart("categorical", 2))),
)
STACKS = replace(SPEC, observations={"obs": ObservationSpec((4, 6, 6), "uint8")})
NOTHING = Entered()
RECORDED = {"q_taken": Recorded(("T", "R")), "q_max": Recorded(("T", "R"))}
PLAN = ReplayPlan(
    capacity=160,
    alpha=0.6,
    priority_epsilon=1e-3,
    prioritized=True,
    n_steps=3,
    gamma=0.9,
    batch_size=16,
    replay_ratio=2.0,
    learning_starts=30,
)


@dataclass
class Replay:
    """A world, and the source of its learner.

    Attributes:
        world: of the run.
        plan: of the replay.
        context: of the learner.
        source: as the learner has it.
        obs: what was shown so far in every row, [slot hand-over] -> obs by key.
    """

    world: World
    plan: ReplayPlan
    context: Context
    source: ReplaySource
    random: np.random.Generator
    path: Path | None = None

    @property
    def trajectories(self) -> Trajectories:
        return self.world.trajectories

    def succeed(self) -> ReplaySource:
        """Let a learner that takes the place of one that died make its source."""
        self.source = ReplaySource(self.plan, self.context, self.trajectories, self.source.hold, self.path)
        return self.source

    def hand_over(self, slot: int, ends: float = 0.2) -> TrajectoryReady:
        """Fill a slot, and give it to the source."""
        fill_slot(self, slot, ends)
        message = hand_over(self.world, slot)
        self.trajectories.owner[slot] = 1
        self.source.add(message)
        return message

    def fill(self, version: int = 1) -> list[SlotReleased]:
        """Let the source take what it can, noted as the worker does it."""
        released = []
        for message in self.source.fill(version):
            assert isinstance(message, SlotReleased)
            LearnerLedger(self.trajectories, 0).release(message)
            released.append(message)
        return released

    def note(self, entered: Entered, before: Entered = NOTHING) -> Entered:
        """Note the totals as the worker does it; they."""
        totals = Entered(before.samples + entered.samples, before.env_steps + entered.env_steps)
        counts = dict.fromkeys(LearnerLedger.NAMES, 0) | totals._asdict() | {"batches": 1}
        LearnerLedger(self.trajectories, 0).note(counts)
        return totals


def replay_of(
    spec: EnvSpec = SPEC,
    *,
    recorded: dict[str, Recorded] | None = None,
    lockstep: bool = False,
    path: Path | None = None,
    rollout: int = ROLLOUT,
    **changes: object,
) -> Replay:
    plan = replace(PLAN, **changes)
    counts = {"rows": ROWS, "rollout": rollout}
    fields = replay_fields(plan, spec, replace(TOPOLOGY, **counts), rnn_state_size=2)
    more = (*fields, *StateBlock.declare(0, {}))
    world = world_of(
        spec,
        rnn_state_size=2,
        more=more,
        recorded=RECORDED if recorded is None else recorded,
        **counts,
    )
    seeds = np.random.SeedSequence(3)
    context = Context(spec, None, ModelConfig(), "float32", "cpu", seeds=seeds, arena=world.arena)
    source = ReplaySource(plan, context, world.trajectories, lockstep, path)
    return Replay(world, plan, context, source, np.random.default_rng(4), path)


def fill_slot(replay: Replay, slot: int, ends: float) -> None:
    """Fill a slot with random steps; episodes end with this probability, as the environment's kind of reset has it."""
    t, random, spec = replay.trajectories, replay.random, replay.world.spec
    shape = t.valid.shape[1:]
    for name, o in spec.observations.items():
        t.obs[name][slot] = random.integers(0, 200, t.obs[name][slot].shape)
        if len(o.shape) == 3 and o.shape[0] == 4:
            _stack(t.obs[name][slot])
    t.first[slot, 1:], t.valid[slot], t.terminated[slot], t.truncated[slot] = False, True, False, False
    t.first[slot, 0] = random.random(shape[1]) < ends
    for step, row in np.argwhere(random.random(shape) < ends).tolist():
        if not t.valid[slot, step, row]:
            continue
        (t.terminated if random.random() < 0.5 else t.truncated)[slot, step, row] = True
        if spec.same_step:
            t.first[slot, step + 1, row] = True
        elif step + 1 < shape[0]:  # the step that resets
            t.valid[slot, step + 1, row], t.first[slot, step + 2, row] = False, True
    t.reward[slot] = np.where(t.valid[slot], random.normal(size=shape), np.nan)
    t.num_frames[slot] = random.integers(1, 5, shape)
    t.action[slot] = random.integers(0, 2, t.action[slot].shape)
    t.policy_version[slot] = random.integers(1, 9, shape)
    t.rnn_state[slot] = random.normal(size=t.rnn_state[slot].shape)
    for name in t.recorded:
        t.recorded[name][slot] = np.where(t.valid[slot], random.normal(size=shape), random.choice([1.0, 2.0]))


def _stack(obs: Array) -> None:
    """Let observations [T+1, R, k, *] show the last k frames."""
    for step in range(1, len(obs)):
        obs[step, :, :-1] = obs[step - 1, :, 1:]
