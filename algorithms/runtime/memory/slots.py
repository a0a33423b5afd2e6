"""Shared memory of trajectories: one declaration per field is its shape, its documentation and its allocation."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from appo.algorithms.runtime.memory.arena import Arena, Array, Field
from appo.algorithms.runtime.topology import Topology
from appo.envs.spec import EnvSpec


class Recorded(NamedTuple):
    """A field of every slot filled by acting, beside observations, actions, rewards and flags.

    Attributes:
        dims: dimensions behind the slots: T steps, R rows, F steps with possible final values (0 unless SAME_STEP), or
            numbers.
        dtype: a numpy name.
    """

    dims: tuple[str | int, ...]
    dtype: str = "float32"


NOTHING_RECORDED: Mapping[str, Recorded] = {}


def dims(shape: str, dtype: type[Any] | str) -> Any:
    """Declare a shared array by its named dimensions; `dtype` is a numpy type, or names the declaring part.

    The environment declares "observation" and "action", the algorithm "recorded".
    """
    return dataclasses.field(metadata={"dims": shape.split(), "dtype": dtype})


def sizes_of(topology: Topology, spec: EnvSpec, rnn_state_size: int, recurrence: int) -> dict[str, int]:
    """Return the size of every named dimension."""
    return {
        "S": topology.num_slots,
        "P": topology.num_policies,
        "C": 16,  # room for the counts of one group or learner, on separate cache lines
        "T": topology.rollout,
        "T+1": topology.rollout + 1,
        "R": topology.rows,
        "A": spec.action.num_values,
        "H": rnn_state_size,
        "N": topology.rollout // recurrence,  # BPTT segments
        "F": topology.rollout if spec.same_step else 0,  # steps that can need a separate final value
        "G": topology.num_groups,
        "G'": topology.num_groups if spec.same_step else 0,
    }


class SharedArrays:
    """Base of dataclasses with fields of arena arrays, or dicts of arrays by observation key or recorded name."""

    @classmethod
    def declare(
        cls, sizes: dict[str, int], spec: EnvSpec, recorded: Mapping[str, Recorded] = NOTHING_RECORDED
    ) -> list[Field]:
        """Return the arena fields of this class; `recorded` has the fields of the algorithm."""
        fields = []
        for declared in dataclasses.fields(cls):  # type: ignore[arg-type]
            shape = tuple(sizes[d] for d in declared.metadata["dims"])
            name, dtype = f"{cls.__name__}.{declared.name}", declared.metadata["dtype"]
            if dtype == "observation":
                fields += [Field(f"{name}.{key}", shape + o.shape, o.dtype) for key, o in spec.observations.items()]
            elif dtype == "recorded":
                for key, one in recorded.items():
                    of_slot = tuple(d if isinstance(d, int) else sizes[d] for d in one.dims)
                    fields.append(Field(f"{name}.{key}", shape + of_slot, one.dtype))
            else:
                fields.append(Field(name, shape, np.dtype(spec.action.dtype if dtype == "action" else dtype).name))
        return fields

    @classmethod
    def attach(cls, arena: Arena, spec: EnvSpec, recorded: Mapping[str, Recorded] = NOTHING_RECORDED) -> Self:
        """Return the arrays as laid out in the arena."""
        arrays: dict[str, Any] = {}
        for declared in dataclasses.fields(cls):  # type: ignore[arg-type]
            name = f"{cls.__name__}.{declared.name}"
            keys = {"observation": spec.observations, "recorded": recorded}.get(declared.metadata["dtype"])
            arrays[declared.name] = arena[name] if keys is None else {key: arena[f"{name}.{key}"] for key in keys}
        return cls(**arrays)


@dataclass(frozen=True)
class Trajectories(SharedArrays):
    """Trajectories, recorded by actors and policies, read by learners. S slots, T steps, R rows, time-major in a slot.

    Index T holds the real bootstrap observation, which becomes row 0 of the group's next slot. Two independent signals:
    `first` marks observations that start an episode, where the model zeroes its state, and nowhere else. `valid` marks
    steps taken by an active agent in a living environment, and masks every loss and statistic.
    """

    obs: dict[str, Array] = dims("S T+1 R", "observation")
    first: Array = dims("S T+1 R", np.bool_)
    policy_id: Array = dims("S T+1 R", np.int32)  # redrawn exactly where `first` is true
    valid: Array = dims("S T R", np.bool_)
    reward: Array = dims("S T R", np.float32)  # scaled and clipped
    terminated: Array = dims("S T R", np.bool_)
    truncated: Array = dims("S T R", np.bool_)
    num_frames: Array = dims("S T R", np.int32)  # simulator frames behind the step
    action: Array = dims("S T R A", "action")  # as sampled: neither clipped nor squashed
    recorded: dict[str, Array] = dims("S", "recorded")  # by the policy that acted, for its algorithm
    policy_version: Array = dims("S T R", np.int64)
    rnn_state: Array = dims("S N R H", np.float32)  # before every BPTT segment
    owner: Array = dims("S", np.int64)  # a bit per policy still reading the slot; 0: the group owns the slot
    sequence: Array = dims("S", np.int64)  # hand-overs of the slot so far
    released: Array = dims("S P", np.int64)  # the last hand-over that the learner of the policy has released
    taker: Array = dims("S", np.int64)  # number of the taker of the slot, see `Topology.apart`
    columns_used: Array = dims("S P", np.int64)  # of the present hand-over, see `memory/ownership.py`
    continues: Array = dims("S", np.int64)  # the slot whose row T became row 0 of this one; -1: new episodes
    follows: Array = dims("S", np.int64)  # the hand-over of that slot
    group_counts: Array = dims("G C", np.int64)  # totals of a group, continued by a replacement actor
    learner_counts: Array = dims("P C", np.int64)  # totals of a learner

    def valid_of(self, slot: int, policy: int | None) -> Array:
        """Return the valid steps of a policy in a slot, [T, R]; None: of all policies."""
        valid: Array = self.valid[slot]
        return valid if policy is None else valid & (self.policy_id[slot, : len(valid)] == policy)


@dataclass(frozen=True)
class FinalObservations(SharedArrays):
    """True final observations of the rows of a group that ended in its last step; SAME_STEP environments only."""

    final_obs: dict[str, Array] = dims("G' R", "observation")
    has_final: Array = dims("G' R", np.bool_)
