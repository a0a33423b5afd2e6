"""Which device the networks run on."""

import os
from pathlib import Path

from utils.errors import UsageError


def choose_device(wanted: str) -> str:
    """The device of the networks, found out without importing torch.

    Raises:
        UsageError: CUDA is wanted and there is no NVIDIA device.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")
    present = visible and any(Path(path).exists() for path in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"))
    if wanted == "cuda" and not present:
        raise UsageError("--device=cuda: no NVIDIA GPU is visible on this machine")
    return "cuda" if present and wanted != "cpu" else "cpu"
