import json
from dataclasses import replace

import pytest

from appo.algorithms.replay.algorithm import REPLAY
from appo.algorithms.runtime.messages import TimeReport
from appo.algorithms.runtime.monitor.performance import (
    Machine,
    Performance,
    ProcessTimes,
    RoleTimes,
    WorkWindow,
    bottleneck,
    performance,
)
from appo.algorithms.runtime.roles import register

TWO_CORES = Machine(2)


def report(elapsed: float, collected: int = 0, trained: int = 0, started: int = 0) -> TimeReport:
    """Of a process that waits a quarter of its time and uses the CPU otherwise."""
    seconds = {"env": 0.75 * elapsed, "waiting": 0.25 * elapsed}
    return TimeReport("actor_0", "actor", started, seconds, {"env": 0.75 * elapsed}, collected, trained)


def test_a_window_is_the_last_ten_seconds() -> None:
    times = ProcessTimes()
    for second in range(1, 31):
        times.add(report(second, collected=100 * second if second <= 20 else 2000 + 40 * (second - 20)))
        window = times.window()
        assert window.length == min(second, 10)
        assert window.collected == (100 * window.length if second <= 20 else 1000 - 60 * (second - 20))
    assert window == WorkWindow("actor", {"env": 7.5, "waiting": 2.5}, {"env": 7.5}, 400, 0)


