"""The user's modules and functions that flags name; the working directory is searched too."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from appo.utils.errors import PACKAGE, UsageError, text_of

FORMER = ("algorithms", "envs", "utils")
"""Former top-level names of subpackages of `appo`, which flags and saved runs may contain."""


def import_user_module(name: str) -> ModuleType:
    """Import a module by name; installed packages come before files of the working directory.

    Raises:
        Exception: any error of the import.
    """
    here = Path.cwd()
    if str(here) not in sys.path:
        sys.path.append(str(here))  # last, so a file in the user's directory hides no installed package
    top = name.partition(".")[0]
    path = here / top
    is_module = path.with_suffix(".py").is_file() or path.is_dir()
    is_ours = not is_module or path.resolve() == (PACKAGE / top).resolve()
    return import_module(f"{PACKAGE.name}.{name}" if top in FORMER and is_ours else name)


def keep_out_of(*folders: Path) -> None:
    """Refuse every later import of modules below these folders in this process.

    Folders of runs lie below the working directory, from which modules are imported, and may come from strangers.
    """
    finder = next((one for one in sys.meta_path if isinstance(one, _ClosedFolders)), None)
    if finder is None:
        finder = _ClosedFolders()
        sys.meta_path.insert(0, finder)
    finder.close(*(os.path.realpath(folder) for folder in folders if "\0" not in str(folder)))


class _ClosedFolders(MetaPathFinder):
    """Refuses modules with files below closed folders, links resolved; the next finder finds other modules."""

    def __init__(self) -> None:
        self.folders: set[str] = set()
        self._suspects: dict[str, bool] = {}  # by entry of a search path

    def close(self, *folders: str) -> None:
        """Close folders, given by real paths."""
        if not self.folders.issuperset(folders):
            self.folders.update(folders)
            self._suspects.clear()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Raise ImportError for a module of a closed folder."""
        suspects = [place for place in (sys.path if path is None else path) if self._is_suspect(place)]
        if not suspects or self._folder_of(PathFinder.find_spec(name, suspects)) is None:
            return
        if (folder := self._folder_of(PathFinder.find_spec(name, path))) is not None:  # no open folder comes first
            raise ImportError(f"module {name} lies below {folder}: code in a folder of runs is never imported")

    def _is_suspect(self, place: str) -> bool:
        """Return whether modules of a place may lie in a closed folder; remembered, because imports are frequent."""
        place = place or os.getcwd()
        if place not in self._suspects:
            real = os.path.realpath(place)
            near = any(_is_below(real, folder) or _is_below(folder, real) for folder in self.folders)
            libraries = map(os.path.realpath, (sys.prefix, sys.base_prefix, sys.exec_prefix))
            self._suspects[place] = near or not any(_is_below(real, folder) for folder in libraries)
        return self._suspects[place]

    def _folder_of(self, spec: ModuleSpec | None) -> str | None:
        """Return the closed folder that contains a module or a part of its package."""
        if spec is None:
            return None
        places = [spec.origin, *(spec.submodule_search_locations or ())]
        found = [os.path.realpath(place) for place in places if place and os.path.isabs(place)]
        return next((folder for folder in self.folders for place in found if _is_below(place, folder)), None)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def find_function(flag: str, name: str) -> Callable[..., Any]:
    """Return the function that `--flag=package.module:function` names (UsageError: the function does not exist)."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise UsageError(f"--{flag}={name} must read package.module:function")
    try:
        function: object = getattr(import_user_module(module_name), function_name)
    except Exception as error:  # the user's module may raise anything
        raise UsageError(f"--{flag}={name} failed: {type(error).__name__}: {text_of(error)}") from error
    if not callable(function):
        raise UsageError(f"--{flag}={name} is a {type(function).__name__}, not a function")
    return function
