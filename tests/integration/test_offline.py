"""Runs that learn from datasets, without an environment: counts, later starts, refusals; and recordings of policies."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from appo import load_policy
from appo.algorithms import cli
from appo.algorithms.datasets.reader import dataset_for, open_dataset
from appo.algorithms.run.config import resolve
from appo.algorithms.run.defaults import learned_spec
from appo.algorithms.tools import estimate as estimating
from appo.algorithms.tools import record as recording
from appo.envs.config import EnvConfig
from appo.envs.spaces import ActionForm, spec_of
from appo.utils import checkpoint_files
from appo.utils.errors import UsageError
from tests.integration.balancing import STEPS
from tests.integration.enjoying import enjoyed
from tests.integration.runs import Run, command_line, run_command
from tests.patience import in_time
from tests.unit.datasets.data import written

BATCH, BATCHES = 64, 150
INPUT = "tests.integration.balancing:episodes"
SMALL: dict[str, object] = {
    "input": INPUT,
    "inference": "serial",
    "rollout": 16,
    "batch_size": BATCH,
    "encoder_mlp_layers": 32,
    "learning_rate": 0.003,
}
GOOD = 150.0  # return that random actions never come near


def train(directory: Path, **flags: object) -> Run:
    """Train as `appo train` does, in this process."""
    assert cli.run_command(lambda: cli.run("train", command_line(directory, **flags))) == 0
    return Run(directory)


def refused(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """The line with which a command line of `appo train` is refused, with exit code 2."""
    assert cli.run_command(lambda: cli.run("train", list(words))) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    return said.removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("algo", "placement"),
    [
        ("MARWIL", "serial"),
        *(pytest.param("BC", placement, marks=pytest.mark.slow) for placement in ("serial", "central")),
    ],
)
def test_a_run_learns_from_a_dataset_alone(
    tmp_path: Path, algo: str, placement: str, capfd: pytest.CaptureFixture[str]
) -> None:
    budget = BATCH * BATCHES
    run = train(tmp_path / "run", **SMALL | {"algo": algo, "inference": placement, "train_for_env_steps": budget})
    said = "".join(capfd.readouterr())
    assert "no actors, learning on cpu" in said
    assert "no preset for datasets, which show numbers and no image" in said
    totals, state = run.totals, run.state()
    # A column holds the final observations of the episodes in it, which are no steps.
    assert totals["samples"] == totals["used"] == totals["env_steps"] == state["samples"]
    assert budget <= totals["samples"] < budget + BATCH
    assert totals["updates"] == totals["batches"] >= BATCHES
    assert run.statistics()[0] == totals["samples"]
    assert run.config["env"] == ""
    assert run.metrics[-1]["train/entropy"] < 0.6
    assert "reward/mean" not in run.metrics[-1]
    played = enjoyed(capfd, tmp_path, "--experiment=run", "--env=CartPole-v1", "--max_num_episodes=10", "--seed=1")
    assert played["mean"] > GOOD


def test_a_later_start_reads_on_where_the_last_one_ended(tmp_path: Path) -> None:
    """Two starts make the weights of one, also where only a part of the episodes is held in memory."""
    ends = {}
    for name, budgets in (("whole", (6_400,)), ("halves", (3_200, 6_400))):
        for budget in budgets:
            flags = SMALL | {"algo": "BC", "shuffle_buffer_size": 700, "train_for_env_steps": budget}
            run = train(tmp_path / name, **flags)
        ends[name] = run.weights()
        assert run.totals["samples"] > 2 * STEPS
    for name, weights in ends["whole"].items():
        np.testing.assert_array_equal(weights, ends["halves"][name])


def test_an_environment_that_is_given_must_fit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [f"--train_dir={tmp_path}", "--algo=BC", f"--input={INPUT}", "--train_for_env_steps=100"]
    error = refused(capfd, *words, "--env=Acrobot-v1", "--inference=serial")
    assert error == "--env=Acrobot-v1: its observations have another space than those of --input"


def test_flags_that_give_actions_another_meaning_than_datasets_have_are_refused(tmp_path: Path) -> None:
    words = [str(tmp_path / "d")]
    assert cli.run("record", ["--env=Pendulum-v1", "--steps=20", "-o", *words]) == 0
    assert dataset_for(EnvConfig(), words).spec.action.scale == (2.0,)
    for flags, error in (
        ({"clip_actions": False}, "--clip_actions=False: actions have no bounds, but those of .* have"),
        ({"continuous_as_bins": 5}, "--continuous_as_bins=5: datasets have numbers in place of choices"),
    ):
        with pytest.raises(UsageError, match=error):
            dataset_for(EnvConfig(**flags), words)  # type: ignore[arg-type]
    assert dataset_for(EnvConfig(clip_actions=False), [INPUT]).steps  # choices have no bounds


@pytest.mark.parametrize(("stated", "played", "learned"), [(4, 1, None), (0, 4, 4), (4, 4, 4), (0, None, 1)])
def test_steps_of_an_environment_and_of_datasets_have_equal_frames(
    monkeypatch: pytest.MonkeyPatch, stated: int, played: int | None, learned: int | None
) -> None:
    """Keys are in the order of the environment; a dataset of an earlier version has sorted them."""
    keys = {"b": spaces.Box(-1, 1, (2,)), "a": spaces.Box(-1, 1, (3,))}
    own, its = (spec_of(spaces.Dict(order), spaces.Discrete(2)) for order in (sorted(keys.items()), [*keys.items()]))
    config = resolve({"algo": "BC", "input": INPUT, "env": "my.games:Maze"})[0]
    monkeypatch.setattr(type(config.algorithm), "find_spec", lambda *_: replace(own, frames_per_step=stated))
    asked = replace(its, frames_per_step=played) if played else None
    if learned is None:
        with pytest.raises(UsageError, match="a step is 1 frames, and 4 in --input"):
            learned_spec(config, asked)
        return
    found = learned_spec(config, asked)
    assert (found.frames_per_step, list(found.observations)) == (learned, ["b", "a"] if asked else ["a", "b"])


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((), "--input is required: a dataset to learn from; appo record writes some"),
        (("--input=nowhere/at/all",), "--input: there is no dataset nowhere/at/all"),
        (
            (f"--input={INPUT}", "--input_evaluation=simulation"),
            "--input_evaluation=simulation plays episodes: it needs --env",
        ),
        ((f"--input={INPUT}", "--eval_every_sec=5"), "--eval_every_sec=5 plays episodes: it needs --env"),
        (
            (f"--input={INPUT}", "--train_until_return=100"),
            "--train_until_return: no environment is played with --algo=BC, which has no actors",
        ),
    ],
)
def test_what_has_no_place_is_refused_in_one_line(
    tmp_path: Path, words: tuple[str, ...], error: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert refused(capfd, f"--train_dir={tmp_path}", "--algo=BC", *words) == error
    assert list(tmp_path.iterdir()) == []


def test_simulation_asks_for_evaluations(tmp_path: Path) -> None:
    from appo.algorithms.run.config import parse_train

    words = ["--algo=BC", f"--input={INPUT}", "--env=CartPole-v1", "--input_evaluation=simulation"]
    assert parse_train(words).logging.eval_every_sec == 10
    assert parse_train([*words, "--eval_every_sec=3"]).logging.eval_every_sec == 3
    assert parse_train([*words, "--eval_every_sec=0"]).logging.eval_every_sec == 0
    (tmp_path / "printed.json").write_text('{"eval_every_sec": 0}')  # has every flag, this one at its default
    assert parse_train([*words, f"--config={tmp_path / 'printed.json'}"]).logging.eval_every_sec == 10
    words += [f"--train_dir={tmp_path}", "--experiment=a"]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text(json.dumps(parse_train([*words, "--eval_every_sec=0"]).to_flat()))
    assert parse_train(words).logging.eval_every_sec == 0  # as the run began


def test_a_damaged_file_ends_a_run_in_one_line(tmp_path: Path) -> None:
    written(tmp_path / "d")
    path = tmp_path / "d" / "part-00000" / "data" / "2" / "part-0.arrow"
    path.write_bytes(path.read_bytes()[:100])
    flags = SMALL | {"algo": "BC", "inference": "central", "input": tmp_path / "d", "train_for_env_steps": 1000}
    run = run_command(tmp_path / "runs" / "run", **flags)
    assert run.returncode == 2, run.stdout + run.stderr
    assert in_time(run.stderr).startswith(f"error: learner_0: --input: episode 2 of {tmp_path}")
    assert in_time(run.stderr).count("\n") == 1


# --- recordings


def recorded(capfd: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What `appo record --json` prints."""
    assert cli.run("record", [*words, "--json"]) == 0
    figures: dict[str, Any] = json.loads(capfd.readouterr().out)
    return figures


