"""Runs that repeat themselves bit by bit, interrupted or not."""

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appo.utils import failpoints
from tests.chaos.runs import START_SECONDS, TrainingRun, kill
from tests.integration.runs import Run, record, run_command
from tests.patience import patient

SMALL: dict[str, object] = {
    "rollout": 8,
    "batch_size": 64,
    "num_batches_per_iteration": 2,
    "num_envs_per_worker": 4,
    "train_for_env_steps": 1000,
    "lr_schedule": "linear",
}
MLP = {**SMALL, "env": "CartPole-v1", "use_rnn": False, "encoder_mlp_layers": 16, "ppo_epochs": 2}
GRU = {**SMALL, "env": "toy/Memory-v0", "hidden_size": 16, "recurrence": 4}
STREAM = {
    **{name: value for name, value in MLP.items() if name != "ppo_epochs"},
    "algo": "PPO",
    "ppo_epochs": 1,
    "batch_size": 128,
    "microbatch_size": 32,
    "num_batches_per_iteration": 1,
    "normalize_advantages": "running",
    "lockstep": True,
    "num_workers": 2,
    "worker_num_splits": 2,
}
"""PPO whose batches stream: four parts in two rounds."""
NOISY = {"env": "toy/Target-v0", "rpo_alpha": 0.5}
LEGS: dict[str, object] = {"deterministic_resume": True, "save_every_env_steps": 300}
LOCKSTEP: dict[str, object] = {"lockstep": True, "num_workers": 2, "worker_num_splits": 2}


def check_same(run: Run, other: Run, *, in_order: bool = True) -> None:
    """Everything that was learned and counted is the same; nothing depends on the clock but the time it took.

    Which episodes main has heard of, and in which order, is chance where actors are processes.
    """
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert run.checkpoint()[name] == other.checkpoint()[name]
    states = [run.state(), other.state()]
    for state in states:
        assert state["updates"] > 0
        progress = state["progress"] if in_order else state.pop("progress")
        del progress["elapsed_seconds"]
    assert states[0] == states[1]


