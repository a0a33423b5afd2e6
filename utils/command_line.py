"""Flags on a command line: exact names only, one-line errors with the nearest name, help grouped by part."""

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NoReturn

from appo.utils.directories import closing
from appo.utils.errors import PACKAGE, UsageError
from appo.utils.flags import Flag
from appo.utils.values import (
    NOUNS,
    Places,
    flag_hint,
    nowhere,
    parse_bool,
    parse_json_word,
    parse_text,
    parse_words,
    printable,
    shown,
)

LISTS = {"ints": "INTS", "strs": "WORDS", "dict": "K=V"}
METAVARS = {"int": "INT", "float": "FLOAT", "bool": "BOOL", "str": "TEXT", **LISTS}
PLAIN_WORD = re.compile(r"(?!(?i:none)$)[\w./:@+][^\s,=()\[\]{}\"']*")
"""Words that stand for themselves in a list, and as a key."""
Groups = Mapping[str, Mapping[str, Flag]]
"""Title of a part -> its flags by name."""


class _Parser(argparse.ArgumentParser):
    """A parser that raises one line instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


class UnknownFlag(UsageError):
    """A word that is no flag of the command.

    Args:
        option: word as typed.
        known: names of the flags of the command.
        places: commands or algorithms with a flag, by the name of the flag.
    """

    def __init__(self, option: str, known: Sequence[str], places: Places = nowhere) -> None:
        self.option, self.known, name = option, known, option.lstrip("-")
        hint = f"; did you mean --{name}?" if name in known else flag_hint(name, known, places)
        super().__init__(f"unknown flag {shown(option)}{hint or ' (--help lists all)'}")


def parse_command_line(argv: Sequence[str], flags: Mapping[str, Flag]) -> dict[str, object]:
    """Return the values of the given flags only; the last value of a flag, or of an entry of a mapping, wins.

    Raises:
        UsageError: unknown or misspelt flag, missing value, or a value that the flag does not take.
    """
    spoken, strangers = _parser("", {"": flags}, {}).parse_known_args(_normalized(underscored(argv), flags))
    if strangers:
        named = [word for word in strangers if word.startswith("-")]
        if not named:
            raise UsageError(f"unexpected word {shown(strangers[0])}: flags are given as --name=value")
        known = ["help", "version"] + [name for flag in flags.values() for name in (flag.name, *flag.aliases)]
        known += [name for flag in flags.values() for name in flag.negations]
        raise UnknownFlag(named[0].partition("=")[0], known)
    given: dict[str, object] = {}
    for name, words in vars(spoken).items():
        flag = flags[name]
        if words == []:  # `--x=` is the empty list
            raise UsageError(f"--{name} needs a value: {flag.elements or NOUNS[flag.kind]}")
        given[name] = parse_words(flag, words) if isinstance(words, list) else parse_text(flag, words)
    return given


def underscored(argv: Sequence[str]) -> list[str]:
    """Return the words with underscores for dashes inside names of flags: `--learning-rate` is valid too."""
    split = (word.partition("=") if word.startswith("--") else ("", word, "") for word in argv)
    return [re.sub(r"(?<=\w)-", "_", name) + equals + value for name, equals, value in split]


def changed_flags(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return `flag old -> new` for every flag of both mappings (as `Config.to_flat`) with different values."""
    pairs = {name: (before[name], after[name]) for name in after if name in before and before[name] != after[name]}
    return [f"{name} {words_of(old)} -> {words_of(new)}" for name, (old, new) in pairs.items()]


def word_of(argv: Sequence[str], name: str) -> str:
    """Return the value of a flag on a command line that may contain other errors."""
    flag, found = f"--{name}", ""
    argv = underscored(argv)
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        if word == flag:
            found = following
        elif word.startswith(f"{flag}="):
            found = word.removeprefix(f"{flag}=")
    return found


def negates(argv: Sequence[str], flag: Flag) -> bool:
    """Return whether a command line, which may contain errors, switches a flag off by name."""
    return any(word.removeprefix("--") in flag.negations for word in underscored(argv))


def leading_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the words before its first flag, and the rest."""
    first = next((place for place, word in enumerate(argv) if word.startswith("-")), len(argv))
    return list(argv[:first]), list(argv[first:])


def format_help(usage: str, groups: Groups, preset: Mapping[str, object]) -> str:
    """Return the help text: every flag with its meaning and the default, of the preset if given."""
    return _parser(usage, groups, preset).format_help()


def own_command(words: Sequence[str], path: Sequence[str] = ()) -> list[str]:
    """Return the command line of another process that runs `appo` with these words, wherever appo is installed.

    The process searches the folders of `path` for modules last.
    """
    # The working directory may hold modules with the names of ours.
    search = "import os, sys; sys.path += [p for p in sys.argv.pop(1).split(os.pathsep) if p not in sys.path]"
    program = f"{search}; from appo.algorithms.cli import main; sys.exit(main())"
    folders = os.pathsep.join([str(PACKAGE.parent), *filter(None, path)])
    return [sys.executable, "-P", "-c", program, folders, *words]


def wants_help(argv: Iterable[str]) -> bool:
    """Return whether the command line requests help, which comes before everything else."""
    return any(word in ("-h", "--help") for word in argv)


def print_and_exit(text: str) -> NoReturn:
    """Print and end the program with success, quietly even after the reader (`| head`) has gone."""
    say(text.rstrip("\n"))
    raise SystemExit(0)


def apart(*, as_json: bool) -> contextlib.AbstractContextManager[object]:
    """Send what code of environments prints to stderr, if stdout is to hold nothing but JSON."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def say(text: str) -> None:
    """Print a line on stdout; once the reader has gone or the disk is full, all output is dropped.

    The text cannot command a terminal, see `printable`. Characters that the encoding of stdout does not have become
    question marks.
    """
    text = printable(text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError):
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + "\n")
    flush_or_drop()


