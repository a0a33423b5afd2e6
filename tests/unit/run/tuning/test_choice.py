"""The model of what a sample costs, with numbers that can be checked by hand, and the choices it makes."""

import json
from dataclasses import replace

import pytest

from appo.algorithms.run.config import Config
from appo.algorithms.run.placement import Sampling
from appo.algorithms.run.tuning.choice import (
    HAND_OVER_SECONDS,
    PROCESS_BYTES,
    RELIABLE,
    RELIABLE_FEW,
    RELIABLE_LEARNER,
    ROUND_TRIP_SECONDS,
    Costs,
    at,
    candidates,
    choose,
    is_open,
    predict,
    report,
    rising,
    thread_limit,
    threads_to_time,
    with_threads,
)

US = 1e-6
# 100 us per step and 3 of the loop; 40 us per forward pass and 10 per row.
COSTS = Costs(
    env=((1, 103 * US), (16, 1603 * US)), act=((1, 50 * US), (16, 200 * US)), learn=((1, 60 * US),), env_bytes=0
)
FREE = 1 << 40


def config_of(**flags: object) -> Config:
    return Config.from_flat({"rollout": 32, "batch_size": 1024, **flags})


def chosen(costs: Costs = COSTS, cores: int = 2, free_bytes: int = FREE, **flags: object) -> Sampling:
    return choose(costs, config_of(**flags), 1, cores, lambda plan: 0, free_bytes).sampling


def test_curves_are_straight_between_points_and_beyond() -> None:
    curve = ((1, 2.0), (5, 6.0), (9, 8.0))
    assert [at(curve, n) for n in (1, 3, 5, 7, 9, 13)] == [2.0, 4.0, 6.0, 7.0, 8.0, 10.0]
    assert [at(((4, 8.0),), n) for n in (1, 4, 8)] == [2.0, 8.0, 16.0]
    assert rising([(1, 3.0), (4, 2.0), (16, 5.0)]) == ((1, 2.0), (4, 2.0), (16, 5.0))  # less work is never slower


def test_the_slowest_part_decides() -> None:
    plan, hand_over = Sampling("local", 2, 16, 1), HAND_OVER_SECONDS / (32 * 16)
    actor = (1603 + 200) * US / 16 + hand_over
    learner = 60 * US + hand_over
    assert predict(COSTS, plan, config_of(), 1, 2) == pytest.approx(2 / (actor + learner))  # all cores are busy
    one = replace(plan, num_workers=1)
    assert predict(COSTS, one, config_of(), 1, 2) == pytest.approx(RELIABLE_FEW / actor)
    slow = replace(COSTS, learn=((1, 500 * US), (2, 300 * US)))
    learner = RELIABLE_LEARNER / (500 * US + hand_over)
    assert predict(slow, plan, config_of(), 1, 8) == pytest.approx(learner)
    assert predict(slow, plan, config_of(num_policies=2), 1, 8) == pytest.approx(2 * learner)
    threads = replace(plan, learner_threads=2)
    assert predict(slow, threads, config_of(), 1, 8) == pytest.approx(RELIABLE_LEARNER / (300 * US + hand_over))
    # a single actor has two thirds of a core while two threads train, and must not be left alone with them
    scaling = replace(COSTS, learn=((1, 390 * US), (2, 200 * US)))
    single = replace(one, learner_threads=2)
    assert predict(scaling, single, config_of(), 1, 2) == pytest.approx(RELIABLE_FEW / (actor + 200 * US / 2))
    assert predict(scaling, threads, config_of(), 1, 2) == pytest.approx(2 / (actor + 400 * US + hand_over))


def test_agents_share_the_step_of_their_environment() -> None:
    plan, hand_over = Sampling("local", 1, 8, 1), HAND_OVER_SECONDS / (32 * 16)
    actor = (803 + 200) * US / 16 + hand_over
    assert predict(COSTS, plan, config_of(), 2, 2) == pytest.approx(RELIABLE_FEW / actor)


def test_a_policy_worker_costs_messages_and_saves_by_larger_batches() -> None:
    plan, hand_over = Sampling("central", 2, 16, 2), HAND_OVER_SECONDS / (32 * 8)
    message = ROUND_TRIP_SECONDS / 2 / 8
    actor, policy_worker = 803 * US / 8 + hand_over + message, 200 * US / 16 + message
    total = actor + policy_worker + 60 * US + hand_over
    assert predict(COSTS, plan, config_of(), 1, 2) == pytest.approx(2 / total)
    quick = replace(COSTS, learn=((1, 6 * US),))
    assert predict(quick, plan, config_of(), 1, 16) == pytest.approx(RELIABLE_FEW * 2 / actor)
    # one group per actor waits while its actions are computed
    single = replace(plan, num_splits=1)
    cycle = 1603 * US + 200 * US + ROUND_TRIP_SECONDS
    assert predict(quick, single, config_of(), 1, 2) == pytest.approx(RELIABLE * 32 / cycle)


