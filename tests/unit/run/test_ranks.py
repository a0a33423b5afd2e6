"""A run as one of several learners: its place, its share of a batch, its seeds, and what it refuses."""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from appo.algorithms.run.config import Config, parse_train
from appo.algorithms.run.defaults import completed
from appo.algorithms.run.folder import journal
from appo.algorithms.run.machines.ray_wire import share_of_cores
from appo.algorithms.run.main import Run
from appo.algorithms.run.plan import RunPlan
from appo.algorithms.run.ranks import launch
from appo.algorithms.run.ranks.meeting import announce, choose_gpu, follow, given_ranks, share_of
from appo.algorithms.run.training import Training
from appo.algorithms.run.trust import marked
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.learning import rank_store
from appo.algorithms.runtime.processes.restarts import Revival
from appo.algorithms.runtime.ranks import SHARED_GPU, Rank
from appo.algorithms.runtime.topology import Topology
from appo.utils.errors import UsageError
from tests.patience import HANG_SECONDS
from tests.unit.models.cases import env_spec_of

STREAMING = ("--algo=PPO", "--ppo_epochs=1", "--num_batches_per_iteration=1", "--normalize_advantages=off")
PLACE = Rank(1, 2, 1, 2, "10.0.0.1", 4000, "3")


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def flags(*words: str, algo: str = "APPO") -> Config:
    return parse_train(["--env=CartPole-v1", f"--algo={algo}", "--preset=none", "--num_learners=2", *words])


def test_the_place_is_read_from_the_launchers_variables() -> None:
    assert Rank.of({}) is None
    assert Rank.of({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert Rank.of(PLACE.variables()) == PLACE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"TORCHELASTIC_USE_AGENT_STORE": ""}, "no launcher keeps a store: start with torchrun"),
        ({"LOCAL_RANK": "x"}, "what torchrun sets this is wrong"),
    ],
)
def test_variables_that_no_launcher_sets_are_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Rank.of({**PLACE.variables(), **change})


def test_the_launcher_decides_the_number_of_learners() -> None:
    assert given_ranks({"env": "x"}, None) == {"env": "x"}
    assert given_ranks({"env": "x"}, PLACE) == {"env": "x", "num_learners": 2}
    assert given_ranks({"env": "x"}, replace(PLACE, number=0, start="0")) == {"env": "x", "num_learners": 2}
    with pytest.raises(UsageError, match="--num_learners=3: the launcher has started 2 ranks"):
        given_ranks({"num_learners": 3}, PLACE)


@pytest.mark.parametrize(("written", "asked"), [("num_learners = 4", 4), ("[run]\nnum-learners = 3", 3)])
def test_a_config_file_cannot_ask_for_another_number_of_learners(tmp_path: Path, written: str, asked: int) -> None:
    (tmp_path / "f.toml").write_text(written)
    given = {"env": "x", "config": str(tmp_path / "f.toml")}
    with pytest.raises(UsageError, match=f"--num_learners={asked}: the launcher has started 2 ranks"):
        given_ranks(given, PLACE)
    assert given_ranks({**given, "num_learners": 2}, PLACE) == {**given, "num_learners": 2}
    for agreed in ("num_learners = 2", "num_learners = 1", "gamma = 0.9"):  # 1 is in every file of --print_config
        (tmp_path / "f.toml").write_text(agreed)
        assert given_ranks(given, PLACE) == {**given, "num_learners": 2}


@pytest.mark.parametrize("announced_by", ["0", "1"])
def test_a_further_start_of_torchrun_resumes_the_run(announced_by: str) -> None:
    place = replace(PLACE, host="127.0.0.1", port=(store := rank_store.serve()).port, number=0)
    announce(started(0), replace(place, start=announced_by), None)
    given = given_ranks({"env": "x", "restart_behavior": "overwrite"}, replace(place, start="2"))
    assert given == {"env": "x", "restart_behavior": "resume", "num_learners": 2, "experiment": "x"}
    del store


ONE_GPU = {"CUDA_VISIBLE_DEVICES": "0", SHARED_GPU: "1"}