def test_a_policy_is_recorded_with_what_it_thought(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run", **SMALL | {"algo": "BC", "env": "CartPole-v1", "train_for_env_steps": 3200})
    capfd.readouterr()
    words = ["run", f"--train_dir={tmp_path}", "--seed=3", "--steps=1000", "--num_envs=4"]
    figures = recorded(capfd, *words, "-o", str(tmp_path / "d"))
    dataset = open_dataset([str(tmp_path / "d")])
    assert (figures["episodes"], figures["steps"]) == (len(dataset), dataset.steps)
    assert figures["steps"] >= 1000
    policy = load_policy("run", train_dir=tmp_path)
    for episode in list(dataset)[:3]:
        obs, length = torch.from_numpy(episode.obs["obs"][:-1]), len(episode)
        first = torch.arange(length) == 0
        logits, value, _ = policy.model.act({"obs": obs}, first, torch.zeros(length, 0))
        thought = {"logits": logits, "value": policy.model.denormalize_value(value)}
        chosen = torch.from_numpy(episode.action).long()
        thought["log_prob"] = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)
        for name, expected in thought.items():
            np.testing.assert_allclose(episode.infos[name], expected.detach().numpy(), atol=1e-5)
        assert set(episode.infos["policy_version"].tolist()) == {Run(tmp_path / "run").state()["version"]}
        position, _, angle, _ = episode.obs["obs"][-1].tolist()  # the true final observation
        assert episode.terminated == (abs(position) > 2.4 or abs(angle) > np.radians(12))
        assert episode.terminated or length == 500
        assert episode.returns(1.0) == length

    again = recorded(capfd, *words, "-o", str(tmp_path / "again"))
    assert again | {"dataset": ""} == figures | {"dataset": ""}
    for one, other in zip(open_dataset([str(tmp_path / "again")]), dataset, strict=True):
        np.testing.assert_array_equal(one.obs["obs"], other.obs["obs"])

    assert cli.run_command(lambda: cli.run("record", [*words, "-o", str(tmp_path / "d")])) == 2
    assert "there is a dataset" in capfd.readouterr().err