def test_choices() -> None:
    assert chosen() == Sampling("local", 2, 16, 1)
    # learning takes almost all of the time: one actor is enough
    assert chosen(replace(COSTS, learn=((1, 1000 * US),))) == Sampling("local", 1, 32, 1)
    # a small group costs as much as a large one: twice the environments are worth it
    vector = replace(COSTS, env=((1, 100 * US), (64, 110 * US)), learn=((1, 0.1 * US),))
    assert chosen(vector) == Sampling("local", 2, 32, 1)
    # and are not for less than a tenth
    few, many = (Sampling("local", 2, envs, 1) for envs in (16, 32))
    for fixed_us, expected in ((300, few), (1500, many)):
        costs = replace(COSTS, env=((1, (100 + fixed_us) * US), (64, (6400 + fixed_us) * US)), learn=((1, 5 * US),))
        rate, twice = (predict(costs, plan, config_of(), 1, 2) for plan in (few, many))
        assert (twice / rate > 1.11) == (expected is many)
        assert twice / rate > 1.04
        assert chosen(costs) == expected
    # a forward pass costs the same for one row and for all
    fixed = replace(COSTS, act=((1, 800 * US), (64, 900 * US)), learn=((1, 5 * US),))
    assert chosen(fixed, cores=4) == Sampling("central", 4, 16, 2)
    # an environment of 100 ms needs all cores, and what the network costs plays no part
    assert chosen(replace(COSTS, env=((1, 0.1),)), cores=4) == Sampling("local", 4, 8, 1)


def test_nothing_gets_too_old_on_many_cores() -> None:
    slow = replace(COSTS, env=((1, 10_000 * US),))
    flags = {"batch_size": 128, "num_batches_per_iteration": 4, "ppo_epochs": 10}
    assert chosen(slow, cores=64, **flags) == Sampling("local", 16, 1, 1)  # 20 at most, and the next one is 32
    assert chosen(slow, cores=64, **flags, max_policy_lag=1000) == Sampling("local", 64, 1, 1)
    assert chosen(slow, cores=64, **flags, max_policy_lag=1000, num_policies=4).num_workers == 64
    assert chosen(slow, cores=64, **flags, num_envs_per_worker=4) == Sampling("local", 4, 4, 1)
    assert chosen(slow, cores=64, **flags, num_workers=63).num_workers == 63  # given


def test_each_doubling_of_the_environments_has_to_pay() -> None:
    """Where actors are the limit, and 32 environments fill a batch."""
    costs = replace(COSTS, env=((1, 10_000 * US),))
    assert chosen(costs, cores=64, num_envs_per_worker=4) == Sampling("local", 64, 4, 1)
    full = replace(costs, learn=((1, 600 * US),))  # no more than 1,500 samples per second
    assert chosen(full, cores=64, num_envs_per_worker=4) == Sampling("local", 32, 4, 1)


def test_a_step_of_all_environments_must_not_seem_to_hang() -> None:
    """Of the 120 seconds that it may take, it should take 30."""
    assert chosen(replace(COSTS, env=((1, 1.0),))) == Sampling("local", 2, 16, 1)
    assert chosen(replace(COSTS, env=((1, 10.0),))) == Sampling("local", 2, 2, 1)
    assert chosen(replace(COSTS, env=((1, 10.0),)), step_timeout_seconds=80) == Sampling("local", 2, 2, 1)
    assert chosen(replace(COSTS, env=((1, 100.0),))).num_envs_per_worker == 1


def test_threads_of_the_learner_where_cores_are_left() -> None:
    slow = replace(COSTS, learn=((1, 1000 * US), (4, 300 * US)))
    assert chosen(slow, cores=8) == Sampling("local", 1, 32, 1, 4)
    assert chosen(slow, cores=8, learner_main_loop_num_cores=1) == Sampling("local", 1, 32, 1, 1)
    assert [thread_limit(cores) for cores in (1, 2, 3, 8)] == [1, 2, 2, 4]


def test_fewer_threads_than_were_timed_are_as_fast_as_a_power_of_them() -> None:
    """A straight line from one to eight would make two and four look as if they brought next to nothing."""
    times = [with_threads(((1, 800 * US), (8, 100 * US)), threads) for threads in (1, 2, 4, 8)]
    assert times == pytest.approx([800 * US, 400 * US, 200 * US, 100 * US])
    assert with_threads(((4, 3.0),), 4) == 3.0
    costs = replace(COSTS, env=((1, 600 * US),), learn=((1, 100 * US), (8, 30 * US)))
    assert chosen(costs, cores=16).learner_threads == 4


