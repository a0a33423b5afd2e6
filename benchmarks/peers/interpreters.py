"""Interpreters of the peers: virtual environments with pinned versions in a cache directory."""

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from appo.utils.errors import ResourceError

DEFAULT_CACHE = Path("~/.cache/appo-benchmarks")
TORCH = "torch==2.13.0"  # installed first: other versions pull gigabytes of CUDA packages
# Without shimmy, despite Sample Factory's documentation: shimmy hides the newer ALE. Sample Factory does not
# require vizdoom.
REQUIREMENTS = {
    "sample_factory": (
        TORCH,
        "sample-factory==2.1.1",
        "numpy<2",
        "gymnasium[mujoco]==0.29.1",
        "box2d==2.3.10",
        "pygame==2.6.1",
        "ale-py==0.12.1",
        "vizdoom==1.3.2",
        "opencv-python-headless<4.12",
        "huggingface-hub<1.0",
        "setuptools<81",
    ),
    "envpool": (TORCH, "envpool==1.2.5"),
    "stable_baselines3": (
        TORCH,
        "stable-baselines3==2.9.2",
        "gymnasium[mujoco]==1.4.0",
        "box2d==2.3.10",
        "pygame==2.6.1",
        "ale-py==0.12.1",
        "opencv-python-headless==5.0.0.93",
    ),
    # setup.py needs the last three packages; pufferlib itself requires a version of gymnasium.
    "pufferlib": (TORCH, "numpy<2", "setuptools<81", "wheel"),
}


class Source(NamedTuple):
    """A package that must be patched and built.

    Attributes:
        url: address of the archive, which contains one folder.
        sha256: hash of the archive.
        wrong, right: text of setup.py, and its replacement.
        environment: environment variables of the build.
    """

    url: str
    sha256: str
    wrong: str
    right: str
    environment: dict[str, str]


# Without the games in C, whose libraries come from GitHub; setup.py leaves a name undefined without the games.
SOURCES = {
    "pufferlib": Source(
        "https://files.pythonhosted.org/packages/7c/e1/"
        "5292f9b69c6263707b40ba04a87e6b9bcc177281d31092f77afd90c412f1/pufferlib-3.0.0.tar.gz",
        "7df3a3e3f5f894d78d2a1f5374097890aec01473183e748abefe4f3faa10eaa9",
        "c_extensions = []\n",
        "c_extensions = c_extension_paths = []\n",
        {"NO_OCEAN": "1"},
    )
}


def interpreter(name: str, cache: Path) -> Path:
    """Return the Python of a virtual environment; create the environment if missing or with other pins.

    Raises:
        ResourceError: pip failed.
    """
    home = cache.expanduser() / name
    python, stamp = home / "bin" / "python", home / "installed.txt"
    source = SOURCES.get(name)
    wanted = "\n".join([*REQUIREMENTS[name], *([source.url] if source else [])]) + "\n"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print(f"installing {', '.join(wanted.split())} into {home} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
    for packages in ((TORCH,), REQUIREMENTS[name]):
        _install(name, python, packages, {})
    if source:
        with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder:
            _install(name, python, ["--no-build-isolation", str(_mended(source, Path(folder)))], source.environment)
    stamp.write_text(wanted, encoding="utf-8")  # last, so that an interrupted installation is repeated
    return python


def _install(name: str, python: Path, words: Sequence[str], environment: Mapping[str, str]) -> None:
    # setup.py takes a CUDA compiler on the path for a GPU.
    paths = (path for path in os.environ["PATH"].split(os.pathsep) if not Path(path, "nvcc").exists())
    done = subprocess.run(
        [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment, "PATH": os.pathsep.join(paths)},
    )
    if done.returncode:
        raise ResourceError(f"pip could not install the peer {name}: {done.stderr.strip().splitlines()[-1]}")


def _mended(source: Source, folder: Path) -> Path:
    """Unpack the archive of a source and patch setup.py; return the folder."""
    try:
        with urllib.request.urlopen(source.url, timeout=60) as answer:  # noqa: S310 (https)
            archive = answer.read()
    except OSError as error:
        raise ResourceError(f"{source.url} cannot be read: {error}") from error
    found = hashlib.sha256(archive).hexdigest()
    if found != source.sha256:
        raise ResourceError(f"{source.url} is not what it was: SHA-256 {found} instead of {source.sha256}")
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    script = unpacked / "setup.py"
    text = script.read_text(encoding="utf-8")
    script.write_text(text.replace(source.wrong, source.right), encoding="utf-8")
    return unpacked
