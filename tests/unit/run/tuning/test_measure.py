"""What is measured before a run, without its processes: no test here asks how long anything took."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from appo.algorithms.run.config import Config, parse_train_flags, resolve
from appo.algorithms.run.defaults import completed
from appo.algorithms.run.placement import plan_workers
from appo.algorithms.run.plan import Probe
from appo.algorithms.run.tuning import measure, network
from appo.algorithms.run.tuning.choice import Costs, usual_ratio
from appo.algorithms.run.tuning.environment import ROLLOUT, GroupTimer, observation_bytes, stepping_costs
from appo.algorithms.run.tuning.measure import BUDGET_SECONDS, Measurement, measure_run
from appo.algorithms.run.tuning.network import NetworkTimer, _seconds, probe
from appo.algorithms.runtime.memory.learner_state import ModelDescription
from appo.algorithms.runtime.messages import WorkerFailed
from appo.algorithms.runtime.processes.supervisor import WorkerError
from appo.envs.make import make_group, make_single
from appo.envs.spec import ActionPart, ActionSpec, GroupEnv
from appo.utils.errors import UsageError
from appo.utils.system import machine
from appo.utils.system.memory import held_bytes
from tests.states import adam_layout
from tests.unit.run import own_kinds
from tests.unit.runtime.worlds import SPEC

MODELS = (ModelDescription([("w", (2,))], 0, adam_layout(2)),)
PROBE = Probe(SPEC, MODELS, completed(Config(), SPEC))


def config_of(env: str, **flags: object) -> Config:
    small = {"encoder_mlp_layers": [8], "use_rnn": False, "rollout": 4, "batch_size": 16, "ppo_epochs": 3}
    return Config.from_flat({"env": env, **small, **flags})


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as little as possible."""
    monkeypatch.setattr("appo.algorithms.run.tuning.environment.STEPPING_SECONDS", 0.0)
    for name in ("ACTING_SECONDS", "TRAINING_SECONDS", "SLOWEST_SECONDS"):
        monkeypatch.setattr(network, name, 0.0)
    for name in ("SLOWEST_ACTING_SECONDS", "SLOWEST_ROW_SECONDS"):
        monkeypatch.setattr(network, name, 1e9)


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What other programs take of the cores; nothing, unless a test puts another number there."""
    share = [0.0]
    monkeypatch.setattr("appo.utils.system.usage.OtherPrograms.share", lambda programs: share[0])
    return share


# ---- the environment


def test_a_rehearsal_steps_real_groups_through_slots_and_episodes() -> None:
    for vectorization, rows in (("python", 2), ("native", 3)):
        config = config_of("toy/Counter-v0", env_vectorization=vectorization)
        group = make_group(config.env, rows)
        actor = GroupTimer(config, group)
        for _ in range(3 * ROLLOUT):
            assert actor.step() > 0
        totals = actor.actor.report().totals
        assert totals["trajectories"] == 3
        assert totals["collected"] + totals["reset_rows"] == 3 * ROLLOUT * rows


@pytest.mark.parametrize("mask", ["observation", "info"])
@pytest.mark.parametrize("vectorization", ["python", "native"])
def test_only_allowed_actions_are_taken(mask: str, vectorization: str) -> None:
    """The environment raises at any other."""
    config = config_of("toy/Spaces-v0", env_vectorization=vectorization, env_kwargs={"mask": mask, "action": "tuple"})
    group = GroupTimer(config, make_group(config.env, 2))
    for _ in range(4 * ROLLOUT):
        group.step()


@pytest.mark.usefixtures("_at_once")
def test_a_larger_group_is_tried_where_that_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    sixteen = 16 * 9 * observation_bytes(make_group(config_of("toy/Zero-v0").env, 1).spec)
    for limit, value, flags, sizes in (
        ("LARGER_GROUP_SECONDS", 1e9, {}, [1, 64]),
        ("LARGER_GROUP_SECONDS", 1e9, {"num_envs_per_worker": 6, "worker_num_splits": 2}, [1, 3]),
        ("LARGER_GROUP_SECONDS", 1e9, {"num_envs_per_worker": 1}, [1]),
        ("LARGEST_BYTES", sixteen, {}, [1, 16]),
        ("LARGER_GROUP_SECONDS", 0.0, {}, [1]),
    ):
        monkeypatch.setattr(f"appo.algorithms.run.tuning.environment.{limit}", value)
        config = config_of("toy/Zero-v0", **flags)
        with ExitStack() as made:
            found = list(stepping_costs(config, make_group(config.env, 1), 0.0, held_bytes(), made))
        assert [[size for size, _ in curve] for curve, _ in found] == [sizes[:i] for i in range(1, len(sizes) + 1)]
        assert all(seconds > 0 for curve, _ in found for _, seconds in curve)
        assert all(0 <= env_bytes < 1 << 20 for _, env_bytes in found)


def test_the_memory_of_this_process_is_counted() -> None:
    program = """