@pytest.mark.parametrize(
    ("seen", "devices", "expected"),
    [
        (None, ["nvidia3"], ONE_GPU),
        (None, ["nvidia4", "nvidia6"], {"CUDA_VISIBLE_DEVICES": "1"}),
        (None, [], {}),
        ("5,7", ["nvidia0"], {"CUDA_VISIBLE_DEVICES": "7"}),
        ("0", ["nvidia0", "nvidia1"], ONE_GPU),
        ("", ["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": ""}),
        ("-1", ["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": "-1"}),
    ],
)
def test_a_rank_sees_one_gpu_by_the_index_of_cuda(
    monkeypatch: pytest.MonkeyPatch, seen: str | None, devices: list[str], expected: dict[str, str]
) -> None:
    variables = {} if seen is None else {"CUDA_VISIBLE_DEVICES": seen}
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", variables)
        patch.setattr(Path, "glob", lambda folder, pattern: (folder / name for name in devices))
        choose_gpu(PLACE)
    assert variables == expected


@pytest.mark.parametrize(
    ("algo", "words", "expected"),
    [
        ("APPO", ["--batch_size=256"], {"batch_size": 128, "microbatch_size": 0}),
        ("APPO", ["--batch_size=256", "--microbatch_size=64"], {"batch_size": 128, "microbatch_size": 64}),
        ("APPO", ["--batch_size=256", "--microbatch_size=128"], {"batch_size": 128, "microbatch_size": 0}),
        ("PPO", [], {"batch_size": 32, "num_batches_per_iteration": 32}),
        (
            "APEX",
            ["--replay_capacity=1001", "--learning_starts=100", "--max_weight_sync_delay=9"],
            {"batch_size": 256, "replay_capacity": 500, "learning_starts": 50, "max_weight_sync_delay": 4},
        ),
    ],
)
def test_a_rank_takes_its_share(algo: str, words: list[str], expected: dict[str, int]) -> None:
    config = flags(*words, algo=algo)
    shared = share_of(config, PLACE)
    assert {name: getattr(shared.learning, name) for name in expected} == expected
    assert share_of(config, None) is config
    assert replace(shared, learning=config.learning, run=config.run) == config


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (3, "--batch_size=128 cannot be divided among --num_learners=3"),
        (8, "--num_learners=8 divides --batch_size=128, and then: --batch_size=16 is not a multiple of --rollout=32"),
    ],
)
def test_a_batch_that_cannot_be_shared_is_refused(size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        share_of(flags("--batch_size=128"), replace(PLACE, size=size))


@pytest.mark.parametrize(("cores", "size"), [(8, 2), (7, 3), (1, 2), (2, 4)])
def test_ranks_divide_the_cores_of_every_machine(cores: int, size: int) -> None:
    owners = set()
    for node in ("00", "01", "02", "03"):
        shares = [share_of_cores(node, cores, Rank(number, size)) for number in range(size)]
        assert sum(shares) == cores
        assert max(shares) - min(shares) <= 1
        owners |= {number for number, share in enumerate(shares) if share}
    assert owners == set(range(size)), "each rank has a machine"
    assert share_of_cores("00", cores, None) == cores


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_policies=2"], "--num_policies=2 does not go with --num_learners=2"),
        (["--lockstep"], "--lockstep does not go with --num_learners=2"),
        (["--algo=A3C", "--device=cpu"], "are for APPO, PPO, APEX and SAC, not --algo=A3C"),
        (["--algo=examples.spo:SPO"], "are for APPO, PPO, APEX and SAC, not --algo=examples.spo:SPO"),
        (["--algo=APEX", "--save_replay"], "--save_replay does not go with --num_learners=2"),
        (["--algo=BC", "--input=x"], "are for APPO, PPO, APEX and SAC, not --algo=BC"),
        (["--algo=SAC", "--input=x"], "--input does not go with --num_learners=2"),
        (["--output=x"], "--output does not go with --num_learners=2"),
        (
            [*STREAMING, "--batch_size=512", "--microbatch_size=256"],
            "--microbatch_size=256, by which batches stream, does not go with --num_learners=2",
        ),
    ],
)
def test_flags_that_several_learners_do_not_support_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_train(["--env=CartPole-v1", "--preset=none", "--num_learners=2", *words])


