"""The mark of trust, which separates the saved runs of this user from foreign runs. Foreign code is never run unasked.

A keyed hash in config.json covers every flag that could run, read, write or send something. Each start of a run writes
the hash. The key is in the user's configuration folder. A run without a valid mark is data: its weights can be played,
with environment and network of the user's own installation.
"""

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from appo.algorithms.run.algorithms import ALGORITHMS, DEFAULT, flag_table
from appo.algorithms.run.folder import LOCATION, MARK, MEASURED, flags_in
from appo.utils.checkpoint_files import Limit
from appo.utils.directories import closing
from appo.utils.errors import UsageError
from appo.utils.flags import Flag
from appo.utils.run_folder import RunFolder, write_json_atomic
from appo.utils.user_modules import keep_out_of
from appo.utils.values import shown

log = logging.getLogger(__name__)
KEY_BYTES = 32
CONTEXT = b"appo run 1\0"  # another key or another meaning of the mark gets another number
OF_STRANGERS = Limit(1 << 30, "--trust if you know where it comes from")
MOST_SHOWN = 6  # things in the line that lists what a run would use
LOOKED_AT = frozenset({"algo"})
"""Flags that have an effect wherever flags of a run are read."""
ANSWERS = LOOKED_AT | {"encoder_custom"}
"""Flags of a network that answers observations."""
PLAYED = ANSWERS | {"env", "env_kwargs"}
"""Flags of an episode."""
TRAINED = None
"""All flags."""


class NoKey(Exception):
    """The key is missing and cannot be made; the text has the reason."""


def key_path() -> Path:
    """Return the path of this user's key (NoKey: the user has no configuration folder)."""
    given = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        folder = Path(given) if os.path.isabs(given) else Path.home() / ".config"
    except RuntimeError:
        raise NoKey("there is no home folder, set XDG_CONFIG_HOME") from None
    return folder / "appo" / "key"


