import json
import os
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from appo.envs import incidents
from appo.envs.incidents import Incident, IncidentFolder, random_state
from appo.envs.journal import Journal
from appo.envs.loop.env_set import OnFailure
from appo.envs.loop.python_loop import PythonLoop
from appo.utils.errors import EnvironmentFailure, UsageError
from tests.unit.envs.mortal import SPEC, Mortals
from tests.unit.envs.rollouts import collect

STORY = Journal(1).story(0)


def told(folder: Path, mortals: Mortals, *, most: int = 10, steps: int = 12, decorrelate: int = 0) -> list[Incident]:
    """The incidents of an environment beside one that never fails."""
    on_failure = OnFailure(most, IncidentFolder(folder / "incidents", "actor_3", {"env": "Mortal"}))
    factories = [Mortals({}), mortals]
    loop = PythonLoop(factories, name="Mortal", spec=SPEC, on_failure=on_failure, decorrelate_steps=decorrelate)
    by_row = lambda obs: (obs["obs"][:, 2] % 2).astype(np.int32)[:, None]  # noqa: E731 - odd after odd steps
    try:
        collect(loop, steps, [5, 6], by_row)
    except EnvironmentFailure:
        if most:
            raise
    paths = sorted((folder / "incidents").iterdir())
    assert [path.name for path in paths] == [f"env_actor_3_{number}.json" for number in range(len(paths))]
    return [Incident.read(path) for path in paths]


@pytest.fixture(autouse=True)
def _unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incidents, "INTERVAL_SECONDS", 0.0)


@pytest.mark.parametrize("most", [0, 10])
def test_a_failure_is_written_with_all_that_led_to_it(tmp_path: Path, most: int) -> None:
    (incident,) = told(tmp_path, Mortals({(0, "step", 4): ValueError("no\nluck")}), most=most)
    assert "_planned" in incident.traceback
    assert incident.traceback.endswith("ValueError: no\nluck\n")
    assert incident == Incident(
        flags={"env": "Mortal"}, index=1, error="ValueError", message="Mortal raised ValueError: no luck", place="step",
        seed=6, random_state=None, actions=[[0], [1], [0], [1]], num_steps=4, seeds=[], traceback=incident.traceback,
        ended_process=False,
    )  # fmt: skip


def test_a_later_episode_is_written_with_its_random_numbers(tmp_path: Path) -> None:
    mortals = Mortals({(0, "step", 7): ValueError("no"), (1, "reset", 2): SystemExit(1)})
    first, second = told(tmp_path, mortals, steps=20)
    assert (first.place, first.seed, first.actions, first.num_steps) == ("step", 6, [[0], [1]], 2)
    assert first.random_state == random_state(mortals.made[0])
    assert (second.place, second.error, second.seed) == ("reset", "SystemExit", mortals.made[1].seeds[0])
    assert (second.random_state, second.actions) == (None, [[0], [1], [0], [1], [0]])


def test_what_cannot_be_made_again_is_written_too(tmp_path: Path) -> None:
    plan = {(0, "step", 1): ValueError("no"), (1, "init", 1): OSError("no"), (2, "reset", 1): ValueError("no")}
    found = told(tmp_path, Mortals(plan), most=0)
    assert [(one.place, one.error) for one in found] == [("step", "ValueError")]
    with pytest.raises(EnvironmentFailure):
        told(tmp_path, Mortals(plan))
    found = [Incident.read(tmp_path / "incidents" / f"env_actor_3_{number}.json") for number in (1, 2, 3)]
    assert [(one.place, one.error) for one in found] == [
        ("step", "ValueError"), ("init", "OSError"), ("first reset", "ValueError"),
    ]  # fmt: skip
    assert [one.num_steps for one in found] == [1, 0, 0]


def test_random_steps_before_the_first_one_are_part_of_the_story(tmp_path: Path) -> None:
    (incident,) = told(tmp_path, Mortals({(0, "step", 5): ValueError("no")}), decorrelate=5)
    assert len(incident.actions) == incident.num_steps == 5
    assert {number for (number,) in incident.actions} <= {0, 1}