def started(rank: int, *words: str, env: str = "UnknownEnv-v1") -> Config:
    """The flags of a rank of a named run, as a start reads them."""
    return parse_train([f"--env={env}", "--num_learners=2", "--train_dir=.", "--experiment=x", "--seed=1", *words])


def saved(config: Config, **changed: object) -> Config:
    """Complete the flags of rank 0 and save them, as a start does once the environment is known."""
    whole = completed(config, env_spec_of())
    values: Mapping[str, object] = whole.to_flat() | changed
    config.run.run_directory.mkdir(parents=True)
    journal(config.run.run_directory, marked(values), [], [0])
    return whole


def test_a_rank_that_reads_completed_flags_joins_a_rank_0_that_had_them_open() -> None:
    first, place = started(0), replace(PLACE, host="127.0.0.1", port=(store := rank_store.serve()).port)
    announce(first, replace(place, number=0), None)
    assert len(first.undecided) > 150
    whole = saved(first)
    again = started(1)
    assert not again.undecided
    assert (first.learning.learning_rate, again.learning.learning_rate) == (0.0001, 0.001)
    followed, reason = follow(again, place)
    assert (followed.learning, reason) == (whole.learning, None)
    with pytest.raises(UsageError, match=r"rank 1 .* has --learning_rate=0.01, rank 0 .* has 0.0001: all need"):
        follow(started(1, "--learning_rate=0.01"), place)
    del store


def test_a_rank_with_open_flags_takes_those_that_rank_0_has_saved(tmp_path: Path) -> None:
    """A resumed rank 0 has saved flags; a rank on a machine without the folder knows none of them."""
    saved(started(0), learning_rate=0.02, encoder_mlp_layers=[32, 16])
    place = replace(PLACE, host="127.0.0.1", port=(store := rank_store.serve()).port)
    announce(started(0), replace(place, number=0), None)
    further = started(1, "--train_dir=elsewhere")
    assert further.undecided
    followed, _ = follow(further, place)
    assert not followed.undecided
    assert (followed.learning.learning_rate, followed.model.encoder_mlp_layers) == (0.02, (32, 16))
    assert followed.run.run_directory == Path("elsewhere/x/logs/rank_1")
    with pytest.raises(UsageError, match=r"rank 1 .* has --rollout=16, rank 0 .* has 32: all need the same"):
        follow(started(1, "--train_dir=elsewhere", "--rollout=16"), place)
    del store


def test_a_flag_that_rank_0_alone_is_given_is_refused() -> None:
    place = replace(PLACE, host="127.0.0.1", port=(store := rank_store.serve()).port)
    announce(started(0, "--learning_rate=0.01"), replace(place, number=0), None)
    with pytest.raises(UsageError, match=r"has --learning_rate=0.0001, rank 0 .* has 0.01: all need the same"):
        follow(started(1), place)
    del store


def test_the_goal_of_a_return_is_rank_0s_alone() -> None:
    place = replace(PLACE, host="127.0.0.1", port=(store := rank_store.serve()).port)
    words = ("--train_until_return=400", "--train_for_env_steps=5000")
    first = announce(started(0, *words), replace(place, number=0), None)
    followed, _ = follow(started(1, *words), place)
    assert (first.run.train_until_return, first.run.train_for_env_steps) == (400.0, 5000)
    assert (followed.run.train_until_return, followed.run.train_for_env_steps) == (None, 5000)
    del store


def test_rank_0_alone_decides_the_end() -> None:
    budget = Budget(1000, seconds=8.0, benchmark=True)
    assert Run._limits(SimpleNamespace(_is_further=False), budget) is budget  # type: ignore[arg-type]
    assert Run._limits(SimpleNamespace(_is_further=True), budget) == Budget(2**62)  # type: ignore[arg-type]


