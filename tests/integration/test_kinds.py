"""Environments that are in no preset, from the command line to the weights: their kind of observation decides."""

import json
from pathlib import Path
from typing import Any

import pytest

from appo.algorithms import cli
from appo.algorithms.appo import presets as learning_presets
from appo.algorithms.run.training import Training
from appo.envs import presets as env_presets
from tests.integration.runs import Run, record, train

NUMBERS = env_presets.NUMBERS | learning_presets.NUMBERS
IMAGES = env_presets.IMAGES | learning_presets.IMAGES
UNKNOWN = "appo.envs.toys.spaces:Spaces"
SMALL: dict[str, Any] = {
    "env": UNKNOWN,
    "auto_tune": False,
    "num_workers": 1,
    "num_envs_per_worker": 8,
    "train_for_env_steps": 1_500,
}
DECIDED = NUMBERS | {"encoder_mlp_layers": [64, 64]}


def decided_in(run: Run) -> dict[str, Any]:
    return {name: run.config[name] for name in DECIDED}


@pytest.mark.slow
def test_an_unknown_environment_is_trained_by_its_kind_and_resumed_as_it_was(tmp_path: Path) -> None:
    first = train(tmp_path / "run", **SMALL, ppo_epochs=2)
    assert "kind of observation: no preset for appo.envs.toys.spaces:Spaces, " in first.stdout
    assert decided_in(first) == DECIDED | {"ppo_epochs": 2}
    assert first.weights()["actor.encoder.encoders.0.0.weight"].shape == (64, 4)
    assert not [name for name in first.weights() if "rnn" in name]
    assert first.state()["updates"] == 2 * 4 * 2  # macro batches of 1,024 x minibatches x epochs
    page = (first.directory / "README.md").read_text().splitlines()
    given = SMALL | {"ppo_epochs": 2, "seed": 1, "tensorboard": False, "plot": False}
    shortest = next(line.split() for line in page if f"--env={UNKNOWN}" in line)
    assert sorted(shortest[2:]) == sorted(f"--{name}={value}" for name, value in given.items())
    again = train(tmp_path / "run", **SMALL | {"train_for_env_steps": 4_000}, env_kwargs="{}")
    assert "kind of observation" not in again.stdout
    assert decided_in(again) == decided_in(first)


@pytest.mark.parametrize("inference", [pytest.param(place, marks=pytest.mark.slow) for place in ("serial", "central")])
def test_every_placement_and_every_policy_gets_the_same(tmp_path: Path, inference: str) -> None:
    flags = SMALL | {"inference": inference, "num_policies": 2, "with_pbt": True, "use_rnn": True}
    run = record(tmp_path / "run", **flags)
    assert decided_in(run) == DECIDED | {"use_rnn": True}
    assert run.config["hidden_size"] == 64
    for policy in range(2):
        assert run.weights(policy)["actor.core.rnn.weight_hh_l0"].shape == (3 * 64, 64)


def test_a_program_sees_what_was_decided(tmp_path: Path) -> None:
    with Training(SMALL, inference="serial", train_dir=str(tmp_path), experiment="run", seed=1, plot=False) as run:
        assert run.config.model.use_rnn  # nobody knows yet
        for _ in run:
            assert not run.config.model.use_rnn
    assert decided_in(Run(tmp_path / "run")) == DECIDED


def test_the_printed_configuration_says_what_the_kind_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"--env={UNKNOWN}", "--learning_rate=0.5"]
    with pytest.raises(SystemExit):
        cli.run("train", [*words, "--print_config=json"])
    printed = json.loads(capsys.readouterr().out)
    by_kind = {name: entry["value"] for name, entry in printed.items() if entry["origin"] == "kind of observation"}
    assert by_kind == {name: value for name, value in DECIDED.items() if name != "learning_rate"}
    assert printed["learning_rate"] == {"value": 0.5, "origin": "command line"}
    with pytest.raises(SystemExit):
        cli.run("train", [*words, "--env_kwargs", "observation=image_hwc", "--print_config=json"])
    printed = json.loads(capsys.readouterr().out)
    by_kind = {name for name, entry in printed.items() if entry["origin"] == "kind of observation"}
    assert by_kind == IMAGES.keys() - {"learning_rate"}
    assert list(tmp_path.iterdir()) == []


def test_a_memory_is_all_that_must_be_asked_for_where_one_is_needed(tmp_path: Path) -> None:
    flags = {"env": "appo.envs.toys.toy:Memory", "inference": "serial", "num_envs_per_worker": 32, "use_rnn": True}
    run = record(tmp_path / "run", **flags, train_until_return=0.9, train_for_env_steps=100_000)
    assert run.reached_return >= 0.9
