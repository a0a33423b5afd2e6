"""The same environment everywhere: package versions of a machine, and the user's modules for machines."""

import contextlib
import importlib.util
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from appo.algorithms.run.config import Config
from appo.algorithms.run.directory.code import NAMED
from appo.envs.make import FAMILIES
from appo.utils.errors import PACKAGE

EVERYWHERE = ("appo", "torch", "numpy", "gymnasium")
MISSING = ""


def versions(env: str) -> dict[str, str]:
    """Return the versions of Python, and of the packages for acting in an environment; "": not installed."""
    used = [family.package for family in FAMILIES if family.has_id(env.rpartition(":")[2])]
    found = {package: _version(package) for package in (*EVERYWHERE, *used)}
    major, minor, _ = platform.python_version_tuple()
    return {"python": f"{major}.{minor}", **found}


def _version(package: str) -> str:
    for name in (package, package.replace("_", "-")):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name).partition("+")[0]  # builds for CPU and GPU are equal here
    return "found" if importlib.util.find_spec(package) else MISSING


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
    flat = config.to_flat()
    names = [name for value in map(flat.get, NAMED) for name in (value if isinstance(value, list) else [value])]
    places: dict[str, None] = {}
    for module in {str(name).partition(":")[0].partition(".")[0] for name in names if ":" in str(name)}:
        here = Path.cwd() / module
        found = next((path for path in (here.with_suffix(".py"), here) if path.exists()), None)
        with contextlib.suppress(ImportError, ValueError):
            if found is None and (spec := importlib.util.find_spec(module)) is not None:
                folders = spec.submodule_search_locations
                found = Path(next(iter(folders)) if folders else spec.origin or "")
        if found and "site-packages" not in found.parts and PACKAGE.resolve() not in [found, *found.resolve().parents]:
            places[str(found)] = None
    return list(places)
