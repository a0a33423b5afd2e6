"""Algorithms by the value of `--algo`, with the flags and presets of a run that trains with an algorithm."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pkgutil import resolve_name
from typing import Any, NamedTuple, cast

from appo.algorithms.datasets.config import RunOutputConfig
from appo.algorithms.models.config import ModelConfig
from appo.algorithms.population.config import PopulationConfig
from appo.algorithms.runtime.algorithm import Algorithm
from appo.algorithms.runtime.config import NO_PRESET, SAMPLE_EFFICIENT, LoggingConfig, RunConfig, SamplingConfig
from appo.envs.config import EnvConfig
from appo.envs.family import Preset
from appo.envs.presets import env_preset, find_name, for_version, public_name
from appo.utils.errors import UsageError, text_of
from appo.utils.flags import Flag, flags_of, flattened
from appo.utils.user_modules import import_user_module
from appo.utils.values import nearest, shown

DEFAULT = "APPO"
AUTO = "auto"
"""Value of `--algo` that chooses by `BEST`."""
ALGORITHMS = {
    "APPO": "appo.algorithms.appo.algorithm:APPO",
    "PPO": "appo.algorithms.ppo.algorithm:PPO",
    "A3C": "appo.algorithms.a3c.algorithm:A3C",
    "APEX": "appo.algorithms.apex.algorithm:APEX",
    "SAC": "appo.algorithms.sac.algorithm:SAC",
    "PQN": "appo.algorithms.pqn.algorithm:PQN",
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
        known = [*ALGORITHMS, AUTO]
        wrong = f"--algo={shown(name)} is none of {', '.join(known)}{nearest(name, known)}"
        raise UsageError(f"{wrong}; one of yours is package.module:Class")
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


def find_preset(env_id: str, device: str, algorithm: Algorithm, preset: str = "default") -> Preset | None:
    """Return flag -> value of environment, network and learning; None without a preset.

    Args:
        env_id: value of `--env`.
        device: device of the learner, `cpu` or `cuda`.
        algorithm: algorithm of the run.
        preset: value of `--preset`; `none` is a preset without flags.
    """
    if preset == NO_PRESET:
        return {}
    name = find_name(env_id)
    if name is None:
        return None
    learning: Mapping[str, object] | None = algorithm.preset(name, device)
    if preset == SAMPLE_EFFICIENT:
        public, table = public_name(env_id), algorithm.sample_efficient
        learning = next((flags for pattern, flags in table.items() if fnmatchcase(public, pattern)), None)
    return None if learning is None else for_version({**env_preset(name, device), **learning}, env_id)


def distinct(patterns: Iterable[str]) -> list[str]:
    """Return the patterns of names of environments that no other pattern contains."""
    known = list(patterns)
    return [name for name in known if not any(name != other and fnmatchcase(name, other) for other in known)]


def require_preset(env_id: str, algorithm: Algorithm, preset: str) -> None:
    """Refuse a sample-efficient preset that does not exist (UsageError)."""
    if preset != SAMPLE_EFFICIENT or find_preset(env_id, "cpu", algorithm, preset) is not None:
        return
    if found := _with_sample_efficient(env_id):
        others = f"--algo={found[0]} has one"
    elif known := algorithm.sample_efficient:
        others = f"it has one for {', '.join(distinct(known))}"
    else:
        others = "it has none; APPO, PPO and SAC have some"
    what = shown(env_id) if env_id else "datasets"
    raise UsageError(f"--preset={preset}: {algorithm.name} has no such preset for {what}; {others}")


def _with_sample_efficient(env_id: str) -> list[str]:
    """Return the algorithms that have a sample-efficient preset for an environment."""
    return [name for name in ALGORITHMS if find_preset(env_id, "cpu", find_algorithm(name), SAMPLE_EFFICIENT)]


class Best(NamedTuple):
    """The algorithm that returned most in an environment, with a preset of ours, in a quarter of an hour on two cores.

    Attributes:
        algo: name of the algorithm.
        mean: mean return over the seeds.
        env_steps: budget.
    """

    algo: str
    mean: float
    env_steps: int


# docs/ppo.md has five seeds of PPO, docs/results.md three seeds of the recipes. Against APPO: -80.8 for Acrobot
# (docs/results.md). LunarLander: PQN's default preset returns 278 (docs/pqn.md), that of APPO 264, after 3 M steps.
# Pendulum: -229 after 100,000 steps. One seed each: Walker2d 988, and 1,052 with the recipe for PPO and APPO's batches;
# Reacher -4.34; Hopper 2,331. Swimmer, three seeds: PPO 357, 229 and 162, APPO 26, 44 and 27. HalfCheetah is no row:
# eight seeds of APPO return 5,884 after 1 M steps, five of PPO 5,640; SAC takes longer (docs/sac.md). Nor is Ant: three
# seeds 3,709, one of PPO 2,577.
EVERYWHERE = {
    "Acrobot": Best("PPO", -74.5, 1_000_000),
    "LunarLander": Best("PQN", 278.3, 1_000_000),
    "Pendulum": Best("SAC", -161.9, 20_000),
}
BEST: Mapping[str, Mapping[str, Best]] = {
    "default": EVERYWHERE,
    SAMPLE_EFFICIENT: EVERYWHERE
    | {
        "Acrobot": Best("PPO", -72.8, 1_000_000),
        "CartPole": Best("PPO", 500.0, 100_000),
        "Hopper": Best("PPO", 3345.0, 1_000_000),
        "InvertedDoublePendulum": Best("SAC", 9360.0, 100_000),
        "LunarLander": Best("PPO", 256.7, 1_000_000),
        "LunarLanderContinuous": Best("PPO", 264.1, 1_000_000),
        "Reacher": Best("PPO", -3.92, 1_000_000),
        "Swimmer": Best("PPO", 249.5, 1_000_000),
        "Walker2d": Best("PPO", 4745.0, 1_000_000),
    },
}
"""Value of `--preset` -> name of the environment -> what was measured; other environments: nothing or APPO."""


def written_in(content: Mapping[str, object], source: str) -> dict[str, object]:
    """Return the flags in a configuration file, not converted (UsageError: a flag is there twice, or in a wrong part).

    A flag that the default algorithm lacks keeps its alias: such flags play no role before the algorithm is known.
    """
    usual = flag_table(DEFAULT)
    return {usual.aliases.get(word, word): value for word, value in flattened(content, usual.by_part, source).items()}


def chosen_algorithm(flags: Mapping[str, object]) -> str:
    """Return the name of the algorithm of a new run.

    Args:
        flags: values or words of `algo`, `env`, `env_kwargs` and `preset`, each if given.
    """
    env, preset, asked = str(flags.get("env", "")), str(flags.get("preset", "default")), flags.get("algo") or DEFAULT
    if asked != AUTO:
        return str(asked)
    if best := _measured(env, preset, flags.get("env_kwargs")):
        return best.algo
    return next(iter(_with_sample_efficient(env)), DEFAULT) if preset == SAMPLE_EFFICIENT else DEFAULT


def _measured(env_id: str, preset: str, env_kwargs: object) -> Best | None:
    """Return what was measured in an environment, unless arguments make another task of it."""
    return None if env_kwargs else BEST.get(preset, {}).get(public_name(env_id))


def better_algorithm(algo: str, env_id: str, preset: str, env_kwargs: object = None) -> str:
    """Return a line that names a better algorithm than the default algorithm; empty without any.

    The user chose any other algorithm.
    """
    best = _measured(env_id, preset, env_kwargs)
    if best is None or algo != DEFAULT or best.algo == algo:
        return ""
    return f"{best.algo} reaches {best.mean:,g} here in {best.env_steps:,} env steps: --algo={best.algo}"
