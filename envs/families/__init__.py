"""Families are environments that live in optional packages; every module of this folder is the adapter of one.

To add a family, write its adapter into this folder, where it is found (`highway.py` is a short one to copy from), an
extra into `setup.py` and a version into `constraints.txt`. The adapter declares its `FAMILY` and has a function
`make_single`, and `vector_arguments` if there is a native vector (`Adapter` and `VectorAdapter` in `envs/make.py`).
All adapters are imported at every start, to read their families: they import the optional package inside functions.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Environments of one optional package.

    Attributes:
        name: as messages and tables have it.
        package: name of the Python package that has to be there.
        extra: of `setup.py`, which installs the package: `pip install "appo[EXTRA]"`.
        ids: regular expression of how ids begin that need the package; None: none can be known by their ids.
        claims_ids: whether the adapter makes whatever has such an id, or only what has such an entry point, because
            ids are words that others use too.
        entry_points: regular expression of how entry points begin that need the package, for ids that gymnasium or the
            user registered; None: none can be known by their entry points.
        register: imports what registers the ids with gymnasium; None if nothing has to be imported.
        flags: of `EnvConfig`, which only this family understands.
    """

    name: str
    package: str
    extra: str
    ids: str | None = None
    claims_ids: bool = True
    entry_points: str | None = None
    register: Callable[[], object] | None = None
    flags: tuple[str, ...] = ()

    def has_id(self, text: str) -> bool:
        """Return whether a text begins like an id of the family."""
        return self.ids is not None and re.match(self.ids, text) is not None

    def has_entry_point(self, text: str) -> bool:
        """Return whether a text begins like an entry point of the family."""
        return self.entry_points is not None and re.match(self.entry_points, text) is not None

    def is_adapted(self, env_id: str, entry_point: str) -> bool:
        """Return whether the family's adapter, if it has one, makes a registered environment."""
        texts = (env_id, entry_point)
        return any(self.has_entry_point(text) or (self.claims_ids and self.has_id(text)) for text in texts)


WITHOUT_ADAPTER = (
    Family("MuJoCo", "mujoco", "mujoco", entry_points=r"gymnasium\.envs\.mujoco"),
    Family("Box2D", "Box2D", "box2d", entry_points=r"gymnasium\.envs\.box2d"),
)
"""Families that are made as gymnasium makes them."""


def adapter_names() -> list[str]:
    """Find the dotted names of all adapters."""
    return [f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)]
