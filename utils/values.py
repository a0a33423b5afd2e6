"""Conversion of text or JSON to the value of a flag, by the flag's type, without evaluating code.

A `UsageError` of one line names the flag if a value does not parse, is no choice, or exceeds the limits.
"""

import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard, cast

from appo.utils.errors import UsageError
from appo.utils.flags import Flag, Kind

TRUE_WORDS = ("true", "1", "yes", "on", "t", "y")
FALSE_WORDS = ("false", "0", "no", "off", "f", "n")
NOUNS: dict[Kind, str] = {
    "int": "a whole number",
    "float": "a finite number",
    "bool": "True or False",
    "str": "text",
    "ints": "whole numbers separated by commas",
    "strs": "words separated by commas",
    "dict": "key=value words",
}


def parse_text(flag: Flag, text: str) -> object:
    """Convert the text of a flag to the value.

    Raises:
        UsageError: the text is not of the flag's type, no choice, or out of the limits.
    """
    if flag.optional and text.lower() == "none":
        return None
    try:
        value = PARSERS[flag.kind](text)
    except (ValueError, OverflowError, RecursionError):
        raise UsageError(f"--{flag.name} must be {NOUNS[flag.kind]}, got {shown(text)}") from None
    return checked(flag, value)


def parse_words(flag: Flag, words: Sequence[str]) -> object:
    """Convert the words after a tuple or dict flag to the value; see `parse_text`."""
    if flag.kind != "dict":
        return parse_text(flag, " ".join(words))
    parsed = (cast(dict[str, object], parse_text(flag, word)) for word in words)
    return {key: value for one in parsed for key, value in one.items()}


def from_plain(flag: Flag, value: object) -> object:
    """Convert a value from JSON, TOML or YAML, or a text as on the command line (UsageError: see `parse_text`)."""
    if value is None and flag.optional:
        return None
    if isinstance(value, str):
        return parse_text(flag, value)
    accepted = ACCEPTED[flag.kind]
    if not isinstance(value, accepted) or (isinstance(value, bool) and flag.kind != "bool") or not is_plain(value):
        raise UsageError(f"--{flag.name} must be {NOUNS[flag.kind]}, got {shown(value)}")
    try:
        return checked(flag, CONVERTERS[flag.kind](value))
    except (ValueError, OverflowError):
        raise UsageError(f"--{flag.name} must be {NOUNS[flag.kind]}, got {shown(value)}") from None


def checked(flag: Flag, value: object) -> object:
    """Return a value, with synonyms replaced; `UsageError` for a value that is no choice or out of the limits."""
    if flag.choices:
        value = flag.synonyms.get(str(value), value)
        if value not in flag.choices:
            hint = nearest(str(value), (*flag.choices, *flag.synonyms))
            raise UsageError(f"--{flag.name}={shown(value)} is not one of {', '.join(flag.choices)}{hint}")
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            if flag.minimum is not None and number < flag.minimum:
                raise UsageError(f"--{flag.name} must be at least {flag.minimum:g}, got {shown(number)}")
            if flag.maximum is not None and number > flag.maximum:
                raise UsageError(f"--{flag.name} must be at most {flag.maximum:g}, got {shown(number)}")
    return value


ABSURD = 1e15
"""Size of absurd rewards, observations and losses: soon, float32 cannot represent the squares."""


def shown(value: object) -> str:
    """Return a printable, one-line, bounded form of a user's input."""
    text = value if isinstance(value, str) and value.isprintable() and value else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def printable(text: str) -> str:
    """Return text that cannot command a terminal, except by line ends; a second call changes nothing.

    Other unprintable characters, such as escapes and marks of writing direction, become Python's escapes.
    """
    if text.isprintable():
        return text
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


MOST_LEVELS = 100
"""Deepest nesting of values. Our files have few levels; comparing or printing deep values may exhaust the stack."""


def refuse_deep(value: object) -> None:
    """Refuse a value of JSON nested deeper than `MOST_LEVELS` (ValueError)."""
    level: list[object] = [value]
    for _ in range(MOST_LEVELS):
        holders = [one for one in level if isinstance(one, dict | list)]
        inner = [value for one in holders for value in (one.values() if isinstance(one, dict) else one)]
        level = list({id(value): value for value in inner}.values())  # YAML can repeat a value
        if not level:
            return
    raise ValueError(f"it is nested deeper than {MOST_LEVELS} levels")


