"""The peers' own interpreters: virtual environments with pinned versions, made once under a cache directory."""

import subprocess
import sys
from pathlib import Path

from utils.errors import ResourceError

DEFAULT_CACHE = Path("~/.cache/appo-benchmarks")
TORCH = "torch==2.13.0"  # first and alone: other versions pull gigabytes of CUDA packages
# shimmy, which its documentation asks for, must stay away: it hides the newer ALE. vizdoom is not required by it.
REQUIREMENTS = {
    "sample_factory": (
        TORCH,
        "sample-factory==2.1.1",
        "numpy<2",
        "gymnasium[mujoco]==0.29.1",
        "ale-py==0.12.1",
        "vizdoom==1.3.2",
        "opencv-python-headless<4.12",
        "huggingface-hub<1.0",
        "setuptools<81",
    ),
    "envpool": (TORCH, "envpool==1.2.5"),
}


def interpreter(name: str, cache: Path) -> Path:
    """The Python of a virtual environment, made and filled where it is missing or has other pins.

    Raises:
        ResourceError: pip could not install what is needed.
    """
    home = cache.expanduser() / name
    python, stamp = home / "bin" / "python", home / "installed.txt"
    wanted = "\n".join(REQUIREMENTS[name]) + "\n"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print(f"installing {', '.join(REQUIREMENTS[name])} into {home} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
    for packages in ((TORCH,), REQUIREMENTS[name]):
        done = subprocess.run(
            [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install", *packages],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ResourceError(f"pip could not install the peer {name}: {done.stderr.strip().splitlines()[-1]}")
    stamp.write_text(wanted, encoding="utf-8")  # last, so that an interrupted installation is repeated
    return python