def test_threads_are_timed_only_where_they_could_help() -> None:
    slow = replace(COSTS, learn=((1, 1000 * US),))
    assert threads_to_time(slow, config_of(), 1, 8) == 4
    assert threads_to_time(slow, config_of(), 1, 2) == 2
    assert threads_to_time(slow, config_of(), 1, 1) == 0
    assert threads_to_time(COSTS, config_of(), 1, 2) == 0  # the environment is the limit
    assert threads_to_time(slow, config_of(learner_main_loop_num_cores=1), 1, 8) == 0
    assert threads_to_time(slow, config_of(sampler_only=True), 1, 8) == 0
    crowd = replace(COSTS, env=((1, 1000 * US), (16, 2000 * US)), learn=((1, 20 * US),))
    assert threads_to_time(crowd, config_of(), 16, 2) == 0  # two environments of 16 agents fill a batch
    # on two cores a second thread pays what it gains where the actor needs little
    assert chosen(replace(COSTS, learn=((1, 1000 * US), (2, 600 * US)))).learner_threads == 2
    assert chosen(replace(COSTS, learn=((1, 1000 * US), (2, 980 * US)))).learner_threads == 1


def test_flags_that_are_given_hold() -> None:
    given = {"num_workers": 3, "num_envs_per_worker": 6, "worker_num_splits": 3}
    plans = set(candidates(config_of(**given), 2))
    assert plans == {Sampling(placement, 3, 6, 3, n) for placement in ("local", "central") for n in (1, 2)}
    assert {p.placement for p in candidates(config_of(inference="central"), 2)} == {"central"}
    assert chosen(inference="central", num_workers=1).num_workers == 1
    assert chosen(num_envs_per_worker=5).num_envs_per_worker == 5


def test_memory_limits_environments_and_processes() -> None:
    heavy = replace(COSTS, env_bytes=1 << 30)
    room = 3 * PROCESS_BYTES
    assert chosen(heavy, free_bytes=room + (32 << 30)) == Sampling("local", 2, 16, 1)
    assert chosen(heavy, free_bytes=room + (31 << 30)) == Sampling("local", 2, 8, 1)
    assert chosen(heavy, free_bytes=PROCESS_BYTES) == Sampling("local", 1, 1, 1)  # it could only be tried
    for_others = 3 * PROCESS_BYTES  # every further policy has a learner
    assert chosen(heavy, free_bytes=room + for_others + (32 << 30), num_policies=4) == Sampling("local", 2, 16, 1)
    assert chosen(heavy, free_bytes=room + (32 << 30), num_policies=4) == Sampling("local", 2, 8, 1)


def test_what_is_open_to_tuning() -> None:
    assert is_open(config_of(), "cpu", 2)
    assert is_open(config_of(inference="local", num_workers=2), "cpu", 2)
    assert not is_open(config_of(inference="local", num_workers=2, num_envs_per_worker=4), "cpu", 2)
    for fixed in ({"inference": "serial"}, {"auto_tune": False}, {"lockstep": True}):
        assert not is_open(config_of(**fixed), "cpu", 2)
    assert not is_open(config_of(), "cuda", 2)
    assert not is_open(config_of(), "cpu", 1)


def test_the_line_that_is_shown() -> None:
    plan = choose(COSTS, config_of(), 1, 2, lambda plan: 0, FREE)
    text = "env 100 us, act 12.5 us, learn 60 us/sample -> local, 2 actors x 16 envs, predicted 11.6k samples/s"
    assert report(COSTS, plan) == text
    for rate, shown in ((870, "870"), (2400, "2.4k"), (1.2e6, "1.2M")):
        assert report(COSTS, replace(plan, samples_per_second=rate)).endswith(f"predicted {shown} samples/s")
    slow = replace(COSTS, env=((1, 1.5),), learn=((1, 2e-3),))
    assert report(slow, plan).startswith("env 1.5 s, act 12.5 us, learn 2 ms/sample")
    central = replace(plan, sampling=Sampling("central", 1, 32, 2, 4))
    assert "-> central, 1 actor x 32 envs in 2 groups, 4 learner threads, " in report(COSTS, central)


def test_agents_share_an_environment() -> None:
    """As many trajectories as without: an actor x 8 envs x 4 agents fill a batch, which now waits for the learner."""
    plan = choose(COSTS, config_of(), 4, 2, lambda plan: 0, FREE)
    assert plan.sampling == Sampling("local", 1, 8, 1)
    assert plan.samples_per_second == pytest.approx(RELIABLE_LEARNER / (60 * US + HAND_OVER_SECONDS / (32 * 32)))
    line = report(COSTS, plan, 4)
    assert line.startswith("env 100 us, act 11.2 us, learn 60 us/sample -> local, 1 actor x 8 envs of 4 agents, predic")
    assert all(plan.num_envs_per_worker <= 8 for plan in candidates(config_of(num_workers=1), 2, 8))


def test_costs_survive_json() -> None:
    assert Costs.from_plain(json.loads(json.dumps(COSTS.plain()))) == COSTS


@pytest.mark.parametrize("change", [{"env": []}, {"act": None}, {"learn": [[1]]}, {"env_bytes": "much"}])
def test_costs_of_another_shape_are_refused(change: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Costs.from_plain(COSTS.plain() | change)
