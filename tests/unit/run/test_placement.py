from dataclasses import replace

import pytest

from appo.algorithms.run.config import Config
from appo.algorithms.run.placement import (
    Sampling,
    choose_placement,
    cores_of,
    goes_on,
    gpus_of,
    most_envs,
    plan_workers,
    require_one_per_process,
    topology_of,
)
from appo.algorithms.runtime.config import SamplingConfig
from appo.algorithms.runtime.messages import Address
from appo.algorithms.runtime.topology import Placement
from appo.utils.errors import UsageError


def config_of(**flags: object) -> Config:
    given = {"rollout": 32, "batch_size": 1024, **flags}
    return Config.from_flat({name: value for name, value in given.items() if value is not None})


@pytest.mark.parametrize(
    ("placement", "cores", "flags", "expected"),
    [
        ("local", 4, {}, (4, 8, 1)),  # 32 columns over 4 actors
        ("central", 4, {}, (4, 8, 2)),
        ("serial", 4, {}, (1, 32, 1)),
        ("local", 64, {}, (64, 1, 1)),
        ("central", 64, {}, (64, 2, 2)),  # at least one env in each split
        ("serial", 1, {"batch_size": 32 * 1000}, (1, 64, 1)),  # no more than 64 by itself
        ("local", 2, {"num_batches_per_iteration": 3}, (2, 48, 1)),
        ("local", 8, {"num_workers": 2}, (2, 16, 1)),
        ("local", 8, {"num_envs_per_worker": 100}, (8, 100, 1)),
        ("central", 8, {"num_envs_per_worker": 7}, (8, 7, 1)),  # odd: not split
        ("central", 8, {"num_envs_per_worker": 6}, (8, 6, 2)),
        ("central", 4, {"worker_num_splits": 3}, (4, 6, 3)),
        ("central", 4, {"worker_num_splits": 1}, (4, 8, 1)),
        ("central", 4, {"worker_num_splits": 4, "num_envs_per_worker": 4}, (4, 4, 4)),
        # weights change 40 times per 16 columns, and no trajectory may get half as old as 100 updates
        ("local", 64, {"batch_size": 128, "num_batches_per_iteration": 4, "ppo_epochs": 10}, (20, 1, 1)),
        ("central", 64, {"batch_size": 128, "num_batches_per_iteration": 4, "ppo_epochs": 10}, (10, 2, 2)),
        ("local", 64, {"batch_size": 512, "ppo_epochs": 10, "num_envs_per_worker": 8}, (10, 8, 1)),
        ("local", 64, {"ppo_epochs": 10, "max_policy_lag": 1}, (32, 1, 1)),
        ("local", 64, {"batch_size": 128, "ppo_epochs": 50, "num_workers": 64}, (64, 1, 1)),
        # Actors of a synchronous learner fill an iteration exactly, or some would go on by the old weights.
        ("local", 3, {"algo": "PPO", "num_batches_per_iteration": 1, "batch_size": 512}, (2, 8, 1)),
        ("local", 12, {"algo": "PPO", "num_batches_per_iteration": 1, "batch_size": 512}, (8, 2, 1)),
        ("central", 12, {"algo": "PPO", "num_batches_per_iteration": 1, "batch_size": 512}, (8, 2, 2)),
        ("local", 3, {"num_minibatches_to_accumulate": 0}, (2, 16, 1)),
        ("local", 3, {"algo": "PPO", "num_batches_per_iteration": 1, "batch_size": 512, "num_workers": 3}, (3, 5, 1)),
        ("local", 16, {"algo": "PPO", "num_batches_per_iteration": 1, "batch_size": 34 * 32}, (16, 2, 1)),  # not 2 x 17
        ("local", 3, {"algo": "PPO", "num_batches_per_iteration": 1, "lockstep": True}, (3, 10, 1)),
        ("local", 64, {"algo": "A3C", "batch_size": None, "num_envs_per_worker": 8}, (64, 8, 1)),  # nobody waits
    ],
)
def test_counts_are_filled_in(
    placement: Placement, cores: int, flags: dict[str, object], expected: tuple[int, int, int]
) -> None:
    assert plan_workers(config_of(**flags), cores, placement) == Sampling(placement, *expected)