def test_the_newest_incidents_of_all_workers_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incidents, "MAX_INCIDENTS", 3)
    for worker in ("actor_1", "actor_10", "actor_1", "actor_1", "actor_10"):
        IncidentFolder(tmp_path, worker, {}).write(0, EnvironmentFailure("no"), STORY)
        for age, path in enumerate(sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)):
            os.utime(path, ns=(0, 1_000_000_000_000 - age))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "env_actor_10_1.json", "env_actor_1_1.json", "env_actor_1_2.json",
    ]  # fmt: skip


def test_incidents_are_written_once_in_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incidents, "INTERVAL_SECONDS", 1e9)
    mortals = Mortals({(life, "step", 2): ValueError(f"no {life}") for life in range(9)})
    on_failure = OnFailure(3, IncidentFolder(tmp_path, "actor_3", {}))
    with pytest.raises(EnvironmentFailure):
        collect(
            PythonLoop([mortals], name="M", spec=SPEC, on_failure=on_failure),
            20,
            [0],
            lambda obs: np.zeros((1, 1), np.int32),
        )
    found = [Incident.read(path) for path in sorted(tmp_path.iterdir())]
    assert [one.message[-4:] for one in found] == ["no 0", "no 3"]  # the last one, as it is given up


def test_a_disk_that_is_full_costs_only_the_incident(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    IncidentFolder(tmp_path / "file" / "incidents", "actor_0", {}).write(2, EnvironmentFailure("no"), STORY)
    (record,) = caplog.records
    assert record.message.startswith("what led to a failure of env 2 is not kept: ")


@pytest.mark.parametrize("generator", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_random_numbers_of_every_kind_survive_the_file(tmp_path: Path, generator: type) -> None:
    env: gymnasium.Env = gymnasium.Env()
    env.np_random = np.random.Generator(generator(3))
    story = STORY._replace(random_state=random_state(env))
    expected = env.np_random.random(5).tolist()
    IncidentFolder(tmp_path, "actor_0", {}).write(0, EnvironmentFailure("no"), story)
    state = Incident.read(tmp_path / "env_actor_0_0.json").random_state
    assert state is not None
    incidents.restore_random_state(env, state)
    assert env.np_random.random(5).tolist() == expected
    with pytest.raises(UsageError, match="random numbers"):
        incidents.restore_random_state(env, {"bit_generator": "Other"})


@pytest.mark.parametrize(("length", "kept"), [(10, 10), (10_000, 10_000), (10_001, 10_007), (64 << 20, 10_007)])
def test_what_an_environment_says_of_its_failure_is_bounded(tmp_path: Path, length: int, kept: int) -> None:
    IncidentFolder(tmp_path, "actor_0", {}).write(0, EnvironmentFailure("x" * (length - 3) + "end"), STORY)
    incident = Incident.read(tmp_path / "env_actor_0_0.json")
    assert (len(incident.message), incident.message[-3:]) == (kept, "end")
    assert len(incident.traceback) < 100_100


def test_an_environment_without_such_numbers_has_no_state() -> None:
    class Odd(gymnasium.Env):
        np_random = "own"  # type: ignore[assignment]

    assert random_state(Odd()) is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"seed": 5}'])
def test_a_file_that_is_no_incident_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "env_actor_0_0.json"
    with pytest.raises(UsageError, match="cannot read"):
        Incident.read(path)
    path.write_text(content)
    with pytest.raises(UsageError):
        Incident.read(path)
    IncidentFolder(tmp_path, "actor_1", {}).write(0, EnvironmentFailure("no"), STORY)
    good = json.loads((tmp_path / "env_actor_1_0.json").read_text())
    for name in good:
        path.write_text(json.dumps(good | {name: 3.5}))
        with pytest.raises(UsageError, match=f"no incident of an environment: no {name}"):
            Incident.read(path)
