"""Playing checkpoints: the command line of enjoy over runs trained here."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from algorithms import cli
from algorithms.appo.config import EvaluationConfig
from algorithms.evaluation import find_run, load_player, make_envs, play
from envs.make import make_group
from utils.errors import CheckpointError, UsageError

ROOT = Path(__file__).parents[2]
COUNTER_LENGTHS_ARE_IN = range(3, 10)


class Windowed(gymnasium.Env[Any, Any]):
    """Three steps an episode; counts the frames it shows, as an environment with a window would."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["human"]}
    frames_shown = 0

    def __init__(self, render_mode: str | None = None):
        self.render_mode = render_mode
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        print("chatter of an environment")
        if self.render_mode == "human":
            Windowed.frames_shown += 1
        return np.zeros(2, np.float32), float(action[0]), self._step == 3, False, {}


TRAIN_ALL = "import json, sys; from algorithms.cli import train; [train(argv) for argv in json.loads(sys.argv[1])]"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained CartPole run, the newest, and short runs of other kinds."""
    train_dir = tmp_path_factory.mktemp("runs")
    common = ["--inference=serial", "--seed=1", f"--train_dir={train_dir}", "--no_tensorboard"]
    small = ["--train_for_env_steps=600", "--batch_size=256", "--rollout=16", "--num_envs_per_worker=8"]
    same_step = ["--env_kwargs", "autoreset_mode=SameStep"]
    flags = {
        "counter": ["--env=toy/Counter-v0", "--use_rnn=False", *small],
        "same_step": ["--env=toy/Counter-v0", "--use_rnn=False", *small, *same_step],
        "windowed": [f"--env={__name__}:Windowed", "--use_rnn=False", *small],
        "memory": ["--env=toy/Memory-v0", "--hidden_size=16", *small],
        "cartpole": ["--env=CartPole-v1", "--train_for_env_steps=30000"],
    }
    argvs = [[*common, f"--experiment={name}", *words] for name, words in flags.items()]
    process = subprocess.run(  # one process for all: torch takes longer to import than most of these runs
        [sys.executable, "-c", TRAIN_ALL, json.dumps(argvs)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return train_dir


def evaluation(runs: Path, experiment: str, **flags: Any) -> EvaluationConfig:
    defaults: dict[str, Any] = {"no_render": True, "seed": 7, "json": True}
    return EvaluationConfig(train_dir=str(runs), experiment=experiment, **(defaults | flags))


def enjoyed(capfd: pytest.CaptureFixture[str], runs: Path, *flags: str) -> dict[str, Any]:
    """What `enjoy --json` prints, which must be one JSON object and nothing else."""
    assert cli.enjoy([f"--train_dir={runs}", "--json", "--no_render", *flags]) == 0
    printed = capfd.readouterr().out
    assert printed.count("\n") == 1
    result: dict[str, Any] = json.loads(printed)
    return result


def test_the_same_seed_plays_the_same_episodes(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ("--experiment=memory", "--max_num_episodes=30")
    once, again = (enjoyed(capfd, runs, *flags, "--seed=3") for _ in range(2))
    other = enjoyed(capfd, runs, *flags, "--seed=4")
    assert once == again
    assert once["episodes"] != other["episodes"]
    returns = [episode["return"] for episode in once["episodes"]]
    assert len(returns) == once["num_episodes"] == 30
    assert once["mean"] == pytest.approx(np.mean(returns))
    assert once["std"] == pytest.approx(np.std(returns))
    assert once["median"] == np.median(returns)


def test_a_trained_policy_plays_better_than_chance(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = enjoyed(capfd, runs, "--env=CartPole-v1", "--deterministic", "--seed=5")
    assert len(result["episodes"]) == 10
    assert result["mean"] > 100  # random actions reach 22
    assert result["env_steps"] >= 30_000
    assert all(episode["return"] == episode["length"] for episode in result["episodes"])


@pytest.mark.parametrize("experiment", ["counter", "same_step"])
def test_every_episode_is_reported_once_with_its_own_steps(
    runs: Path, capfd: pytest.CaptureFixture[str], experiment: str
) -> None:
    episodes = enjoyed(capfd, runs, f"--experiment={experiment}", "--max_num_episodes=25", "--seed=0")["episodes"]
    assert len(episodes) == 25
    for episode in episodes:
        assert episode["length"] in COUNTER_LENGTHS_ARE_IN
        assert episode["stats"]["length"] == episode["length"]
        assert episode["stats"]["true_reward"] == pytest.approx(episode["return"], abs=1e-4)


def test_frames_are_limited_too(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = enjoyed(capfd, runs, "--experiment=windowed", "--max_num_frames=8", "--max_num_episodes=0")
    assert [episode["length"] for episode in result["episodes"]] == [3, 3]
    nothing = enjoyed(capfd, runs, "--experiment=windowed", "--max_num_frames=2")
    assert (nothing["episodes"], nothing["mean"], nothing["median"]) == ([], None, None)


def test_the_newest_run_is_played_when_none_is_named(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert enjoyed(capfd, runs, "--max_num_episodes=1") != {}
    assert find_run(evaluation(runs, "")).directory.name == "cartpole"
    assert find_run(evaluation(runs, "", env="toy/Memory-v0")).directory.name == "memory"


def test_continuous_actions_are_their_means_when_asked(runs: Path) -> None:
    def actions(**flags: Any) -> list[float]:
        config = evaluation(runs, "windowed", **flags)
        run = find_run(config)
        envs = make_envs(run.config, config)
        player, _ = load_player(run, envs.spec, config, seed=1)
        obs, first = {"obs": np.ones((1, 2), np.float32)}, np.ones(1, np.bool_)
        envs.close()
        return [float(player.act(obs, first)[0, 0]) for _ in range(3)]

    assert len(set(actions())) == 3
    assert len(set(actions(continuous_actions_sample=False))) == 1
    assert actions(continuous_actions_sample=False) == actions(deterministic=True)


def test_the_recurrent_state_starts_afresh_with_every_episode(runs: Path) -> None:
    """Memory asks for a cue shown `delay` steps before: the state must be carried, and zeroed between episodes."""
    config = evaluation(runs, "memory", max_num_episodes=3)
    run = find_run(config)
    envs = make_envs(run.config, config)
    player, _ = load_player(run, envs.spec, config, seed=1)
    before: list[tuple[bool, float]] = []
    act = player.act

    def spying_act(obs: dict[str, Any], first: Any) -> Any:
        before.append((bool(first[0]), float(player.rnn_state.abs().sum())))
        return act(obs, first)

    player.act = spying_act  # type: ignore[method-assign]
    assert len(list(play(envs, player, config, seed=1))) == 3
    envs.close()
    assert [first for first, _ in before].count(True) == 3
    assert [magnitude > 0 for _, magnitude in before] == [False] + [True] * (len(before) - 1)
    fresh, _ = load_player(run, envs.spec, config, seed=1)
    obs = {"obs": np.zeros((1, 3), np.float32)}
    player.act, begins = act, np.ones(1, np.bool_)  # type: ignore[method-assign]
    player.act(obs, begins)
    fresh.act(obs, begins)
    assert np.array_equal(player.rnn_state.numpy(), fresh.rnn_state.numpy())


def test_a_window_shows_every_step(runs: Path) -> None:
    config = evaluation(runs, "windowed", no_render=False, json=False, max_num_episodes=4, fps=1000)
    run = find_run(config)
    envs = make_envs(run.config, config)
    player, _ = load_player(run, envs.spec, config, seed=1)
    module = sys.modules[__name__]
    before = module.Windowed.frames_shown
    assert [episode.length for episode in play(envs, player, config, seed=1)] == [3] * 4
    assert module.Windowed.frames_shown == before + 12
    envs.close()


def test_measuring_opens_no_window(runs: Path) -> None:
    config = evaluation(runs, "windowed", no_render=False, json=True)
    envs = make_envs(find_run(config).config, config)
    assert envs._envs[0].render_mode is None  # type: ignore[attr-defined]
    envs.close()


def test_training_never_opens_a_window(runs: Path) -> None:
    run = find_run(evaluation(runs, "windowed"))
    envs = make_group(run.config.env, 1)
    envs.reset([0], {"obs": np.zeros((1, 2), np.float32)})
    assert envs._envs[0].render_mode is None  # type: ignore[attr-defined]
    envs.close()


def test_text_has_a_line_per_episode_and_a_summary(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--experiment=memory", "--max_num_episodes=2", "--seed=1", "--no_render"]
    assert cli.enjoy([f"--train_dir={runs}", *flags]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].endswith("env steps, seed 1")
    assert [line.split()[0] for line in lines[1:4]] == ["episode", "1", "2"]
    assert lines[4].startswith("2 episodes: return ")


@pytest.mark.parametrize(
    ("flags", "error", "text"),
    [
        ({"experiment": "nothing"}, UsageError, "there is no run"),
        ({"experiment": "", "env": "Acrobot-v1"}, UsageError, "no run of Acrobot-v1"),
        ({"experiment": "memory", "env": "CartPole-v1"}, UsageError, "is of toy/Memory-v0, not of --env=CartPole-v1"),
        ({"experiment": "memory", "policy_index": 1}, UsageError, "has 1 policies, counted from 0"),
    ],
)
def test_a_run_that_is_not_there(runs: Path, flags: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        find_run(evaluation(runs, **flags))


def test_a_run_without_a_usable_checkpoint_exits_6(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, copy = runs / "counter", tmp_path / "counter"
    copy.mkdir()
    (copy / "config.json").write_bytes((source / "config.json").read_bytes())
    config = evaluation(tmp_path, "counter")
    with pytest.raises(CheckpointError, match="has no checkpoint of policy 0 yet"):
        find_run(config)
    (newest,) = (source / "checkpoint_p0").glob("ckpt_*")
    damaged = copy / "checkpoint_p0" / newest.name
    damaged.mkdir(parents=True)
    for file in newest.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    flags = [f"--train_dir={tmp_path}", "--experiment=counter", "--no_render"]
    assert cli.run_command(lambda: cli.enjoy(flags)) == 6
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[0].startswith("error: none of 1 checkpoints can be used")


def test_a_checkpoint_of_another_model_is_refused(runs: Path) -> None:
    config = evaluation(runs, "memory")
    run = find_run(config)
    other = run._replace(config=replace(run.config, model=replace(run.config.model, hidden_size=8)))
    envs = make_envs(other.config, config)
    with pytest.raises(UsageError, match="the checkpoint belongs to another model"):
        load_player(other, envs.spec, config, seed=1)
    envs.close()