@pytest.mark.parametrize(
    ("flags", "plan", "num_agents", "reason"),
    [
        ({}, Sampling("local", 2, 16, 1), 1, ""),
        ({}, Sampling("local", 2, 4, 1), 4, ""),
        ({}, Sampling("local", 3, 5, 1), 1, "32 trajectories of an iteration are no multiple of 15 played at once"),
        ({}, Sampling("local", 1, 9, 1), 4, "32 trajectories of an iteration are no multiple of 36 played at once"),
        ({"num_policies": 2}, Sampling("local", 2, 16, 1), 1, "several policies: sampling goes on while one trains"),
    ],
)
def test_sampling_that_goes_on_beside_a_synchronous_learner_has_a_reason(
    flags: dict[str, object], plan: Sampling, num_agents: int, reason: str
) -> None:
    found = goes_on(plan, config_of(algo="PPO", num_batches_per_iteration=1, **flags), num_agents)
    assert found.removesuffix(": some go on in training") == reason


@pytest.mark.parametrize(
    ("flags", "num_agents", "expected"),
    [
        # Iterations of 32 trajectories, in which weights change 4 times; 50 changes are half of --max_policy_lag.
        ({"algo": "APPO"}, 1, 12.5 * 32),
        ({"algo": "PPO"}, 1, 32.0),
        ({"algo": "PPO"}, 4, 8.0),
        ({"algo": "PPO", "num_policies": 2}, 1, 64.0),
        ({"algo": "APPO", "max_policy_lag": 1}, 1, 32.0),
        # Microbatches of 8 trajectories, dropped when they are in the gradient.
        ({"algo": "PPO", "num_batches_per_iteration": 1, "ppo_epochs": 1, "microbatch_size": 256,
          "normalize_advantages": "off"}, 1, 50 * 8.0),
    ],
)  # fmt: skip
def test_environments_are_no_more_than_keep_trajectories_young(
    flags: dict[str, object], num_agents: int, expected: float
) -> None:
    sizes = {"batch_size": 512, "num_batches_per_iteration": 2, "ppo_epochs": 2}
    assert most_envs(config_of(**sizes | flags), num_agents) == expected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"num_envs_per_worker": 4}, "not --num_envs_per_worker=4: --num_envs_per_worker=1"),
        ({"num_envs_per_worker": 2, "worker_num_splits": 2, "inference": "central"},
         "not --num_envs_per_worker=2 --worker_num_splits=2: --num_envs_per_worker=1 --worker_num_splits=1"),
        ({"worker_num_splits": 2}, "not --worker_num_splits=2: --num_envs_per_worker=1 --worker_num_splits=1"),
        ({"inference": "serial", "num_workers": 3, "num_envs_per_worker": 1},
         "not --num_workers=3: --num_envs_per_worker=1 --num_workers=1"),
        ({"num_envs_per_worker": 1, "num_workers": 3, "inference": "local"}, None),
        ({"inference": "serial"}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_one_environment_per_process_goes_with_flags_or_is_refused(flags: dict[str, object], words: str | None) -> None:
    config = config_of(env="mine:One", **flags)
    if words is None:
        assert require_one_per_process(config).sampling.num_envs_per_worker == 1
        return
    with pytest.raises(UsageError) as caught:
        require_one_per_process(config)
    assert str(caught.value) == f"mine:One allows one environment per process, {words}"


@pytest.mark.parametrize(("env", "by_kind"), [("CartPole-v1", {}), ("mine:One", {"num_envs_per_worker": 4})])
def test_a_preset_gives_way_where_one_environment_per_process_is_allowed(env: str, by_kind: dict[str, object]) -> None:
    config = replace(config_of(env=env, algo="APEX", num_envs_per_worker=4), by_kind=by_kind)
    assert require_one_per_process(config).sampling.num_envs_per_worker == 1
    for own in (
        replace(config, given=frozenset({"num_envs_per_worker"})),
        replace(config, by_kind={"num_envs_per_worker": 8}),
    ):
        with pytest.raises(UsageError, match="not --num_envs_per_worker=4"):
            require_one_per_process(own)


@pytest.mark.parametrize(("num_agents", "envs"), [(1, 8), (2, 4), (8, 1), (100, 1)])
def test_the_agents_of_all_envs_fill_a_batch(num_agents: int, envs: int) -> None:
    assert plan_workers(config_of(), 4, "local", num_agents) == Sampling("local", 4, envs, 1)


def slots_of(num_splits: int = 1, **flags: object) -> int:
    """Slots of a group where 4 actors with 8 envs share batches of 64 trajectories, two in an iteration."""
    config = config_of(batch_size=2048, num_batches_per_iteration=2, **flags)
    return topology_of(config, Sampling("local", 4, 8, num_splits), num_agents=1).slots_per_group


@pytest.mark.parametrize(("ratio", "slots"), [(256, 2), (8, 33), (0, 257)])
def test_actors_run_ahead_of_a_replay_by_one_update(ratio: float, slots: int) -> None:
    """256 steps an update; trajectories of one step of one environment."""
    flags = {"rollout": 1, "batch_size": 256, "replay_ratio": ratio, "n_steps": 3}
    config = config_of(algo="APEX", **flags)
    assert topology_of(config, Sampling("local", 1, 1, 1), num_agents=1).slots_per_group == slots


def test_minibatches_that_may_wait_decide_slots() -> None:
    """An iteration is 128 trajectories, four of every env; one more is being written."""
    assert slots_of() == slots_of(num_minibatches_to_accumulate=2) == 1 + 4
    assert slots_of(num_minibatches_to_accumulate=-1) == slots_of(num_minibatches_to_accumulate=4) == 1 + 8
    assert slots_of(num_minibatches_to_accumulate=0) == 4
    assert slots_of(algo="PPO", num_minibatches_to_accumulate=-1) == 4  # it waits for no more


@pytest.mark.parametrize("num_splits", [1, 2, 4])
def test_every_env_has_room_for_as_many_trajectories_as_asked_for(num_splits: int) -> None:
    assert slots_of(num_splits, min_traj_buffers_per_worker=6) == 6
    assert slots_of(num_splits, min_traj_buffers_per_worker=4) == 5


def test_actors_see_one_gpu_each_in_turn() -> None:
    """Those in one process all of theirs; who is no actor sees what it saw."""
    actors, sampling = [Address("actor", index) for index in range(5)], SamplingConfig(actor_worker_gpus=(3, 5))
    beside = Address("policy_worker", 0, 1)
    assert [gpus_of([actor, beside], sampling) for actor in actors] == ["3", "5", "3", "5", "3"]
    assert gpus_of(actors, sampling) == "3,5"
    assert gpus_of(actors[:1], SamplingConfig()) == ""
    assert gpus_of([Address("learner"), beside], sampling) is None


def test_actors_are_pinned_where_there_are_whole_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appo.algorithms.run.placement.allowed_cores", lambda: (0, 1, 2, 3))
    topology, actor = topology_of(config_of(), Sampling("local", 4, 8, 1), num_agents=1), Address("actor", 2)
    assert cores_of(actor, topology, SamplingConfig(), 4) == {2}
    assert cores_of(actor, topology, SamplingConfig(), 3) == frozenset()  # a cgroup gives time, not cores
    assert cores_of(actor, topology, SamplingConfig(set_workers_cpu_affinity=False), 4) == frozenset()
    assert cores_of(Address("learner"), topology, SamplingConfig(), 4) == frozenset()


def test_envs_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(UsageError, match="--num_envs_per_worker=7 is not a multiple of --worker_num_splits=2"):
        plan_workers(config_of(num_envs_per_worker=7, worker_num_splits=2), 4, "central")


@pytest.mark.parametrize(
    ("wanted", "cores", "device", "expected"),
    [
        ("central", 1, "cpu", "central"),
        ("local", 1, "cuda", "local"),
        ("serial", 4, "cuda", "serial"),
        ("auto", 16, "cuda", "local"),  # numbers: a message per step would cost more than the network
        ("auto", 1, "cpu", "serial"),
        ("auto", 2, "cpu", "local"),
    ],
)
def test_placements_without_measurements(wanted: str, cores: int, device: str, expected: str) -> None:
    assert choose_placement(config_of(inference=wanted), cores, device) == expected


def test_a_gpu_acts_on_images_in_large_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appo.algorithms.run.config.choose_device", {"auto": "cuda", "cpu": "cpu"}.__getitem__)
    images = config_of(encoder_type="conv")
    assert choose_placement(images, 16, images.device) == "central"
    assert plan_workers(images, 16, "central") == Sampling("central", 16, 16, 2)
    few = config_of(encoder_type="conv", batch_size=256, num_batches_per_iteration=4, ppo_epochs=4)
    assert plan_workers(few, 16, "central") == Sampling("central", 16, 6, 2)  # more would be too old
    assert plan_workers(config_of(encoder_type="conv", device="cpu"), 16, "central") == Sampling("central", 16, 2, 2)


@pytest.mark.parametrize(
    ("flags", "device"),
    [
        ({}, "cuda"),
        ({"batch_size": 512}, "cpu"),
        ({"algo": "SAC", "batch_size": 256, "rollout": 1}, "cuda"),
        ({"algo": "SAC", "batch_size": 128, "rollout": 1}, "cpu"),
        ({"batch_size": 512, "encoder_type": "conv"}, "cuda"),
        ({"batch_size": 512, "device": "cuda"}, "cuda"),
        ({"device": "cpu"}, "cpu"),
    ],
)
def test_auto_takes_a_gpu_that_is_worth_its_launches(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, object], device: str
) -> None:
    found = {"auto": "cuda", "cuda": "cuda", "cpu": "cpu"}
    monkeypatch.setattr("appo.algorithms.run.config.choose_device", found.__getitem__)
    assert config_of(**flags).device == device