def nearest(word: str, known: Iterable[str], most: int = 1) -> str:
    """Return `; did you mean X or Y?` with the nearest known words; "" if no word is near.

    The threshold is low, for the few values of a flag; `flag_hint` has a higher threshold for names of flags.
    """
    spellings = {name.lower(): name for name in known if name != word}
    found = difflib.get_close_matches(word[:80].lower(), spellings, n=most, cutoff=0.6)
    return f"; did you mean {' or '.join(spellings[name] for name in found)}?" if found else ""


@cache
def synonyms() -> Mapping[str, Mapping[str, str]]:
    """Return framework -> foreign name -> our name, or the reason for none: the table of `synonyms.toml`."""
    return tomllib.loads(Path(__file__).with_name("synonyms.toml").read_text(encoding="utf-8"))


Places = Callable[[str], Sequence[str]]
"""Name of a flag -> commands or algorithms with the flag."""


def nowhere(name: str) -> Sequence[str]:
    """Return no place."""
    return ()


def flag_hint(word: str, known: Iterable[str], places: Places = nowhere, dashes: str = "--") -> str:
    """Return `; did you mean --x?` for an unknown name of a flag, or the reason for no such flag; "" if unknown.

    Names of other frameworks come first, then only typing errors: a flag with another word would train otherwise.

    Args:
        word: name as typed, without dashes in front.
        known: names of the possible flags.
        places: commands or algorithms with a flag, by the name of the flag.
        dashes: text before a name, "" in files and in Python.
    """
    plain, names = word[:80].replace("-", "_").lower(), list(known)
    row = _synonym(plain)
    opposite = "" if row or not plain.startswith("no_") else _synonym(plain.removeprefix("no_"))
    ours, _, note = row.partition("; ")
    name = re.split("[= ]", ours.removeprefix("--"))[0]
    if name == plain:
        row = name = ""
    is_known = name in names or bool(re.search(r"\bof (appo|--algo)", row))
    elsewhere = "" if is_known else ", ".join(places(name or plain))
    if row.startswith("none: "):
        text = f"; there is none here: {row.removeprefix('none: ')}"
    elif row and (is_known or elsewhere):
        notes = "; ".join(filter(None, (note, elsewhere and f"a flag of {elsewhere}")))
        text = f"; did you mean {ours}{f' ({notes})' if notes else ''}?"
    elif opposite:
        text = f"; --{plain.removeprefix('no_')} would be {opposite}"
    elif elsewhere:
        text = f"; it is a flag of {elsewhere}"
    else:
        found = [f"--{name}" for name in names if name != word and _is_slip(plain, name)]
        text = f"; did you mean {' or '.join(found)}?" if found else ""
    return text if dashes else re.sub(r"(?<![\w-])--(?=\w)", "", text)


def _synonym(word: str) -> str:
    """Return the row of another framework's name; "" without a row."""
    rows = [(name, text) for table in synonyms().values() for name, text in table.items()]
    return next((text for name, text in rows if fnmatchcase(word, name)), "")


def _is_slip(typed: str, name: str) -> bool:
    """Return whether two names differ by a typing error: a letter in up to two words, or a missing end."""
    mine, yours = typed.split("_"), name.lower().split("_")
    if len(mine) != len(yours):
        return "".join(mine) == "".join(yours) or (len(name) > 5 and _edits(typed, name.lower()) == 1)
    if len(typed) > 3 and name.startswith(typed) and "_" not in name.removeprefix(typed):
        return True
    edits = [_edits(*pair) for pair in zip(mine, yours, strict=True)]
    return max(edits) <= 1 and sum(edits) <= 2


def _edits(typed: str, word: str) -> int:
    """Return 0 for equal words, 1 for a difference in a letter, the order of two letters or the plural, else 2."""
    if typed == word:
        return 0
    if typed.rstrip("s") == word.rstrip("s") or typed.removesuffix("y") == word.removesuffix("ies"):
        return 1
    short, long = sorted((typed, word), key=len)
    if len(long) < 3 or len(long) - len(short) > 1:
        return 2
    same = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    mine, yours = short[same:], long[same:]
    if len(short) < len(long):
        return 1 if mine == yours[1:] else 2
    swapped = mine[:2] == yours[1::-1] and mine[2:] == yours[2:]
    return 1 if swapped or (mine[1:] == yours[1:] and len(word) > 3) else 2


