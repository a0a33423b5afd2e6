"""The algorithms: what to learn, which processes exist, and the maths they share."""

from importlib.util import find_spec
from pathlib import Path


def _check_siblings() -> None:
    """Fail readably when a stranger's `utils` or `envs` comes before ours on sys.path."""
    root = Path(__file__).resolve().parent.parent
    for name in ("envs", "utils"):
        spec = find_spec(name)
        found = [Path(p).resolve() for p in (spec.submodule_search_locations or [])] if spec else []
        if root / name not in found:
            origin = spec.origin if spec else "nowhere"
            raise ImportError(
                f"package '{name}' of appo (expected in {root}) is hidden by {origin}; rename that module"
            )


_check_siblings()
