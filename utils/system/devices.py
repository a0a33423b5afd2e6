"""The device of the networks, found without importing torch."""

import importlib.util
import os
import runpy
from functools import cache
from pathlib import Path

from appo.utils.errors import UsageError


def choose_device(wanted: str) -> str:
    """Return the device of the networks.

    Raises:
        UsageError: CUDA is wanted, and there is no NVIDIA device or torch is built without CUDA.
    """
    if wanted == "cpu":
        return "cpu"
    obstacle = cuda_obstacle()
    if obstacle and wanted == "cuda":
        raise UsageError(f"--device=cuda: {obstacle}")
    return "cpu" if obstacle else "cuda"


def cuda_obstacle() -> str | None:
    """Return why networks cannot run on a GPU, judged by files; None if networks can."""
    if not has_gpu():
        return "no NVIDIA GPU is visible on this machine"
    return None if _torch_has_cuda() else "torch is a build for the CPU, though there is an NVIDIA GPU"


def has_gpu() -> bool:
    """Return whether the machine has an NVIDIA GPU that is not hidden."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")
    return visible and any(Path(path).exists() for path in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"))


@cache
def _torch_has_cuda() -> bool:
    """Return whether the file of torch's version names a version of CUDA."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    return runpy.run_path(str(Path(torch.origin).with_name("version.py")))["cuda"] is not None
