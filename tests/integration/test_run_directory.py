"""What a run leaves in its directory, and how it goes on from there."""

import json
import logging
import os
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event

from appo.algorithms.runtime.messages import LearnerReport
from appo.utils import checkpoint_files
from appo.utils.lock import RunLock
from tests.integration.runs import LINGERING, Command, Recorded, Run, command_line, record, run_command, train
from tests.patience import in_time

Train = Callable[..., "subprocess.CompletedProcess[str]"]
SMALL: dict[str, object] = {
    "env": "CartPole-v1",
    "inference": "serial",
    "rollout": 16,
    "batch_size": 256,
    "num_batches_per_iteration": 1,
    "ppo_epochs": 2,
    "encoder_mlp_layers": 16,
    "num_envs_per_worker": 16,
    "use_rnn": False,
    "tensorboard": True,
    "train_for_env_steps": 3000,
}
BUDGET = 3000
KEYS = ("elapsed_seconds", "policy", "env_steps", "samples", "discarded")
TAGS = (
    *(f"reward/{kind}" for kind in ("mean", "min", "max")),
    *(f"len/{kind}" for kind in ("mean", "min", "max")),
    *(f"train/{name}" for name in ("loss", "policy_loss", "value_loss", "entropy", "kl_divergence", "grad_norm")),
    *(f"train/{name}" for name in ("learning_rate", "policy_lag_mean", "policy_lag_min", "policy_lag_max")),
    *(f"perf/{name}" for name in ("version", "episodes", "env_steps_per_second", "samples_per_second")),
    *(f"perf/{name}" for name in ("memory_main_mib",)),
)
STATE = ("env_steps", "samples", "discarded", "updates", "adam_steps", "version")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Command:
    directory, flags = tmp_path_factory.mktemp("runs") / "finished", SMALL | {"inference": "local", "num_workers": 2}
    return train(directory, program=LINGERING, **flags)  # an actor that is killed at the end reports no last episodes


def test_the_configuration_is_stored(finished: Command) -> None:
    given = {name: value for name, value in SMALL.items() if name != "encoder_mlp_layers"}
    expected = given | {"inference": "local", "seed": 1, "experiment": "finished", "encoder_mlp_layers": [16]}
    assert {name: finished.config[name] for name in expected} == expected
    (start,) = (json.loads(line) for line in (finished.directory / "config_history.jsonl").read_text().splitlines())
    assert start["flags"] == {name: value for name, value in finished.config.items() if name != "mark"}
    assert start["time"] <= time.time()
    assert (start["changed"], start["env_steps"]) == ([], [0])


def test_the_status_says_how_it_ended(finished: Command) -> None:
    status = finished.status
    assert status["state"] == "finished"
    assert status["reason"] == f"every policy has learned from {status['totals']['env_steps']} env steps"
    assert status["reason"] in finished.stdout
    assert BUDGET <= status["totals"]["env_steps"] < BUDGET + 256
    assert len(status["return_mean"]) == 1
    assert status["return_mean"][0] == pytest.approx(finished.series("reward/mean")[-1])
    assert status["budget"]["env_steps"] == BUDGET
    assert 0 < status["seconds"] <= status["elapsed_seconds"] + 1e-6
    assert status["pid"] != os.getpid()


def test_metrics_hold_the_counters_and_every_tag(finished: Command) -> None:
    assert finished.metrics
    for entry in finished.metrics:
        assert tuple(entry)[: len(KEYS)] == KEYS
    last = finished.metrics[-1]
    assert not [tag for tag in TAGS if tag not in last]
    assert all(isinstance(value, int | float) for value in last.values())
    assert {name: last[name] for name in ("env_steps", "samples", "discarded")} == {
        name: finished.totals[name] for name in ("env_steps", "samples", "discarded")
    }
    assert last["perf/episodes"] == finished.totals["actors_episodes"]
    assert last["reward/min"] <= last["reward/mean"] <= last["reward/max"]


def masked_crc(payload: bytes) -> int:
    crc = crc32c(payload)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_events(directory: Path) -> list[Event]:
    """All records of all event files (length, its checksum, payload, its checksum), in the order of their files."""
    events = []
    for path in sorted(directory.iterdir(), key=lambda p: p.name):
        content, place = path.read_bytes(), 0
        while place < len(content):
            (size,) = struct.unpack_from("<Q", content, place)
            payload = content[place + 12 : place + 12 + size]
            checksums = (
                *struct.unpack_from("<I", content, place + 8),
                *struct.unpack_from("<I", content, place + 12 + size),
            )
            assert checksums == (masked_crc(content[place : place + 8]), masked_crc(payload))
            events.append(Event.FromString(payload))
            place += 16 + size
    return events


def scalars(events: list[Event]) -> dict[int, dict[str, float]]:
    return {e.step: {value.tag: value.simple_value for value in e.summary.value} for e in events if e.summary.value}


