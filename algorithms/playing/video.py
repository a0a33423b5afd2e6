"""Videos of a game: pictures of one environment, encoded by ffmpeg."""

import contextlib
import ctypes.util
import importlib
import importlib.util
import os
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np

from appo.algorithms.playing.config import headless
from appo.envs.agents.multi_agent import loop_over
from appo.envs.config import EnvConfig
from appo.envs.conversion import close_env, reraise
from appo.envs.loop.env_set import SingleEnv
from appo.envs.make import counting_frames, is_vector_only, make_single
from appo.envs.spaces import ActionForm
from appo.envs.spec import Array
from appo.envs.wrappers.making import DEFAULT_FRAMES_PER_SECOND, natural_steps_per_second
from appo.utils.errors import EnvironmentFailure, ResourceError, UsageError
from appo.utils.values import shown

END_SECONDS = 5.0
FASTEST_GIF = 50.0  # pictures per second; players slow down pictures of less than 0.02 s
OUTPUT = {
    # Players expect yuv420p, which stores colours per 2x2 pixels: an odd size gets a black row or column.
    ".mp4": "-vf pad=ceil(iw/2)*2:ceil(ih/2)*2 -c:v libx264 -crf 18 -pix_fmt yuv420p -movflags +faststart -f mp4",
    # A palette per picture: a common palette would need all pictures in memory. No colour is transparent, or a black
    # picture would be transparent.
    ".gif": "-vf split[a][b];[a]palettegen=stats_mode=single[p];[b][p]paletteuse=new=1:alpha_threshold=0"
    " -loop 0 -f gif",
}


