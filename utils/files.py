"""Files that the user names: written whole or not at all, and settings that are read without evaluating anything."""

import contextlib
import errno
import importlib
import json
import os
import secrets
import stat
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from appo.utils.directories import closing
from appo.utils.errors import ResourceError, UsageError
from appo.utils.run_folder import parse_mapping
from appo.utils.values import shown

SETTINGS_BYTES = 1 << 18
DEEPEST = 64  # lists and mappings within each other in a YAML file
"""Largest file of settings; YAML is read at some hundred kB a second."""


@contextlib.contextmanager
def replaced_when_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside a file that the user has named; at the end, the temporary file replaces the file.

    Raises:
        UsageError: the file cannot be written.
        ResourceError: the disk is full.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # Hidden, short enough for every file system, and with a name under which no link can wait.
        temporary = path.with_name(f".{path.stem[:40]}-{secrets.token_hex(8)}{path.suffix}")
        try:
            yield temporary
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):  # the first error is raised
                temporary.unlink()
    except OSError as error:
        kind = ResourceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else UsageError
        raise kind(f"cannot write {shown(str(path))}: {error.strerror or error}") from None


def read_mapping(path: Path) -> dict[str, object]:
    """Return the mapping in a JSON, TOML or YAML file of the user, by the suffix; without a known suffix, JSON.

    Raises:
        UsageError: the file is missing, unreadable, no plain file, too large, damaged or no mapping of names.
    """
    parsers: dict[str, Callable[[str], object]] = {".toml": tomllib.loads, ".yaml": _load_yaml, ".yml": _load_yaml}
    try:
        with closing(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)) as descriptor:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise _NoSettings("it is no plain file (a folder, pipe or device)")
            if found.st_size > SETTINGS_BYTES:
                raise _NoSettings(f"it is larger than {SETTINGS_BYTES >> 10} KiB, no settings are")
            content = os.fdopen(descriptor, "rb", closefd=False).read(SETTINGS_BYTES + 1)
        return parse_mapping(content, str(path), SETTINGS_BYTES, parsers.get(path.suffix.lower(), _load_json))
    except _NoSettings as error:
        raise UsageError(f"cannot use {path}: {error}") from None
    except (OSError, ValueError) as error:  # no file has a NUL in its name
        raise UsageError(f"cannot read {shown(str(path))}: {getattr(error, 'strerror', None) or error}") from None


class _NoSettings(Exception):
    """A file, or a part of its content, that settings never need."""


def _load_json(text: str) -> object:
    return json.loads(text, object_pairs_hook=_distinct)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if twice := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise ValueError(f"{shown(twice[0])} is there twice")
    return dict(pairs)


def _load_yaml(text: str) -> object:
    yaml = importlib.import_module("yaml")
    loader, depth = yaml.SafeLoader(text), 0
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            line = event.start_mark.line + 1
            if isinstance(event, yaml.AliasEvent):  # a few bytes of aliases of aliases stand for endless values
                raise _NoSettings(f"line {line} has the alias *{shown(event.anchor)}: write out what it stands for")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:  # the time to read it grows with the square of the depth
                raise _NoSettings(f"line {line} is nested more than {DEEPEST} times, no settings are")
        nodes = [root := loader.get_single_node()]
        while nodes:
            node = nodes.pop()
            if isinstance(node, yaml.MappingNode):
                named = [(key.value, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
                nodes += _distinct(named).values()
            elif isinstance(node, yaml.SequenceNode):
                nodes += node.value
        value: object = None if root is None else loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    return value