def test_random_actions_are_recorded_and_learned_from(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--env=CartPole-v1", "--steps=500", "--seed=1", "--output_max_file_size=4000"]
    figures = recorded(capfd, *words, "-o", str(tmp_path / "random"))
    dataset = open_dataset([str(tmp_path / "random")])
    assert figures["parts"] == len(list((tmp_path / "random").glob("part-*"))) > 1
    assert dataset.steps == figures["steps"] >= 500
    actions = np.concatenate([episode.action for episode in dataset])
    assert 0.4 < actions.mean() < 0.6
    for episode in dataset:
        np.testing.assert_allclose(episode.infos["log_prob"], np.log(0.5), rtol=1e-6)
        assert not episode.infos["policy_version"].any()
    run = train(tmp_path / "run", **SMALL | {"algo": "BC", "input": tmp_path / "random", "train_for_env_steps": 1000})
    assert run.metrics[-1]["train/loss"] == pytest.approx(np.log(2), abs=0.1)  # there is nothing to be learned


def test_actions_are_recorded_in_the_units_of_the_environment(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And learned in those in which a policy acts."""
    recorded(capfd, "--env=Pendulum-v1", "--steps=800", "--seed=1", "--num_envs=4", "-o", str(tmp_path / "d"))
    (part,) = (tmp_path / "d").glob("part-*/data")
    import minari

    given = np.concatenate([episode.actions for episode in minari.MinariDataset(part)])
    assert (given.min(), given.max()) == (-2.0, 2.0)  # of which [-1, 1] stands for all
    drawn = open_dataset([str(tmp_path / "d")], form=ActionForm(scaled=True))
    np.testing.assert_array_equal(np.clip(np.concatenate([one.action for one in drawn]), -1, 1) * 2, given)
    flags = {"algo": "BC", "input": tmp_path / "d", "env": "Pendulum-v1", "train_for_env_steps": 1600}
    run = train(tmp_path / "run", **SMALL | flags)
    assert run.totals["samples"] >= 1600


def test_an_argument_that_only_a_vector_knows_is_recorded_with_the_vector(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ale_py")
    arguments = {"reward_clipping": True, "max_num_frames_per_episode": 400}
    words = ["--env=ALE/MsPacman-v5", f"--env_kwargs={json.dumps(arguments)}", "--steps=150", "--num_envs=2"]
    figures = recorded(capfd, *words, "-o", str(tmp_path / "d"))
    dataset = open_dataset([str(tmp_path / "d")])
    assert dataset.steps == figures["steps"] >= 150
    assert {reward for episode in dataset for reward in episode.reward.tolist()} == {0.0, 1.0}


class Endless(gymnasium.Env[Any, Any]):
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (64,)), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(64, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(64, np.float32), 0.0, False, False, {}


def test_episodes_without_an_end_are_not_recorded_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recording, "available_memory_bytes", lambda: 10_000)
    words = [f"--env={__name__}:Endless", "--steps=10", "-o", str(tmp_path / "d")]
    assert cli.run_command(lambda: cli.run("record", words)) == 5
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: episodes without an end fill half of the free memory after 64 steps: ")
    assert line.endswith("kept: 0 episodes with 0 steps")
    assert list((tmp_path / "d").iterdir()) == []


def test_a_recording_of_nothing_or_to_nowhere_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    for words, error in (
        (["--env=CartPole-v1"], "appo record needs -o DATASET, the folder that it writes"),
        (["-o", "x"], "appo record needs a run, or --env for random actions"),
        (
            ["--env=CartPole-v1", "-o", "x", "--policy_index=3"],
            "--policy_index is for the policy of a run: leave it out",
        ),
        (
            ["--env=CartPole-v1", "-o", "x", "--deterministic"],
            "--deterministic is for the policy of a run: leave it out",
        ),
        (["run", "-o", "x", "--milestone=3"], "--milestone=3 needs --load_checkpoint_kind=milestone"),
        (["run", "-o", "x", "--output_columns=q"], "--output_columns=q is none of logits, log_prob, value, "),
    ):
        assert cli.run_command(lambda words=words: cli.run("record", words)) == 2
        assert capfd.readouterr().err.startswith(f"error: {error}")


# --- estimates


def test_an_estimate_takes_discount_and_network_of_the_policy(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    per_policy = json.dumps({"gamma": [0.5, 0.9], "hidden_size": [16, 24], "encoder_mlp_layers": [[8], [12, 6]]})
    small = {"inference": "serial", "num_workers": 1, "num_envs_per_worker": 8, "rollout": 8, "batch_size": 64}
    run = train(
        tmp_path / "run",
        **small | {"env": "CartPole-v1", "num_policies": 2, "per_policy": per_policy, "train_for_env_steps": 300},
    )
    capfd.readouterr()
    networks: list[Any] = []
    fitted = estimating.FittedQ
    monkeypatch.setattr(
        estimating, "FittedQ", lambda spec, network, *more: networks.append(network) or fitted(spec, network, *more)
    )
    location, dataset = f"--train_dir={tmp_path}", str(tmp_path / "d")
    recorded(capfd, "run", location, "--steps=100", "--num_envs=4", "-o", dataset)
    words = ["run", location, f"--dataset={dataset}", "--updates=1", "--resamples=2", "--json"]

    def gamma_of(policy: int) -> float:
        assert cli.run("estimate", [*words, f"--policy_index={policy}"]) == 0
        return float(json.loads(capfd.readouterr().out)["gamma"])

    assert [gamma_of(0), gamma_of(1)] == [0.5, 0.9]
    assert [(one.hidden_size, one.encoder_mlp_layers) for one in networks] == [(16, (8,)), (24, (12, 6))]
    (path,) = (run.directory / "checkpoint_p1").glob("ckpt_*")
    state = json.loads((path / "state.json").read_text())
    state["traits"]["hyperparameters"]["gamma"] = 0.75  # as a population mutates it
    files: dict[str, Any] = {one.name: one.read_bytes() for one in path.iterdir() if one.name != "MANIFEST.json"}
    files["state.json"] = json.dumps(state).encode()
    checkpoint_files.save(path.parent, checkpoint_files.checkpoint_name(10**6), files)
    assert gamma_of(1) == 0.75


@pytest.mark.slow
def test_estimates_of_the_policy_that_acted_are_its_mean_return(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "run", **SMALL | {"algo": "BC", "env": "CartPole-v1", "train_for_env_steps": 3200})
    capfd.readouterr()
    location = f"--train_dir={tmp_path}"
    recorded(capfd, "run", location, "--seed=3", "--steps=1500", "--num_envs=4", "-o", str(tmp_path / "d"))
    words = ["run", location, f"--dataset={tmp_path / 'd'}", "--updates=1500", "--resamples=100", "--gamma=0.9"]
    assert cli.run("estimate", [*words, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    dataset = open_dataset([str(tmp_path / "d")])
    mean = float(np.mean([episode.returns(0.9) for episode in dataset]))
    assert found["episodes"] == len(dataset)
    assert found["effective_episodes"] == pytest.approx(len(dataset), rel=1e-3)
    for name in ("dataset", "is", "wis"):
        assert found[name]["value"] == pytest.approx(mean, rel=1e-3)
        assert found[name]["low"] <= found[name]["value"] <= found[name]["high"]
    for name in ("fitted_q", "dr"):
        assert found[name]["value"] == pytest.approx(mean, rel=0.5)
    assert cli.run("estimate", words) == 0
    assert "discounted return (gamma 0.9)" in capfd.readouterr().out

    with monkeypatch.context() as patched:
        patched.setattr(estimating, "_log_ratios", lambda episodes, thoughts: np.full((len(episodes), 1), 900.0))
        assert cli.run_command(lambda: cli.run("estimate", [*words, "--estimators=is"])) == 2
        assert capfd.readouterr().err.startswith("error: --estimators=is: ratios of probabilities overflow")

    # An estimate by ratios needs to know what the actions were drawn from.
    written_without = ["run", location, "-o", str(tmp_path / "plain"), "--steps=100", "--output_columns=value"]
    recorded(capfd, *written_without)
    without = ["run", location, f"--dataset={tmp_path / 'plain'}"]
    assert cli.run_command(lambda: cli.run("estimate", without)) == 2
    assert "lack the probabilities of what was done, which is, wis, dr need" in capfd.readouterr().err
