"""Playing checkpoints: how episodes are played and reported."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from appo.algorithms import cli
from appo.algorithms.models.build import new_model
from appo.algorithms.parts.stochastic_policy import StochasticPolicy
from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.playing.episodes import PlayedEpisode
from appo.algorithms.playing.player import Player, load_player, play
from appo.algorithms.playing.saved_run import find_run
from appo.algorithms.run.config import Config
from appo.envs.make import make_alone, make_group
from appo.envs.spec import ActionPart, ActionSpec, EnvSpec, ObservationSpec
from appo.envs.toys.agents import shift_of
from appo.utils.errors import UsageError
from tests.integration import enjoying
from tests.integration.enjoying import copied, enjoyed, evaluation

COUNTER_LENGTHS_ARE_IN = range(3, 10)


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


def test_an_episode_of_several_agents_is_one_with_each_of_them(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = enjoyed(capfd, runs, "--experiment=shifts", "--max_num_episodes=6", "--seed=0")
    assert len(result["episodes"]) == 6
    for number, episode in enumerate(result["episodes"]):
        shifts = [shift_of(agent, number) for agent in range(3)]
        assert episode["length"] == max(shift.end for shift in shifts)
        assert episode["stats"]["length"] == pytest.approx(np.mean([shift.end - shift.begin for shift in shifts]))
        returns = episode["agent_returns"]
        assert [int(r // 1) for r in returns] == [agent * (s.end - s.begin) for agent, s in enumerate(shifts)]
        assert episode["return"] == pytest.approx(np.mean(returns))
        assert episode["stats"]["team_return"] == pytest.approx(np.sum(returns))
    assert result["mean"] == pytest.approx(np.mean([episode["return"] for episode in result["episodes"]]))
    by_agent = np.mean([episode["agent_returns"] for episode in result["episodes"]], axis=0)
    assert result["agent_means"] == pytest.approx(by_agent.tolist())
    assert result["team_mean"] == pytest.approx(by_agent.sum())
    flags = ["--experiment=shifts", "--max_num_episodes=6", "--no_render", "--seed=0"]
    assert cli.run("enjoy", [f"--train_dir={runs}", *flags]) == 0
    each = ", ".join(f"{mean:.3f}" for mean in by_agent)
    last = capfd.readouterr().out.splitlines()[-1]
    assert last == f"return of each agent: {each}; of all together {by_agent.sum():.3f}"


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
        envs = make_alone(run.config.env, window=config.window)
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
    envs = make_alone(run.config.env, window=config.window)
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
    envs = make_alone(run.config.env, window=config.window)
    player, _ = load_player(run, envs.spec, config, seed=1)
    before = enjoying.Windowed.frames_shown
    assert [episode.length for episode in play(envs, player, config, seed=1)] == [3] * 4
    assert enjoying.Windowed.frames_shown == before + 12
    envs.close()


@pytest.mark.parametrize("name", ["Blind", "Blind-v0"])
def test_what_cannot_be_drawn_is_played_without_a_window(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    env = f"tests.integration.enjoying:{name}"
    copied(runs, "windowed", tmp_path, "700", config={"env": env})
    argv = [f"--train_dir={tmp_path}", "--experiment=windowed", "--no_render=False", "--max_num_episodes=2"]
    assert cli.run_command(lambda: cli.run("enjoy", argv)) == 0
    printed = capsys.readouterr()
    assert printed.err == f"warning: no window: {env} cannot be drawn: it takes no render_mode\n"
    assert "2 episodes: return " in printed.out
    assert cli.run_command(lambda: cli.run("enjoy", [*argv, f"--save_video={tmp_path}/x.mp4"])) == 2
    assert capsys.readouterr().err == f"error: {env} cannot be drawn: it takes no render_mode\n"


def test_measuring_opens_no_window(runs: Path) -> None:
    config = evaluation(runs, "windowed", no_render=False, json=True)
    envs = make_alone(find_run(config).config.env, window=config.window)
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
    assert cli.run("enjoy", [f"--train_dir={runs}", *flags]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].endswith("env steps, seed 1")
    assert [line.split()[0] for line in lines[1:4]] == ["episode", "1", "2"]
    assert lines[4].startswith("2 episodes: return ")


def test_statistics_that_are_not_finite_are_null(
    runs: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    episode = PlayedEpisode(1.0, 2, {"x": math.nan, "y": -math.inf, "z": 0.5})
    monkeypatch.setattr("appo.algorithms.tools.enjoy.play", lambda *arguments: [episode])
    played = enjoyed(capfd, runs, "--experiment=memory")
    assert played["episodes"] == [{"return": 1.0, "length": 2, "stats": {"x": None, "y": None, "z": 0.5}}]


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


PARTS = (
    ActionPart("categorical", 5),
    ActionPart("categorical", 3),
    ActionPart("bernoulli", 4),
    ActionPart("gaussian", 2),
)


def test_the_most_probable_action_of_every_kind() -> None:
    spec = EnvSpec({"obs": ObservationSpec((3,), "float32")}, ActionSpec(PARTS, (-1.0, -1.0), (1.0, 1.0)))
    torch.manual_seed(0)
    flat = new_model(Config().model, spec, "cpu")
    obs, first = {"obs": np.ones((1, 3), np.float32)}, np.ones(1, np.bool_)

    def actions(**flags: bool) -> np.ndarray:
        player = Player(StochasticPolicy(flat, spec), spec, EvaluationConfig(**flags), seed=1)
        return np.stack([player.act(obs, first)[0] for _ in range(60)])

    sampled, means, fixed = actions(), actions(continuous_actions_sample=False), actions(deterministic=True)
    assert fixed.shape == (60, 8)
    assert (fixed == fixed[0]).all()
    assert [len(np.unique(column)) > 1 for column in sampled.T] == [True] * 8
    assert [len(np.unique(column)) > 1 for column in means.T] == [True] * 6 + [False] * 2
    logits = flat.module.act({"obs": torch.ones(1, 3)}, torch.ones(1, dtype=torch.bool), torch.zeros(1, 512))[0][0]
    best = [int(logits[:5].argmax()), int(logits[5:8].argmax()), *(int(one > 0) for one in logits[8:12])]
    assert fixed[0][:6].tolist() == best
    assert fixed[0][6:].tolist() == pytest.approx(logits[12:14].tolist())


def test_actions_are_repeated_as_often_as_asked(runs: Path) -> None:
    config = evaluation(runs, "windowed", render_action_repeat=2, max_num_episodes=4)
    run = find_run(config)
    envs = make_alone(config.played_env(run.config.env))
    player, _ = load_player(run, envs.spec, config, seed=1)
    looks: list[bool] = []
    assert [episode.length for episode in play(envs, player, config, 1, looks.append)] == [3] * 4
    assert looks == [False, False, True] * 4  # two actions an episode: one for two steps, one for the last
    envs.close()
