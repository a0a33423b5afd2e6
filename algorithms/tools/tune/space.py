"""The search space of a study: for each flag a range or choices, around the preset of the environment."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from appo.algorithms.run.algorithms import FlagTable, algorithms_with
from appo.algorithms.run.config import Config
from appo.algorithms.tools.flags import TUNE_DECIDES
from appo.utils.command_line import flag_text
from appo.utils.errors import UsageError
from appo.utils.flags import Flag
from appo.utils.values import flag_hint, from_plain, is_number, shown

RATE_FACTOR = 8.0
ITERATIONS = 4
"""Iterations of a run, at least: larger batches would learn nothing within the budget."""
CHOICES: Mapping[str, tuple[object, ...]] = {
    "lr_schedule": ("constant", "linear"),
    "gamma": (0.9, 0.95, 0.98, 0.99, 0.995, 0.999),
    "gae_lambda": (0.8, 0.9, 0.95, 0.98, 1.0),
    "vtrace_lambda": (0.8, 0.9, 0.95, 0.98, 1.0),
    "exploration_loss_coeff": (0.0, 1e-4, 1e-3, 3e-3, 0.01, 0.03),
    "value_loss_coeff": (0.25, 0.5, 1.0, 2.0),
    "ppo_clip_ratio": (0.1, 0.2, 0.3, 0.4),
    "ppo_epochs": (1, 2, 4, 8, 16),
    "max_grad_norm": (0.3, 0.5, 1.0, 2.0, 5.0),
    "n_steps": (1, 3, 5, 10),
    "encoder_mlp_layers": ([64, 64], [128, 128], [256, 256]),
    "hidden_size": (128, 256, 512),
    "nonlinearity": ("elu", "relu", "tanh"),
    "actor_critic_share_weights": (False, True),
    "normalize_input": (False, True),
    "normalize_returns": (False, True),
}
"""Choices of the built-in space; the preset's value is added. A flag without an effect is left out."""
MULTIPLES = ("rollout", "batch_size", "num_batches_per_iteration", "target_update_interval", "learning_starts")
"""Flags of the built-in space that take the preset's value, or 2 or 4 times as much or as little."""


class Range(NamedTuple):
    """Values from `low` to `high`, both included; with `log` searched on a logarithmic scale."""

    low: float
    high: float
    log: bool


Space = Mapping[str, Range | tuple[object, ...]]
"""Flag -> range, or choices."""


def parse_space(content: Mapping[str, object], table: FlagTable, source: str) -> Space:
    """Read the mapping of a file: flag -> [low, high], [low, high, "log"], a list of choices, or {"choices": list}.

    Two numbers are always a range.

    Args:
        content: mapping of the file.
        table: flags of the algorithm.
        source: name of the file, for messages.

    Raises:
        UsageError: a flag does not exist or belongs to the study, or a value is wrong.
    """
    space: dict[str, Range | tuple[object, ...]] = {}
    for word, asked in content.items():
        key = word.replace("-", "_")
        name = table.aliases.get(key, key)
        if name not in table.flags:
            hint = flag_hint(key, table.flags, algorithms_with, dashes="")
            raise UsageError(f"{source}: unknown flag {shown(word)}{hint}")
        if name in TUNE_DECIDES:
            raise UsageError(f"{source}: {name} is decided by appo tune")
        if name in space:
            raise UsageError(f"{source}: {name} is there twice")
        space[name] = _parameter(table.flags[name], asked, source)
    if not space:
        raise UsageError(f"{source} names no flag to tune")
    return space


def _parameter(flag: Flag, asked: object, source: str) -> Range | tuple[object, ...]:
    listed = asked.get("choices") if isinstance(asked, Mapping) and asked.keys() == {"choices"} else asked
    if not isinstance(listed, list) or not listed:
        shape = "[low, high], [low, high, log] or a list of choices"
        raise UsageError(f"{source}: {flag.name} needs {shape}, got {shown(asked)}")
    log = listed[2:]
    is_log = len(log) == 1 and (log[0] == "log" or log[0] is True)  # `[1, 2, 1]` is three choices
    if listed is asked and flag.kind in ("int", "float") and len(listed) > 1 and (is_log or not log):
        return _range(flag, listed[:2], source, log=is_log)
    values = {flag_text(value): value for value in (_value(flag, one, source) for one in listed)}
    return tuple(values.values())


def _range(flag: Flag, numbers: list[object], source: str, *, log: bool) -> Range:
    low, high = (_value(flag, one, source) for one in numbers)
    if not (is_number(low) and is_number(high) and low < high and (low > 0 or not log)):
        need = "two numbers, the lower first" + ", above 0 for log" * log
        raise UsageError(f"{source}: {flag.name} needs {need}, got {shown(numbers)}")
    return Range(low, high, log)