@pytest.mark.parametrize(
    ("flags", "cores", "expected"),
    [
        ({"deterministic_resume": True}, 4, "serial"),  # exact without more ado
        ({"lockstep": True}, 4, "local"),
        ({"lockstep": True, "deterministic_resume": True}, 4, "local"),
        ({"lockstep": True}, 1, "serial"),
    ],
)
def test_placements_of_runs_that_repeat_themselves(flags: dict[str, object], cores: int, expected: str) -> None:
    config = config_of(**flags)
    assert config.repeatable
    assert choose_placement(config, cores, "cpu") == expected


@pytest.mark.parametrize(
    ("flags", "turns"),
    [
        ({}, False),
        ({"lockstep": True}, True),
        ({"num_minibatches_to_accumulate": 0}, True),
        ({"num_minibatches_to_accumulate": 0, "num_policies": 2}, False),  # each goes on while the other one trains
        ({"num_minibatches_to_accumulate": 0, "self_play": True}, False),  # as does the past
        ({"algo": "PPO"}, True),
        ({"algo": "PPO", "num_policies": 2}, False),
    ],
)
def test_runs_in_which_nobody_acts_while_the_learner_trains(flags: dict[str, object], turns: bool) -> None:
    assert config_of(**flags).takes_turns == turns


def test_in_lockstep_a_group_has_one_slot_however_large_a_batch_is() -> None:
    config = config_of(lockstep=True, batch_size=32 * 1000)
    assert topology_of(config, Sampling("local", 2, 4, 2), num_agents=1).slots_per_group == 1


