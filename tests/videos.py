"""Reading videos, for tests that have made one."""

import io
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.patience import HANG_SECONDS


def pictures_of(path: Path) -> list[np.ndarray]:
    """Every picture [H,W,3] of a video, in order."""
    if path.suffix == ".gif":
        imageio = pytest.importorskip("imageio.v3")
        return list(imageio.imiter(path, plugin="pillow", mode="RGB"))
    # imageio reads other videos through a program too, and leaves its pipes to the garbage collector.
    file = io.BytesIO(_ffmpeg(path, "-fps_mode", "passthrough", "-f", "image2pipe", "-c:v", "ppm", "-").stdout)
    pictures = []
    while header := file.readline() + file.readline() + file.readline():
        kind, width, height, _ = header.split()
        assert kind == b"P6"
        size = (int(height), int(width), 3)
        pictures.append(np.frombuffer(file.read(int(np.prod(size))), np.uint8).reshape(size))
    return pictures


def durations_of(path: Path) -> list[float]:
    """Seconds for which a GIF shows its pictures, or the length of another video alone."""
    if path.suffix == ".gif":
        imageio = pytest.importorskip("imageio.v3")
        count = len(pictures_of(path))
        return [imageio.immeta(path, plugin="pillow", index=index)["duration"] / 1000 for index in range(count)]
    said = re.search(r"Duration: 00:00:(\d+\.\d+)", _ffmpeg(path, "-f", "null", "-").stderr.decode())
    assert said
    return [float(said[1])]


def rate_of(path: Path) -> float:
    """Pictures per second, as the file says."""
    said = re.search(r", (\d+(?:\.\d+)?) fps", _ffmpeg(path, "-f", "null", "-").stderr.decode())
    assert said
    return float(said[1])


def _ffmpeg(path: Path, *output: str) -> "subprocess.CompletedProcess[bytes]":
    program = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    return subprocess.run([program, "-i", str(path), *output], capture_output=True, timeout=HANG_SECONDS, check=True)