def _value(flag: Flag, value: object, source: str) -> object:
    try:
        return from_plain(flag, value)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def built_in(config: Config, fixed: Mapping[str, object]) -> dict[str, object]:
    """Return the space around a preset, as the mapping of a file.

    Args:
        config: flags of the preset, all decided.
        fixed: flags of the user, which all trials share.
    """
    images = config.reads_images
    features = {
        "images": images,
        "vectors": not images,
        "memory": config.model.use_rnn,
        "critic": config.algorithm.values == "critic",
        "returns": bool(config.algorithm.values),
        "actors": config.algorithm.needs_actors,
    }
    flat = config.to_flat()
    space: dict[str, object] = {}
    for name in ("learning_rate", *CHOICES, *MULTIPLES):
        flag, value = config.table.flags.get(name), flat.get(name)
        if flag is None or name in fixed or flag.missing({**flat, **features}):
            continue
        if name == "learning_rate" and is_number(value) and value > 0:
            space[name] = [value / RATE_FACTOR, min(value * RATE_FACTOR, 1.0), "log"]
        elif name in CHOICES:
            space[name] = {"choices": [value, *(one for one in CHOICES[name] if one != value)]}
        elif isinstance(value, int) and value > 0:
            sizes = [value, *(size for size in (value // 4, value // 2, 2 * value, 4 * value) if size > 0)]
            space[name] = {"choices": list(dict.fromkeys(sizes))}
    return space


def first_words(space: Space, preset: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Return the parameters of the first trial, and the flags whose preset lies outside of the space.

    The parameter of a range is a number, the parameter of choices is the text of a flag.
    """
    words: dict[str, object] = {}
    moved = []
    for name, one in space.items():
        value = preset[name]
        if isinstance(one, Range):
            words[name] = min(max(value, one.low), one.high) if is_number(value) else one.low
            inside = words[name] == value
        else:
            texts = [flag_text(choice) for choice in one]
            inside = flag_text(value) in texts
            words[name] = flag_text(value) if inside else texts[0]
        moved += [] if inside else [name]
    return words, moved


def values_of(words: Mapping[str, object], space: Space, preset: Config, budget_env_steps: float) -> dict[str, object]:
    """Return the flags of a trial: readable numbers, and batches that the algorithm and the budget allow.

    Args:
        words: parameters as `first_words` describes.
        space: search space.
        preset: flags of the preset.
        budget_env_steps: env steps of a run; inf: the budget is a time.

    Raises:
        UsageError: a parameter is none of the space.
    """
    flat, values = preset.to_flat(), dict[str, object]()
    for name, one in space.items():
        word = words.get(name)
        if isinstance(one, Range):
            if not is_number(word):
                raise UsageError(f"{name}={shown(word)} is no number")
            whole = preset.table.flags[name].kind == "int"
            values[name] = flat[name] if word == flat[name] else int(word) if whole else float(f"{word:.4g}")
        else:
            texts = {flag_text(choice): choice for choice in one}
            if word not in texts:
                raise UsageError(f"{name}={shown(word)} is none of the choices of the study")
            values[name] = texts[str(word)]
    changed = any(flag_text(value) != flag_text(flat[name]) for name, value in values.items())
    return _with_whole_batches(values, preset, budget_env_steps) if changed else values


def _with_whole_batches(values: dict[str, object], preset: Config, budget: float) -> dict[str, object]:
    """Lower tuned batches to a share of the budget, and round the batch up to whole rollouts if required."""
    table, learning = preset.table.by_part["learning"], preset.learning
    own = {name: value for name, value in values.items() if name in table}
    names = ("batch_size", "num_batches_per_iteration", "rollout")
    if not own.keys() & set(names) or not all(hasattr(learning, name) for name in names):
        return values
    batch, count, rollout = (int(own.get(name, getattr(learning, name))) for name in names)  # type: ignore[call-overload]
    most = math.inf if math.isinf(budget) else max(1, int(budget) // ITERATIONS)
    while batch * count > most and ("num_batches_per_iteration" in own and count > 1):
        count //= 2
    while batch * count > most and ("batch_size" in own and batch > 1):
        batch //= 2
    changes: dict[str, object] = {"batch_size": batch, "num_batches_per_iteration": count}
    fitted = {**values, **{name: value for name, value in changes.items() if name in own}}
    try:
        preset.algorithm.check(replace(learning, **{name: fitted[name] for name in own}), None)
    except UsageError:
        fitted["batch_size"] = -(-batch // rollout) * rollout
    return fitted