def saved(directory: Path) -> list[int]:
    """Env steps of the checkpoints, to the end of the segment that each of them ended."""
    return [int(path.name[5:]) // 300 * 300 for path in sorted(directory.glob("checkpoint_p0/ckpt_*"))]


@pytest.fixture
def disarm() -> Iterator[None]:
    yield
    failpoints.arm("")


@pytest.mark.parametrize(
    ("flags", "update", "segments"),
    [
        pytest.param(MLP, 30, [300, 600], id="mlp", marks=pytest.mark.slow),
        pytest.param(GRU, 15, [300, 600], id="gru", marks=pytest.mark.slow),
        # A batch of this one has two moments at which a step is heard of.
        pytest.param(STREAM, 13, [300, 600], id="stream", marks=pytest.mark.slow),
        pytest.param({**MLP, **NOISY}, 30, [300, 600], id="noise", marks=pytest.mark.slow),
        pytest.param({**STREAM, **NOISY}, 13, [300, 600], id="stream-noise", marks=pytest.mark.slow),
        pytest.param(MLP, 3, [], id="mlp-in-the-first-segment", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_failed_and_goes_on_is_the_one_that_did_not(
    tmp_path: Path, disarm: None, flags: dict[str, object], update: int, segments: list[int]
) -> None:
    flags = {"inference": "serial", **LEGS, **flags}
    straight = record(tmp_path / "straight", **flags)
    assert straight.state()["env_steps"] >= 1000
    failpoints.arm(f"learner.step:raise@{update}")
    with pytest.raises(failpoints.FailpointError):
        record(tmp_path / "resumed", **flags)
    failpoints.arm("")
    assert saved(tmp_path / "resumed") == segments
    check_same(straight, record(tmp_path / "resumed", **flags))


SHORT = {"train_for_env_steps": 4000}


@pytest.mark.parametrize(
    "flags",
    [
        {"num_workers": 2, "num_policies": 2, **SHORT},
        *(
            pytest.param(flags, marks=pytest.mark.slow)
            for flags in (
                {"num_workers": 2, "train_for_env_steps": 12_000},
                {"num_workers": 3, "worker_num_splits": 2, "stats_avg": 7, **SHORT},
                {
                    "num_workers": 1,
                    "worker_num_splits": 4,
                    "rollout": 5,
                    "batch_size": 100,
                    "train_for_env_steps": 4000,
                },
            )
        ),
    ],
)
def test_what_main_averages_in_serial_follows_from_the_steps_alone(tmp_path: Path, flags: dict[str, object]) -> None:
    flags = {**MLP, "inference": "serial", "stats_avg": 30, "seed": 5, "ppo_epochs": 1, **flags}
    first, second = (record(tmp_path / name, **flags) for name in ("first", "second"))
    check_same(first, second)
    assert len(first.state()["progress"]["windows"]["reward"]) == flags["stats_avg"]


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "update"), [pytest.param(MLP, 30, id="mlp"), pytest.param(GRU, 15, id="gru")])
def test_a_run_that_was_killed_and_goes_on_is_the_one_that_was_not(
    tmp_path: Path, flags: dict[str, object], update: int
) -> None:
    flags = {"inference": "serial", **LEGS, **flags}
    killed = run_command(tmp_path / "resumed", failpoints=f"learner.step:kill9@{update}", **flags)
    assert killed.returncode == -signal.SIGKILL
    assert saved(tmp_path / "resumed")[-1] >= 600
    check_same(record(tmp_path / "straight", **flags), record(tmp_path / "resumed", **flags))


@pytest.mark.slow
def test_a_stream_that_is_killed_in_the_middle_of_a_batch_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """The second of four parts of the fifth batch dies with its learner: it is neither applied nor counted twice."""
    flags = {**LEGS, **STREAM, "inference": "serial"}
    killed = run_command(tmp_path / "resumed", failpoints="learner.batch:kill9@18", **flags)
    assert killed.returncode == -signal.SIGKILL
    assert saved(tmp_path / "resumed") == [300]
    straight, resumed = (record(tmp_path / name, **flags) for name in ("straight", "resumed"))
    check_same(straight, resumed, in_order=False)
    state = resumed.state()
    assert state["updates"] == state["adam_steps"] > 8
    assert state["samples"] == state["used"] == state["env_steps"] >= 1000


@pytest.mark.parametrize(
    ("flags", "placements"),
    [
        pytest.param(GRU, ["serial", "local"], id="gru", marks=pytest.mark.slow),
        pytest.param(MLP, ["serial", "local", "central"], id="mlp", marks=pytest.mark.slow),
        pytest.param(GRU, ["local", "central"], id="gru-central", marks=pytest.mark.slow),
        pytest.param({**MLP, **NOISY}, ["serial", "central"], id="noise", marks=pytest.mark.slow),
    ],
)
def test_in_lockstep_it_makes_no_difference_where_workers_live(
    tmp_path: Path, flags: dict[str, object], placements: list[str]
) -> None:
    first, *others = (record(tmp_path / place, **LOCKSTEP, **flags, inference=place) for place in placements)
    for other in others:
        check_same(first, other, in_order=False)
        assert set(other.workers) == {"actor_0", "actor_1"}
        assert other.totals["discarded"] == 0


@pytest.mark.slow
def test_a_lockstep_run_that_is_disturbed_and_killed_is_the_one_that_was_not(tmp_path: Path) -> None:
    flags = {"inference": "local", **LEGS, **LOCKSTEP, **MLP}
    flags |= {"save_every_env_steps": 1500, "train_for_env_steps": 5000}
    straight = record(tmp_path / "straight", seed=1, **flags)
    words = [f"--{name}={value}" for name, value in flags.items()]
    with TrainingRun(tmp_path, *words, "--no_tensorboard") as run:
        disturb(run, lambda: run.env_steps() >= 2000)
        kill(run.process.pid)
        run.wait()
        run.seconds_until_gone(30)
    with TrainingRun(tmp_path, *words, "--no_tensorboard") as run:
        disturb(run, lambda: run.process.poll() is not None)
        ended = run.wait()
    assert ended.exit_code == 0, ended.stderr
    assert "resuming policy 0 at env step" in ended.stdout
    check_same(straight, Run(run.directory), in_order=False)


def disturb(run: TrainingRun, enough: Callable[[], bool]) -> None:
    """Stop workers for a moment, one after the other, until it is enough."""
    workers = itertools.cycle(("actor_0", "learner_0", "actor_1"))
    began = time.monotonic()
    while not enough():
        assert time.monotonic() - began < patient(START_SECONDS), run.stderr
        name = next(workers)
        for pid in [pid for pid, role in run.roles().items() if role == name]:
            kill(pid, signal.SIGSTOP)
            time.sleep(0.01)
            kill(pid, signal.SIGCONT)
