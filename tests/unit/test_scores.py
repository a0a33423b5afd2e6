"""Benchmarks that train on several seeds; the scores of presets and the page that is made of them."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest

from appo.algorithms.cli import parse
from appo.algorithms.datasets.episodes import spaces_of
from appo.algorithms.datasets.space_json import space_to_json
from appo.algorithms.run.config import parse_train
from appo.envs.config import EnvConfig
from appo.envs.make import make_group
from appo.utils.errors import UsageError
from benchmarks.report import results_page
from benchmarks.scores import __main__ as scores_program
from benchmarks.scores import apex_returns, choosing, offline_returns, ppo_returns, published, returns, trials
from benchmarks.shared import measuring, runs, seeds
from benchmarks.shared.workloads import words_of


class Counted(NamedTuple):
    """What came of a run that was none."""

    runs: int

    def line(self) -> str:
        return f"{self.runs} runs"


class TestSeeds:
    def train(self, path: Path, *words: str, failing: str = "") -> tuple[list[str], dict[str, Any]]:
        """Contenders a and b with these words: what was trained, in this order, and what the file then holds."""
        arguments = seeds.parser_of("", ("a", "b")).parse_args([f"--json={path}", *words])
        trained: list[str] = []

        def train(name: str, seed: int) -> Counted:
            trained.append(f"{name}{seed}")
            if trained[-1] == failing:
                raise runs.RunError("no luck", "")
            return Counted(len(trained))

        try:
            seeds.train_all("population", arguments, train)
        except runs.RunError:
            assert failing
        return trained, measuring.read(path)["results"]

    def test_contenders_take_turns_and_every_run_is_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "x.json"
        trained, kept = self.train(path, "--seeds", "1", "2", failing="a2")
        assert trained == ["a1", "b1", "a2", "b2"]
        assert {name: list(of["seeds"]) for name, of in kept.items()} == {"a": ["1"], "b": ["1", "2"]}
        assert kept["b"]["seeds"]["2"]["runs"] == 4
        assert kept["b"]["seeds"]["2"].keys() == {"runs", "commit", "date"}
        trained, kept = self.train(path, "--add")
        assert trained == ["a2", "a3", "b3"]
        assert [of["runs"] for of in kept["a"]["seeds"].values()] == [1, 1, 2]
        trained, kept = self.train(path, "--contender", "b", "--seeds", "1")
        assert trained == ["b1"]
        assert (len(kept["a"]["seeds"]), list(kept["b"]["seeds"])) == (3, ["1"])

    def test_a_file_of_something_else_is_refused_before_training(self, tmp_path: Path) -> None:
        path = tmp_path / "x.json"
        measuring.save(path, "peers", {})
        with pytest.raises(UsageError, match="give another --json"):
            self.train(path)


def scored(mean: float | None, episodes: int = 100, *, samples: int = 4_000_000) -> dict[str, Any]:
    played = {mode: {"mean": mean, "std": 7.0, "episodes": episodes} for mode in ("sampled", "most_probable")}
    one = trials.Scored("--env=CartPole-v1", "--episodes=100", 4_000_000, samples, 20.0, played, False)
    return {**one._asdict(), "commit": "abc", "date": "2026-11-21 10"}


class TestScores:
    @pytest.mark.parametrize("name", trials.TRIALS)
    def test_trials_are_command_lines(self, name: str, tmp_path: Path) -> None:
        trial = trials.TRIALS[name]
        config = parse_train(words_of({**trial.training(), "train_dir": tmp_path}))
        no_limit = parse_train(["--env=CartPole-v1"]).run.train_for_seconds
        assert (config.env.env, config.run.train_for_seconds) == (trial.env, trial.seconds or no_limit)
        assert parse("evaluate", ["RUN", *trial.evaluation()])[0].episodes == trial.episodes

    def test_trials_of_hours_are_trained_where_they_are_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trained: list[str] = []

        def score(trial: trials.Trial, *_: object, **__: object) -> Counted:
            trained.append(trial.env)
            return Counted(1)

        monkeypatch.setattr(scores_program, "score", score)
        for words in (["--seeds=1"], ["--seeds=1", "--workload", "humanoid_published"]):
            monkeypatch.setattr("sys.argv", ["scores", *words])
            assert scores_program.main() == 0
        assert (trained.count("Humanoid-v5"), trained[-1]) == (1, "Humanoid-v5")

    def test_seeds_together(self) -> None:
        assert trials.summary([scored(490.0), scored(500.0), scored(None, 0)], "sampled") == (495.0, 50**0.5, 2, 200)
        assert trials.summary([scored(490.0)], "sampled") == (490.0, 7.0, 1, 100)
        assert trials.summary([scored(None, 0)], "sampled") == (None, None, 0, 0)

    def test_a_page_has_ours_beside_what_is_published(self) -> None:
        results = {"pendulum": {"seeds": {"1": scored(-150.0, samples=10**6)}}, "cartpole": {"seeds": {}}}
        results["pong"] = {"seeds": {"1": scored(None, 0)}}
        results["cartpole"]["seeds"] = {"1": scored(None, 0), "2": scored(490.0), "3": scored(500.0)}
        text = results_page.render([{"benchmark": "scores", "machine": measuring.machine(), "results": results}])
        ours = "| `CartPole-v1` | **appo**, sampled actions | 4 M | 20 s | **495.0 ± 7.1** | 2 seeds, 200 episodes |"
        assert f"{ours}\n|  | **appo**, most probable actions |  |  | **495.0 ± 7.1** |" in text
        assert f"|  | [RL Zoo, PPO]({published.ZOO}) | 0.1 M |  | 500.0 ± 0.0 | 1 seed, 300 episodes |" in text
        assert "4 M (1 M samples) | 20 s | **-150.0 ± 7.0** | 1 seed, 100 episodes |" in text
        assert "| `CartPole-v1` | `--env=CartPole-v1` | `--episodes=100` | 1, 2, 3 |" in text
        assert text.index("CartPole") < text.index("Pendulum")
        assert "| **appo**, sampled actions | 4 M | 20 s | no episode ended | 0 seeds, 0 episodes |" in text

    def test_unknown_results_are_not_left_out(self) -> None:
        content = {"benchmark": "scores", "machine": measuring.machine(), "results": {"x": {"seeds": {}}}}
        with pytest.raises(UsageError, match=r"trials\.py has no x"):
            results_page.render([content])

    def test_published_figures_have_a_source(self) -> None:
        assert published.PUBLISHED.keys() <= trials.TRIALS.keys()
        for name, figures in published.PUBLISHED.items():
            assert all(one.source.startswith("https://") for one in figures)
            for one in (one for one in figures if one.source == published.GYMNASIUM):
                assert one.mean == gymnasium.spec(trials.TRIALS[name].env).reward_threshold


class TestPPOReturns:
    @pytest.mark.parametrize("name", ppo_returns.TRIALS)
    def test_trials_are_command_lines_of_whole_iterations(self, name: str, tmp_path: Path) -> None:
        trial = ppo_returns.TRIALS[name]
        config = parse_train(words_of({**trial.training(), "train_dir": tmp_path}))
        learning, sampling = config.learning, config.sampling
        assert (config.run.algo, sampling.inference, config.model.use_rnn) == ("PPO", "serial", False)
        iteration = sampling.num_workers * sampling.num_envs_per_worker * learning.rollout
        assert learning.batch_size * learning.num_batches_per_iteration == iteration
        assert config.run.train_for_env_steps == trial.env_steps
        assert trial.episodes == 100

    @pytest.mark.parametrize(
        ("name", "expected"),  # n_envs, n_steps, batch_size, n_epochs, gamma, gae_lambda, rate, clip, normalize
        [
            ("cartpole", (8, 32, 256, 20, 0.98, 0.8, 1e-3, 0.2, False)),
            ("acrobot", (16, 256, 64, 4, 0.99, 0.94, 3e-4, 0.2, True)),
            ("lunar_lander", (16, 1024, 64, 4, 0.999, 0.98, 3e-4, 0.2, False)),
            ("half_cheetah", (1, 512, 64, 20, 0.98, 0.92, 2.0633e-5, 0.1, True)),
        ],
    )
    def test_hyperparameters_are_those_of_the_zoo(self, name: str, expected: tuple[float, ...]) -> None:
        config = parse_train(words_of(ppo_returns.TRIALS[name].training()))
        learning = config.learning
        found = (
            learning.batch_size, learning.ppo_epochs, learning.gamma, learning.gae_lambda, learning.learning_rate,
            learning.ppo_clip_ratio, config.model.normalize_input,
        )  # fmt: skip
        assert (config.sampling.num_envs_per_worker, learning.rollout, *found) == expected
        assert learning.normalize_returns == config.model.normalize_input

    def test_a_table_says_what_is_missed(self) -> None:
        results = {
            "acrobot": {"seeds": {"10": scored(-100.0), "2": scored(-80.0)}},
            "cartpole": {"seeds": {"1": scored(500.0)}},
            "lunar_lander": {"seeds": {}},
        }
        first, second = returns.rows(ppo_returns.GOALS, results)
        assert (first.name, first.seeds, first.mean, first.reached) == ("cartpole", (1,), 500.0, True)
        assert (second.name, second.seeds, second.mean, second.reached) == ("acrobot", (2, 10), -90.0, False)
        text = returns.table(ppo_returns.GOALS, results)
        assert (
            "| acrobot | Acrobot-v1 | 1,000,000 | 2, 10 | -80.0, -100.0 | **-90.0 ± 14.1** (missed) | -85 | 20 |"
            in text
        )
        assert "| cartpole | CartPole-v1 | 100,000 | 1 | 500.0 | **500.0 ± 0.0** | 500 | 20 |" in text
        assert "Measured on 2026-11-21, commit abc." in text

    def test_a_seed_without_episodes_reaches_nothing(self) -> None:
        (row,) = returns.rows(ppo_returns.GOALS, {"cartpole": {"seeds": {"1": scored(500.0), "2": scored(None, 0)}}})
        assert not row.reached


@pytest.mark.parametrize("name", apex_returns.TRIALS)
def test_trials_of_ape_x_are_the_presets_with_their_budgets(name: str, tmp_path: Path) -> None:
    trial = apex_returns.TRIALS[name]
    config = parse_train(words_of({**trial.training(), "train_dir": tmp_path}))
    assert (config.run.algo, config.run.train_for_env_steps) == ("APEX", trial.env_steps)
    assert config.learning.prioritized_replay == (not name.endswith("uniform"))


def test_of_a_trial_for_comparison_nothing_is_asked() -> None:
    (row,) = returns.rows(apex_returns.GOALS, {"lunar_lander_uniform": {"seeds": {"1": scored(-500.0)}}})
    assert row.reached
    assert row.cells()[-2] == ""


def learned(mean: float) -> dict[str, Any]:
    """What is kept of a run that has learned from datasets."""
    one = offline_returns.Learned("", 10, 20.0, mean, 1.0, 100, {"random": -200.0, "medium": 50.0, "expert": 250.0})
    return {**one._asdict(), "commit": "abc", "date": "2026-11-25T00:00:00"}


class TestOfflineReturns:
    @pytest.mark.parametrize("name", offline_returns.TRIALS)
    def test_trials_are_command_lines_of_runs_without_actors(self, name: str, tmp_path: Path) -> None:
        trial = offline_returns.TRIALS[name]
        spec = make_group(EnvConfig(env=offline_returns.TASKS[trial.task].env), 1).spec
        for policy in trial.policies:
            metadata = dict(
                zip(("observation_space", "action_space"), map(space_to_json, spaces_of(spec)), strict=True)
            )
            file = tmp_path / trial.task / policy / "part-00000" / "data" / "metadata.json"
            (file.parent / "0").mkdir(parents=True)
            file.write_text(json.dumps({**metadata, "data_format": "arrow", "total_episodes": 1}))
            (file.parent / "0" / "metadata.json").write_text('{"total_steps": 5}')
        config = parse_train(words_of({**trial.training(tmp_path), "train_dir": tmp_path / "runs"}))
        assert not config.algorithm.needs_actors
        assert config.run.algo == trial.algo
        assert len(config.learning.mix.words) == len(trial.policies)
        assert parse_train(words_of(offline_returns.policy_flags(trial.task, "medium"))).run.train_until_return

    def test_a_table_says_what_is_missed(self) -> None:
        results = {
            "lunar_lander_bc_expert": {"seeds": {"2": learned(230.0), "1": learned(238.0)}},
            "lunar_lander_bc_medium": {"seeds": {"1": learned(50.0), "2": learned(54.0), "3": learned(52.0)}},
            "lunar_lander_marwil_medium": {"seeds": {"1": learned(80.0), "2": learned(90.0), "3": learned(100.0)}},
            "lunar_lander_cql_mixed": {"seeds": {"1": learned(99.0)}},
        }
        expert, cloned, weighted, conservative = offline_returns.rows(results)
        assert (expert.means, expert.asked, expert.reached) == ((238.0, 230.0), "≥ 237.5", False)
        assert (cloned.asked, cloned.reached) == ("", True)
        assert (weighted.reached, conservative.reached) == (True, False)
        assert weighted.asked.startswith("above BC: +38.0 ± ")
        text = offline_returns.table(results)
        shown = "expert 250.0 | most probable | 238.0, 230.0 | **234.0** ± 50.8 | ≥ 237.5 (missed)"
        assert f"| LunarLander-v3 | BC | {shown} |" in text
        acted = "random -200.0, medium 50.0, expert 250.0"
        assert f"| LunarLander-v3 | APEX + CQL | {acted} | most probable | 99.0 | **99.0** |" in text
        assert "| LunarLander-v3 | MARWIL | medium 50.0 | sampled | 80.0, 90.0, 100.0 |" in text


class TestChoosing:
    @pytest.mark.parametrize(
        ("named", "reached", "right"),
        [
            ("APPO", (True, True), False),
            ("SAC", (True, True), True),
            ("APPO", (True, False), True),
            ("SAC", (True, False), False),
            ("APPO", (False, False), False),
        ],
    )
    def test_the_named_algorithm_is_right_if_it_was_the_faster_one(
        self, named: str, reached: tuple[bool, bool], right: bool
    ) -> None:
        at_goal = dict(zip(choosing.ALGORITHMS, reached, strict=True))
        assert choosing.is_faster(named, {"APPO": 30.0, "SAC": 20.0}, at_goal) is right

    def test_the_toy_moves_its_mass_and_ends(self) -> None:
        env = choosing.Reach()
        env.reset(seed=0)
        env.position = np.array([0.3, 0.4])
        shown, reward, *_ = env.step(np.array([1.0, -9.0]))
        assert shown.tolist() == pytest.approx([0.31, 0.39, 0.1, -0.1])
        assert reward == pytest.approx(-math.hypot(0.31, 0.39))
        ends = [env.step(np.zeros(2))[3] for _ in range(49)]
        assert (ends.count(True), ends[-1]) == (1, True)