import mmap
from appo.utils.system.memory import held_bytes
before = held_bytes()
with mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
    block.write(bytes(1) * (16 << 20))
    print(held_bytes() - before)
"""
    # A process of its own: earlier tests leave memory to this process, and children, that may end meanwhile.
    grown = int(subprocess.check_output([sys.executable, "-c", program], text=True))
    assert 15 << 20 < grown < 50 << 20


# ---- the network


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize(
    ("flags", "threads"),
    [
        ({}, 1),
        ({"use_rnn": True, "microbatch_size": 8, "max_policy_lag": 1, "recurrence": 2}, 1),
        ({"learner_main_loop_num_cores": 2}, 2),
        ({"num_minibatches_to_accumulate": 0, "env_kwargs": {"mask": "observation"}}, 1),
    ],
    ids=["mlp", "gru", "given threads", "mask"],
)
def test_acting_and_training_are_timed(flags: dict[str, object], threads: int) -> None:
    config = config_of("toy/Spaces-v0", **flags)
    network = NetworkTimer(config, probe(config).spec)
    acting, training = network.costs()
    assert [rows for rows, _ in acting] == [1, 4, 16, 64, 256]
    assert [count for count, _ in training] == [threads]
    assert all(seconds > 0 for _, seconds in (*acting, *training))
    assert network.threads_ratio(2) > 0


class Timed(NetworkTimer):
    """A network whose forward passes take 1 ms per row, and whose training takes `sample` seconds per sample.

    A minibatch takes `step` seconds more, however large it is.
    """

    def __init__(self, sample: float, step: float = 0.0, **flags: object) -> None:
        super().__init__(config_of("toy/Zero-v0", **flags), SPEC)
        self.sample, self.step = sample, step
        self.trained: list[int] = []

    def acting_seconds(self, rows: int) -> float:
        return 0.001 * rows

    def update_seconds(self, columns: int, budget_seconds: float) -> float:
        self.trained.append(columns)
        return self.step + self.sample * columns * self.config.learning.rollout


def test_continuous_actions_have_no_divergence_from_uniform_ones() -> None:
    gaussian = replace(SPEC, action=ActionSpec((ActionPart("gaussian", 2),), (-1.0, -1.0), (1.0, 1.0)))
    flags = {"num_policies": 2, "per_policy": {"exploration_loss": "entropy,symmetric_kl"}}
    with pytest.raises(UsageError, match="--exploration_loss=symmetric_kl: the environment has continuous actions"):
        NetworkTimer(config_of("toy/Zero-v0", **flags), gaussian)
    NetworkTimer(config_of("toy/Zero-v0", **flags), SPEC)
    NetworkTimer(config_of("toy/Zero-v0", **flags, exploration_loss_coeff=0.0), gaussian)


def test_rows_need_not_be_whole_environments() -> None:
    network = NetworkTimer(config_of("toy/Zero-v0"), replace(SPEC, num_agents=8))
    assert network.acting_seconds(1) > 0
    assert network.update_seconds(1, 0.0) > 0


def test_a_slow_forward_pass_is_not_tried_with_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Timed(0.001).costs()[0] == ((1, 0.001), (4, 0.004), (16, 0.016))
    monkeypatch.setattr(network, "LARGEST_BYTES", 4 * 3 * observation_bytes(SPEC))
    assert Timed(0.001).costs()[0] == ((1, 0.001), (4, 0.004))


def test_a_single_row_that_takes_long_is_compared_with_more(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Timed(0.001)
    for one, counts in ((0.006, [1, 4]), (0.03, [1])):
        monkeypatch.setattr(network, "acting_seconds", lambda rows, one=one: one + 1e-3 * (rows - 1))
        assert [rows for rows, _ in network.costs()[0]] == counts


@pytest.mark.parametrize(
    ("sample", "step", "columns"),
    [(2.5e-4, 0.0, [1, 16]), (4e-3, 0.0, [1, 12]), (4e-3, 0.024, [1, 5]), (0.02, 0.05, [1, 2]), (0.1, 0.0, [1])],
)
def test_the_largest_minibatch_that_time_allows_says_what_the_real_one_takes(
    sample: float, step: float, columns: list[int]
) -> None:
    network = Timed(sample, step, batch_size=64)  # 16 columns of 4 steps
    assert network.training_seconds() == pytest.approx(3 * (sample + step / 64))  # epochs
    assert network.trained == columns


def test_a_single_trajectory_that_took_long_does_not_make_training_quick() -> None:
    network = Timed(1e-3, batch_size=64)
    network.update_seconds = lambda columns, budget: 0.02  # type: ignore[method-assign]
    assert network.training_seconds() == pytest.approx(3 * (0.02 + 0.0005 * 6) / 64)


@pytest.mark.parametrize("measured", [0.52, 0.98])
@pytest.mark.parametrize("images", [False, True])
def test_half_is_believed_of_threads_that_share_images(
    monkeypatch: pytest.MonkeyPatch, images: bool, measured: float
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(network, "share_images", lambda module: images)
    monkeypatch.setattr(machine, "limit_threads", counts.append)
    monkeypatch.setattr(network, "_time_call", lambda train: {1: 1.0, 2: measured}[counts[-1]])
    monkeypatch.setattr(network, "TRAINING_SECONDS", 0.0)
    believed = (measured * usual_ratio(2)) ** 0.5 if images else measured
    assert Timed(1e-3).threads_ratio(2) == pytest.approx(believed)


@pytest.mark.parametrize(
    ("calls", "shortest", "left"),
    [
        ([0.01, 0.004, 0.003, 0.005, 0.006, 9.0], 0.003, 1),  # until the budget is spent
        ([0.2, 0.04, 0.03, 9.0], 0.03, 1),  # two beyond it
        ([0.3, 0.21, 9.0], 0.21, 1),  # and no second one if they take long
        ([0.6, 9.0], 0.6, 1),
    ],
)
def test_the_shortest_of_repeated_calls_counts_as_long_as_there_is_time(
    monkeypatch: pytest.MonkeyPatch, calls: list[float], shortest: float, left: int
) -> None:
    monkeypatch.setattr(network, "_time_call", lambda function: calls.pop(0))
    assert _seconds(lambda: None, 0.028) == shortest
    assert len(calls) == left


def test_threads_of_an_encoder_of_images_are_timed() -> None:
    config = config_of("toy/Spaces-v0", env_kwargs={"observation": "image_hwc"})
    network = NetworkTimer(config, probe(config).spec)
    network.costs()
    try:
        assert network.threads_ratio(2) > 0
        assert machine.threads() == 1
    finally:
        machine.limit_threads(1)


@pytest.mark.parametrize(
    ("flags", "times", "cores", "expected"),
    [
        ((), 30.0, 3, {"ppo_epochs": 10, "batch_size": 128}),
        ((), 30.0, 4, {}),  # four actors would have to wait for the learner
        ((), 19.0, 2, {}),
        (("--ppo_epochs=4",), 30.0, 2, {"batch_size": 128}),
        (("--rollout=256",), 30.0, 2, {"ppo_epochs": 10}),  # a batch holds whole trajectories
        (("--num_batches_per_iteration=8",), 30.0, 2, {}),  # steps of the second half of training would be too old
        (("--microbatch_size=256",), 30.0, 2, {}),  # larger than the smaller batch: the run could not resume
        (("--algo=SAC",), 30.0, 2, {}),
        (("--env=CartPole-v1",), 30.0, 2, {}),  # has a preset
    ],
)
def test_more_is_learned_from_steps_that_cost_much(
    flags: tuple[str, ...], times: float, cores: int, expected: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    asked = resolve(parse_train_flags(["--env=mine:Game", *flags]))[0]
    spec = replace(SPEC, action=ActionSpec((ActionPart("gaussian", 1),))) if "--algo=SAC" in flags else SPEC
    costs = Costs(env=((1, 2e-3), (4, 8e-3 * times / 30)), act=((1, 1e-5),), learn=((1, 2e-3 / 30),), env_bytes=0)
    found = Measurement(Probe(spec, MODELS, completed(asked, spec)), costs, 0.0)
    slow = found.for_slow_steps(asked.undecided, cores)
    before, after = found.probe.config.to_flat(), slow.probe.config.to_flat()
    assert {name: value for name, value in after.items() if value != before[name]} == expected
    assert after.items() >= expected.items()
    assert len(caplog.records) == bool(expected)
    assert slow.costs is not None
    dearer = {0: 1.0, 1: 2.0 if "batch_size" in expected else 2.5, 2: 5.0}[len(expected)]
    assert slow.costs.learn[0][1] == pytest.approx(costs.learn[0][1] * dearer)


def test_a_guess_of_costs_decides_nothing_of_learning() -> None:
    asked = resolve(parse_train_flags(["--env=mine:Game"]))[0]
    costs = Costs(env=((1, 1.0),), act=((1, 1e-5),), learn=((1, 1e-5),), env_bytes=0)
    found = Measurement(Probe(SPEC, MODELS, completed(asked, SPEC)), costs, 0.0)
    assert found.for_slow_steps(asked.undecided, 2) is not found
    for unsure in (found._replace(guessed=True), found._replace(alone=True), found._replace(costs=None)):
        assert unsure.for_slow_steps(asked.undecided, 2) is unsure
    assert found.for_slow_steps(frozenset(), 2) is found  # a run that resumes keeps its flags


# ---- what main makes of it


class Answers:
    """An inquiry whose answers are known; None stands for one that is late."""

    def __init__(self, *answers: object) -> None:
        self.answers, self.log_path = list(answers), Path("probe.log")
        self.questions: list[object] = []

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *exception: object) -> None:
        self.left = True

    def finish(self) -> None:
        self.questions.append("finish")

    def ask(self, question: object) -> None:
        self.questions.append(question)

    def answer(self, timeout_seconds: float, about: str = "environment") -> object:
        return self.answers.pop(0)

    def answer_by(self, deadline: float) -> object:
        return self.answers.pop(0) if self.answers else None


def asked(environment: Answers, network: Answers, cores: int = 2) -> measure.Measurement:
    return measure_run(Config(), lambda *_: environment, lambda *_: network, cores)  # type: ignore[arg-type, return-value]


def test_both_processes_say_what_they_know() -> None:
    stepping, acting, training = ((1, 1e-3),), ((1, 1e-4),), ((1, 1e-5),)
    environment = Answers(SPEC, (stepping, 5))
    found = asked(environment, Answers(MODELS, (acting, training)))
    assert found[:2] == (PROBE, Costs(stepping, acting, training, 5))
    assert environment.left
    assert not found.guessed
    assert found.lasting == found.costs
    assert asked(Answers(SPEC), Answers(MODELS), cores=0) == (PROBE, None, 0.0, False, False, 0.0)


@pytest.mark.parametrize(("share", "busy"), [(0.0, False), (0.14, False), (0.15, True), (1.0, True)])
def test_what_is_measured_beside_other_programs_does_not_last(others: list[float], share: float, busy: bool) -> None:
    others[0] = share
    found = asked(Answers(SPEC, (((1, 1e-3),), 5)), Answers(MODELS, (((1, 1e-4),), ((1, 1e-5),))))
    assert (found.others, found.busy) == (share, busy)
    assert found.costs is not None
    assert found.lasting == (None if busy else found.costs)


def test_the_network_that_is_measured_is_the_one_that_is_trained() -> None:
    environment, network, asked_for = Answers(SPEC), Answers(MODELS), list[tuple[object, ...]]()

    def ask_network(target: object, arguments: tuple[object, ...]) -> Answers:
        asked_for.append(arguments)
        return network

    config = resolve({"env": "my.games:Maze"})[0]
    found = measure_run(config, lambda *_: environment, ask_network, 0)  # type: ignore[arg-type, return-value]
    assert found.probe.config == completed(config, SPEC) != config
    assert asked_for == [(found.probe.config, SPEC, False)]
    assert not found.probe.config.model.use_rnn


@pytest.mark.parametrize(
    ("kind", "stack", "frames", "distributions", "given"),
    [
        ("Squashed", 3, 2, ["tanh_gaussian"], {}),
        ("Squashed", 3, 1, ["tanh_gaussian"], {"env_frameskip": 1}),
        ("Squashed", 3, 2, ["gaussian"], {"action_distribution": "gaussian"}),
        ("Binned", 1, 1, ["bins"] * 2, {}),
    ],
)
def test_flags_of_the_environment_that_its_kind_decides_are_those_of_its_spec(
    tmp_path: Path, kind: str, stack: int, frames: int, distributions: list[str], given: dict[str, object]
) -> None:
    flags = {"env": f"{own_kinds.__name__}:Line", "algo": f"{own_kinds.__name__}:{kind}", "train_dir": str(tmp_path)}
    config = resolve({**flags, "encoder_mlp_layers": (8,), **given})[0]
    known = probe(config)
    spec, models, found = known.spec, known.models, known.config
    assert [part.kind for part in spec.action.parts] == distributions
    with make_single(found.env) as env:
        env.reset(seed=0)
        assert env.step(env.action_space.sample())[1] == 8.0 * frames
    assert {key: one.shape for key, one in spec.observations.items()} == {"obs": (stack * 3,)}
    assert dict(models[0].table)["actor.encoder.encoders.0.0.weight"] == (8, stack * 3)
    assert make_group(found.env, 1).spec == spec
    # As in processes: the environment is made once more, and the network measured is the one of its second spec.
    first = make_group(config.env, 1).spec
    asked_for = list[tuple[object, ...]]()
    answers = [Answers(first), Answers(spec), Answers(models)]

    def ask(target: object, arguments: tuple[object, ...]) -> Answers:
        asked_for.append(arguments)
        return answers[len(asked_for) - 1]

    measured = measure_run(config, ask, ask, 0)  # type: ignore[arg-type]
    assert measured.probe == known
    assert asked_for == [(config, False), (found, False), (found, spec, False)]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Late", "chooses device, which is read before the environment is made"),
        ("LatePlacement", "chooses inference, which is read before the environment is made"),
        ("Misspelt", "chooses frame_skip, which is none of its flags"),
    ],
)
def test_flags_that_the_kind_decides_too_late_are_refused(tmp_path: Path, kind: str, words: str) -> None:
    algo = f"{own_kinds.__name__}:{kind}"
    config = resolve({"env": f"{own_kinds.__name__}:Line", "algo": algo, "train_dir": str(tmp_path)})[0]
    with pytest.raises(UsageError) as caught:
        probe(config)
    assert str(caught.value) == f"--algo={algo}: its preset_by_kind {words}"


def test_threads_of_a_learner_that_would_be_the_limit_are_timed_on_a_still_machine() -> None:
    stepping, acting, training = ((1, 1e-5),), ((1, 1e-6),), ((1, 1e-3),)
    network = Answers(MODELS, (acting, training), 0.625)
    environment = Answers(SPEC, (stepping, 5))
    found = asked(environment, network)
    assert (environment.questions, network.questions) == (["finish"], [2])
    assert found.costs == Costs(stepping, acting, ((1, 1e-3), (2, 0.625e-3)), 5)
    failed = WorkerFailed("probe", 1, "no memory", "")
    found = asked(Answers(SPEC, (stepping, 5)), Answers(MODELS, (acting, training), failed))
    assert found.costs == Costs(stepping, acting, training, 5)
    # A network that takes too long to find out needs them most.
    found = asked(Answers(SPEC, (stepping, 5)), Answers(MODELS, (acting, training), None))
    assert found.costs == Costs(stepping, acting, ((1, 1e-3), (2, 1e-3 * usual_ratio(2))), 5)


SLOW = "the environment was not measured in time: counted as taking 2 s a step"
FAILED = WorkerFailed("probe", 3, "step raised", "")


@pytest.mark.parametrize(
    ("late", "said"),
    [
        (None, SLOW),
        (FAILED, "stepping the environment has failed, counted as taking 2 s a step: step raised (see probe.log)"),
    ],
)
def test_an_environment_that_is_not_measured_is_slow(caplog: pytest.LogCaptureFixture, late: object, said: str) -> None:
    with caplog.at_level(logging.INFO):
        found = asked(Answers(SPEC, late), Answers(MODELS, (((1, 1e-4),), ((1, 1e-5),))))
    assert found.costs == Costs(((1, BUDGET_SECONDS),), ((1, 1e-4),), ((1, 1e-5),), 0)
    assert (found.guessed, found.lasting, caplog.messages) == (True, None, [said])
    assert found.planned == found.probe.config == PROBE.config


@pytest.mark.parametrize("more", [None, FAILED, (((1, 1e-3), (4, 2e-3)), 7)], ids=["late", "failed", "measured"])
def test_what_one_environment_has_shown_counts_whatever_becomes_of_more(
    caplog: pytest.LogCaptureFixture, more: object
) -> None:
    one, of_network = (((1, 1e-3),), 5), (((1, 1e-4),), ((1, 1e-5),))
    with caplog.at_level(logging.INFO):
        found = asked(Answers(SPEC, one, more), Answers(MODELS, of_network))
    curve, env_bytes = more if isinstance(more, tuple) and more is not FAILED else one
    assert found.costs == Costs(curve, *of_network, env_bytes)
    failed = more is FAILED
    words = "several environments in one process have failed, so each actor gets one: step raised (see probe.log)"
    assert (found.guessed, found.alone, caplog.messages) == (False, failed, [words] * failed)
    assert found.planned.sampling.num_envs_per_worker == int(failed)
    assert found.lasting == (None if failed else found.costs)
    assert found.probe == PROBE  # and config.json has what the flags say


def test_an_environment_that_allows_one_per_process_gets_one_by_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tests.unit.envs.stubborn:OnePerProcess"
    one, of_network = (((1, 1e-3),), 5), (((1, 1e-4),), ((1, 1e-5),))
    for cores in (0, 2):
        found = asked(Answers(replace(SPEC, one_per_process=True), one), Answers(MODELS, of_network), cores)
        assert found.planned.sampling.num_envs_per_worker == 1
        for placement in ("local", "central", "serial"):
            assert plan_workers(found.planned, 4, placement).num_envs_per_worker == 1  # type: ignore[arg-type]
    found = Measurement(probe(config_of(name)), None, 0.0)
    assert found.planned.sampling.num_envs_per_worker == 1
    assert found.probe.spec.notes[0].endswith(": each actor gets one")
    with pytest.raises(UsageError, match=r"not --num_envs_per_worker=2: --num_envs_per_worker=1$"):
        _ = Measurement(probe(config_of(name, num_envs_per_worker=2)), None, 0.0).planned
    assert not probe(config_of(name, num_envs_per_worker=1)).spec.one_per_process  # and nobody asks for a second one


@pytest.mark.parametrize("cores", [0, 2])
@pytest.mark.parametrize(
    ("answer", "why"),
    [(None, "it was not made in 10 s"), (WorkerFailed("probe", 1, "killed by SIGSEGV", ""), "killed by SIGSEGV")],
)
def test_a_second_environment_that_ends_or_blocks_the_process_is_never_made_again(
    answer: object, why: str, cores: int
) -> None:
    tried = replace(SPEC, one_per_process=None)
    found = asked(Answers(tried, answer), Answers(MODELS, (((1, 1e-4),), ((1, 1e-5),))), cores)
    assert found.probe.spec.one_per_process
    assert found.probe.spec.notes == (
        f" allows one environment per process (of a second one: {why}): each actor gets one",
    )
    assert found.planned.sampling.num_envs_per_worker == 1
    assert found.guessed == (cores > 0)
    known = replace(SPEC, one_per_process=False)
    assert asked(Answers(tried, known), Answers(MODELS), 0).probe.spec == known


@pytest.mark.parametrize("given", [{"num_envs_per_worker": 4}, {"worker_num_splits": 2}])
def test_a_given_number_of_environments_stays_if_several_have_failed(
    caplog: pytest.LogCaptureFixture, given: dict[str, int]
) -> None:
    config = Config.from_flat(given)
    answers = Answers(SPEC, (((1, 1e-3),), 5), FAILED), Answers(MODELS, (((1, 1e-4),), ((1, 1e-5),)))
    found = measure_run(config, lambda *_: answers[0], lambda *_: answers[1], 2)  # type: ignore[arg-type, return-value]
    assert found.planned.sampling == config.sampling
    assert caplog.messages == ["several environments in one process have failed: step raised (see probe.log)"]


@pytest.mark.parametrize(
    ("late", "reason"),
    [(None, "the network was not measured in time"), (WorkerFailed("probe", 1, "ValueError: x", ""), "ValueError: x")],
)
def test_without_a_measured_network_there_are_rules(
    caplog: pytest.LogCaptureFixture, late: object, reason: str
) -> None:
    with caplog.at_level(logging.INFO):
        found = asked(Answers(SPEC, (((1, 1e-3),), 0)), Answers(MODELS, late))
    assert found[:2] == (PROBE, None)
    assert caplog.messages == [f"not auto-tuned, the sampling flags follow fixed rules: {reason}"]


def test_what_cannot_be_made_is_an_error() -> None:
    with pytest.raises(WorkerError, match="no such thing"):
        asked(Answers(WorkerFailed("probe", 2, "no such thing", "")), Answers())
    with pytest.raises(WorkerError, match="not of this shape"):
        asked(Answers(SPEC), Answers(WorkerFailed("probe", 2, "not of this shape", "")))


def test_a_mistake_in_the_code_of_the_environment_ends_the_start() -> None:
    """Of one environment; where several fail, each may have a process of its own."""
    mistake = WorkerFailed("probe", 3, "step must return five things", "", lasting=True)
    network = MODELS, (((1, 1e-4),), ((1, 1e-5),))
    with pytest.raises(WorkerError, match="five things") as failure:
        asked(Answers(SPEC, mistake), Answers(*network))
    assert failure.value.exit_code == 3
    assert asked(Answers(SPEC, (((1, 1e-3),), 5), mistake), Answers(*network)).alone


def test_the_processes_answer_once_or_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []

    questions = [2]

    class Pipe:
        def send(self, answer: object) -> None:
            sent.append(answer)

        def poll(self, timeout_seconds: float) -> bool:
            return bool(questions)

        def recv(self) -> int:
            return questions.pop()

    monkeypatch.setattr(measure, "enter", lambda name, log_path: None)
    monkeypatch.setattr(
        "appo.algorithms.run.tuning.environment.stepping_costs",
        lambda config, envs, making_seconds, bytes_before, made: ["costs", "better ones"],
    )
    monkeypatch.setattr(NetworkTimer, "costs", lambda self: "more costs")
    monkeypatch.setattr(NetworkTimer, "threads_ratio", lambda self, threads: f"{threads} threads")
    config = config_of("toy/Zero-v0")
    measure.measure_environment(Pipe(), tmp_path, config, True)  # type: ignore[arg-type]
    tried, spec = sent.pop(0), sent[0]
    assert tried == replace(spec, one_per_process=None)  # type: ignore[type-var]
    description = probe(config).models
    measure.measure_network(Pipe(), tmp_path, config, spec, True)  # type: ignore[arg-type]
    assert sent == [spec, "costs", "better ones", None, description, "more costs", "2 threads"]
    measure.measure_network(Pipe(), tmp_path, config, spec, True)  # type: ignore[arg-type]
    assert sent[7:] == [description, "more costs"]
    sent.clear()
    measure.measure_environment(Pipe(), tmp_path, config, False)  # type: ignore[arg-type]
    measure.measure_network(Pipe(), tmp_path, config, spec, False)  # type: ignore[arg-type]
    measure.measure_environment(Pipe(), tmp_path, config_of("toy/Zero-v0", env_kwargs={"no": 1}), True)  # type: ignore[arg-type]
    assert sent[1:-1] == [spec, description]
    assert isinstance(sent[-1], WorkerFailed)


def test_what_has_failed_is_told_before_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is broken may take longer to close than main waits."""
    told: list[object] = []
    pipe = SimpleNamespace(send=told.append)

    def fails(
        config: Config, envs: GroupEnv, making_seconds: float, bytes_before: int, made: ExitStack
    ) -> Iterator[object]:
        made.callback(lambda: told.append("closed"))
        yield "one"
        raise ValueError("several")

    monkeypatch.setattr(measure, "enter", lambda name, log_path: None)
    monkeypatch.setattr("appo.algorithms.run.tuning.environment.stepping_costs", fails)
    config = config_of("toy/Zero-v0", num_envs_per_worker=1)
    measure.measure_environment(pipe, tmp_path, config, True)  # type: ignore[arg-type]
    _, one, failure, closed = told
    assert isinstance(failure, WorkerFailed)
    assert (one, failure.summary, closed) == ("one", "ValueError: several", "closed")