def read_key() -> bytes:
    """Return the key of this user (NoKey: the key is missing, or other users could have read or made the file)."""
    path = key_path()
    try:
        with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as descriptor:
            status, key = os.fstat(descriptor), os.read(descriptor, KEY_BYTES + 1)
    except OSError as error:
        raise NoKey(f"cannot read {shown(str(path))}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode) or len(key) != KEY_BYTES:
        raise NoKey(f"{shown(str(path))} is no key: remove it, another one is made")
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise NoKey(f"{shown(str(path))} can be read by others than you: chmod 600, or remove it")
    return key


def make_key() -> bytes:
    """Return the key of this user; make a missing one (NoKey: the key cannot be read or made)."""
    path = key_path()
    if not os.path.lexists(path):
        temporary = path.with_name(f".key-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with closing(
                os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            ) as descriptor:
                os.write(descriptor, secrets.token_bytes(KEY_BYTES))
                os.fsync(descriptor)
            with contextlib.suppress(FileExistsError):  # another run has made one in this moment
                os.link(temporary, path)
        except OSError as error:
            raise NoKey(f"cannot write {shown(str(path))}: {error.strerror}") from None
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
    return read_key()


def mark_of(flags: Mapping[str, object], key: bytes) -> str:
    """Return the mark of a run's flags. Numbers, which can do no harm, are not covered."""
    reaching = {name for name, flag in flag_table(DEFAULT).flags.items() if flag.reaches_out}
    covered = {
        name: value
        for name, value in flags.items()
        if name not in {*LOCATION, MARK, MEASURED}
        and value is not None
        and (name in reaching or not isinstance(value, bool | int | float))
    }
    text = json.dumps(covered, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, CONTEXT + text.encode(), hashlib.sha256).hexdigest()


def marked(flags: Mapping[str, object]) -> dict[str, object]:
    """Return the flags of a run with their mark. Without a key, log a line: later commands treat the run as foreign."""
    try:
        return {**flags, MARK: mark_of(flags, make_key())}
    except NoKey as error:
        log.info("no mark of yours on this run, later commands may ask for --trust: %s", error)
        return dict(flags)


def is_marked(content: Mapping[str, object]) -> bool:
    """Return whether this user wrote or trusted the mapping of a config.json, which is unchanged since."""
    mark = content.get(MARK)
    if not isinstance(mark, str) or not mark.isascii():
        return False
    try:
        return hmac.compare_digest(mark, mark_of(content, read_key()))
    except (NoKey, RecursionError):
        return False


@dataclass(frozen=True)
class Reading:
    """One reading of a run's config.json with the verdict on its trust; the file may be replaced later.

    Attributes:
        directory: directory of the run.
        content: content of the file; {}: no file.
        is_trusted: whether `--trust` is given, or the content has the mark of this user.
    """

    directory: Path
    content: Mapping[str, object]
    is_trusted: bool

    @classmethod
    def of(cls, directory: Path, *, trust: bool = False) -> Self:
        """Read config.json (UsageError: damaged)."""
        content = RunFolder(directory).read_config()
        return cls(directory, content, trust or is_marked(content))

    @property
    def flags(self) -> dict[str, object]:
        """Return the flags as stored; {}: no file."""
        return flags_in(self.content)

    @property
    def limit(self) -> Limit | None:
        """Return the size limit of checkpoints whose model is unknown; None: no limit."""
        return None if self.is_trusted else OF_STRANGERS

    def refusal(self, needed: Collection[str] | None, given: Collection[str] = ()) -> str:
        """Return the line that refuses the needed flags; empty: permitted.

        From now on no code is imported from below the folder of the run, whatever the answer.
        """
        keep_out_of(self.directory)
        if not (used := [] if self.is_trusted else uses(self.content, needed, given)):
            return ""
        more = f" and {len(used) - MOST_SHOWN} more" if len(used) > MOST_SHOWN else ""
        return (
            f"run {shown(self.directory.name)} has no mark of yours, or was changed since, and would use "
            f"{', '.join(used[:MOST_SHOWN])}{more}: --trust if you know where it comes from"
        )

    def permitted(
        self,
        needed: Collection[str] | None,
        *,
        given: Collection[str] = (),
        remember: bool = False,
        closed: Collection[Path] = (),
    ) -> dict[str, object]:
        """Return all flags, if the needed ones are permitted.

        Args:
            needed: names of used flags, such as `PLAYED`; `TRAINED`: all.
            given: names of flags that the user gives too, which need no trust.
            remember: whether to write a missing mark; a start of the run writes the mark anyway.
            closed: further folders, from below which no code is imported from now on.

        Raises:
            UsageError: the run needs trust; one line lists the flags that need trust.
        """
        keep_out_of(*closed)
        if refusal := self.refusal(needed, given):
            raise UsageError(refusal)
        if remember and self.flags and not is_marked(self.content):
            with_mark = marked({name: value for name, value in self.content.items() if name != MARK})
            try:
                write_json_atomic(RunFolder(self.directory).config, with_mark)
            except OSError as error:
                name, why = self.directory.name, error.strerror
                log.warning("run %s is trusted this once: cannot write its mark: %s", name, why)
        return self.flags


def uses(
    content: Mapping[str, object], needed: Collection[str] | None = TRAINED, given: Collection[str] = ()
) -> list[str]:
    """List, as flag=value, the flags of a run that could run, read, write or send something.

    Args:
        content: content of a config.json of any origin.
        needed: names of the flags that count; None: all.
        given: names of flags that do not count.
    """
    algo = content.get("algo", DEFAULT)
    is_ours = isinstance(algo, str) and algo in ALGORITHMS
    table = flag_table(str(algo) if is_ours else DEFAULT)
    found = [] if is_ours or "algo" in given else [_shown("algo", algo)]
    for word, value in content.items():
        name = table.aliases.get(word, word)
        flag = table.flags.get(name)
        skipped = name in {*given, *LOCATION, "algo"} or (needed is not None and name not in needed)
        if flag is not None and not skipped:
            found += _uses_of(flag, value, content)
    return found


def _uses_of(flag: Flag, value: object, content: Mapping[str, object]) -> list[str]:
    if flag.name == "env":
        module, colon, _ = value.rpartition(":") if isinstance(value, str) else ("", "", "")
        return [_shown("env", value)] if colon and module != "envpool" else []
    if flag.name in ("env_kwargs", "eval_env_kwargs") and isinstance(value, dict):
        if not value:
            return []
        # Only now: it imports gymnasium, which most commands do not need.
        from appo.envs.harmless import harmful_arguments

        names = harmful_arguments(str(content.get("env", "")), value)
        return [_shown(f"{flag.name} {shown(name)}", value[name]) for name in names]
    empty = flag.default if not isinstance(flag.default, tuple) else list(flag.default)
    return [_shown(flag.name, value)] if flag.reaches_out and value not in (empty, None, "", [], {}, False) else []


def _shown(name: str, value: object) -> str:
    return f"{name}={shown(value)}"
