"""`--output`: runs that write what they play while they train, counts, Minari's own loader."""

import json
from pathlib import Path

import minari
import numpy as np
import pytest
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_storage import MinariStorage

from appo.algorithms import cli
from appo.algorithms.datasets.reader import Dataset, open_dataset
from tests.integration.runs import Run, command_line

SMALL: dict[str, object] = {
    "env": "CartPole-v1",
    "inference": "serial",
    "num_workers": 1,
    "num_envs_per_worker": 8,
    "worker_num_splits": 2,
    "rollout": 16,
    "batch_size": 64,
    "encoder_mlp_layers": 16,
    "seed": 3,
    "output_max_file_size": 30_000,
    "train_for_env_steps": 3_000,
    "device": "cpu",
}
OF_ALGORITHM: dict[str, dict[str, object]] = {
    "APPO": {"num_batches_per_iteration": 2, "ppo_epochs": 1, "reward_scale": 0.1, "reward_clip": 0.05},
    "PPO": {"num_batches_per_iteration": 2, "ppo_epochs": 1},
    "APEX": {"learning_starts": 200, "replay_capacity": 5_000, "replay_ratio": 1},
    "A3C": {"worker_num_splits": 1, "inference": "local", "num_workers": 2, "batch_size": None},
}


def trained(directory: Path, algo: str, **flags: object) -> tuple[Run, Dataset]:
    """Train, and read what was written."""
    given = SMALL | OF_ALGORITHM[algo] | {"algo": algo, "output": directory / "set"} | flags
    words = command_line(directory / "run", **{name: value for name, value in given.items() if value is not None})
    assert cli.run_command(lambda: cli.run("train", words)) == 0
    return Run(directory / "run"), open_dataset([str(directory / "set")])


def require_cart_pole(dataset: Dataset) -> None:
    """Every episode is whole, with the observation that ended it, and the rewards of the environment."""
    for episode in dataset:
        assert np.abs(episode.obs["obs"][0]).max() <= 0.05
        ends = (np.abs(episode.obs["obs"][:, 0]) > 2.4) | (np.abs(episode.obs["obs"][:, 2]) > np.radians(12))
        assert not ends[:-1].any()
        assert bool(ends[-1]) == episode.terminated
        assert episode.terminated or len(episode) == 500
        assert (episode.reward == 1.0).all()


def require_counts(run: Run, dataset: Dataset) -> None:
    """Every step that was collected has been written, or counted as dropped."""
    totals = run.totals
    assert (totals["output_episodes"], totals["output_steps"]) == (len(dataset), dataset.steps)
    assert totals["actors_collected"] == totals["output_steps"] + totals["output_dropped_steps"]
    assert run.metrics[-1]["output/steps"] == dataset.steps


@pytest.mark.parametrize("algo", ["APPO", "PPO", "APEX", pytest.param("A3C", marks=pytest.mark.slow)])
def test_what_is_played_in_training_is_written(tmp_path: Path, algo: str) -> None:
    run, dataset = trained(tmp_path, algo)
    require_cart_pole(dataset)
    require_counts(run, dataset)
    assert dataset.steps > 1_000
    assert run.totals["output_parts"] == len(list((tmp_path / "set").glob("part-*"))) > 1
    versions = np.concatenate([episode.infos["policy_version"] for episode in dataset])
    assert len(set(versions.tolist())) > 3
    assert 1 <= versions.min() <= versions.max() <= run.state()["version"]
    if algo == "APEX":
        assert dataset[0].infos.keys() == {"policy_version"}
        return
    for episode in dataset:
        logits = episode.infos["logits"].astype(np.float64)
        log_softmax = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        taken = np.take_along_axis(log_softmax, episode.action.astype(np.int64), -1)[:, 0]
        np.testing.assert_allclose(episode.infos["log_prob"], taken, atol=1e-5)


def test_first_episodes_of_a_vector_are_written(tmp_path: Path) -> None:
    """No row of a vector begins with random steps; those of our own loop do, and only their rest is left out."""
    flags = {"env": "toy/Counter-v0", "train_for_env_steps": 500}
    _, dataset = trained(tmp_path / "vector", "APPO", **flags)
    assert sum(int(episode.obs["obs"][0, 1]) == 0 for episode in dataset) == SMALL["num_envs_per_worker"]
    run, dataset = trained(tmp_path / "loop", "APPO", **flags, env_vectorization="python")
    require_counts(run, dataset)
    for episode in dataset:
        np.testing.assert_array_equal(episode.obs["obs"][:, 2], np.arange(len(episode) + 1))


