"""The names that programs use: `from appo import load_policy, train` (docs/python_api.md).

The folders `algorithms`, `envs` and `utils` of a checkout are subpackages of `appo`, by links beside this file. No
module of the project takes a top-level name from a program that has a `utils.py` or an `envs/` of its own. Each public
name is imported with its first use: the command line and actors load nothing for the others.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appo.algorithms.playing.policy import Policy as Policy
    from appo.algorithms.playing.policy import load_policy as load_policy
    from appo.algorithms.run.notebook import watch as watch
    from appo.algorithms.run.training import Report as Report
    from appo.algorithms.run.training import Result as Result
    from appo.algorithms.run.training import Training as Training
    from appo.algorithms.run.training import train as train
    from appo.algorithms.runtime.callbacks import Callbacks as Callbacks

PUBLIC = {
    "Callbacks": "appo.algorithms.runtime.callbacks",
    "Policy": "appo.algorithms.playing.policy",
    "load_policy": "appo.algorithms.playing.policy",
    "Report": "appo.algorithms.run.training",
    "Result": "appo.algorithms.run.training",
    "Training": "appo.algorithms.run.training",
    "train": "appo.algorithms.run.training",
    "watch": "appo.algorithms.run.notebook",
}
"""Public name -> module that defines it."""


def __getattr__(name: str) -> object:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *PUBLIC])
