"""`appo train` reads a command line of training, prints the origins of flags, and starts the run.

`--print_config` prints every flag with its value and origin, as TOML that `--config` reads, or as JSON.
"""

import json
import os
from collections.abc import Mapping, Sequence

from appo.algorithms.run.config import Config, parse_train_flags, resolve
from appo.algorithms.run.ranks.meeting import given_ranks, share_of
from appo.algorithms.runtime.ranks import Rank
from appo.utils.command_line import print_and_exit, say, underscored, words_of
from appo.utils.errors import UsageError
from appo.utils.values import shown

FLAG = "--print_config"
FORMATS = ("toml", "json")
ORIGINS = ("env preset", "saved run", "config file")
"""Origins of flags that a start prints."""


def train(argv: Sequence[str]) -> int:
    """Train a policy, or print the configuration for `--print_config`; return the exit code.

    Raises:
        UsageError: the command line is wrong.
        AppoError: training failed.
    """
    wanted, argv = asked_format(argv)
    rank = Rank.of(os.environ)
    config, origins = resolve(given_ranks(parse_train_flags(argv), rank))
    if wanted:
        from appo.algorithms.run.defaults import ORIGIN, chosen_in
        from appo.algorithms.run.tuning.measure import resolve_defaults

        found = resolve_defaults(config)
        origins |= dict.fromkeys(chosen_in(found, config.undecided), ORIGIN)
        print_and_exit(format_flags(found, origins, wanted))
    if config.run.num_learners > 1 and rank is None:
        from appo.algorithms.run.ranks.launch import launch  # late, so help is quick

        share_of(config, Rank(0, config.run.num_learners))
        return launch(config, argv)
    if config.logging.log_format != "json" and not (rank and rank.number):
        for line in describe(config.to_flat(), origins):
            say(line)
    from appo.algorithms.run.machines.head import kind_of  # late, so help is quick
    from appo.algorithms.run.main import train as start

    return start(config, kind_of(config), rank)


def describe(values: Mapping[str, object], origins: Mapping[str, str]) -> list[str]:
    """Return a line per origin other than defaults, with the flags and values from the origin."""
    names = {origin: [name for name in values if origins[name] == origin] for origin in ORIGINS}
    flags = {origin: " ".join(f"{name}={words_of(values[name])}" for name in own) for origin, own in names.items()}
    flags["saved run"] = f"{len(names['saved run'])} flags as before"
    return [f"{origin}: {flags[origin]}" for origin, own in names.items() if own]


def asked_format(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the format of `--print_config`, empty without the flag, and the other words (UsageError: unknown)."""
    if not (asked := [word for word in argv if underscored([word])[0].partition("=")[0] == FLAG]):
        return "", list(argv)
    if (wanted := asked[-1].partition("=")[2] or FORMATS[0]) not in FORMATS:
        raise UsageError(f"{FLAG}={shown(wanted)} is not one of {', '.join(FORMATS)}")
    return wanted, [word for word in argv if word not in asked]


def format_flags(config: Config, origins: Mapping[str, str], wanted: str) -> str:
    """Return the text of all flags in a format of `FORMATS`."""
    flat = config.to_flat()
    if wanted == "json":
        return json.dumps({name: {"value": value, "origin": origins[name]} for name, value in flat.items()}, indent=1)
    return "\n".join(
        line
        for part, flags in config.table.by_part.items()
        for line in (f"[{part}]", *(_line(name, flat[name], origins[name]) for name in flags), "")
    )


def _line(name: str, value: object, origin: str) -> str:
    # A config file cannot name a config file, and a run without a name gets a new name each time.
    left_out = name == "config" or (name == "experiment" and origin == "default")
    return f"{'# ' * left_out}{name} = {toml_text(value)}  # {origin}"


def toml_text(value: object) -> str:
    """Return a value as TOML. TOML lacks null: None is a word, and a mapping with null is a string of JSON."""
    if value is None:
        return '"none"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_text, value))}]"
    if isinstance(value, dict):
        text = json.dumps(value, ensure_ascii=False)
        if "null" in text:
            return toml_text(text)
        return f"{{{', '.join(f'{toml_text(key)} = {toml_text(element)}' for key, element in value.items())}}}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
