"""`--print_config` prints every flag with its value and origin, as TOML that `--config` reads, or as JSON."""

import json
from collections.abc import Mapping, Sequence

from appo.algorithms.run.config import Config
from appo.utils.command_line import underscored
from appo.utils.errors import UsageError
from appo.utils.values import shown

FLAG = "--print_config"
FORMATS = ("toml", "json")


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