def is_plain(value: object) -> bool:
    """Return whether JSON can represent a value (but not a TOML date)."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(element) for key, element in value.items())
    if isinstance(value, (list, tuple)):
        return all(is_plain(element) for element in value)
    return math.isfinite(value) if isinstance(value, float) else value is None or isinstance(value, (str, int))


def json_text(value: object) -> str:
    """Return JSON in one line; numbers that are not finite become null, because JSON has no word for NaN."""
    return json.dumps(_with_nulls(value), allow_nan=False)


def _with_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _with_nulls(element) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_nulls(element) for element in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value from JSON is a usable number: finite, and of 64 bits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)


def parse_int(text: str) -> int:
    """Return a whole number of 64 bits; `1e6` is one, `1.5` is not (ValueError)."""
    try:
        return _whole(int(text))
    except ValueError:
        return _whole(float(text))


def _whole(value: float) -> int:
    if int(value) != value or not -(2**63) <= value < 2**63:  # int: OverflowError for infinity, ValueError for NaN
        raise ValueError("not a whole number of 64 bits")
    return int(value)


def _finite(value: str | float) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def parse_bool(text: str) -> bool:
    """Return the value of a word like `True`, `no`, `1`; ValueError for any other word."""
    word = text.strip().lower()
    if word not in TRUE_WORDS + FALSE_WORDS:
        raise ValueError(text)
    return word in TRUE_WORDS


def _parse_str(text: str) -> str:
    if "\0" in text:
        raise ValueError("no path or name can hold a zero byte")
    return text


def _parse_word(text: str) -> str:
    if not text:
        raise ValueError("two commas in a row")
    return _parse_str(text)


def _elements(text: str) -> list[str]:
    inner = text.strip()
    if inner.startswith('["'):  # words with commas or spaces
        return [_str_element(element) for element in json.loads(inner)]
    if inner[:1] + inner[-1:] in ("[]", "()"):
        inner = inner[1:-1].strip()
    inner = inner.removesuffix(",").rstrip()
    return re.split(r"\s*,\s*|\s+", inner) if inner and inner.lower() != "none" else []


def _parse_dict(text: str) -> dict[str, object]:
    if text.lstrip().startswith("{"):
        mapping: dict[str, object] = json.loads(text)
        is_valid = is_plain(mapping)
    else:
        key, equals, value = text.partition("=")
        mapping, is_valid = {key: parse_json_word(value)}, bool(key and equals)
    if not is_valid:
        raise ValueError(text)
    return mapping


def parse_json_word(text: str) -> object:
    """Return the JSON value of a word (Python's True, False, None, .5 and 1. too), else the word itself."""
    if re.fullmatch(r"[+-]?(\d+\.|\.\d+)", text):
        return float(text)
    try:
        value: object = json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except (ValueError, RecursionError):
        return text
    return value if is_plain(value) else text


PARSERS: dict[Kind, Callable[[str], object]] = {
    "int": parse_int,
    "float": _finite,
    "bool": parse_bool,
    "str": _parse_str,
    "ints": lambda text: tuple(parse_int(word) for word in _elements(text)),
    "strs": lambda text: tuple(_parse_word(word) for word in _elements(text)),
    "dict": _parse_dict,
}
ACCEPTED: dict[Kind, tuple[type, ...]] = {
    "int": (int, float),
    "float": (int, float),
    "bool": (bool,),
    "str": (),
    "ints": (list, tuple),
    "strs": (list, tuple),
    "dict": (dict,),
}


def _int_element(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(value)
    return _whole(value)


def _str_element(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


CONVERTERS: dict[Kind, Callable[[Any], object]] = {
    "int": _int_element,
    "float": _finite,
    "bool": bool,
    "str": str,
    "ints": lambda value: tuple(_int_element(element) for element in value),
    "strs": lambda value: tuple(_str_element(element) for element in value),
    "dict": dict,
}
