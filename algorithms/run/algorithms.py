"""Algorithms by the value of `--algo`, with the flags and presets of a run that trains with an algorithm."""

from functools import cache
from pkgutil import resolve_name
from typing import Any, cast

from appo.algorithms.datasets.config import RunOutputConfig
from appo.algorithms.models.config import ModelConfig
from appo.algorithms.population.config import PopulationConfig
from appo.algorithms.runtime.algorithm import Algorithm
from appo.algorithms.runtime.config import LoggingConfig, RunConfig, SamplingConfig
from appo.envs.config import EnvConfig
from appo.envs.family import Preset
from appo.envs.presets import env_preset, find_name
from appo.utils.errors import UsageError, text_of
from appo.utils.flags import Flag, flags_of
from appo.utils.user_modules import import_user_module
from appo.utils.values import nearest, shown

DEFAULT = "APPO"
ALGORITHMS = {
    "APPO": "appo.algorithms.appo.algorithm:APPO",
    "PPO": "appo.algorithms.ppo.algorithm:PPO",
    "A3C": "appo.algorithms.a3c.algorithm:A3C",
    "APEX": "appo.algorithms.apex.algorithm:APEX",
    "BC": "appo.algorithms.offline.algorithm:BC",
    "MARWIL": "appo.algorithms.offline.algorithm:MARWIL",
}
"""Name -> class of the algorithm."""


@cache
def find_algorithm(name: str) -> Algorithm:
    """Return an algorithm of `ALGORITHMS` or the user's class `package.module:Class` (UsageError: no algorithm)."""
    if name in ALGORITHMS:
        return cast(Algorithm, resolve_name(ALGORITHMS[name])())
    module, _, kind = name.partition(":")
    if not module or not kind:
        names = ", ".join(ALGORITHMS)
        raise UsageError(
            f"--algo={shown(name)} is none of {names}{nearest(name, ALGORITHMS)}; one of yours is package.module:Class"
        )
    try:
        found = getattr(import_user_module(module), kind)
        lacking = _lacking(found)
        made = None if lacking else found()
    except Exception as error:  # the user's module may raise anything
        raise UsageError(f"--algo={shown(name)} failed: {type(error).__name__}: {text_of(error)}") from error
    if lacking:
        raise UsageError(f"--algo={shown(name)} is no algorithm: {lacking}")
    return cast(Algorithm, made)


def _lacking(found: Any) -> str:
    """Return why an object of a user's module is no algorithm; empty: an algorithm."""
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        return f"it is no subclass of {Algorithm.__module__}.{Algorithm.__name__}"
    unset = [member for member in Algorithm.__annotations__ if not hasattr(found, member)]
    missing = [*unset, *sorted(found.__abstractmethods__)]
    return f"it has no {', '.join(missing)}" if missing else ""


class FlagTable:
    """All flags of a run that trains with an algorithm.

    Attributes:
        parts: part -> dataclass of flags, in the order of `--help`.
        by_part: part -> name -> flag.
        flags: name -> flag.
        aliases: other spelling -> name.
        values_before: name -> value for runs saved before the flag existed, if different from the default.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self.parts: dict[str, type] = {
            "run": RunConfig,
            "env": EnvConfig,
            "sampling": SamplingConfig,
            "learning": algorithm.flags,
            "model": ModelConfig,
            "population": PopulationConfig,
            "logging": LoggingConfig,
            "output": RunOutputConfig,
        }
        self.by_part: dict[str, dict[str, Flag]] = {part: flags_of(cls) for part, cls in self.parts.items()}
        self.flags: dict[str, Flag] = {}
        for part, flags in self.by_part.items():
            if twice := sorted(self.flags.keys() & flags.keys()):
                raise UsageError(f"--algo={algorithm.name}: {twice[0]} of {part} is a flag of another part already")
            self.flags |= flags
        self.aliases = {alias: flag.name for flag in self.flags.values() for alias in flag.aliases}
        self.values_before = {name: flag.before for name, flag in self.flags.items() if flag.before is not None}


@cache
def flag_table(algo: str) -> FlagTable:
    """Return the flags of a run that trains with this algorithm (UsageError: no such algorithm)."""
    return FlagTable(find_algorithm(algo))


def algorithms_with(name: str) -> list[str]:
    """Return `--algo=NAME` for every algorithm of `ALGORITHMS` that has a flag of this name."""
    return [f"--algo={algo}" for algo in ALGORITHMS if name in flag_table(algo).flags]


def find_preset(env_id: str, device: str, algorithm: Algorithm) -> Preset | None:
    """Return flag -> value of environment, network and learning; None for an unknown environment.

    Args:
        env_id: value of `--env`.
        device: device of the learner, `cpu` or `cuda`.
        algorithm: algorithm of the run.
    """
    name = find_name(env_id)
    return None if name is None else {**env_preset(name, device), **algorithm.preset(name, device)}
