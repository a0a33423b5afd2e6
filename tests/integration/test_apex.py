"""Whole runs of Ape-X: what was inserted and used, the same twice, and a run that goes on."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from appo import load_policy
from appo.algorithms import cli
from appo.algorithms.population.lineage import read_events
from appo.algorithms.runtime.learning import learner_worker
from appo.algorithms.runtime.sampling import episodes
from appo.utils.errors import UsageError
from appo.utils.metrics import read_metrics
from appo.utils.run_folder import RunFolder
from tests.integration.runs import record, run_command
from tests.spikes.training import totals_of

FLAGS = (
    "--env=CartPole-v1",
    "--experiment=run",
    "--algo=APEX",
    "--auto_tune=False",
    "--tensorboard=False",
    "--inference=serial",
    "--num_workers=1",
    "--num_envs_per_worker=4",
    "--rollout=8",
    "--batch_size=32",
    "--encoder_mlp_layers=16",
    "--use_rnn=False",
    "--learning_starts=200",
    "--replay_capacity=2000",
    "--replay_ratio=4",
    "--target_update_interval=10",
    "--seed=3",
)


@pytest.fixture
def quick_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Main hears everything at once: in such a short run half a second is half of it."""
    monkeypatch.setattr(learner_worker, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(episodes, "FLUSH_SECONDS", 0.0)


def train(folder: Path, *flags: str) -> Path:
    """Train to a good end with main in this process; the folder of the run."""
    assert cli.run_command(lambda: cli.run("train", [f"--train_dir={folder}", *flags])) == 0
    return folder / "run"


def newest(run: Path) -> Path:
    return max(path for path in (run / "checkpoint_p0").iterdir() if path.name.startswith("ckpt_"))


def test_every_step_is_inserted_once_and_used_as_often_as_asked(tmp_path: Path) -> None:
    run = train(tmp_path, *FLAGS, "--train_for_env_steps=1500")
    totals, state = totals_of(run), json.loads((newest(run) / "state.json").read_text())
    assert totals["samples"] == totals["env_steps"] == state["env_steps"] >= 1500
    assert totals["discarded"] == 0
    assert totals["used"] == 32 * totals["updates"]
    # Uses are due for what is inserted after the slot (32 steps at most) with which 200 steps are there; when the
    # budget ends, those of the last slot need not be made, nor those that fill no batch.
    most = 4 * (totals["samples"] - 200)
    assert most - 4 * (32 + 32) - 32 <= totals["used"] <= most
    last = read_metrics(run / "metrics.jsonl")[-1]
    assert {"reward/mean", "reward_exploring/mean", "train/td_error", "replay/mean_priority"} <= set(last)
    saved = load_file(newest(run) / "optimizer.safetensors")
    weights = load_file(newest(run) / "model.safetensors")
    assert {f"target.{name}" for name in weights} <= set(saved)

    again = train(tmp_path / "again", *FLAGS, "--train_for_env_steps=1500")
    assert newest(again).name == newest(run).name
    for name, array in load_file(newest(again) / "model.safetensors").items():
        assert np.array_equal(array, weights[name])

    train(tmp_path, *FLAGS, "--train_for_env_steps=2500")
    later = json.loads((newest(run) / "state.json").read_text())
    assert later["env_steps"] >= 2500
    assert later["updates"] > state["updates"]


@pytest.mark.slow
def test_with_compressed_frames_a_run_learns_the_same_bit_by_bit(tmp_path: Path) -> None:
    flags = [flag for flag in FLAGS if not flag.startswith("--env=")]
    flags += ["--env=toy/Spaces-v0", "--env_kwargs", '{"observation": "image_hwc"}', "--train_for_env_steps=400"]
    plain, packed = (train(tmp_path / name, *flags, f"--replay_compression={name}") for name in ("off", "lz4"))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (newest(plain) / name).read_bytes() == (newest(packed) / name).read_bytes()
    assert totals_of(packed)["updates"] > 10


@pytest.mark.usefixtures("quick_reports")
def test_shards_insert_every_step_once_and_hand_it_on_as_often_as_asked(tmp_path: Path) -> None:
    """In processes of their own."""
    flags = [flag for flag in FLAGS if not flag.startswith("--inference")]
    flags += ["--inference=local", "--device=cpu", "--num_replay_shards=2"]
    run = train(tmp_path, *flags, "--train_for_env_steps=2000")
    status = json.loads((run / "status.json").read_text())["totals"]
    assert status["samples"] == status["env_steps"] >= 2000
    assert status["samples"] + status["in_flight"] == status["actors_collected"]
    assert status["released"] + status["held"] == status["trajectories"] == status["actors_sent"]
    last = read_metrics(run / "metrics.jsonl")[-1]
    assert last["replay/shard_0/size"] + last["replay/shard_1/size"] == last["replay/size"]
    # Uses are due for what a shard gets after the trajectory in which its 100th step is: up to 31 steps later. At the
    # end the uses of up to a trajectory (32 steps) and a batch are due, and two batches (32 samples) wait in its ring.
    most = 4 * (status["samples"] - 200)
    assert most - 2 * (4 * 31 + 4 * 32 + 31 + 2 * 32) <= status["used"] <= most


@pytest.mark.slow
def test_a_later_start_goes_on_with_what_each_shard_has_saved(tmp_path: Path) -> None:
    flags = [flag for flag in FLAGS if not flag.startswith("--inference")]
    flags += ["--inference=local", "--device=cpu", "--num_replay_shards=2", "--save_replay"]
    totals = []
    for steps in (1000, 2000):
        run = train(tmp_path, *flags, f"--train_for_env_steps={steps}")
        totals.append(json.loads((run / "status.json").read_text())["totals"])
    assert [path.name for path in RunFolder(run).replays()] == ["replay_p0.0", "replay_p0.1"]
    before, after = totals
    assert after["samples"] + after["in_flight"] == after["actors_collected"] + before["samples"]
    owed = 4 * (after["samples"] - before["samples"])
    assert owed - 2 * (4 * 32 + 3 * 32) <= after["used"] - before["used"] <= owed


@pytest.mark.parametrize(
    "flags",
    [
        ("--inference=serial",),
        pytest.param(("--inference=local", "--lockstep", "--device=cpu"), marks=pytest.mark.slow),
    ],
)
def test_where_a_run_repeats_itself_or_is_one_process_the_learner_has_the_replay(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    run = train(tmp_path, *FLAGS, *flags, "--num_replay_shards=2", "--train_for_env_steps=300")
    assert not list((run / "logs").glob("replay*"))
    assert not any("shard" in name for name in read_metrics(run / "metrics.jsonl")[-1])


def test_shards_are_for_one_policy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--num_policies=2: replay shards in processes .* are for one policy"):
        cli.run("train", [*FLAGS, f"--train_dir={tmp_path}", "--num_replay_shards=2", "--num_policies=2"])


@pytest.mark.slow
def test_a_later_start_goes_on_with_the_replay_that_was_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uses are owed from the first step on; without the flag only when the replay has filled again."""
    owed = {}
    for kept in (True, False):
        flags = (*FLAGS, f"--save_replay={kept}", "--batch_replay", "--use_rnn=True", "--hidden_size=8", "--burn_in=4")
        run = train(tmp_path / f"{kept}", *flags, "--train_for_env_steps=1000")
        before = totals_of(run)
        assert RunFolder(run).replay(0).exists() == kept
        capsys.readouterr()
        train(tmp_path / f"{kept}", *flags, "--train_for_env_steps=1500")
        after = totals_of(run)
        said = capsys.readouterr().out
        assert ("it fills again, training goes on when it holds --learning_starts=200 steps" in said) != kept
        assert f"the replay goes on with {before['samples']} steps" in said or not kept
        owed[kept] = (after["used"] - before["used"]) / 4 - (after["samples"] - before["samples"])
    assert -40 <= owed[True] <= 0
    assert -280 <= owed[False] <= -200


@pytest.mark.slow
@pytest.mark.parametrize("shards", [0, 2])
def test_a_later_start_that_measures_goes_on_with_all_steps_of_the_saved_replay(tmp_path: Path, shards: int) -> None:
    """Another size of batches costs something else, so that the network is timed again, with a replay of its own."""
    flags: dict[str, object] = {"env": "CartPole-v1", "algo": "APEX", "device": "cpu", "save_replay": True}
    flags |= {"encoder_mlp_layers": 16, "learning_starts": 64, "rollout": 8, "replay_capacity": 50_000}
    flags |= {"num_replay_shards": shards, "replay_ratio": 1}
    first = run_command(tmp_path / "run", **flags, batch_size=32, train_for_env_steps=1107)
    assert first.returncode == 0, first.stderr
    samples = first.totals["samples"]
    kept = {path.name for path in RunFolder(first.directory).replays()}
    assert kept == ({"replay_p0.0", "replay_p0.1"} if shards else {"replay_p0"})
    second = run_command(tmp_path / "run", batch_size=48, train_for_env_steps=samples + 500)
    assert second.returncode == 0, second.stderr
    assert re.search(r"auto-tuned in \d", second.stdout)
    assert "it fills again" not in second.stdout
    assert {path.name for path in second.directory.glob("replay_*")} == kept
    logs = [path.read_text() for path in sorted(second.directory.glob("logs/*.log"))]
    loaded = [re.findall(r"the replay goes on with (\d+) steps", log) for log in logs]
    saved = [re.findall(r"saved (\d+) steps of the replay", log) for log in logs]
    assert sum(int(steps) for found in loaded for steps in found) == samples
    assert sum(int(found[-1]) for found in saved if found) == second.totals["samples"] >= samples + 500


def test_a_start_that_would_lose_the_saved_replay_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (*FLAGS, "--save_replay")
    run = train(tmp_path, *flags, "--train_for_env_steps=500")
    kept, config = RunFolder(run).replay(0).read_bytes(), (run / "config.json").read_bytes()
    words = [f"--train_dir={tmp_path}", *flags, "--replay_capacity=4000", "--train_for_env_steps=1000"]
    assert cli.run_command(lambda: cli.run("train", words)) == 2
    assert "has 250 trajectories of 8 steps and not 500 of 8" in capsys.readouterr().err
    assert RunFolder(run).replay(0).read_bytes() == kept
    assert (run / "config.json").read_bytes() == config
    train(tmp_path, *flags, "--train_for_env_steps=1000")  # as before


@pytest.mark.slow
def test_a_policy_is_exported_and_played_by_its_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    run, path = train(tmp_path, *FLAGS, "--train_for_env_steps=300"), tmp_path / "policy.onnx"
    assert cli.run("export", [str(run), "-o", str(path)]) == 0
    session, policy = onnxruntime.InferenceSession(str(path)), load_policy(run)
    assert [output.name for output in session.get_outputs()] == ["action", "q_values", "value"]
    obs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    action, q, value = session.run(None, {"obs": obs})
    assert np.allclose(q.max(1), value, atol=1e-5)
    assert np.array_equal(q.argmax(1), action[:, 0])
    assert np.array_equal(policy.act_batch(obs), action[:, 0])

    played = {}
    for epsilon in ("0", "1"):
        flags = [f"--train_dir={tmp_path}", "--experiment=run", "--json", "--no_render", "--seed=3"]
        capsys.readouterr()
        assert cli.run("enjoy", [*flags, "--max_num_episodes=20", f"--epsilon={epsilon}"]) == 0
        played[epsilon] = json.loads(capsys.readouterr().out)
    assert played["0"] != played["1"]


SEVERAL = {
    "env": "toy/Counter-v0",
    "algo": "APEX",
    "inference": "serial",
    "use_rnn": False,
    "encoder_mlp_layers": 8,
    "normalize_input": False,
    "rollout": 8,
    "batch_size": 32,
    "replay_ratio": 2,
    "learning_starts": 64,
    "replay_capacity": 2000,
    "num_envs_per_worker": 8,
    "num_policies": 2,
}


def test_several_policies_have_a_replay_each_and_learn_with_their_own_values(tmp_path: Path) -> None:
    """Every step enters the replay of the policy that took it; one learns with n = 1, the other with n = 3."""
    flags = SEVERAL | {"per_policy": json.dumps({"n_steps": [1, 3], "gamma": [0.5, 0.9]}), "train_for_env_steps": 600}
    run = record(tmp_path / "run", **flags)
    collected = sum(totals["collected"] for totals in run.workers.values())
    learners = [run.learners[policy] for policy in (0, 1)]
    assert sum(t["samples"] + t["discarded"] + t["in_flight"] for t in learners) == collected
    for policy, totals in enumerate(learners):
        assert totals["samples"] >= 600
        assert totals["used"] == 32 * totals["updates"]
        assert totals["used"] == pytest.approx(2 * (totals["samples"] - 64), abs=300)
        assert run.series("replay/size", policy)[-1] <= 1000


@pytest.mark.slow
@pytest.mark.usefixtures("quick_reports")
def test_a_population_hands_on_discounts_and_weights(tmp_path: Path) -> None:
    """A policy that copies another learns with the values of that one, which its replay is told."""
    pbt = {"with_pbt": True, "pbt_start_mutation": 100, "pbt_period_env_steps": 200, "pbt_min_episodes": 3}
    values = json.dumps({"gamma": [0.3, 0.5, 0.7, 0.9], "n_steps": [1, 2, 3, 4]})
    rest = {"num_policies": 4, "per_policy": values, "train_for_env_steps": 3000}
    sure = {"pbt_replace_reward_gap": 0, "pbt_replace_fraction": 0.5, "pbt_target_objective": "reward"}
    run = record(tmp_path / "run", **SEVERAL | pbt | rest | sure)
    copies = [event for event in read_events(run.directory) if event.kind == "copy" and event.state == "applied"]
    assert any(event.after["gamma"] != event.before["gamma"] for event in copies)
    for event in copies:
        assert (event.after["gamma"], event.after["n_steps"]) in [(0.3, 1), (0.5, 2), (0.7, 3), (0.9, 4)]


@pytest.mark.slow
def test_in_lockstep_two_runs_are_the_same(tmp_path: Path) -> None:
    flags = [flag for flag in FLAGS if not flag.startswith(("--inference", "--num_workers"))]
    lockstep = ("--lockstep", "--inference=local", "--num_workers=2", "--train_for_env_steps=1500", "--device=cpu")
    one, other = (train(tmp_path / name, *flags, *lockstep) for name in ("one", "other"))
    assert newest(one).name == newest(other).name
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (newest(one) / name).read_bytes() == (newest(other) / name).read_bytes()
    assert totals_of(one)["updates"] == totals_of(other)["updates"] > 20
