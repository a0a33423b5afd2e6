"""`appo replay`: a failure comes again, or it is said that it does not."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from appo.algorithms import cli
from appo.algorithms.tools.flags import ReplayConfig
from appo.algorithms.tools.replay_incident import replay
from appo.envs.config import EnvConfig
from appo.envs.incidents import Incident, IncidentFolder
from appo.envs.loop.env_set import OnFailure
from appo.envs.loop.python_loop import PythonLoop
from appo.envs.make import make_group, make_single
from appo.utils.errors import EnvironmentFailure, UsageError
from appo.utils.tracebacks import traceback_of
from tests.patience import HANG_SECONDS
from tests.unit.envs.rollouts import collect, journal_memory

DICE = "tests.unit.tools.test_replay_incident:Dice"
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


class DiceVector(SyncVectorEnv):
    """Some players, none of whom is lucky."""

    def __init__(self, num_envs: int) -> None:
        super().__init__([Dice] * num_envs)


class Team(Dice):
    """Two agents, of whom only the second throws."""

    num_agents = 2

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        shown, info = super().reset(seed=seed)
        return [shown, shown], [info, info]

    def step(self, action: Any) -> Any:
        shown, reward, terminated, truncated, info = super().step(action[1])
        return [shown, shown], [reward, reward], terminated, truncated, info


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
    return ReplayConfig(str(path), trust=True)


def test_actions_of_several_agents_come_again(tmp_path: Path, capsys: Any) -> None:
    flags: dict[str, Any] = {"env": "tests.unit.tools.test_replay_incident:Team", "env_kwargs": {"lucky": 2}}
    failing = OnFailure(0, IncidentFolder(tmp_path, "actor_0", {"env": flags["env"]}))
    rng = np.random.default_rng(0)
    group = make_group(EnvConfig(**flags), 2, decorrelate_steps=4, on_failure=failing)
    with pytest.raises(EnvironmentFailure, match="unlucky"):
        collect(group, 1000, [3, 4], lambda obs: rng.integers(6, size=(4, 1)).astype(np.int32))
    path = next(tmp_path.glob("env_*.json"))
    assert replay(ReplayConfig(str(path), trust=True)) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("reproduced: ")
    assert all(len(actions) == 2 for actions in Incident.read(path).actions)


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
    assert replay(ReplayConfig(str(path), trust=True)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == line.format(HOSTILE)


class Ledge(gymnasium.Env[Any, Any]):
    """Walks where it is told to, and falls beyond 28."""

    observation_space = spaces.Box(0.0, 30.0, (1,), np.float32)
    action_space = spaces.Box(10.0, 30.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action[0] > 28:
            raise ValueError(f"fell at {action[0]:.6f}")
        return action, 0.0, False, False, {}


@pytest.mark.parametrize(
    ("flags", "stored", "place"),
    [
        ({}, 0.9, 29.0),
        ({"action_distribution": "tanh_gaussian"}, float(np.arctanh(0.85)), 28.5),
        ({"action_scaling": "off"}, 28.25, 28.25),
    ],
)
def test_numbers_come_again_in_the_units_of_the_run(
    tmp_path: Path, capsys: Any, flags: dict[str, str], stored: float, place: float
) -> None:
    config = EnvConfig(f"{__name__}:Ledge", **flags)  # type: ignore[arg-type]
    failing = OnFailure(0, IncidentFolder(tmp_path, "actor_0", asdict(config)))
    with pytest.raises(EnvironmentFailure, match=f"fell at {place:.6f}"):
        collect(make_group(config, 1, on_failure=failing), 1, [0], lambda obs: np.array([[stored]], np.float32))
    path = tmp_path / "env_actor_0_0.json"
    assert replay(ReplayConfig(str(path), trust=True)) == 0
    said = f"{__name__}:Ledge raised ValueError: fell at {place:.6f}"
    assert capsys.readouterr().out.splitlines()[-1] == f"reproduced: {said} (in step 1)"


ENDED = {"ended_process": True, "traceback": ""}


@pytest.mark.parametrize(
    ("fault", "error", "line"),
    [
        ("segfault", "SIGSEGV", "reproduced: its process ended with SIGSEGV (in step 7)"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("os_exit", "exit code 7", "reproduced: its process ended with exit code 7 (in step 7)"),
                ("hang", "hang", "reproduced: nothing has happened for 10 s (in step 7)"),
                ("hang_in_c", "hang", "reproduced: nothing has happened for 10 s (in step 7)"),
                ("abort", "SIGSEGV", "not reproduced: its process ended with SIGABRT (in step 7)"),
                ("raise", "hang", f"not reproduced: {HOSTILE} raised HostileError: out of cheese (in step 7)"),
                ("", "hang", "not reproduced: nothing failed after 7 steps"),
            )
        ),
    ],
)
def test_what_takes_its_process_with_it_is_repeated_in_another_one(
    tmp_path: Path, capsys: Any, fault: str, error: str, line: str
) -> None:
    path = incident_of(tmp_path, HOSTILE, fault="raise", at=7)
    flags = {"env": HOSTILE, "env_kwargs": {"fault": fault, "at": 7}}
    config = changed(path, flags=flags, error=error, **ENDED)
    patience = 10.0 if fault.startswith("hang") else HANG_SECONDS
    assert replay(replace(config, hang_seconds=patience)) == line.startswith("not")
    assert capsys.readouterr().out.splitlines()[-1] == line


@pytest.mark.slow
def test_what_cannot_be_repeated_is_one_line_from_there_too(tmp_path: Path) -> None:
    path = incident_of(tmp_path, HOSTILE, fault="raise", at=7)
    with pytest.raises(UsageError, match="there is no module no_such"):
        replay(changed(path, flags={"env": "no_such.module:Name"}, error="hang", **ENDED))


@pytest.mark.parametrize("seed", range(3))
def test_of_a_vector_everything_comes_again(tmp_path: Path, seed: int, capsys: Any) -> None:
    config, players = EnvConfig(f"{__name__}:DiceVector"), 3
    spec = make_group(config, players).spec
    folder = IncidentFolder(tmp_path, "actor_0", {"env": config.env})
    on_failure = OnFailure(10, folder, journal_memory(players, spec.action))
    group, rng = make_group(config, players, spec=spec, on_failure=on_failure), np.random.default_rng(seed)
    with pytest.raises(EnvironmentFailure):
        collect(group, 1000, [seed, 5, 6], lambda obs: rng.integers(6, size=(players, 1)).astype(np.int32))
    incident = Incident.read(tmp_path / "env_actor_0_0.json")
    assert (incident.index, incident.seeds, incident.place) == (-1, [seed, 5, 6], "step")
    assert np.shape(incident.actions) == (incident.num_steps, players, 1)
    assert replay(ReplayConfig(str(tmp_path / "env_actor_0_0.json"), trust=True)) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == f"reproduced: {incident.message} (in step {incident.num_steps})"
    assert err.splitlines()[-1] == incident.traceback.splitlines()[-1]


def test_numbers_that_are_not_finite_come_again(tmp_path: Path, capsys: Any) -> None:
    assert replay(ReplayConfig(str(incident_of(tmp_path, HOSTILE, reward="nan", at=0)), trust=True)) == 0
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
        ({"random_state": {"bit_generator": "MT19937", "state": {}}}, "the environment has other random numbers"),
        ({"random_state": {"bit_generator": "PCG64"}}, "the environment has other random numbers"),
        ({"random_state": {"bit_generator": "PCG64", "state": {"state": -1, "inc": "x"}}}, "has other random numbers"),
        ({"random_state": {}}, "the environment has other random numbers"),
        ({"seed": "5"}, "is no incident of an environment: no seed"),
        ({"seeds": ["5"]}, "the seeds of the incident are no numbers"),
        ({"seeds": [0] * 65_537}, "or more than 65536"),
    ],
)
def test_what_cannot_be_repeated_is_one_line(tmp_path: Path, content: dict, words: str) -> None:
    path = incident_of(tmp_path, HOSTILE, fault="raise", at=7)
    with pytest.raises(UsageError, match=words) as caught:
        replay(changed(path, **content))
    assert traceback_of(caught.value) == ""


def test_the_command_line(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = incident_of(tmp_path, HOSTILE, fault="raise", at=7)
    assert cli.parse("replay", [str(path), "--render"]) == (ReplayConfig(str(path), render=True),)
    assert cli.parse("replay", [f"--incident={path}"]) == (ReplayConfig(str(path)),)
    with pytest.raises(UsageError, match="needs the file of an incident"):
        cli.parse("replay", [])
    monkeypatch.setattr("sys.argv", ["appo", "replay", str(path), "--trust"])
    assert cli.main() == 0
    assert "reproduced" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["appo", "replay", str(tmp_path / "none.json")])
    assert cli.main() == 2
    assert capsys.readouterr().err.startswith("error: cannot read ")
