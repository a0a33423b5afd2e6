"""The same environment everywhere: package versions of a machine, and the user's modules for machines."""

import contextlib
import hashlib
import importlib.util
import os
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from appo.algorithms.run.config import Config
from appo.algorithms.run.directory.code import named_modules
from appo.envs.make import FAMILIES
from appo.utils.errors import PACKAGE

SOURCE = "appo's source"  # two checkouts may have the same version
EVERYWHERE = ("python", "appo", SOURCE, "torch", "numpy", "gymnasium")
MISSING = ""


def packages(config: Config) -> list[str]:
    """Return the names of what must be equal to act in the environment; modules that travel are equal."""
    used = [family.package for family in FAMILIES if family.has_id(config.env.env.rpartition(":")[2])]
    installed = [module for module in named_modules(config) if _that_travels(module) is None]
    found = metadata.packages_distributions() if installed else {}  # reads the lists of files of all packages
    return [*EVERYWHERE, *used, *(name for module in installed for name in found.get(module, ()))]


def versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of `packages`; "": not installed."""
    return {name: _version(name) for name in names}


def _version(package: str) -> str:
    if package == "python":
        return ".".join(platform.python_version_tuple()[:2])
    if package == SOURCE:
        return digest(PACKAGE)
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package).partition("+")[0]  # builds for CPU and GPU are equal here
    with contextlib.suppress(ModuleNotFoundError):  # of the part before a dot
        return "found" if importlib.util.find_spec(package) else MISSING
    return MISSING


def digest(folder: Path) -> str:
    """Return a short hash of all Python files in a folder, with their places."""
    found = hashlib.sha256()
    for here, folders, names in os.walk(folder, followlinks=True):  # links lead to the folders of a checkout
        folders.sort()
        for path in (Path(here, name) for name in sorted(names) if name.endswith(".py")):
            found.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:8]


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return the first difference of two results of `versions` in words; empty: none."""
    for name, version in ours.items():
        there = theirs.get(name, MISSING)
        if version not in (MISSING, there):
            return (
                f"{name} {version} is missing".replace(" found", "")
                if there == MISSING
                else f"{name} is {there} in place of {version}"
            )
    return ""


def user_modules(config: Config) -> list[str]:
    """Return files and packages of the user's modules named by flags, without installed packages."""
    return [str(place) for place in map(_that_travels, named_modules(config)) if place]


def _that_travels(module: str) -> Path | None:
    here = Path.cwd() / module
    found = next((path for path in (here.with_suffix(".py"), here) if path.exists()), None)
    with contextlib.suppress(ImportError, ValueError):
        if found is None and (spec := importlib.util.find_spec(module)) is not None:
            folders = spec.submodule_search_locations
            found = Path(next(iter(folders)) if folders else spec.origin or "")
    if found and "site-packages" not in found.parts and PACKAGE.resolve() not in [found, *found.resolve().parents]:
        return found
    return None
