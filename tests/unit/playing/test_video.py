"""Videos, decoded again."""

import errno
import importlib.util
import os
import stat
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from appo.algorithms.playing.video import FASTEST_GIF, Recorder, VideoFile, make_drawn
from appo.envs.config import EnvConfig
from appo.envs.make import make_single
from appo.envs.wrappers.making import natural_steps_per_second
from appo.utils.errors import EnvironmentFailure, ResourceError, UsageError
from tests.patience import require_programs_in
from tests.unit.envs.rollouts import collect
from tests.videos import durations_of, pictures_of, rate_of

pytest.importorskip("imageio_ffmpeg")
pytest.importorskip("imageio")

HEIGHT, WIDTH = 35, 51  # odd, which H.264 refuses


def picture(number: int) -> np.ndarray:
    """Gray, lighter with every number, so that pictures can be told apart after compression."""
    return np.full((HEIGHT, WIDTH, 3), 20 * number, np.uint8)


def make(path: Path, pictures: Iterable[Any], rate: float = 30.0) -> VideoFile:
    """Write a video; an exception among the pictures is raised in their place."""
    with VideoFile(path) as video:
        video.pictures_per_second = rate
        for one in pictures:
            if isinstance(one, Exception):
                raise one
            video.add(one)
    return video


class Drawn(gymnasium.Env[Any, Any]):
    """Two steps an episode, drawn by `pictures`: what `render` returns, one after the other."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["human", "rgb_array"], "render_fps": 20}
    pictures: ClassVar[list[Any]] = []

    def __init__(self, render_mode: str | None = None):
        self.render_mode = render_mode
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._rest = iter(self.pictures)

    def render(self) -> Any:
        one = next(self._rest)
        if isinstance(one, Exception):
            raise one
        return one


class OnlyHuman(Drawn):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["human"]}


class Invisible(gymnasium.Env[Any, Any]):
    """Its constructor does not even know the argument."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)


def named(cls: type) -> EnvConfig:
    return EnvConfig(env=f"{__name__}:{cls.__name__}")


@pytest.mark.parametrize(("suffix", "size"), [(".mp4", (36, 52)), (".gif", (35, 51)), (".MP4", (36, 52))])
def test_every_picture_is_in_the_video_once_and_in_order(tmp_path: Path, suffix: str, size: tuple[int, int]) -> None:
    path = tmp_path / "new" / f"x{suffix}"
    video = make(path, map(picture, range(10)), 12.5)
    assert video.pictures == 10
    lower = path.rename(path.with_suffix(suffix.lower()))
    frames = pictures_of(lower)
    assert [frame.shape for frame in frames] == [(*size, 3)] * 10
    brightness = [float(frame[:HEIGHT, :WIDTH].mean()) for frame in frames]
    assert brightness == pytest.approx([20.0 * number for number in range(10)], abs=4)
    assert list(path.parent.iterdir()) == [lower]


def test_pictures_that_stay_the_same_count_too(tmp_path: Path) -> None:
    for suffix in (".mp4", ".gif"):
        video = make(tmp_path / f"still{suffix}", map(picture, (3, 3, 3, 5, 5)))
        seconds = sum(durations_of(video.path))
        assert seconds == pytest.approx(5 / 30, abs=0.02)


def test_the_rate_is_that_asked_for_and_a_gif_is_not_faster_than_it_can_be_shown(tmp_path: Path) -> None:
    for suffix, shown in ((".mp4", 80.0), (".gif", FASTEST_GIF)):
        video = make(tmp_path / f"x{suffix}", map(picture, range(4)), 80.0)
        assert video.pictures_per_second == shown
    assert rate_of(tmp_path / "x.mp4") == 80.0
    assert durations_of(tmp_path / "x.gif") == [0.02] * 4