def test_a_share_of_a_batch_stays_on_the_device_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Config, "device", property(lambda config: "cuda" if config.learning.batch_size == 256 else "cpu")
    )
    config = Config.from_flat({"env": "Pendulum-v1", "algo": "SAC", "batch_size": 256})
    assert share_of(config, Rank(1, 2)).run.device == "cuda"


def test_a_restarted_rank_0_keeps_the_budget_of_the_preset() -> None:
    saved(first := started(0, "--algo=PPO", env="CartPole-v1"))
    words = launch._resuming("x", first.run.train_for_seconds, 10.0)
    assert words == ["--experiment=x", "--restart_behavior=resume"]
    again = started(0, "--algo=PPO", *words, env="CartPole-v1")
    assert again.run.train_for_env_steps == first.run.train_for_env_steps == 100_000
    assert launch._resuming("x", 3600.0, 10.0) == [*words, "--train_for_seconds=3590"]
    assert launch._resuming("x", 3600.0, 3599.0)[-1] == "--train_for_seconds=10"  # time to take over the others' state


ENDINGS = {signal.SIGINT: 130, **dict.fromkeys((signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR2, signal.SIGXCPU), 143)}


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> Iterator[launch._Process]:
    """A rank 0 in the place of which `sleep` dies by any signal, like a rank that is still loading."""
    monkeypatch.setattr(launch, "own_command", lambda words: ["sleep", "600"])
    monkeypatch.setattr(launch, "LOOK_SECONDS", 0.01)
    process = launch._Process(Rank(0, 2), Revival("rank 0", Path()))
    # A script that runs the tests in the background ignores SIGQUIT, and an ignored signal stays ignored.
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDINGS}
    with launch._passing_signals_to(process):
        yield process
    process.send(signal.SIGKILL)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), ENDINGS.items())
def test_a_signal_ends_a_launcher_whose_rank_0_is_still_loading(
    rank_0: launch._Process, number: signal.Signals, code: int
) -> None:
    rank_0.start([])
    os.kill(os.getpid(), signal.SIGHUP)  # a closed terminal ends nothing
    os.kill(os.getpid(), number)
    assert launch._watch([rank_0], [], 1e10) == code
    assert rank_0.revival.restarts == 0


@pytest.mark.parametrize(("number", "code"), ENDINGS.items())
def test_a_signal_ends_a_launcher_whose_rank_0_waits_for_a_restart(
    rank_0: launch._Process, number: signal.Signals, code: int
) -> None:
    rank_0.revival.ended(time.monotonic(), -9)
    os.kill(os.getpid(), number)
    assert launch._watch([rank_0], [], 1e10) == code
    assert rank_0.process is None


def test_a_signal_before_the_process_of_rank_0_reaches_the_process(rank_0: launch._Process) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    rank_0.start([])
    assert rank_0.process is not None
    assert rank_0.process.wait(HANG_SECONDS) == -signal.SIGTERM


def test_programs_train_with_one_learner() -> None:
    with pytest.raises(UsageError, match="num_learners=2 is for the command appo train"):
        Training(env="CartPole-v1", num_learners=2)


def test_seeds_follow_the_rank_except_for_the_first_weights() -> None:
    def plan(rank: Rank | None, starts: int = 1) -> RunPlan:
        topology = Topology("serial", 1, 1, 1, 1, 1, rows=1, rollout=8)
        return RunPlan(Config(), env_spec_of(), (), topology, Budget(1), "cpu", 7, rank=rank, starts=starts)

    def drawn(plan: RunPlan, branch: str) -> list[int]:
        return np.asarray(plan.seeds(branch, 0).generate_state(4)).tolist()

    alone, first, second = plan(None), plan(replace(PLACE, number=0)), plan(PLACE)
    assert drawn(alone, "group") == drawn(first, "group")
    assert drawn(alone, "model") == drawn(second, "model")
    assert drawn(alone, "group") != drawn(second, "group") != drawn(plan(PLACE, 2), "group")