def test_a_window_is_as_long_as_the_last_piece_of_work() -> None:
    times = ProcessTimes()
    for second in range(1, 101):
        times.add(report(second, trained=500 * (second // 30)))
    window = times.window()
    assert (window.length, window.trained) == (11, 500)  # from 89 to 100: the batch was done at 90
    for second in range(101, 117):
        times.add(report(second, trained=500 * (second // 30)))
    assert (times.window().length, times.window().trained) == (27, 500)


def test_a_process_without_work_keeps_no_more_than_ten_seconds() -> None:
    times = ProcessTimes()
    for second in range(1, 1000):
        times.add(report(second))
    assert times.window().length == 10


def test_a_process_that_was_started_again_begins_anew() -> None:
    times = ProcessTimes()
    for second in range(1, 21):
        times.add(report(second, collected=100 * second))
    for second in range(1, 4):
        times.add(report(second, collected=10 * second, started=5))
        assert (times.window().length, times.window().collected) == (second, 10 * second)


def local_run(env_us: float, training_us: float, rate: float = 1000.0) -> list[WorkWindow]:
    """Ten seconds of two actors that act by themselves and a learner; inference costs 50, the framework 10."""
    samples = int(10 * rate)
    acting = {"framework": 10e-6, "env": env_us * 1e-6, "inference": 50e-6}
    cpu = {phase: unit * samples / 2 for phase, unit in acting.items()}
    wall = {**cpu, "waiting_for_slots": 10 - sum(cpu.values())}
    training = training_us * 1e-6 * samples
    learner = WorkWindow(
        "learner", {"training": training, "waiting": 10 - training}, {"training": training}, 0, samples
    )
    return [*2 * [WorkWindow("actor", wall, cpu, samples // 2, 0)], learner]


def approx(values: dict[str, float]) -> object:
    return pytest.approx(values, rel=1e-9)


def test_costs_shares_and_the_limit_of_the_cores() -> None:
    found = performance(
        [WorkWindow("main", {"waiting": 10.0}, {"waiting": 0.05}, 0, 0), *local_run(340, 130)], TWO_CORES
    )
    assert found is not None
    assert found.cpu_us == approx({"framework": 15, "env": 340, "inference": 50, "training": 130})  # main: 5
    assert list(found.roles) == ["main", "actor", "learner"]
    assert found.roles["actor"].processes == 2
    assert found.roles["actor"].shares == approx(
        {"framework": 0.005, "env": 0.17, "inference": 0.025, "waiting_for_slots": 0.8}
    )
    assert found.roles["learner"].shares == approx({"training": 0.13, "waiting": 0.87})
    assert (found.busy_cores, found.samples_per_second) == pytest.approx((0.535, 1000))
    assert found.limit_samples_per_second == pytest.approx(2e6 / 535)
    assert found.limit_ratio == pytest.approx(1000 * 535 / 2e6)


@pytest.mark.parametrize(("cores", "limit"), [(1, 1e6 / 540), (2, 2e6 / 540), (3, 1e6 / 200), (16, 1e6 / 200)])
def test_many_cores_wait_for_the_thread_of_the_learner(cores: int, limit: float) -> None:
    found = performance(local_run(280, 200), Machine(cores))
    assert found is not None
    assert found.limit_samples_per_second == pytest.approx(limit)


def test_the_busiest_of_several_learners_is_the_one_that_is_full() -> None:
    *actors, learner = local_run(20, 200)
    full = learner._replace(seconds={"training": 9.5, "waiting": 0.5}, cpu_seconds={"training": 9.5})
    found = performance([*actors, learner, full], Machine(16))
    assert found is not None
    assert found.bottleneck == "one of 2 learners is full, 95% training: more sampling would not help"


def test_samples_that_are_too_old_come_before_anything_else() -> None:
    words = {share: performance(local_run(340, 130), TWO_CORES, share).bottleneck for share in (0.04, 0.12)}  # type: ignore[union-attr]
    assert words == {
        0.04: "nothing is full: actors wait 80% for free slots, the learner 87% for trajectories",
        0.12: "12% of the samples are too old: fewer environments or a larger --max_policy_lag",
    }


def test_every_learner_has_a_thread() -> None:
    *actors, learner = local_run(20, 200)
    found = performance([*actors, learner, learner], Machine(16))
    assert found is not None
    assert found.limit_samples_per_second == pytest.approx(2e6 / 200)


@pytest.mark.parametrize(
    ("wall", "cpu", "gpu", "limit"),
    [
        (4.0, 2.0, False, 5000),  # others used the core: the CPU time counts
        (2.0, 6.0, False, 5000),  # three threads: the wall time counts
        (4.0, 1.0, True, 2500),  # the CPU only starts the work
    ],
)
def test_time_of_a_sample_in_the_learner(wall: float, cpu: float, gpu: bool, limit: float) -> None:
    *actors, _ = local_run(20, 200)
    learner = WorkWindow("learner", {"training": wall, "waiting": 10 - wall}, {"training": cpu}, 0, 10_000)
    found = performance([*actors, learner], Machine(64, gpu))
    assert found is not None
    assert found.limit_samples_per_second == pytest.approx(limit)


def test_a_learner_takes_samples_in_whole_batches() -> None:
    """What a sample costs does not depend on how many of the batches happen to lie in its window."""
    *actors, learner = local_run(340, 130)
    fewer = learner._replace(
        seconds={"training": 0.65, "waiting": 9.35}, cpu_seconds={"training": 0.65}, trained=learner.trained // 2
    )
    costs = [performance([*actors, window], TWO_CORES).cpu_us for window in (learner, fewer)]  # type: ignore[union-attr]
    assert costs[0] == approx(costs[1])


def test_before_anything_is_trained_no_limit_is_known() -> None:
    *actors, learner = local_run(340, 130)
    idle = learner._replace(seconds={"waiting": 10.0}, cpu_seconds={"waiting": 0.0}, trained=0)
    assert performance([], TWO_CORES) is None
    assert performance([idle, WorkWindow("actor", {}, {}, 0, 0)], TWO_CORES) is None
    found = performance([*actors, idle], TWO_CORES)
    assert found is not None
    assert (found.limit_samples_per_second, found.limit_ratio) == (0, 0)
    assert "training" not in found.cpu_us
    assert "perf/limit_ratio" not in found.tags()
    assert found.lines()[1].startswith("limit: not known yet; ")


def test_one_thread_for_everything() -> None:
    seconds = {"framework": 0.5, "env": 5.0, "inference": 0.5, "training": 4.0}
    found = performance([WorkWindow("main", seconds, seconds, 1000, 1000)], TWO_CORES)
    assert found is not None
    assert found.limit_samples_per_second == pytest.approx(200)
    assert found.limit_ratio == pytest.approx(0.5)
    assert found.lines() == (
        "time: main env 50% training 40% framework 5% inference 5%",
        "limit: 200 samples/s, at 50%; one thread does it all, 50% environment; other placements use all 2 cores",
    )


def test_tags_and_plain_values() -> None:
    found = performance(local_run(340, 130), TWO_CORES)
    assert found is not None
    assert found.tags() == approx({
        "perf/actor/framework": 0.005, "perf/actor/env": 0.17, "perf/actor/inference": 0.025,
        "perf/actor/waiting_for_slots": 0.8, "perf/learner/training": 0.13, "perf/learner/waiting": 0.87,
        "perf/cpu_us/framework": 10, "perf/cpu_us/env": 340, "perf/cpu_us/inference": 50, "perf/cpu_us/training": 130,
        "perf/busy_cores": 0.53, "perf/limit_samples_per_second": 2e6 / 530, "perf/limit_ratio": 0.265,
    })  # fmt: skip
    plain = json.loads(json.dumps(found.plain()))
    assert plain.pop("limit_ratio") == found.limit_ratio
    roles = {role: RoleTimes(**times) for role, times in plain.pop("roles").items()}
    assert Performance(roles=roles, **plain) == found


def role(processes: int = 1, cpu: float | None = None, **shares: float) -> RoleTimes:
    """A role whose processes use the CPU whenever they do not wait, unless told otherwise; shares in percent."""
    times = RoleTimes(processes, {phase: share / 100 for phase, share in shares.items()}, 0.0)
    return replace(times, busy_cores=times.busy * processes if cpu is None else cpu)


register(REPLAY)  # as a topology with shards does

IDLE = role(waiting=100)
ENV_FIRST = {"env": 340.0, "inference": 50.0, "training": 10.0}
CASES = [
    ({"main": role(training=62, env=38)}, 2, "one thread does it all, 62% training; other placements use all 2 cores"),
    ({"main": role(training=38, env=62)}, 1, "one thread does it all, 62% environment"),
    (
        {"main": role(cpu=0.5, env=99)}, 2,
        "one thread does it all, 99% environment; other programs or hidden waits slow it down",
    ),
    (
        {"actor": role(2, env=30, waiting_for_slots=70), "learner": role(training=94, copying=2, waiting=4)}, 2,
        "the learner is full, 94% training: more sampling would not help",
    ),
    (
        {"actor": role(2, env=75, waiting_for_slots=25), "learner": role(cpu=0.6, training=99, waiting=1)}, 2,
        "all 2 cores are full, 85% of it environment",  # the learner would be quicker with a core of its own
    ),
    (
        {"actor": role(env=88, waiting=12), "learner": role(training=9, waiting=91)}, 1,
        "the core is full, 85% of it environment",
    ),
    (
        {"actor": role(2, env=40, waiting=60), "policy_worker": role(inference=95, waiting=5), "learner": IDLE},
        4,
        "the policy worker is full, 95% inference: raise --policy_workers_per_policy",
    ),
    (
        {"actor": role(2, env=40, waiting=60), "policy_worker": role(3, inference=95, waiting=5), "learner": IDLE},
        8,
        "one of 3 policy workers is full, 95% inference: raise --policy_workers_per_policy",
    ),
    (
        {"actor": role(2, env=40, waiting=60), "learner": IDLE, "replay": role(2, copying=95, waiting=5)}, 8,
        "one of 2 replay shards is full, 95% copying: raise --num_replay_shards",
    ),
    (
        {"actor": role(2, env=20, waiting_for_slots=80), "learner": role(cpu=0.6, training=99, waiting=1)}, 4,
        "the learner is full, but gets 60% of a core; other programs or hidden waits slow it down",
    ),
    (
        {"actor": role(2, env=20, waiting_for_slots=80), "learner": IDLE}, 1.5,
        "nothing is full: actors wait 80% for free slots, the learner 100% for trajectories",
    ),
    ({"actor": role(2, env=65, waiting=35), "learner": role(training=10, waiting=90)}, 1.5,
     "all 1.5 cores are full, 85% of it environment"),
    (
        {"actor": role(2, env=80, inference=18, waiting=2), "learner": role(training=40, waiting=60)}, 16,
        "actors are full, 80% environment; 2.4 of 16 cores are busy: raise --num_workers",
    ),
    (
        {"actor": role(2, env=28, reset=70, waiting=2), "learner": role(training=40, waiting=60)}, 16,
        "actors are full, 70% environment resets; 2.4 of 16 cores are busy: raise --num_workers",
    ),
    (
        {"actor": role(2, 0.8, env=80, inference=18, waiting=2), "learner": IDLE}, 2,
        "actors are full, 80% environment; other programs or hidden waits slow it down",
    ),
    (
        {"actor": role(2, env=40, waiting=60), "policy_worker": role(inference=55, waiting=45), "learner": IDLE},
        2,
        "actors wait 60% for actions; 1.4 of 2 cores are busy: more or larger groups would help",
    ),
    (
        {"actor": role(2, env=25, waiting=5, waiting_for_slots=70), "learner": role(training=40, waiting=60)}, 2,
        "nothing is full: actors wait 70% for free slots, the learner 60% for trajectories",
    ),
    (
        {"actor": role(2, env=80, waiting=10, waiting_for_slots=10), "learner": role(training=10, waiting=90)}, 2,
        "nothing is full, 1.7 of 2 cores are busy",
    ),
    ({"actor": role(2, env=85, waiting=15)}, 2, "nothing is full, 1.7 of 2 cores are busy"),
]  # fmt: skip


def alone(roles: dict[str, RoleTimes]) -> dict[str, RoleTimes]:
    """One process of each role, all of which spend their time alike."""
    return {name: replace(r, processes=1, busy_cores=r.busy_cores / r.processes) for name, r in roles.items()}


@pytest.mark.parametrize(("roles", "cores", "words"), CASES, ids=[words[:40] for *_, words in CASES])
def test_the_bottleneck_in_words(roles: dict[str, RoleTimes], cores: float, words: str) -> None:
    assert bottleneck(roles, alone(roles), ENV_FIRST, Machine(cores)) == words
    assert len(f"limit: 1.23M samples/s, at 100%; {words}") <= 122


REPLAYS = [
    (
        {"actor": role(2, env=30, waiting_for_slots=70), "learner": role(training=95, waiting=5)},
        "the learner is full, 95% training: updates per step hold the actors",
    ),
    (
        {"actor": role(2, env=80, inference=18, waiting=2), "learner": role(training=40, waiting=60)},
        "actors are full, 80% environment, the learner waits 60% for the replay;"
        " 2.4 of 16 cores are busy: raise --num_workers",
    ),
    (
        {"actor": role(2, env=25, waiting=5, waiting_for_slots=70), "learner": role(training=40, waiting=60)},
        "nothing is full: updates per step hold actors 70%, the learner waits 60%",
    ),
]


@pytest.mark.parametrize(("roles", "words"), REPLAYS, ids=[words[:40] for _, words in REPLAYS])
def test_what_a_replay_waits_for(roles: dict[str, RoleTimes], words: str) -> None:
    assert bottleneck(roles, alone(roles), ENV_FIRST, Machine(16, replays=True)) == words


def test_on_a_gpu_a_learner_is_full_whatever_its_cpu_does() -> None:
    roles = {"actor": role(2, env=30, waiting_for_slots=70), "learner": role(cpu=0.3, training=95, waiting=5)}
    said = [bottleneck(roles, roles, ENV_FIRST, Machine(16, gpu)) for gpu in (True, False)]
    assert said == [
        "the learner is full, 95% training: more sampling would not help",
        "the learner is full, but gets 30% of a core; other programs or hidden waits slow it down",
    ]


def test_actors_and_a_learner_that_take_turns_do_not_wait_for_want_of_anything() -> None:
    roles = {"actor": role(2, env=50, waiting_for_slots=50), "learner": role(training=45, waiting=55)}
    words = "actors and learner take turns, it is busy 45% of the time: nobody acts meanwhile"
    assert bottleneck(roles, roles, ENV_FIRST, Machine(2, takes_turns=True)) == words
    sampling = {"actor": roles["actor"]}
    assert bottleneck(sampling, sampling, ENV_FIRST, Machine(2, takes_turns=True)).startswith("nothing is full")
