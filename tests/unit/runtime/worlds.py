"""Small shared memories, filled so that every number says where it lies."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.runtime.learning.batches import Batch
from appo.algorithms.runtime.memory.arena import Arena, Field
from appo.algorithms.runtime.memory.slots import FinalObservations, Recorded, Trajectories, sizes_of
from appo.algorithms.runtime.messages import TrajectoryReady
from appo.algorithms.runtime.topology import Topology
from appo.envs.spec import ActionPart, ActionSpec, EnvSpec, ObservationSpec

SPEC = EnvSpec({"obs": ObservationSpec((4,), "float32")}, ActionSpec((ActionPart("categorical", 4),)))
TOPOLOGY = Topology(
    placement="serial",
    num_actors=1,
    groups_per_actor=2,
    slots_per_group=2,
    num_policies=1,
    policy_workers_per_policy=1,
    rows=3,
    rollout=4,
)


@dataclass(frozen=True)
class World:
    """The shared arrays of a run that has no process."""

    spec: EnvSpec
    topology: Topology
    arena: Arena
    trajectories: Trajectories
    finals: FinalObservations


def world_of(
    spec: EnvSpec = SPEC,
    *,
    rnn_state_size: int = 0,
    recurrence: int = 0,
    more: tuple[Field, ...] = (),
    recorded: Mapping[str, Recorded] | None = None,
    **counts: object,
) -> World:
    topology = replace(TOPOLOGY, **counts)
    sizes = sizes_of(topology, spec, rnn_state_size, recurrence or topology.rollout)
    recorded = recorded or APPO().recorded(spec)
    arena = Arena.create([*Trajectories.declare(sizes, spec, recorded), *FinalObservations.declare(sizes, spec), *more])
    trajectories, finals = Trajectories.attach(arena, spec, recorded), FinalObservations.attach(arena, spec)
    return World(spec, topology, arena, trajectories, finals)


def arrays_of(trajectories: Trajectories) -> dict[str, np.ndarray]:
    """Every array by name, observations as obs.KEY, recorded ones as recorded.NAME."""
    named = {}
    for field in fields(trajectories):
        value = getattr(trajectories, field.name)
        arrays = value.items() if isinstance(value, dict) else [("", value)]
        named |= {f"{field.name}.{key}".removesuffix("."): array for key, array in arrays}
    return named


BOOKKEEPING = (
    "owner",
    "sequence",
    "released",
    "taker",
    "columns_used",
    "continues",
    "follows",
    "group_counts",
    "learner_counts",
)
"""Fields of slots that processes keep for themselves, without numbers of steps."""


def number_all(world: World) -> None:
    """Make every element of every numeric field different, all steps valid, nothing over."""
    t = world.trajectories
    for array in [array for name, array in arrays_of(t).items() if name not in BOOKKEEPING]:
        if array.dtype == np.bool_:
            array[:] = False
        elif array.size:
            array[:] = np.arange(array.size, dtype=np.int64).reshape(array.shape)
    t.valid[:] = True
    t.policy_version[:] = 1
    t.num_frames[:] = 4
    t.policy_id[:] = 0


def hand_over(world: World, slot: int, policy: int = 0) -> TrajectoryReady:
    """The message with which the slot would now be handed over."""
    world.trajectories.sequence[slot] += 1
    return TrajectoryReady(policy, slot, int(world.trajectories.sequence[slot]), 0)


def copy_of(batch: Batch) -> dict[str, np.ndarray]:
    """Every field of a batch by name, observations as obs.KEY, recorded ones as recorded.NAME, in memory of its own."""
    return {name: value.numpy().copy() for name, value in batch.named().items()}


def assert_blank(blank: Batch | None, batch: Batch) -> None:
    """A blank batch has the form of the batches of its source, and no valid step."""
    assert blank is not None
    forms = [{name: (x.shape, x.dtype) for name, x in one.named().items()} for one in (blank, batch)]
    assert forms[0] == forms[1]
    assert not any(x.any() for x in blank.named().values())


def columns_in(world: World, places: list[tuple[int, int]]) -> dict[str, np.ndarray]:
    """What a batch of the columns (slot, row) must hold, in the form of `copy_of`."""
    names = {f.name for f in fields(Batch)}
    sources = {name: a for name, a in arrays_of(world.trajectories).items() if name.partition(".")[0] in names}
    return {name: np.stack([a[s][:, r] for s, r in places], axis=1) for name, a in sources.items()}