def test_tensorboard_shows_what_the_metrics_say(finished: Command) -> None:
    events = read_events(finished.directory / ".summary" / "p0")
    assert events[0].file_version == "brain.Event:2"
    by_step = scalars(events)
    last = finished.metrics[-1]
    shown = by_step[last["env_steps"]]
    assert shown["perf/samples"] == last["samples"]
    assert set(TAGS) <= set(shown)
    for tag in TAGS:
        assert shown[tag] == pytest.approx(last[tag], rel=1e-6)


def test_the_checkpoint_verifies_and_is_the_end_of_the_run(finished: Command) -> None:
    (path,) = (finished.directory / "checkpoint_p0").iterdir()
    checkpoint_files.verify(path)
    assert path.name == f"ckpt_{finished.totals['env_steps']:012d}"
    assert {p.name for p in path.iterdir()} == {
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
        "MANIFEST.json",
    }
    state = finished.state()
    assert {name: state[name] for name in ("env_steps", "samples", "discarded", "updates")} == {
        name: finished.totals[name] for name in ("env_steps", "samples", "discarded", "updates")
    }
    assert state["adam_steps"] == state["updates"]


def test_every_worker_has_its_log(finished: Command) -> None:
    names = {path.name for path in (finished.directory / "logs").iterdir()}
    assert {"actor_0.log", "actor_1.log", "learner_0.log"} <= names
    assert in_time(finished.stderr) == ""


def check_continued(before: dict[str, Any], run: Recorded, records_before: int) -> dict[str, Any]:
    """Nothing that counts goes back; the version jumps over all that may still be around."""
    after = run.state()
    assert all(after[name] >= before[name] for name in STATE)
    assert after["adam_steps"] == after["updates"]
    assert (
        after["version"] - before["version"] == after["updates"] - before["updates"] + run.config["max_policy_lag"] + 1
    )
    resumed = run.metrics[records_before:]
    assert resumed
    for name in ("env_steps", "samples", "discarded", "perf/version"):
        values = [entry[name] for entry in run.metrics if name in entry]
        assert values == sorted(values)
    assert resumed[0]["env_steps"] >= before["env_steps"]
    # Main knows the counters before anything is trained, so that nothing it writes falls back to zero.
    begun = next(m for m in run.reports if isinstance(m, LearnerReport))
    assert all(begun.totals[name] == before[name] for name in ("env_steps", "samples", "discarded", "updates"))
    return after


def test_a_resumed_run_goes_on_where_it_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "run"
    flags: dict[str, Any] = SMALL | {"lr_schedule": "linear", "learning_rate": 0.001, "train_for_env_steps": 4000}
    first = record(directory, **flags | {"train_for_env_steps": 2000})
    before, records = first.state(), len(first.metrics)
    assert first.statistics()[0] == before["samples"]
    assert before["learning_rate"] <= 0.001 * 256 / 2000  # at its end, but for the last batch
    caplog.set_level(logging.INFO)
    second = record(directory, **flags)
    after = check_continued(before, second, records)
    assert 4000 <= after["env_steps"] < 4256
    assert after["updates"] == before["updates"] + 2 * second.totals["batches"]
    assert second.statistics()[0] == after["samples"]
    # The schedule goes on from the share of the budget that is used up, it does not begin anew.
    share = before["env_steps"] / 4000
    line = f"linear schedules go on at {share:.1%} of --train_for_env_steps=4000: learning_rate"
    assert caplog.messages.count(f"{line} {0.001 * (1 - share):.3g}") == 1
    rates = second.reported("train/learning_rate")
    assert rates
    assert max(rates) <= 0.001 * (1 - before["env_steps"] / 4000) + 1e-9
    assert {p.name for p in (directory / "checkpoint_p0").iterdir()} == {
        f"ckpt_{s['env_steps']:012d}" for s in (before, after)
    }
    history = (directory / "config_history.jsonl").read_text().splitlines()
    assert [json.loads(line)["flags"]["train_for_env_steps"] for line in history] == [2000, 4000]
    events = read_events(directory / ".summary" / "p0")
    assert [e.step for e in events if e.HasField("session_log")] == [before["env_steps"]]


def everything_in(directory: Path) -> dict[Path, tuple[int, bytes]]:
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_finished_run_with_the_same_budget_says_so_and_does_nothing(finished: Command) -> None:
    before = everything_in(finished.directory)
    again = train(finished.directory)
    (line,) = (line for line in again.stdout.splitlines() if line.startswith("finished before: "))
    assert line.startswith(f"finished before: every policy has learned from {finished.totals['env_steps']} env steps")
    assert everything_in(finished.directory) == before
    assert again.stderr == ""