def test_a_video_that_is_given_up_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "x.mp4"
    path.write_text("older")
    with pytest.raises(RuntimeError, match="enough"):
        make(path, [picture(1), RuntimeError("enough")])
    make(path, [])  # no picture, no video
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]
    make(path, [picture(1)])
    assert len(pictures_of(path)) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_of_the_encoder_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_programs_in(tmp_path)
    encoder = tmp_path / "ffmpeg"
    encoder.write_text("#!/bin/sh\necho 'Error: No space left on device' >&2\nexit 1\n")
    encoder.chmod(stat.S_IRWXU)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(encoder))
    path = tmp_path / "x.mp4"
    for count in (1, 1000):  # less and more than a pipe holds
        with pytest.raises(ResourceError, match=r"cannot write the video .*x\.mp4: Error: No space left on device"):
            make(path, [picture(1)] * count)
    assert list(tmp_path.iterdir()) == [encoder]


def test_an_encoder_that_cannot_be_started_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(ResourceError, match=r"no video .*x\.mp4: .*Resource temporarily unavailable"):
        make(tmp_path / "x.mp4", [picture(1)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (np.zeros((4, 4, 3), np.float32), r"must be bytes \[H,W,3\], got float32 \[4, 4, 3\]"),
        (np.zeros((4, 4, 4), np.uint8), r"got uint8 \[4, 4, 4\]"),
        (np.zeros((4, 4), np.uint8), r"got uint8 \[4, 4\]"),
        (np.zeros((0, 4, 3), np.uint8), r"got uint8 \[0, 4, 3\]"),
        (np.asarray(None), r"got object \[\]"),
        (np.zeros((4, 4, 3), np.uint8), r"picture 1 is \(4, 4\), the first one \(35, 51\) pixels"),
    ],
)
def test_what_is_no_picture_is_refused(tmp_path: Path, wrong: np.ndarray, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(tmp_path / "x.gif", [picture(1), wrong])
    assert list(tmp_path.iterdir()) == []


def test_without_the_package_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "imageio_ffmpeg" else find(name))
    with pytest.raises(UsageError, match=r'needs the package imageio-ffmpeg: pip install "appo\[video\]"'):
        Recorder(named(Drawn), tmp_path / "x.mp4", 0.0)


def test_a_program_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "/no/ffmpeg")
    with pytest.raises(UsageError, match="no video: /no/ffmpeg is no program"):
        VideoFile(tmp_path / "x.mp4")


def test_places_that_take_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="that is a folder"):
        VideoFile(tmp_path / "folder.mp4")
    with pytest.raises(UsageError, match="cannot make its folder"):
        VideoFile(tmp_path / "file" / "x.mp4")
    with pytest.raises(UsageError, match="its name is too long"):
        VideoFile(tmp_path / f"{252 * 'x'}.mp4")


def film(path: Path, ends: list[bool], monkeypatch: pytest.MonkeyPatch, pictures: Iterable[Any]) -> Recorder:
    monkeypatch.setattr(Drawn, "pictures", pictures)
    recorder = Recorder(named(Drawn), path, 0.0)
    with recorder.video:
        for ended in ends:
            recorder.look(ended)
    recorder.group.close()
    return recorder


def test_a_black_picture_of_a_finished_game_is_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = [picture(number) for number in (0, 5, 0, 0, 9)]
    recorder = film(tmp_path / "x.gif", [False, False, False, True, False], monkeypatch, pictures)
    brightness = [round(float(frame.mean())) for frame in pictures_of(tmp_path / "x.gif")]
    assert brightness == [0, 100, 0, 0, 180]
    film(tmp_path / "y.gif", [False, False, True, False, False], monkeypatch, pictures)
    assert [round(float(frame.mean())) for frame in pictures_of(tmp_path / "y.gif")] == [0, 100, 100, 0, 180]
    assert recorder.video.pictures_per_second == 20


def test_pictures_that_are_drawn_into_one_buffer_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> Iterator[Any]:
        buffer = picture(0)
        for brightness in (0, 5, 0):
            buffer[...] = picture(brightness)
            yield buffer

    film(tmp_path / "z.gif", [False, False, True], monkeypatch, drawn())
    assert [round(float(frame.mean())) for frame in pictures_of(tmp_path / "z.gif")] == [0, 100, 100]


class Skipping(Drawn):
    def __init__(self, render_mode: str | None = None, frame_skip: int = 1) -> None:
        super().__init__(render_mode)


def test_a_filmed_step_counts_as_many_env_steps_as_any_other(tmp_path: Path) -> None:
    recorder = Recorder(replace(named(Skipping), env_frameskip=8), tmp_path / "x.gif", 0.0)
    assert recorder.group.spec.frames_per_step == 8
    recorder.group.close()


