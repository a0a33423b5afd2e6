"""Playing checkpoints: filming them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from appo.algorithms import cli
from appo.utils import checkpoint_files
from tests.integration.enjoying import copied, enjoyed
from tests.patience import HANG_SECONDS
from tests.videos import pictures_of

ROOT = Path(__file__).parents[2]
DRAWN = {"env": "tests.integration.enjoying:Drawn"}


def filmed(runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, *flags: str) -> dict[str, Any]:
    copied(runs, "windowed", tmp_path, "700", config=DRAWN)
    return enjoyed(capfd, tmp_path, "--experiment=windowed", f"--save_video={tmp_path / name}", *flags)


def steps_shown(path: Path) -> list[int]:
    """Which step of its episode every picture of a video shows."""
    return [round(float(picture[:35, :51].mean()) / 60) for picture in pictures_of(path)]


SHOWN: list[tuple[tuple[str, ...], int, list[int]]] = [
    ((), 1, [0, 1, 2, 3]),
    (("--max_num_episodes=2",), 2, [0, 1, 2, 3] * 2),
    (("--max_num_frames=8",), 2, [*[0, 1, 2, 3] * 2, 0, 1, 2]),
    (("--max_num_frames=6",), 2, [0, 1, 2, 3] * 2),
    (("--max_num_episodes=3", "--max_num_frames=4"), 1, [0, 1, 2, 3, 0, 1]),
    (("--render_action_repeat=2", "--max_num_episodes=2"), 2, [0, 2, 3] * 2),
]
"""Flags, number of episodes and the step of every picture, which is chosen before the format of the file matters."""


@pytest.mark.parametrize(
    ("name", "flags", "episodes", "steps"),
    [*(("x.mp4", *row) for row in SHOWN), *(("x.gif", *row) for row in (SHOWN[0], SHOWN[-1]))],
)
def test_a_video_shows_every_step_once_and_every_end(
    runs: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    name: str,
    flags: tuple[str, ...],
    episodes: int,
    steps: list[int],
) -> None:
    result = filmed(runs, tmp_path, capfd, name, *flags)
    assert result["num_episodes"] == episodes
    rate = 10.0 if "--render_action_repeat=2" in flags else 20.0
    assert result["video"] == {"path": str(tmp_path / name), "pictures": len(steps), "fps": rate}
    assert steps_shown(tmp_path / name) == steps


def test_a_video_changes_nothing_of_what_is_played(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with_video = filmed(runs, tmp_path, capfd, "x.mp4", "--max_num_episodes=5", "--seed=3", "--fps=7")
    without = enjoyed(capfd, tmp_path, "--experiment=windowed", "--max_num_episodes=5", "--seed=3")
    assert with_video.pop("video")["fps"] == 7
    assert with_video == without
    assert len({episode["return"] for episode in without["episodes"]}) == 5


def test_an_environment_trained_as_a_vector_plays_the_same_episodes_in_a_video(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    parent = copied(runs, "cartpole", tmp_path, "700") / "checkpoint_p0"
    loaded = checkpoint_files.load(parent)
    assert loaded is not None
    nothing = {name: np.zeros_like(weights) for name, weights in load(loaded.files["model.safetensors"]).items()}
    checkpoint_files.save(parent, loaded.found.path.name, {**loaded.files, "model.safetensors": save(nothing)})
    flags = ("--experiment=cartpole", "--max_num_episodes=3", "--seed=3")
    with_video = enjoyed(capfd, tmp_path, *flags, f"--save_video={tmp_path / 'x.mp4'}")
    lengths = [episode["length"] for episode in with_video["episodes"]]
    assert len(set(lengths)) > 1
    assert with_video.pop("video")["pictures"] == sum(lengths) + 3  # one more at the end of an episode
    assert with_video == enjoyed(capfd, tmp_path, *flags)


def test_the_text_says_where_the_video_is(runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copied(runs, "windowed", tmp_path, "700", config=DRAWN)
    path = tmp_path / "videos" / "x.gif"
    assert cli.run("enjoy", [f"--train_dir={tmp_path}", "--experiment=windowed", f"--save_video={path}"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == f"video: {path}, 4 pictures at 20 per second"
    assert [file.name for file in path.parent.iterdir()] == ["x.gif"]


def test_a_video_without_a_name_has_one(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied(runs, "windowed", tmp_path, "700", config=DRAWN)
    monkeypatch.chdir(tmp_path)
    assert cli.run("enjoy", [f"--train_dir={tmp_path}", "--experiment=windowed", "--save_video", "--seed=1"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "video: video.mp4, 4 pictures at 20 per second"
    assert Path("video.mp4").stat().st_size > 0


@pytest.mark.parametrize(
    ("experiment", "flags", "text"),
    [
        ("windowed", (), r"cannot be filmed: no rgb_array among its render modes (human)"),
        ("counter", (), "toy/Counter-v0 cannot be filmed"),
        ("counter", ("--save_video=x.avi",), "--save_video=x.avi: the name must end in .mp4 or .gif"),
        ("counter", ("--max_num_episodes=0",), "--save_video with --max_num_episodes=0 needs --max_num_frames"),
    ],
)
def test_what_cannot_be_filmed_is_one_line(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], experiment: str, flags: tuple[str, ...], text: str
) -> None:
    argv = [f"--train_dir={runs}", f"--experiment={experiment}", f"--save_video={tmp_path}/x.mp4", *flags]
    assert cli.run_command(lambda: cli.run("enjoy", argv)) == 2
    printed = capfd.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith("error: ")
    assert text in printed.err
    assert list(tmp_path.iterdir()) == []


def test_a_video_needs_no_display(runs: Path, tmp_path: Path) -> None:
    """As a person makes one on a machine without a screen, saying nothing of that."""
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    path = tmp_path / "x.mp4"
    command = [sys.executable, str(ROOT / "enjoy_appo.py"), "--env=CartPole-v1", f"--train_dir={runs}"]
    done = subprocess.run(
        [*command, f"--save_video={path}", "--seed=1", "--max_num_frames=20", "--max_num_episodes=1"],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    pictures = pictures_of(path)
    assert f"{len(pictures)} pictures at 50 per second" in done.stdout
    assert len(pictures) in range(10, 22)
    assert {picture.shape for picture in pictures} == {(400, 600, 3)}
    assert len({picture.tobytes() for picture in pictures}) > 5