@pytest.mark.slow
def test_another_run_begins_with_its_weights_and_statistics(finished: Command, tmp_path: Path) -> None:
    flags = SMALL | {"learning_rate": 0, "init_from": str(finished.directory), "train_for_env_steps": 1000}
    run = record(tmp_path / "run", **flags)
    source, weights = finished.weights(), run.weights()
    learned = [name for name in source if "encoder" in name]  # the critic follows the statistics of the returns
    assert learned
    for name in learned:
        np.testing.assert_array_equal(weights[name], source[name])
    begun = next(m for m in run.reports if isinstance(m, LearnerReport))
    assert (begun.version, begun.totals["env_steps"], begun.totals["samples"], begun.totals["updates"]) == (1, 0, 0, 0)
    state = run.state()
    assert state["adam_steps"] == state["updates"] == 2 * run.totals["batches"]
    assert run.statistics()[0] == finished.statistics()[0] + state["samples"]
    assert run.config["init_from"] == str(finished.directory)
    refused = run_command(tmp_path / "other", **SMALL | {"init_from": str(finished.directory), "use_rnn": True})
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"error: --init_from={finished.directory}: the checkpoint belongs to another model; ")


@pytest.mark.slow
def test_changed_flags_are_said_and_written_down(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    first = train(directory, **SMALL | {"learning_rate": 0.001, "train_for_env_steps": 500})
    assert "changed:" not in first.stdout
    steps = first.state()["env_steps"]
    second = train(directory, learning_rate=0.0005, train_for_env_steps=1000, tensorboard=True)
    said = "changed: train_for_env_steps 500 -> 1000, learning_rate 0.001 -> 0.0005"
    assert said in second.stdout.splitlines()
    history = [json.loads(line) for line in (directory / "config_history.jsonl").read_text().splitlines()]
    assert [(start["env_steps"], start["changed"]) for start in history] == [
        ([0], []),
        ([steps], ["train_for_env_steps 500 -> 1000", "learning_rate 0.001 -> 0.0005"]),
    ]
    assert second.state()["learning_rate"] == pytest.approx(0.0005)


def test_a_changed_learning_rate_takes_the_place_of_one_that_has_adapted(tmp_path: Path) -> None:
    flags = SMALL | {"lr_schedule": "kl_adaptive_epoch", "learning_rate": 0.001, "train_for_env_steps": 1000}
    first = record(tmp_path / "run", **flags)
    assert first.state()["learning_rate"] != pytest.approx(0.001)
    second = record(tmp_path / "run", learning_rate=0.0002, train_for_env_steps=first.state()["env_steps"] + 1)
    # One batch of two epochs, each of which may change it once.
    assert second.state()["learning_rate"] in [pytest.approx(0.0002 * 1.5**exponent) for exponent in range(-2, 3)]


@pytest.mark.slow
def test_a_restart_sets_the_old_run_aside_and_overwriting_removes_it(tmp_path: Path) -> None:
    directory, aside = tmp_path / "run", tmp_path / "run.bak1"
    small = SMALL | {"train_for_env_steps": 500}
    first = train(directory, **small | {"gamma": 0.5})
    checkpoints = first.checkpoint()
    second = train(directory, **small | {"restart_behavior": "restart"})
    assert f"the old run is {aside} now" in second.stdout.splitlines()
    assert Run(aside).checkpoint() == checkpoints
    assert Run(aside).config["gamma"] == 0.5
    assert second.config["gamma"] == 0.99
    assert second.metrics[0]["elapsed_seconds"] < second.status["seconds"]
    third = train(directory, **small | {"restart_behavior": "overwrite"})
    assert f"the old run in {directory} is removed" in third.stdout.splitlines()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.bak1"]
    assert len((directory / "config_history.jsonl").read_text().splitlines()) == 1


def returns_of(run: Recorded) -> list[float]:
    return [value for done in run.episodes for value in done.episode_return.tolist()]


def test_a_resumed_run_plays_new_episodes_which_still_follow_from_the_seed(tmp_path: Path) -> None:
    flags = SMALL | {"learning_rate": 0, "decorrelate_envs_on_one_worker": False}
    played = []
    for name in ("once", "again"):
        starts = [record(tmp_path / name, **flags | {"train_for_env_steps": steps}) for steps in (1500, 3000, 4500)]
        played.append([returns_of(start) for start in starts])
    once, again = played
    assert all(len(returns) > 20 for returns in once)
    for first, second in zip(once, again, strict=True):
        shorter = min(len(first), len(second))
        assert first[:shorter] == second[:shorter]
    assert len({tuple(returns[:20]) for returns in once}) == 3


def test_the_best_policy_is_kept_and_known_to_the_next_start(tmp_path: Path) -> None:
    flags = SMALL | {"save_best_after": 500, "save_best_every_sec": 0.1, "stats_avg": 10, "learning_rate": 0.003}
    first = record(tmp_path / "run", **flags)
    path, value = best_of(first)
    assert value >= first.status["return_mean"][0]  # the last one at most
    held = os.open(path, os.O_RDONLY)  # no other folder gets the number of one that is open
    try:
        second = record(tmp_path / "run", learning_rate=0, train_for_env_steps=BUDGET + 500)
        path, again = best_of(second)
        assert again >= value
        assert os.path.samestat(path.stat(), os.fstat(held)) == (again == value)
    finally:
        os.close(held)


def best_of(run: Recorded) -> tuple[Path, float]:
    """The only checkpoint in best/, verified, and its mean return."""
    (path,) = (run.directory / "checkpoint_p0" / "best").iterdir()
    checkpoint_files.verify(path)
    state = json.loads(checkpoint_files.read(path, "state.json", 1 << 20))
    assert path.name == checkpoint_files.checkpoint_name(state["env_steps"])
    assert state["best"]["metric"] == "reward/mean"
    return path, state["best"]["value"]


def test_figures_of_the_environment_and_of_the_user_are_written(tmp_path: Path) -> None:
    flags = SMALL | {"env": "toy/Counter-v0", "custom_summaries": "tests.unit.runtime.test_summaries:figures"}
    run = record(tmp_path / "run", **flags)
    last, shown = run.metrics[-1], scalars(read_events(run.directory / ".summary" / "p0"))
    for tag in ("stats/length/mean", "stats/true_reward/mean", "custom/policy"):
        assert shown[last["env_steps"]][tag] == pytest.approx(last[tag])
    assert last["stats/true_reward/mean"] == pytest.approx(last["reward/mean"], rel=1e-4)


def test_a_finished_run_started_again_changes_nothing(tmp_path: Path) -> None:
    """Inside the workers, too: the state of the learner is restored bit by bit."""
    first = record(tmp_path / "run", **SMALL | {"lr_schedule": "kl_adaptive_minibatch", "train_for_env_steps": 1000})
    before, files, statistics, records = first.state(), first.checkpoint(), first.statistics(), len(first.metrics)
    assert before["learning_rate"] != pytest.approx(first.config["learning_rate"])  # it has adapted
    again = record(tmp_path / "run", experiment_summaries_interval=1)  # all else as saved
    after = check_continued(before, again, records)
    same = after.keys() - {"version", "progress"}
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert after["progress"]["elapsed_seconds"] >= before["progress"]["elapsed_seconds"]
    assert after["progress"]["episodes"] >= before["progress"]["episodes"]
    assert again.checkpoint()["model.safetensors"] == files["model.safetensors"]
    assert again.checkpoint()["optimizer.safetensors"] == files["optimizer.safetensors"]
    np.testing.assert_array_equal(again.statistics(), statistics)


@pytest.mark.parametrize(
    ("flag", "value", "change"),
    [("hidden_size", 100, "hidden_size 512 -> 100"), ("encoder_mlp_layers", "16,16", "encoder_mlp_layers 16 -> 16,16")],
)
def test_another_network_is_refused(
    finished: Command, train_here: Train, flag: str, value: object, change: str
) -> None:
    config, checkpoints = finished.config, finished.checkpoint()
    refused = train_here(*command_line(finished.directory, **{flag: value}))
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith("error: run finished cannot change")
    assert change in line
    assert finished.config == config
    assert finished.checkpoint() == checkpoints


def test_a_second_run_in_the_same_directory_is_refused(finished: Command) -> None:
    before = {p: p.read_bytes() for p in finished.directory.rglob("*") if p.is_file() and p.name != ".lock"}
    with RunLock(finished.directory / ".lock"):
        refused = run_command(finished.directory)
    assert refused.returncode == 75
    (line,) = refused.stderr.splitlines()
    assert line.startswith("error: ")
    assert "is in use by pid" in line
    assert {p: p.read_bytes() for p in before} == before


@pytest.mark.parametrize("inference", ["local", "central"])
def test_a_run_that_only_samples_ends_by_itself(tmp_path: Path, inference: str) -> None:
    run = record(tmp_path / "run", **SMALL | {"inference": inference, "num_workers": 2, "sampler_only": True})
    assert run.reason.endswith("steps are collected")
    totals = run.totals
    assert totals["actors_collected"] >= BUDGET
    assert totals["actors_sent"] == totals["samples"] == totals["updates"] == totals["trajectories"] == 0
    assert totals["actors_episodes"] > 0


@pytest.mark.slow
def test_a_benchmark_ends_by_itself(tmp_path: Path) -> None:
    run = train(tmp_path / "run", **SMALL | {"benchmark": True})
    assert BUDGET <= run.totals["samples"] < BUDGET + 256
    assert run.status["state"] == "finished"
    assert "finished: every policy has learned from" in run.stdout
