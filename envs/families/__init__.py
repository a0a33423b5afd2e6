"""Families are environments that live in optional packages; every module of this folder is a family.

To add a family, write its module into this folder, which is scanned (`dm_control.py` is a short example), an extra into
`setup.py` and a version into `constraints.txt`. The module declares its `FAMILY` (`envs/family.py`) and defines
`make_single`, and `vector_arguments` if the package has a native vector. Every start imports all modules of
families, so a module imports gymnasium and the optional package inside functions. Wrappers make a family a folder.
"""

import functools
import importlib
import pkgutil
from typing import Any


@functools.cache
def modules() -> dict[str, Any]:
    """Import the modules of all families; return name -> module."""
    return {name: importlib.import_module(f"{__name__}.{name}") for _, name, _ in pkgutil.iter_modules(__path__)}
