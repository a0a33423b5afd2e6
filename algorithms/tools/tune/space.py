"""The search space of a study: for each flag a range or choices, around the preset of the environment."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import NamedTuple, cast

from appo.algorithms.run.algorithms import FlagTable, algorithms_with
from appo.algorithms.run.config import Config, check
from appo.algorithms.run.effects import without_effect
from appo.algorithms.run.first_batch import budget_of
from appo.algorithms.tools.flags import TUNE_DECIDES
from appo.utils.command_line import flag_text
from appo.utils.errors import UsageError
from appo.utils.flags import Flag
from appo.utils.values import flag_hint, from_plain, is_number, shown

RATE_FACTOR = 8.0
FEWEST_ITERATIONS = 4  # of a run: larger batches would learn nothing within the budget
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
    **dict.fromkeys(("actor_critic_share_weights", "normalize_input", "normalize_returns"), (False, True)),
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

    Raises:
        UsageError: a flag does not exist or belongs to the study, or a value is wrong; begins with `source`.
    """
    space: dict[str, Range | tuple[object, ...]] = {}
    for word, asked in content.items():
        key = word.replace("-", "_")
        name = table.aliases.get(key, key)
        try:
            if name not in table.flags:
                raise UsageError(f"unknown flag {shown(word)}{flag_hint(key, table.flags, algorithms_with, dashes='')}")
            if name in TUNE_DECIDES:
                raise UsageError(f"{name} is decided by appo tune")
            space[name] = _parameter(table.flags[name], asked)
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from None
    if not space:
        raise UsageError(f"{source} names no flag to tune")
    return space


def _parameter(flag: Flag, asked: object) -> Range | tuple[object, ...]:
    listed = asked.get("choices") if isinstance(asked, Mapping) and asked.keys() == {"choices"} else asked
    if not isinstance(listed, list) or not listed:
        shape = "[low, high], [low, high, log] or a list of choices"
        raise UsageError(f"{flag.name} needs {shape}, got {shown(asked)}")
    values, log = [from_plain(flag, one) for one in listed[:2]], listed[2:]
    is_log = len(log) == 1 and (log[0] == "log" or log[0] is True)  # `[1, 2, 1]` is three choices
    if listed is not asked or flag.kind not in ("int", "float") or len(listed) == 1 or (log and not is_log):
        return tuple({flag_text(value): value for value in (from_plain(flag, one) for one in listed)}.values())
    low, high = values
    if not (is_number(low) and is_number(high) and low < high and (low > 0 or not is_log)):
        need = "two numbers, the lower first" + ", above 0 for log" * is_log
        raise UsageError(f"{flag.name} needs {need}, got {shown(listed)}")
    return Range(low, high, is_log)


