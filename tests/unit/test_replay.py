"""`appo replay`: a failure comes again, or it is said that it does not."""

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from algorithms import cli
from algorithms.replay import ReplayConfig, parse_replay, replay
from envs.config import EnvConfig
from envs.env_set import OnFailure
from envs.incidents import Incident, IncidentFolder
from envs.make import make_group, make_single
from envs.python_loop import PythonLoop
from tests.unit.envs.rollouts import collect
from utils.errors import EnvironmentFailure, UsageError

DICE = "tests.unit.test_replay:Dice"
HOSTILE = "tests.chaos.hostile_env:Hostile"


class Dice(gymnasium.Env[Any, Any]):
    """After some lucky episodes it raises when it throws the action; an episode has ten throws."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(6)

    def __init__(self, lucky: int = 0) -> None:
        self.lucky, self.episode, self.throws = lucky, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.throws = 1 if seed is not None else self.episode + 1, 0
        return self.np_random.random(1, np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.throws += 1
        if self.np_random.integers(6) == action and self.episode > self.lucky:
            raise ValueError(f"unlucky {self.np_random.random()}")
        return self.np_random.random(1, np.float32), 0.0, self.throws == 10, False, {}


def incident_of(folder: Path, env: str, seed: int = 3, **kwargs: object) -> Path:
    """The file of the first failure of an environment."""
    flags: dict[str, Any] = {"env": env, "env_kwargs": kwargs}
    loop = PythonLoop(
        [lambda: make_single(EnvConfig(**flags))],
        name=env,
        spec=make_group(EnvConfig(env), 1).spec,
        on_failure=OnFailure(0, IncidentFolder(folder, "actor_0", flags)),
    )
    rng = np.random.default_rng(seed)
    with pytest.raises(EnvironmentFailure):
        collect(loop, 1000, [seed], lambda obs: rng.integers(2, size=(1, 1)).astype(np.int32))
    return folder / "env_actor_0_0.json"


def changed(path: Path, **content: object) -> ReplayConfig:
    path.write_text(json.dumps(json.loads(path.read_text()) | content))
    return ReplayConfig(str(path))


@pytest.mark.parametrize("seed", range(5))
def test_the_random_numbers_of_a_later_episode_come_again(tmp_path: Path, seed: int, capsys: Any) -> None:
    path = incident_of(tmp_path, DICE, seed, lucky=2)
    incident = Incident.read(path)
    assert incident.random_state is not None
    assert replay(changed(path, flags={"env": DICE})) == 0  # the first episode it knows is the one that failed
    out, err = capsys.readouterr()
    when = f"(in step {incident.num_steps}"
    assert out.splitlines() == [
        f"incident: {incident.message} {when}, seed {seed})", f"reproduced: {incident.message} {when})"
    ]  # fmt: skip
    assert "unlucky 0." in incident.message
    assert err.startswith("Traceback (most recent call last)")
    assert err.splitlines()[-1] == incident.traceback.splitlines()[-1]


@pytest.mark.parametrize(
    ("where", "fault", "at", "line"),
    [
        ("step", "raise", 3, "reproduced: {} raised HostileError: out of cheese (in step 3)"),
        ("step", "sys_exit", 3, "reproduced: {} raised SystemExit: bye (in step 3)"),
        ("step", "missing_key", 3, "reproduced: {}: observation key speed: expected a value, got none (in step 3)"),
        ("reset", "raise", 1, "reproduced: {} raised HostileError: out of cheese (in its first reset)"),
        ("reset", "raise", 2, "reproduced: {} raised HostileError: out of cheese (in the reset after 50 steps)"),
    ],
)
def test_every_place_of_a_failure(tmp_path: Path, capsys: Any, where: str, fault: str, at: int, line: str) -> None:
    path = incident_of(tmp_path, HOSTILE, where=where, fault=fault, at=at)
    assert replay(ReplayConfig(str(path))) == 0
    assert capsys.readouterr().out.splitlines()[-1] == line.format(HOSTILE)


def test_numbers_that_are_not_finite_come_again(tmp_path: Path, capsys: Any) -> None:
    assert replay(ReplayConfig(str(incident_of(tmp_path, HOSTILE, reward="nan", at=0)))) == 0
    assert "reproduced: " in capsys.readouterr().out


def test_an_environment_that_cannot_be_made(tmp_path: Path, capsys: Any) -> None:
    path = incident_of(tmp_path, HOSTILE, fault="raise")
    flags = {"env": HOSTILE, "env_kwargs": {"fault": "raise", "where": "init"}}
    assert replay(changed(path, place="init", actions=[], num_steps=0, flags=flags)) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("out of cheese (when made)")


def test_a_failure_that_does_not_come_again(tmp_path: Path, capsys: Any) -> None:
    path = incident_of(tmp_path, HOSTILE, fault="raise", at=7)
    flags = {"env": HOSTILE, "env_kwargs": {"fault": "raise", "at": 1000}}
    for content, line in (
        ({"error": "OtherError"}, f"not reproduced: {HOSTILE} raised HostileError: out of cheese (in step 7)"),
        ({"flags": flags}, "not reproduced: nothing failed after 7 steps"),
        ({"actions": [[0]] * 80, "num_steps": 80}, "not reproduced: its episode ended after 50 steps"),
    ):
        assert replay(changed(path, **content)) == 1
        assert capsys.readouterr().out.splitlines()[-1] == line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"num_steps": 100_001}, "cannot be repeated: 100001 steps were too many to keep them"),
        ({"actions": [[0, 1]], "num_steps": 1}, "the actions of the incident are none of this environment"),
        ({"actions": [["a"]], "num_steps": 1}, "the actions of the incident are none of this environment"),
        ({"flags": {"envv": "CartPole-v1"}}, "unknown flag envv"),
        ({"flags": {"env": "no_such.module:Name"}}, "there is no module no_such"),
        ({"random_state": {"bit_generator": "Other"}}, "the environment has other random numbers"),
        ({"seed": "5"}, "is no incident of an environment: no seed"),
    ],
)
def test_what_cannot_be_repeated_is_one_line(tmp_path: Path, content: dict, words: str) -> None:
    path = incident_of(tmp_path, HOSTILE, fault="raise", at=7)
    with pytest.raises(UsageError, match=words):
        replay(changed(path, **content))


def test_the_command_line(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = incident_of(tmp_path, HOSTILE, fault="raise", at=7)
    assert parse_replay([str(path), "--render"]) == ReplayConfig(str(path), render=True)
    assert parse_replay([f"--incident={path}"]) == ReplayConfig(str(path))
    with pytest.raises(UsageError, match="needs the file of an incident"):
        parse_replay([])
    monkeypatch.setattr("sys.argv", ["appo", "replay", str(path)])
    assert cli.main() == 0
    assert "reproduced" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["appo", "replay", str(tmp_path / "none.json")])
    assert cli.main() == 2
    assert capsys.readouterr().err.startswith("error: cannot read ")
