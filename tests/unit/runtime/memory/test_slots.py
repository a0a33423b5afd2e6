from dataclasses import replace

import numpy as np

from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.slots import FinalObservations, Recorded, Trajectories, sizes_of
from appo.envs.spec import ActionPart, ActionSpec, EnvSpec, ObservationSpec
from tests.unit.runtime.worlds import SPEC, TOPOLOGY, arrays_of, world_of

RICH = EnvSpec(
    {"camera": ObservationSpec((2, 5, 3), "uint8"), "speed": ObservationSpec((), "float32")},
    ActionSpec((ActionPart("categorical", 3), ActionPart("gaussian", 2)), (-1.0, -1.0), (1.0, 1.0)),
    same_step=True,
)


def test_sizes_of_the_named_dimensions() -> None:
    assert sizes_of(TOPOLOGY, SPEC, 8, 2) == {
        "S": 4, "T": 4, "T+1": 5, "R": 3, "A": 1, "H": 8, "N": 2, "F": 0, "G": 2, "G'": 0, "P": 1,
            "C": 16
    }  # fmt: skip
    same_step = sizes_of(TOPOLOGY, replace(SPEC, same_step=True), 0, 4)
    assert (same_step["F"], same_step["G'"], same_step["N"]) == (4, 2, 1)


def test_shapes_and_types_of_a_plain_environment() -> None:
    t = world_of().trajectories
    assert {key: (a.shape, a.dtype.name) for key, a in t.obs.items()} == {"obs": ((4, 5, 3, 4), "float32")}
    shapes = {name: (a.shape, a.dtype.name) for name, a in arrays_of(t).items() if name != "obs.obs"}
    assert shapes == {
        "first": ((4, 5, 3), "bool"),
        "policy_id": ((4, 5, 3), "int32"),
        "valid": ((4, 4, 3), "bool"),
        "reward": ((4, 4, 3), "float32"),
        "terminated": ((4, 4, 3), "bool"),
        "truncated": ((4, 4, 3), "bool"),
        "num_frames": ((4, 4, 3), "int32"),
        "action": ((4, 4, 3, 1), "int32"),
        "recorded.logits": ((4, 4, 3, 4), "float32"),
        "recorded.log_prob": ((4, 4, 3), "float32"),
        "recorded.value": ((4, 4, 3), "float32"),
        "recorded.final_value": ((4, 0, 3), "float32"),
        "policy_version": ((4, 4, 3), "int64"),
        "rnn_state": ((4, 1, 3, 0), "float32"),
        "owner": ((4,), "int64"),
        "sequence": ((4,), "int64"),
        "released": ((4, 1), "int64"),
        "taker": ((4,), "int64"),
        "columns_used": ((4, 1), "int64"),
        "continues": ((4,), "int64"),
        "follows": ((4,), "int64"),
        "group_counts": ((2, 16), "int64"),
        "learner_counts": ((1, 16), "int64"),
    }


def test_shapes_and_types_of_a_same_step_dict_environment() -> None:
    world = world_of(RICH, rnn_state_size=6, recurrence=2)
    t, finals = world.trajectories, world.finals
    assert {key: (a.shape, a.dtype.name) for key, a in t.obs.items()} == {
        "camera": ((4, 5, 3, 2, 5, 3), "uint8"),
        "speed": ((4, 5, 3), "float32"),
    }
    assert t.recorded["final_value"].shape == (4, 4, 3)
    assert (t.action.shape, t.action.dtype.name) == ((4, 4, 3, 3), "float32")
    assert t.recorded["logits"].shape == (4, 4, 3, 7)
    assert t.rnn_state.shape == (4, 2, 3, 6)
    assert {key: a.shape for key, a in finals.final_obs.items()} == {"camera": (2, 3, 2, 5, 3), "speed": (2, 3)}
    assert finals.has_final.shape == (2, 3)


def test_final_observations_of_next_step_environments_take_no_memory() -> None:
    declared = FinalObservations.declare(sizes_of(TOPOLOGY, SPEC, 0, 4), SPEC)
    assert [(f.name, f.nbytes) for f in declared] == [
        ("FinalObservations.final_obs.obs", 0),
        ("FinalObservations.has_final", 0),
    ]


def test_attached_arrays_are_those_of_the_arena() -> None:
    world = world_of(RICH)
    again = Trajectories.attach(world.arena, RICH, APPO().recorded(RICH))
    again.obs["camera"][1, 2, 0] = 9
    assert (world.trajectories.obs["camera"][1, 2, 0] == 9).all()
    expected = arrays_of(world.trajectories)
    for name, array in arrays_of(again).items():
        assert np.shares_memory(array, expected.pop(name)) or not array.size
    assert not expected


def test_what_is_recorded_is_declared_by_names_and_numbers() -> None:
    recorded = {"q": Recorded(("T", "R", 2)), "age": Recorded(("R",), "int64")}
    arena = Arena.create(Trajectories.declare(sizes_of(TOPOLOGY, SPEC, 0, 4), SPEC, recorded))
    found = Trajectories.attach(arena, SPEC, recorded).recorded
    assert {name: (a.shape, a.dtype.name) for name, a in found.items()} == {
        "q": ((4, 4, 3, 2), "float32"),
        "age": ((4, 3), "int64"),
    }
    nothing = Arena.create(Trajectories.declare(sizes_of(TOPOLOGY, SPEC, 0, 4), SPEC))
    assert Trajectories.attach(nothing, SPEC).recorded == {}


def test_a_row_of_all_environments_is_one_contiguous_write() -> None:
    t = world_of(RICH).trajectories
    assert t.obs["camera"][1, 2].flags.c_contiguous
    assert t.reward[1, 2].flags.c_contiguous