def built_in(config: Config, fixed: Mapping[str, object]) -> dict[str, object]:
    """Return the space around a preset, as the mapping of a file; all trials share the user's `fixed` flags."""
    flat, features, space = config.to_flat(), _features(config, {}), dict[str, object]()
    for name in ("learning_rate", *CHOICES, *MULTIPLES):
        flag, value = config.table.flags.get(name), flat.get(name)
        if flag is None or name in fixed or name in config.differences[0] or flag.missing(features):
            continue
        if name in CHOICES:
            space[name] = {"choices": [value, *(one for one in CHOICES[name] if one != value)]}
        elif isinstance(value, int) and value > 0:
            sizes = [value, *(size for size in (value // 4, value // 2, 2 * value, 4 * value) if size > 0)]
            space[name] = {"choices": list(dict.fromkeys(sizes))}
        elif is_number(value) and value > 0:
            space[name] = [value / RATE_FACTOR, min(value * RATE_FACTOR, 1.0), "log"]
    return _without_refused(space, config)


def _features(config: Config, space: Space) -> dict[str, object]:
    """Return the values that decide whether flags have an effect, as far as known before the environment is made."""
    algorithm, images = config.algorithm, config.reads_images
    features: dict[str, object] = {"images": images, "vectors": not images, "actors": True}
    features |= {"critic": algorithm.values == "critic", "returns": algorithm.learns_from_rewards}
    features["memory"] = config.model.use_rnn or "use_rnn" in space or bool(config.model.encoder_custom)
    if config.sampling.inference == "serial" and "inference" not in space:
        features |= {"central": False, "processes": False}
    return config.to_flat() | features


def require_effect(space: Space, config: Config, source: str) -> None:
    """Refuse flags that make no difference between trials (UsageError, begins with `source`).

    Args:
        space: space of the user.
        config: flags of all runs.
        source: name of the file.
    """
    features, parts = _features(config, space), config.table.by_part
    for name, one in space.items():
        if len(one) == 1:
            raise UsageError(f"{source}: {name} has one value, so nothing to search: give --{name} to all runs")
        if config.alone and name in parts["logging"] | parts["output"]:  # a population reads the averages
            raise UsageError(f"{source}: {name} has no effect: it is for reports, and changes no return")
        if name.startswith(("save_", "keep_")):
            raise UsageError(f"{source}: {name} has no effect: it is for files, and changes no return")
        conditions = set(re.findall(r"\w+", config.table.flags[name].needs)) & space.keys()
        values = product(*(one[:2] if isinstance(one := space[other], Range) else one for other in conditions))
        cases = ({**features, **dict(zip(conditions, case, strict=True))} for case in values)
        own = replace(config, given=frozenset({name}))
        if all(lines := [next(without_effect(own, case), "") for case in cases]):
            raise UsageError(f"{source}: {lines[0]}")


def dead_flags(config: Config, given: Mapping[str, object], space: Space) -> Iterator[str]:
    """Yield a line for each flag on the command line that changes no run; a study watches processes by their limits."""
    features = {name: value for name, value in _features(config, space).items() if name not in space}
    return without_effect(replace(config, given=frozenset(given)), {**features, "processes": True})


def refused(space: Space, preset: Config) -> list[tuple[str, object]]:
    """Return flag and value of all choices that a start would refuse beside the values of trial 0."""
    first = _drawn(words_of_preset(space, preset.to_flat()), space, preset)
    choices = [(name, value) for name, one in space.items() if not isinstance(one, Range) for value in one]
    fitted = (_fitted({**first, name: value}, preset, math.inf) for name, value in choices)
    return [choice for choice, values in zip(choices, fitted, strict=True) if not is_accepted(values, preset)]


def _without_refused(content: Mapping[str, object], preset: Config) -> dict[str, object]:
    """Return a space without the choices that a start would refuse, and without flags with one choice left."""
    space, left = parse_space(content, preset.table, "the built-in space") if content else {}, dict[str, object]()
    out = refused(space, preset)
    for name, one in space.items():
        if isinstance(one, Range):
            left[name] = content[name]
        elif len(kept := [value for value in one if (name, value) not in out]) > 1:
            left[name] = {"choices": kept}
    return left


def words_of_preset(space: Space, preset: Mapping[str, object]) -> dict[str, object]:
    """Return the parameters of the preset: a number in a range, the text of a flag for choices.

    A value outside of the space becomes the nearest end of a range, or the first choice.
    """
    words: dict[str, object] = {}
    for name, one in space.items():
        value = preset[name]
        if isinstance(one, Range):
            words[name] = min(max(value, one.low), one.high) if is_number(value) else one.low
        else:
            texts = [flag_text(choice) for choice in one]
            words[name] = flag_text(value) if flag_text(value) in texts else texts[0]
    return words


def differences(values: Mapping[str, object], preset: Mapping[str, object]) -> dict[str, object]:
    """Return the values that differ from the preset."""
    return {name: value for name, value in values.items() if flag_text(value) != flag_text(preset[name])}


def values_of(words: Mapping[str, object], space: Space, preset: Config, most_samples: float) -> dict[str, object]:
    """Return the flags of a trial: readable numbers, and batches that the algorithm and the budget allow.

    Where a start would refuse the values together, one flag takes the value of trial 0, or as many as necessary.

    Args:
        words: parameters of the trial.
        space: space of the study.
        preset: flags of all runs.
        most_samples: limit on the samples of a run; inf: the budget is a time.

    Raises:
        UsageError: a parameter is none of the space.
    """
    drawn, flat, names = _drawn(words, space, preset), preset.to_flat(), list(space)
    if not differences(drawn, flat):
        return drawn
    first = _drawn(words_of_preset(space, flat), space, preset)
    given_up = [(), *((name,) for name in names), *(names[:count] for count in range(2, len(names) + 1))]
    trials = (_fitted({**drawn, **{name: first[name] for name in some}}, preset, most_samples) for some in given_up)
    return next((values for values in trials if is_accepted(values, preset)), first)


def _drawn(words: Mapping[str, object], space: Space, preset: Config) -> dict[str, object]:
    flat, values = preset.to_flat(), dict[str, object]()
    for name, one in space.items():
        word = words.get(name)
        if isinstance(one, Range) and is_number(word):
            whole = preset.table.flags[name].kind == "int"
            short = min(max(float(f"{word:.4g}"), one.low), one.high)
            values[name] = flat[name] if word == flat[name] else int(word) if whole else short
            continue
        texts = {} if isinstance(one, Range) else {flag_text(choice): choice for choice in one}
        if word not in texts:
            raise UsageError(f"{name}={shown(word)} is no value of the study")
        values[name] = texts[str(word)]
    return values


def _fitted(values: dict[str, object], preset: Config, most_samples: float) -> dict[str, object]:
    """Lower tuned batches to a share of the budget, and make them whole rollouts if required.

    Flags outside of the space never change: where the batch is fixed, or rounded up would be too much of the budget,
    a tuned rollout becomes shorter instead.
    """
    batch, count, rollout, most = "batch_size", "num_batches_per_iteration", "rollout", most_samples / FEWEST_ITERATIONS
    drawn = {name: values.get(name, getattr(preset.learning, name, 0)) for name in (count, batch, rollout)}
    sizes = cast(dict[str, int], drawn)
    if not all(sizes.values()):
        return values
    for name in (count, batch):
        while name in values and sizes[name] > 1 and sizes[count] * sizes[batch] > most:
            sizes[name] //= 2
    while not is_accepted(fitted := values | {name: size for name, size in sizes.items() if name in values}, preset):
        rounded = -(-sizes[batch] // sizes[rollout]) * sizes[rollout]
        if rollout in values and sizes[rollout] > 1 and (batch not in values or sizes[count] * rounded > most):
            sizes[rollout] //= 2
        elif batch in values:
            return fitted | {batch: rounded}
        elif count in values:
            share = sizes[rollout] // math.gcd(sizes[rollout], sizes[batch])
            return fitted | {count: -(-sizes[count] // share) * share}
        else:
            break
    return fitted


def is_accepted(values: Mapping[str, object], preset: Config) -> bool:
    """Return whether a start takes the flags of a trial, and its budget lasts until the first update."""
    try:
        check(config := Config.from_flat({**preset.to_flat(), **values}))
        budget_of(config, 1)  # skipped frames are not counted: a trial that they end too early fails with a line
    except UsageError:
        return False
    return True