@pytest.mark.parametrize("policies", [1, 2])
@pytest.mark.parametrize(("batch_size", "minibatches", "slots"), [(16, 16, 1), (8, 64, 2), (1024, 1, 4)])
def test_all_slots_of_a_synchronous_algorithm_are_one_batch(
    batch_size: int, minibatches: int, slots: int, policies: int
) -> None:
    """Minibatches may be smaller than a trajectory."""
    flags = {"batch_size": batch_size, "num_batches_per_iteration": minibatches, "num_policies": policies}
    config = config_of(algo="PPO", **flags)
    assert topology_of(config, Sampling("local", 2, 4, 1), num_agents=1).slots_per_group == slots


def test_machines_need_a_process_for_the_bridge_and_slots_for_a_batch() -> None:
    config = config_of(ray="auto", batch_size=256, rollout=32, num_batches_per_iteration=4)
    assert choose_placement(config, 1, "cpu") == "local"
    topology = topology_of(config, Sampling("local", 2, 4, 1), 1)
    assert (topology.num_actors, topology.slots_per_group, topology.bridged) == (2, 5, 2)
    assert topology.num_slots == 20
    assert list(topology.processes()) == ["learner_0", "actor_0", "actor_1", "bridge"]
    assert topology.address_book().actors_of_slots[10] == topology.fillers[2]
    small = config_of(ray="auto", batch_size=32, rollout=32, num_batches_per_iteration=1)
    assert topology_of(small, Sampling("local", 2, 4, 1), 1).bridged == 2
    assert topology_of(config_of(), Sampling("local", 2, 4, 1), 1).bridged == 0