@pytest.mark.parametrize(
    ("pictures", "text"),
    [
        ([picture(1), RuntimeError("no\ncolours")], "Drawn raised RuntimeError: no colours"),
        ([None], "Drawn: cannot film it: a picture must be bytes"),
    ],
)
def test_an_environment_that_cannot_draw_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pictures: list[Any], text: str
) -> None:
    with pytest.raises(EnvironmentFailure, match=text):
        film(tmp_path / "x.gif", [False, False], monkeypatch, pictures)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (named(OnlyHuman), r"OnlyHuman cannot be filmed: no rgb_array among its render modes \(human\)"),
        (named(Invisible), r"Invisible cannot be filmed: no rgb_array among its render modes \(none\)"),
        (EnvConfig(env="toy/Memory-v0"), "toy/Memory-v0 cannot be filmed"),
        (EnvConfig(env="gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"), "exists only as a vector"),
    ],
)
def test_environments_that_cannot_be_filmed(config: EnvConfig, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make_drawn(config)


class Clinging(Drawn):
    def close(self) -> None:
        raise RuntimeError("nothing was drawn")


def test_an_environment_that_cannot_be_closed_can_be_filmed() -> None:
    with pytest.warns(UserWarning, match="Clinging raised RuntimeError in close: nothing was drawn"):
        make_drawn(named(Clinging))


def test_without_a_display_nothing_looks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "MUJOCO_GL"):
        monkeypatch.setenv(name, "as before")  # restored afterwards, whatever is set meanwhile
    make_drawn(named(Drawn)).close()
    assert os.environ["SDL_VIDEODRIVER"] == os.environ["MUJOCO_GL"] == "as before"
    monkeypatch.delenv("DISPLAY")
    monkeypatch.delenv("WAYLAND_DISPLAY")
    make_drawn(named(Drawn)).close()
    assert os.environ["SDL_VIDEODRIVER"] == os.environ["MUJOCO_GL"] == "as before"  # someone has chosen
    monkeypatch.delenv("SDL_VIDEODRIVER")
    monkeypatch.delenv("MUJOCO_GL")
    make_drawn(named(Drawn)).close()
    assert (os.environ["SDL_VIDEODRIVER"], os.environ["MUJOCO_GL"]) == ("dummy", "egl")


@pytest.mark.parametrize(
    ("config", "steps_per_second"),
    [
        (EnvConfig(env="CartPole-v1"), 50.0),
        (EnvConfig(env="CartPole-v1", env_frameskip=4), 12.5),
        (EnvConfig(env="toy/Memory-v0"), 30.0),
        (EnvConfig(env="ALE/Pong-v5"), 15.0),  # 60 frames a second, every 4th
        (EnvConfig(env="PongNoFrameskip-v4", env_frameskip=2), 30.0),
        (EnvConfig(env="VizdoomBasic-v1"), 8.75),  # 35 tics a second, every 4th
        (EnvConfig(env="MiniGrid-Empty-5x5-v0"), 10.0),
    ],
    ids=lambda value: f"{value.env}-{value.env_frameskip}" if isinstance(value, EnvConfig) else "",
)
def test_the_speed_of_the_game_counts_skipped_frames(config: EnvConfig, steps_per_second: float) -> None:
    package = {"ALE": "ale_py", "Pon": "ale_py", "Viz": "vizdoom", "Min": "minigrid"}.get(config.env[:3])
    if package:
        pytest.importorskip(package)
    env = make_single(config)
    assert natural_steps_per_second(env) == steps_per_second
    env.close()


def test_environments_of_several_agents_are_filmed(tmp_path: Path) -> None:
    pytest.importorskip("pettingzoo")
    recorder = Recorder(EnvConfig("tests.unit.envs.crowds:ParallelShifts"), tmp_path / "x.mp4", 10.0)
    with recorder.video:
        collect(recorder.group, 3, [0], lambda obs: [recorder.look(False), np.zeros((3, 1), np.int32)][1])
    recorder.group.close()
    assert [one.mean() for one in pictures_of(tmp_path / "x.mp4")] == pytest.approx([0, 40, 80], abs=3)
