import json
from typing import Any

import gymnasium
import numpy as np
import pytest

from algorithms import cli
from algorithms.run.tuning.choice import Costs
from algorithms.run.tuning.measure import Measurement
from algorithms.tools import doctor, examine_env
from algorithms.tools.doctor import Finding, of_installation, of_machine, recommendation, report_examination
from algorithms.tools.examine_env import REPEATED_STEPS, Examination, examine
from tests.unit.run.tuning.test_measure import config_of
from utils.errors import UsageError

EXAM = Examination(200, None, 1000, 20, 50.0, 1.2e-5, 3e-5, 2e-4, 9e-5, 700, 512 << 10, 0)


class Odd(gymnasium.Env[np.ndarray, int]):
    """Ends after ten steps; its last observation, or its first one, does not depend on the seed alone."""

    observation_space = gymnasium.spaces.Box(0.0, 1e9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    episodes = 0

    def __init__(self, odd_at: int = 10) -> None:
        self.odd_at, self.steps = odd_at, 0

    def _shown(self) -> np.ndarray:
        return np.float32([Odd.episodes if self.steps == self.odd_at else 0])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        Odd.episodes, self.steps = Odd.episodes + 1, 0
        return self._shown(), {}

    def step(self, action: int):
        self.steps += 1
        return self._shown(), 0.0, self.steps == 10, False, {}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By steps, not by time."""
    monkeypatch.setattr(examine_env, "STEPPING_SECONDS", 1e9)
    monkeypatch.setattr(examine_env, "REPEATING_SECONDS", 1e9)
    monkeypatch.setattr(examine_env, "MOST_STEPS", 100)


@pytest.mark.parametrize(("vectorization", "mask"), [("python", ""), ("native", "observation")])
def test_an_environment_that_repeats_itself(vectorization: str, mask: str) -> None:
    config = config_of("toy/Spaces-v0", env_vectorization=vectorization, env_kwargs={"mask": mask})
    exam = examine(config.env)
    assert (exam.repeated, exam.differs_at) == (REPEATED_STEPS, None)
    assert exam.num_steps >= 100
    assert 0 < exam.median_seconds <= exam.slow_seconds <= exam.longest_seconds
    assert 0 < exam.grown_steps < exam.num_steps


@pytest.mark.parametrize(("odd_at", "differs_at"), [(10, 10), (0, 0)])
def test_an_environment_that_does_not_is_found_out(odd_at: int, differs_at: int) -> None:
    exam = examine(config_of("tests.unit.tools.test_doctor:Odd", env_kwargs={"odd_at": odd_at}).env)
    assert exam.differs_at == differs_at
    assert exam.reset_seconds is not None
    # A reset takes a step, which is none of the 100, nor of an episode.
    assert (exam.num_steps, exam.episodes, exam.episode_steps) == (109, 10, 10.0)


class Leaving(gymnasium.Env[Any, Any]):
    """Three agents in lists; the first one leaves after five steps, the others after nine."""

    observation_space, action_space = Odd.observation_space, Odd.action_space
    num_agents = 3

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        self.steps = 0
        return [np.zeros(1, np.float32)] * 3, [{}] * 3

    def step(self, action: list[int]):
        self.steps += 1
        ends = [self.steps == 5, self.steps == 9, self.steps == 9]
        infos = [{"is_active": self.steps <= 5}, {}, {}]
        return [np.zeros(1, np.float32)] * 3, [0.0] * 3, ends, [False] * 3, infos


def test_episodes_are_measured_in_the_steps_of_their_agent() -> None:
    exam = examine(config_of("tests.unit.tools.test_doctor:Leaving").env)
    assert (exam.num_steps, exam.episodes) == (111, 33)  # eleven episodes of all, and one step of the next one
    assert exam.episode_steps == 11 * (5 + 9 + 9) / 33


def said(exam: Examination) -> dict[str, Finding]:
    from envs.make import make_group

    return {
        finding.name: finding
        for finding in report_examination(exam, make_group(config_of("toy/Counter-v0").env, 1).spec)
    }


def test_what_an_examination_says() -> None:
    assert {name: (finding.state, finding.text) for name, finding in said(EXAM).items()} == {
        "seeding": ("ok", "the same seed and actions gave the same 200 steps again"),
        "episodes": ("ok", "20 of about 50 random steps; a new one begins on the step after the end"),
        "step time": ("ok", "median 12 us, 99 % below 30 us, longest 200 us; a reset 90 us"),
        "leaks": ("ok", "512 KiB and 0 open files more after 700 steps"),
    }


@pytest.mark.parametrize(
    ("changed", "name", "text"),
    [
        ({"differs_at": 0}, "seeding", "from the first observation on"),
        ({"differs_at": 17}, "seeding", "from step 17 on"),
        ({"episodes": 0, "reset_seconds": None}, "episodes", "none ended in 1000 random steps"),
        ({"longest_seconds": 1.5}, "step time", "longest 1.5 s"),
        ({"grown_bytes": 9 << 20}, "leaks", "9.0 MiB and 0 open files more after 700 steps: it leaks"),
        ({"grown_files": 9}, "leaks", "9 open files more after 700 steps: it leaks"),
    ],
)
def test_what_is_worth_a_note(changed: dict[str, Any], name: str, text: str) -> None:
    findings = said(EXAM._replace(**changed))
    assert [finding.name for finding in findings.values() if finding.state == "note"] == [name]
    assert text in findings[name].text


def test_this_installation_and_machine_are_in_order() -> None:
    found = [*of_installation(), *of_machine()]
    assert [finding.name for finding in found if finding.state == "bad"] == []
    assert {"python", "packages", "cores", "gpu", "memory", "open files"} <= {finding.name for finding in found}


def test_a_missing_package_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "safetensors" else "1.0")
    monkeypatch.setattr(doctor, "IMPORTED", ("no_such_module",))
    bad = [(finding.name, finding.text) for finding in of_installation() if finding.state == "bad"]
    assert bad == [
        ("packages", "safetensors missing: pip install -c constraints.txt -e ."),
        ("no_such_module", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
    ]


def test_the_recommendation_is_what_a_start_would_choose() -> None:
    from algorithms.run.tuning.network import probe

    config = config_of("toy/Zero-v0")
    costs = Costs(env=((1, 1e-3),), act=((1, 1e-5), (64, 1e-4)), learn=((1, 1e-6),), env_bytes=1 << 20)
    finding = recommendation(Measurement(probe(config), costs, 1.0), 2)
    assert finding.flags["inference"] == "local"
    assert finding.flags["num_workers"] == 2
    assert finding.text.startswith("--inference=local --num_workers=2 ")
    assert "env 1 ms" in finding.text
    by_rules = recommendation(Measurement(probe(config), None, 0.0), 2)
    assert by_rules.text.endswith("(by fixed rules)")


def test_findings_become_lines_or_json_and_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    found = [Finding("cores", "ok", "2"), Finding("env", "bad", "raises"), Finding("a", "ok", "b", {"x": 1})]
    monkeypatch.setattr(doctor, "findings", lambda given: iter(found[: given.get("rollout", 3)]))
    assert cli.run("doctor", []) == 1
    assert capsys.readouterr().out == (
        "ok    cores        2\nbad   env          raises\nok    a            b\n"
        "training will not work before what is bad has changed\n"
    )
    assert cli.run("doctor", ["--rollout=1"]) == 0
    assert capsys.readouterr().out.endswith("nothing is in the way of training\n")
    assert cli.run("doctor", ["--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "ok": False,
        "checks": [{"name": f.name, "state": f.state, "text": f.text} for f in found],
        "recommended": {"x": 1},
    }


def test_a_misspelt_flag_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"unknown flag --jsn; did you mean --json\?"):
        cli.run("doctor", ["--jsn"])
