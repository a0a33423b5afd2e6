"""The algorithms: what to learn, which processes exist, and the maths they share.

`from algorithms import load_policy, train` is for programs: docs/python_api.md. What stands behind these names is
imported with the first use of one, so that the command line and actors pay nothing for it.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from algorithms.playing.policy import Policy as Policy
    from algorithms.playing.policy import load_policy as load_policy
    from algorithms.run.notebook import watch as watch
    from algorithms.run.training import Report as Report
    from algorithms.run.training import Result as Result
    from algorithms.run.training import Training as Training
    from algorithms.run.training import train as train
    from algorithms.runtime.callbacks import Callbacks as Callbacks

PUBLIC = {
    "Callbacks": "algorithms.runtime.callbacks",
    "Policy": "algorithms.playing.policy",
    "load_policy": "algorithms.playing.policy",
    "Report": "algorithms.run.training",
    "Result": "algorithms.run.training",
    "Training": "algorithms.run.training",
    "train": "algorithms.run.training",
    "watch": "algorithms.run.notebook",
}
"""What programs use, and where it is."""


def __getattr__(name: str) -> object:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(PUBLIC[name]), name)


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