class VideoFile:
    """A video that grows picture by picture, and is renamed to `path` when complete.

    As a context manager, the video is completed at the end, or dropped after an exception.

    Args:
        path: .mp4 or .gif file; an existing file is replaced at the end.

    Attributes:
        pictures: number of pictures.
        pictures_per_second: speed; may be set until the first picture.

    Raises:
        UsageError: ffmpeg is missing, or the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.pictures, self.pictures_per_second = path, 0, DEFAULT_FRAMES_PER_SECOND
        self._program = _ffmpeg()
        _check_place(path)
        # In the folder of the file, for the rename; hidden, short enough for every file system, and random, so
        # ffmpeg cannot follow a prepared link.
        self._temporary = path.absolute().with_name(f".{path.stem[:40]}-{secrets.token_hex(8)}{path.suffix}")
        self._process: subprocess.Popen[bytes] | None = None
        self._complaints: IO[bytes] | None = None
        self._shape: tuple[int, ...] = ()

    def add(self, picture: Array) -> None:
        """Append a picture [H,W,3] of bytes; all pictures of a video have equal sizes.

        Raises:
            ValueError: the array is no picture, or has a different size.
            ResourceError: the picture cannot be written.
        """
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or not picture.size:
            raise ValueError(f"a picture must be bytes [H,W,3], got {picture.dtype} {list(picture.shape)}")
        if self._process is None:
            self._shape = picture.shape
            self._process = self._start()
        if picture.shape != self._shape:
            raise ValueError(f"picture {self.pictures} is {picture.shape[:2]}, the first one {self._shape[:2]} pixels")
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(np.ascontiguousarray(picture).data)
        except OSError:
            with contextlib.suppress(subprocess.TimeoutExpired):  # ffmpeg has stopped reading, and should be ending
                self._process.wait(END_SECONDS)
            raise ResourceError(self._complaint()) from None
        self.pictures += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._complaints or contextlib.nullcontext():
            if self._process is None:
                return
            try:
                if error is None:
                    self._finish(self._process)
            finally:
                self._process.kill()  # no effect after the end
                self._process.communicate()
                self._temporary.unlink(missing_ok=True)

    def _finish(self, process: "subprocess.Popen[bytes]") -> None:
        process.communicate()
        if process.returncode != 0:
            raise ResourceError(self._complaint())
        try:
            os.replace(self._temporary, self.path)
        except OSError as error:
            raise ResourceError(f"cannot write the video {shown(str(self.path))}: {error.strerror}") from None

    def _start(self) -> "subprocess.Popen[bytes]":
        height, width, _ = self._shape
        suffix = self.path.suffix.lower()
        if suffix == ".gif":
            self.pictures_per_second = min(self.pictures_per_second, FASTEST_GIF)
        options = (
            "-hide_banner -loglevel error -y -f rawvideo -pix_fmt rgb24"
            f" -video_size {width}x{height} -framerate {self.pictures_per_second} -i pipe:0 -an {OUTPUT[suffix]}"
        )
        try:
            self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__, after the process)
            return subprocess.Popen(  # noqa: S603 (no shell; the words are ours)
                [self._program, *options.split(), str(self._temporary)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._complaints,
                process_group=0,  # Ctrl-C does not reach ffmpeg; no session: ffmpeg keeps our priority
            )
        except OSError as error:
            raise ResourceError(f"no video {shown(str(self.path))}: {error}") from None

    def _complaint(self) -> str:
        assert self._complaints is not None
        self._complaints.seek(0)
        said = self._complaints.read().decode(errors="replace").strip() or "ffmpeg does not say why"
        return f"cannot write the video {shown(str(self.path))}: {said.splitlines()[-1].strip()[:200]}"


class Recorder:
    """Films one environment that the caller steps.

    Args:
        config: flags of the environment.
        path: file of the video.
        steps_per_second: steps per second of video; 0: the speed of the game.

    Attributes:
        group: environment, stepped and closed by the caller.
        video: file, entered by the caller.

    Raises:
        UsageError: the environment cannot be drawn, or the video cannot be written.
        EnvironmentFailure: the environment raised.
    """

    def __init__(self, config: EnvConfig, path: Path, steps_per_second: float) -> None:
        self.name = config.env
        self.video = VideoFile(path)
        self._env = make_drawn(config)
        alone = loop_over([lambda: self._env], name=config.env, form=ActionForm.of(config))
        self.group = counting_frames(alone, config)
        self.video.pictures_per_second = steps_per_second or natural_steps_per_second(self._env)
        self._last: Array | None = None

    def look(self, ended: bool) -> None:
        """Take a picture; `ended` marks the end of the episode.

        Raises:
            EnvironmentFailure: the environment raised, or drew no picture.
            ResourceError: the picture cannot be written.
        """
        try:
            picture: Array = np.array(self._env.render())  # a copy: the environment may reuse the buffer
        except BaseException as error:
            reraise(self.name, error)
        if ended and self._last is not None and not picture.any():
            picture = self._last  # VizDoom has no picture of a finished game and shows black
        try:
            self.video.add(picture)
        except ValueError as error:
            raise EnvironmentFailure(f"{self.name}: cannot film it: {error}") from None
        self._last = picture


def make_drawn(config: EnvConfig) -> SingleEnv:
    """Make one environment that draws pictures instead of opening a window.

    Raises:
        UsageError: the environment cannot draw pictures.
        EnvironmentFailure: the environment raised.
    """
    draw_offscreen()
    if is_vector_only(config):
        raise UsageError(f"{config.env} exists only as a vector environment, which cannot be filmed")
    # Check first: an environment without the mode may fail in any way, or draw nothing.
    asked = make_single(config)
    try:
        modes = asked.metadata.get("render_modes") or ()
        natural_steps_per_second(asked)
    except BaseException as error:
        reraise(config.env, error)
    close_env(asked, config.env, stacklevel=2)
    if "rgb_array" not in modes:
        known = ", ".join(map(str, modes)) or "none"
        raise UsageError(f"{config.env} cannot be filmed: no rgb_array among its render modes ({known})")
    return make_single(config, "rgb_array")


def draw_offscreen() -> None:
    """Without a display, make pygame and MuJoCo draw in memory.

    dm_control reads the variable at import, and cannot be imported if the variable names a missing library.
    """
    if headless():
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        if ctypes.util.find_library("EGL"):
            os.environ.setdefault("MUJOCO_GL", "egl")


def _ffmpeg() -> str:
    """Return the path of ffmpeg."""
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        raise UsageError('a video needs the package imageio-ffmpeg: pip install "appo[video]"')
    try:
        program: str = importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe()
    except RuntimeError as error:
        raise UsageError(f"no video: {' '.join(str(error).split())}") from None
    if shutil.which(program) is None:
        raise UsageError(f"no video: {shown(program)} is no program (IMAGEIO_FFMPEG_EXE)")
    return program


def _check_place(path: Path) -> None:
    """Make the folder of a video; refuse a path that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"no video {shown(str(path))}: cannot make its folder: {error.strerror}") from None
    if os.path.isdir(path):
        raise UsageError(f"no video {shown(str(path))}: that is a folder")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"no video {shown(str(path))}: its folder is not writable")
    if len(os.fsencode(path.name)) > os.pathconf(path.parent, "PC_NAME_MAX"):
        raise UsageError(f"no video {shown(str(path))}: its name is too long")
