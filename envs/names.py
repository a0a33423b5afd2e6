"""Ids of environments that a person may have meant: of a family, without the prefix, or of a package to install."""

import contextlib
import difflib
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

import gymnasium

from appo.envs.agents import pettingzoo
from appo.envs.family import Family
from appo.utils.values import nearest, shown

MOST = 3
"""Largest number of ids in a suggestion."""

LIKENESS = 0.75
"""Similarity of two names without prefix and version, as `difflib` measures, above which a suggestion is made."""


def suggestion(env_id: str, families: Iterable[Family]) -> str:
    """Return `; did you mean X?` with the nearest ids, and how to install their package; empty if none is near.

    All installed families are registered first, which takes seconds.
    """
    families, before = list(families), set(gymnasium.registry)
    for family in families:
        # A package that is broken, in whatever way, has nothing to suggest.
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if family.register is not None and find_spec(family.package) is not None:
                family.register()
    prefixes = tuple(prefix for family in families for prefix in family.prefixes)
    # What registering has just made known, and belongs to no family by its id, would not be found the next time.
    there = [one for one in gymnasium.registry if one in before or any(family.has_id(one) for family in families)]
    ids = [one for one in (*there, *pettingzoo.ids()) if one != env_id]
    by_name: dict[str, list[str]] = {}
    for one in ids:
        by_name.setdefault(bare(one, prefixes), []).append(one)
    same = _by_version(by_name.get(bare(env_id, prefixes), []), _version(env_id))
    if same and _version(same[0]) == _version(env_id):
        return _question(same[:1])
    if needed := _missing_package(env_id, families, prefixes):
        return needed
    names = difflib.get_close_matches(bare(env_id[:80], prefixes), by_name, n=MOST, cutoff=LIKENESS)
    return _question(same or [_by_version(by_name[name], -1)[0] for name in names]) or nearest(env_id, ids, MOST)


def _by_version(ids: Sequence[str], asked: int) -> list[str]:
    """Return ids of one name: the id with the version asked for first, then newer ones."""
    return sorted(ids, key=lambda one: (_version(one) != asked, -_version(one), one))[:MOST]


def _question(ids: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(ids)}?" if ids else ""


def _missing_package(env_id: str, families: Sequence[Family], prefixes: Sequence[str]) -> str:
    """Return a package that has an environment of the name and is not installed; empty if none is known."""
    name = bare(env_id, prefixes)
    for family in families:
        if family.names and re.fullmatch(family.names, name) and find_spec(family.package) is None:
            if not family.prefixes:
                return _of_another(family.name, family.command)
            like = shown(f"{family.prefixes[0]}{env_id}")
            return f"; did you mean {like}? It needs the package {family.package}: {family.command}"
    if re.fullmatch(pettingzoo.NAMES, name) and find_spec("pettingzoo") is None:
        return _of_another("PettingZoo", pettingzoo.INSTALL)
    return ""


def _of_another(family: str, command: str) -> str:
    return f"; {family}, which is not installed, has environments of such names: {command}"


def registered_with_gym(module: str, env_id: str) -> str:
    """Return one line about an id that a module registers with gymnasium's predecessor; empty if there is none."""
    gym = sys.modules.get("gym")
    registry = getattr(getattr(gym, "envs", None), "registry", None)
    if env_id not in getattr(registry, "env_specs", registry or ()):
        return ""
    version = str(getattr(gym, "__version__", "0.26"))
    old = "GymV26" if version.startswith(("0.26", "0.27", "1")) else "GymV21"
    return (
        f"module {module} registers {env_id} with old gym {version}, not with gymnasium, which cannot make it; shimmy"
        f' wraps it: pip install "shimmy[{old[:3].lower()}-{old[3:].lower()}]",'
        f" --env=shimmy:{old}Environment-v0 --env_kwargs env_id={module}:{env_id}"
    )


def bare(env_id: str, prefixes: Sequence[str]) -> str:
    """Return the name in an id, in lower case, without module, prefix and version."""
    name = env_id.rpartition(":")[2]
    prefix = next((prefix for prefix in prefixes if name.lower().startswith(prefix.lower())), "")
    return re.sub(r"[-_]v\d+$", "", name[len(prefix) :].rpartition("/")[2]).lower()


def _version(env_id: str) -> int:
    found = re.search(r"[-_]v(\d{1,9})$", env_id)
    return int(found[1]) if found else -1