def complain(text: str) -> None:
    """Print text on stderr, escaped as by `say`; without a reader, the text is dropped."""
    with contextlib.suppress(OSError):
        sys.stderr.write(printable(text))


def require_working_folder() -> None:
    """Refuse to work in a removed or unreadable folder.

    Raises:
        UsageError: the current folder is gone, or its files cannot be opened.
    """
    try:
        folder = os.getcwd()
    except OSError as error:
        raise UsageError(f"the current folder is gone ({error.strerror}): cd to another one and start again") from None
    if not os.access(".", os.X_OK):
        raise UsageError(f"nothing in the current folder {shown(folder)} may be opened: cd to another one")


def open_closed_streams() -> None:
    """Open /dev/null for stdin, stdout and stderr if the caller has closed the stream, as daemons do.

    Otherwise the next opened file would take the descriptor, and receive all printed text.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                descriptor = os.open(os.devnull, os.O_RDWR)
                if descriptor != number:
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                setattr(sys, name, os.fdopen(number, mode))


def flush_or_drop() -> None:
    """Flush stdout and drop the rest after an error, about which the interpreter would complain at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with closing(os.open(os.devnull, os.O_WRONLY)) as devnull:
            os.dup2(devnull, sys.stdout.fileno())


def _parser(usage: str, groups: Groups, preset: Mapping[str, object]) -> _Parser:
    parser = _Parser(
        usage=usage or None,
        description="Booleans: --x or --x=True, --no_x or --x=False. Also: --help, --version.",
        formatter_class=partial(argparse.HelpFormatter, max_help_position=32, width=110),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for flag in flags.values():
            names = [f"--{name}" for name in (flag.name, *flag.aliases)]
            choices = "|".join(flag.choices) + ("; " if flag.choices else "")
            default = words_of(preset.get(flag.name, flag.default)) + (" by preset" if flag.name in preset else "")
            text = f"{flag.help} ({choices}default: {default})".replace("%", "%%")
            alone = "True" if flag.kind == "bool" else flag.alone
            nargs = "?" if alone is not None else "*" if flag.kind in LISTS else None
            action = "extend" if flag.kind == "dict" else "store"  # entries add up; the last value of an entry wins
            shown_as, own = METAVARS[flag.kind], flag.name
            group.add_argument(*names, dest=own, nargs=nargs, action=action, const=alone, metavar=shown_as, help=text)
    return parser


def words_of(value: object) -> str:
    """Return a value as a user would type it."""
    if isinstance(value, (tuple, list)):
        return ",".join(words_of(element) for element in value) or "empty"
    if isinstance(value, dict):
        return " ".join(_entries(value)) or "empty"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return "none" if value is None else shown(value) if value != "" else "empty"


def words_of_flag(name: str, value: object) -> list[str]:
    """Return the words of a command line that set a flag to a plain value, uncut."""
    if isinstance(value, dict):
        return [f"--{name}", *(_entries(value) or ["{}"])]
    return [f"--{name}={flag_text(value)}"]


def flag_text(value: object) -> str:
    """Return the text that a flag reads as a plain value, uncut."""
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, (tuple, list)):
        as_json = any(isinstance(element, str) and not PLAIN_WORD.fullmatch(element) for element in value)
        return json.dumps(value) if as_json else ",".join(map(flag_text, value))
    return value if isinstance(value, str) else words_of(value)


def _entries(mapping: Mapping[str, object]) -> list[str]:
    """Return words like key=value that a flag reads as a mapping, or JSON if a word would be read otherwise."""
    if not all(PLAIN_WORD.fullmatch(key) for key in mapping):
        return [json.dumps(mapping)]
    plain = {k for k, v in mapping.items() if isinstance(v, str) and v.isprintable() and parse_json_word(v) == v}
    return [f"{key}={value if key in plain else json.dumps(value)}" for key, value in mapping.items()]


def _normalized(argv: Sequence[str], flags: Mapping[str, Flag]) -> list[str]:
    """Turn `--no_x` into `--x=False`, and `--x -1e-3` into `--x=-1e-3`: argparse would read the number as a flag.

    `--no_x` of a flag of choices becomes the choice `Flag.negated`, and `--no_x=False` the default.
    """
    off = {f"--{name}": flag for flag in flags.values() for name in flag.negations}
    words: list[str] = []
    for word in argv:
        option, equals, value = word.partition("=")
        if option in off:
            try:
                flag, is_off = off[option], parse_bool(value if equals else "True")
                chosen = (flag.negated if is_off else flag.default) if flag.negated else not is_off
                words.append(f"--{flag.name}={chosen}")
            except ValueError:
                raise UsageError(f"{option} must be True or False, got {shown(value)}") from None
        elif re.match(r"-\.?\d", word) and words and words[-1].startswith("--") and "=" not in words[-1]:
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words
