"""Which device the networks run on."""

import importlib.util
import os
import runpy
from functools import cache
from pathlib import Path

from utils.errors import UsageError


def choose_device(wanted: str) -> str:
    """The device of the networks, found out without importing torch.

    Raises:
        UsageError: CUDA is wanted, and there is no NVIDIA device or torch is built without.
    """
    if wanted == "cpu":
        return "cpu"
    obstacle = cuda_obstacle()
    if obstacle and wanted == "cuda":
        raise UsageError(f"--device=cuda: {obstacle}")
    return "cpu" if obstacle else "cuda"


def cuda_obstacle() -> str | None:
    """Why networks cannot run on a GPU, as far as files tell; None if they can."""
    if not has_gpu():
        return "no NVIDIA GPU is visible on this machine"
    return None if _torch_has_cuda() else "torch is a build for the CPU, though there is an NVIDIA GPU"


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is there and not hidden."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")
    return visible and any(Path(path).exists() for path in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"))


@cache
def _torch_has_cuda() -> bool:
    """What the file says that torch takes its version from."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    return runpy.run_path(str(Path(torch.origin).with_name("version.py")))["cuda"] is not None
