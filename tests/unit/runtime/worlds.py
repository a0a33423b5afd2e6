"""Small shared memories, filled so that every number says where it lies."""

from dataclasses import dataclass, fields, replace

import numpy as np

from algorithms.runtime.learning.batches import Batch
from algorithms.runtime.memory.arena import Arena, Field
from algorithms.runtime.memory.slots import FinalObservations, Trajectories, sizes_of
from algorithms.runtime.messages import TrajectoryReady
from algorithms.runtime.topology import Topology
from envs.spec import ActionPart, ActionSpec, EnvSpec, ObservationSpec

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
    **counts: object,
) -> World:
    topology = replace(TOPOLOGY, **counts)
    sizes = sizes_of(topology, spec, rnn_state_size, recurrence or topology.rollout)
    arena = Arena.create([*Trajectories.declare(sizes, spec), *FinalObservations.declare(sizes, spec), *more])
    trajectories, finals = Trajectories.attach(arena, spec), FinalObservations.attach(arena, spec)
    return World(spec, topology, arena, trajectories, finals)


def number_all(world: World) -> None:
    """Make every element of every numeric field different, all steps valid, nothing over."""
    t = world.trajectories
    bookkeeping = ("owner", "sequence", "released", "columns_used", "continues", "group_counts", "learner_counts")
    arrays = [getattr(t, f.name) for f in fields(Trajectories) if f.name not in ("obs", *bookkeeping)]
    for array in [*arrays, *t.obs.values()]:
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
    """Every field of a batch by name, observations as obs.KEY, in memory of its own."""
    arrays = {f.name: getattr(batch, f.name).numpy().copy() for f in fields(Batch) if f.name != "obs"}
    return arrays | {f"obs.{key}": value.numpy().copy() for key, value in batch.obs.items()}


def columns_in(world: World, places: list[tuple[int, int]]) -> dict[str, np.ndarray]:
    """What a batch of the columns (slot, row) must hold, in the form of `copy_of`."""
    t = world.trajectories
    sources = {f.name: getattr(t, f.name) for f in fields(Batch) if f.name != "obs"}
    sources |= {f"obs.{key}": array for key, array in t.obs.items()}
    return {name: np.stack([a[s][:, r] for s, r in places], axis=1) for name, a in sources.items()}