def test_minari_opens_what_a_run_has_written(tmp_path: Path) -> None:
    _, dataset = trained(tmp_path, "PPO", train_for_env_steps=1_000, output_compression="zstd")
    theirs = [one for part in sorted((tmp_path / "set").glob("part-*")) for one in minari.MinariDataset(part / "data")]
    assert len(theirs) == len(dataset)
    for ours, other in zip(dataset, theirs, strict=True):
        np.testing.assert_array_equal(other.observations, ours.obs["obs"])
        np.testing.assert_array_equal(other.actions, ours.action[:, 0])
        np.testing.assert_array_equal(other.infos["log_prob"][:-1], ours.infos["log_prob"])


def test_writing_changes_nothing_of_what_is_learned(tmp_path: Path) -> None:
    flags = {"train_for_env_steps": 1_000}
    writing, _ = trained(tmp_path / "writing", "APPO", **flags)
    given = SMALL | OF_ALGORITHM["APPO"] | {"output": ""} | flags
    assert cli.run_command(lambda: cli.run("train", command_line(tmp_path / "plain", **given))) == 0
    expected = Run(tmp_path / "plain").weights()
    for name, weights in writing.weights().items():
        np.testing.assert_array_equal(weights, expected[name])


def test_a_later_start_adds_parts_and_one_of_another_environment_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, first = trained(tmp_path, "APPO", train_for_env_steps=1_000)
    words = command_line(tmp_path / "run", train_for_env_steps=2_000)
    assert cli.run_command(lambda: cli.run("train", words)) == 0
    found = {path.name for path in (tmp_path / "set").iterdir()}
    assert all(name.startswith("part-") for name in found)
    both = open_dataset([str(tmp_path / "set" / name) for name in sorted(found)])
    assert both.steps > first.steps
    require_cart_pole(both)
    capfd.readouterr()
    other = command_line(tmp_path / "other", **SMALL | {"env": "Acrobot-v1", "output": tmp_path / "set"})
    assert cli.run_command(lambda: cli.run("train", other)) == 2
    assert capfd.readouterr().err.endswith("holds a dataset of other spaces\n")


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["arrow", "hdf5"])
def test_images_that_are_played_pass_through_minari_and_are_learned_from(
    tmp_path: Path, stored: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Written beside training, read by Minari bit by bit, stored by it as JPEG, learned from and estimated with."""
    shown = {"env": "toy/Spaces-v0", "env_kwargs": "observation=image_hwc", "train_for_env_steps": 600}
    _, dataset = trained(tmp_path, "APPO", **shown, output_max_file_size=1 << 30)
    theirs = minari.MinariDataset(tmp_path / "set" / "part-00000" / "data")
    (tmp_path / "jpeg" / "data").mkdir(parents=True)
    spaces = theirs.storage.observation_space, theirs.storage.action_space
    storage = MinariStorage.new(tmp_path / "jpeg" / "data", *spaces, data_format=stored)
    names = ("observations", "actions", "rewards", "terminations", "truncations")
    for ours, found in zip(dataset, theirs.iterate_episodes(), strict=True):
        np.testing.assert_array_equal(found.observations, ours.obs["obs"])
        storage.update_episodes([EpisodeBuffer(**{name: getattr(found, name) for name in names})])
    again = open_dataset([str(tmp_path / "jpeg")])
    for one, other in zip(again, dataset, strict=True):
        assert np.abs(one.obs["obs"].astype(int) - other.obs["obs"]).mean() < 3
        np.testing.assert_array_equal(one.action, other.action)
    for algo, rollout in (("MARWIL", 16), ("APEX", None)):
        flags = {"algo": algo, "input": tmp_path / "jpeg", "rollout": rollout, "train_for_env_steps": 300}
        flags |= {"inference": "serial", "batch_size": 64, "device": "cpu"}
        words = command_line(tmp_path / algo, **{name: value for name, value in flags.items() if value is not None})
        assert cli.run_command(lambda words=words: cli.run("train", words)) == 0
        assert Run(tmp_path / algo).totals["samples"] >= 300
    capfd.readouterr()
    words = ["run", f"--train_dir={tmp_path}", f"--dataset={tmp_path / 'jpeg'}", "--estimators=fitted_q", "--json"]
    assert cli.run("estimate", [*words, "--updates=10", "--resamples=10"]) == 0
    assert json.loads(capfd.readouterr().out)["episodes"] == len(dataset)
