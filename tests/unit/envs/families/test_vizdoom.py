import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from appo.algorithms.run.config import resolve
from appo.envs.config import EnvConfig
from appo.envs.make import make_group, make_single
from appo.envs.spec import ActionPart, ObservationSpec
from appo.utils.errors import UsageError
from tests.patience import patient
from tests.unit.envs.rollouts import collect

pytest.importorskip("vizdoom")
pytest.importorskip("cv2")

GONE_SECONDS = 10.0
ATTACK = 3  # of Basic: nothing, left, right, attack


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Every test runs in a directory of its own, which must stay empty."""
    directory = tmp_path / "here"
    directory.mkdir()
    monkeypatch.chdir(directory)
    yield directory
    assert list(directory.iterdir()) == []


def made(name: str = "VizdoomBasic-v1", **flags: Any) -> Any:
    return make_single(EnvConfig(env=name, **flags))


@pytest.mark.parametrize(
    ("width", "height", "name"),
    [
        (1, 1, "RES_160X120"),
        (128, 72, "RES_160X120"),
        (160, 120, "RES_160X120"),
        (161, 1, "RES_200X125"),
        (128, 121, "RES_200X125"),
        (256, 144, "RES_256X144"),
        (320, 240, "RES_320X240"),
        (1920, 1080, "RES_1920X1080"),
    ],
)
def test_the_smallest_resolution_that_covers_the_size(width: int, height: int, name: str) -> None:
    from appo.envs.families.vizdoom.observations import smallest_resolution

    assert smallest_resolution(width, height) == name


@pytest.mark.parametrize("in_run", [False, True])
def test_engines_leave_their_files_in_folders_of_their_own_which_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_run: bool
) -> None:
    temporary, of_run = tmp_path / "tmp", tmp_path / "run"
    temporary.mkdir()
    of_run.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    config: dict[str, str] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if in_run:
        monkeypatch.setitem(config, "tempdir", str(of_run))
    else:
        monkeypatch.delitem(config, "tempdir", raising=False)  # an earlier test may have used a fork server
    envs = [made() for _ in range(2)]
    before = os.getcwd()
    for env in envs:
        env.reset(seed=1)
        env.reset(seed=2)
    found = list((of_run if in_run else temporary).iterdir())
    assert len(found) == 2
    for path in found:
        assert path.name.startswith("vizdoom-")
        assert path.stat().st_mode & 0o777 == 0o700
    for env in envs:
        env.close()
    assert os.listdir(temporary) == os.listdir(of_run) == []
    assert os.getcwd() == before


class Vector(gymnasium.Env[Any, Any]):
    """An environment of the user that shows one array."""

    observation_space, action_space = spaces.Box(0.0, 1.0, (3,), np.float32), spaces.Discrete(2)

    def __init__(self, **kwargs: Any) -> None:
        self.taken = kwargs

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.ones(3, np.float32), {}


def test_an_environment_of_the_user_that_shows_one_array_stays_as_it_is() -> None:
    gymnasium.register("VizdoomMine-v0", Vector)
    try:
        env = made("VizdoomMine-v0", env_framestack=2)
    finally:
        del gymnasium.registry["VizdoomMine-v0"]
    assert env.observation_space.shape == (6,)
    assert env.reset(seed=1)[0].tolist() == [1] * 6
    assert env.unwrapped.taken == {"screen_resolution": "RES_160X120", "frame_skip": 4}


@pytest.mark.parametrize(("width", "height"), [(1921, 1), (1, 1201)])
def test_a_size_that_the_engine_cannot_draw(width: int, height: int) -> None:
    with pytest.raises(UsageError, match=f"--res_w={width} --res_h={height}: no resolution of VizDoom is as large"):
        made(res_w=width, res_h=height)


@pytest.mark.parametrize(
    ("flags", "shape"),
    [({}, (72, 128, 3)), ({"res_w": 160, "res_h": 120}, (120, 160, 3)), ({"res_w": 84, "res_h": 90}, (90, 84, 3)),
     ({"env_kwargs": {"screen_format": "GRAY8"}}, (72, 128, 1))],
)  # fmt: skip
def test_the_screen_is_the_main_observation_in_the_size_asked_for(flags: dict, shape: tuple[int, ...]) -> None:
    if "env_kwargs" in flags:
        from vizdoom import ScreenFormat

        flags = {"env_kwargs": {"screen_format": ScreenFormat.GRAY8}}
    env = made(**flags)
    assert env.observation_space["obs"] == spaces.Box(0, 255, shape, np.uint8)
    for observation in (env.reset(seed=1)[0], env.step(0)[0]):
        assert env.observation_space.contains(observation)
        assert observation["obs"].std() > 5
    env.close()


def test_depth_labels_and_automap_are_resized_alike() -> None:
    buffers = ("depth", "labels", "automap")
    env = made(res_w=100, res_h=60, env_kwargs={f"{name}_buffer_enabled": True for name in buffers})
    assert set(env.observation_space) == {"obs", "gamevariables", *buffers}
    observation, _ = env.reset(seed=1)
    shapes = {key: value.shape for key, value in observation.items() if key in buffers}
    assert shapes == {"depth": (60, 100, 1), "labels": (60, 100, 1), "automap": (60, 100, 3)}
    assert env.observation_space.contains(observation)
    # Names, not colours: what is between two labels is none.
    assert set(np.unique(observation["labels"])) <= set(np.unique(env.unwrapped.state.labels_buffer))
    env.close()


def test_a_picture_of_the_size_of_the_engine_is_shown_as_it_is() -> None:
    env = made(res_w=160, res_h=120)
    observation, _ = env.reset(seed=1)
    np.testing.assert_array_equal(observation["obs"], env.unwrapped.state.screen_buffer)
    env.close()


def test_texts_are_left_out() -> None:
    env = made("VizdoomBasicNotifications-v1")
    assert set(env.observation_space) == {"obs", "gamevariables"}
    assert set(env.reset(seed=1)[0]) == {"obs", "gamevariables"}
    assert set(env.step(ATTACK)[0]) == {"obs", "gamevariables"}
    env.close()


def test_steps_skip_frames_which_are_counted() -> None:
    for skip, expected in ((None, 4), (2, 2)):
        group = make_group(EnvConfig(env="VizdoomBasic-v1", env_frameskip=skip), 1)
        assert group.spec.frames_per_step == expected
        rollout = collect(group, 10, [0], lambda obs: np.zeros((1, 1), np.int32))
        assert (rollout.num_frames == expected).all()
        assert group._envs[0].unwrapped.game.get_episode_time() == 14 + 10 * expected  # the scenario begins at 14
        group.close()


def test_a_timeout_truncates_and_shows_the_last_real_frame() -> None:
    """The scenario lasts 300 tics."""
    env = made()
    observation, _ = env.reset(seed=1)
    for step in range(75):
        before = observation["obs"].copy()
        observation, _, terminated, truncated, _ = env.step(0)
        assert not terminated
        assert truncated == (step == 74)
    np.testing.assert_array_equal(observation["obs"], before)
    assert observation["obs"].std() > 5
    again, _ = env.reset()
    assert again["obs"].std() > 5
    assert env.step(0)[2:4] == (False, False)
    env.close()


def test_a_horizon_truncates() -> None:
    env = made(horizon=5)
    env.reset(seed=1)
    *taken, before, last = [env.step(2) for _ in range(5)]
    assert [step[2:4] for step in (*taken, before, last)] == [(False, False)] * 4 + [(False, True)]
    assert not np.array_equal(last[0]["obs"], before[0]["obs"])  # the game goes on, and is shown
    env.close()


def test_killing_the_monster_terminates_with_the_last_real_frame() -> None:
    """Random players hit it in most episodes; the reward says so."""
    env, random, kills = made(), np.random.default_rng(0), 0
    observation, _ = env.reset(seed=1)
    for _ in range(5000):
        before = observation["obs"]
        observation, reward, terminated, truncated, _ = env.step(int(random.integers(1, 4)))
        assert terminated == (reward > 50)
        if terminated:
            kills += 1
            assert not truncated
            assert observation["obs"] is before
            assert before.std() > 5
        if terminated or truncated:
            if kills == 3:
                break
            observation, _ = env.reset()
    assert kills == 3
    env.close()


def test_frames_are_stacked_for_environments_that_show_one_array_only() -> None:
    with pytest.raises(UsageError, match="--env_framestack=2 needs an environment that shows one array"):
        made(env_framestack=2)


def test_deathmatch_takes_buttons_and_numbers() -> None:
    group = make_group(EnvConfig(env="VizdoomDeathmatch-v1"), 1)
    assert group.spec.action.parts == (ActionPart("categorical", 18), ActionPart("gaussian", 3))
    assert group.spec.observations == {
        "gamevariables": ObservationSpec((5,), "float32"),
        "obs": ObservationSpec((72, 128, 3), "uint8"),
    }
    taken = []
    env = group._envs[0]
    inner = env.env.step
    env.env.step = lambda action: taken.append(action) or inner(action)
    rollout = collect(group, 5, [0], lambda obs: np.array([[4, 1.5, -2.0, 0.0]], np.float32))
    assert len(taken) == 5
    assert all(action["binary"] == 4 and action["continuous"].tolist() == [1.5, -2.0, 0.0] for action in taken)
    assert not rollout.done.any()
    group.close()


def test_several_buttons_at_once() -> None:
    group = make_group(EnvConfig(env="VizdoomBasic-MultiBinary-v1"), 1)
    assert group.spec.action.parts == (ActionPart("bernoulli", 3),)
    rollout = collect(group, 5, [0], lambda obs: np.array([[1, 0, 1]], np.int32))
    assert rollout.reward.min() < -4  # a shot costs 5
    group.close()


def test_two_games_side_by_side_differ_and_repeat() -> None:
    def play() -> np.ndarray:
        group = make_group(EnvConfig(env="VizdoomBasic-v1"), 2)
        rollout = collect(group, 12, [3, 4], lambda obs: np.array([[1], [1]], np.int32))
        group.close()
        return rollout.obs["obs"]

    screens = play()
    assert not np.array_equal(screens[0, 0], screens[0, 1])  # the monster is elsewhere
    np.testing.assert_array_equal(screens, play())


def engines() -> dict[int, str]:
    """Processes below this one that are engines, with the names they go by in shared memory."""
    found, waiting = {}, [os.getpid()]
    while waiting:
        for task in Path(f"/proc/{waiting.pop()}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                waiting.append(child)
                if engine := re.search(rb"viz_instance_id\0(\w+)", Path(f"/proc/{child}/cmdline").read_bytes()):
                    found[child] = engine[1].decode()
    return found


def test_nothing_is_left_when_it_is_closed(elsewhere: Path) -> None:
    before = engines()
    env = made()
    env.reset(seed=1)
    env.step(0)
    ((pid, name),) = [(pid, name) for pid, name in engines().items() if pid not in before]
    assert any(name in file for file in os.listdir("/dev/shm"))
    env.close()
    env.close()
    began = time.monotonic()
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < began + patient(GONE_SECONDS)
        time.sleep(0.01)
    assert not any(name in file for file in os.listdir("/dev/shm"))
    assert list(elsewhere.iterdir()) == []


def test_an_environment_that_was_closed_can_be_reset() -> None:
    env = made()
    first = env.reset(seed=5)[0]
    env.close()
    again = env.reset(seed=5)[0]
    assert all(again[key].shape == first[key].shape for key in first)
    env.close()


def test_an_environment_that_was_never_reset_can_be_closed() -> None:
    made().close()


def test_a_frame_skip_may_come_as_an_argument_also_beside_the_preset() -> None:
    given = {"env": "VizdoomBasic-v1", "env_kwargs": {"frame_skip": 2}, "experiment": "a"}
    env = make_single(resolve(given)[0].env)
    assert env.unwrapped.frame_skip == 2
    env.close()


def test_a_frame_skip_may_come_as_an_argument() -> None:
    for flags, skip in (
        ({"env_kwargs": {"frame_skip": 2}}, 2),
        ({"env_kwargs": {"frame_skip": 2}, "env_frameskip": 3}, 3),
    ):
        env = made(**flags)
        assert env.unwrapped.frame_skip == skip
        env.close()
