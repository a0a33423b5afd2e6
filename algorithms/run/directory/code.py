"""The code that a run was trained with: commits and changes of the repositories that its modules come from.

Only repositories whose code runs anyway are examined: the configuration of a repository can make git start programs.
"""

import contextlib
import difflib
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from appo.algorithms.run.config import Config
from appo.utils.errors import PACKAGE
from appo.utils.run_folder import RunFolder, append_json_line, open_own, own_folder, replace_own

log = logging.getLogger(__name__)
NAMED_IN_WORKERS = ("algo", "encoder_custom", "policy_mapping", "callbacks", "input", "postprocess_inputs")
"""Flags with values `package.module:Name`, which worker processes look up."""
NAMED = ("env", *NAMED_IN_WORKERS, "custom_summaries")
"""All flags with such values."""
GIT_SECONDS = 5.0  # for one command, in a repository that may be huge
MOST_BYTES = 8 << 20  # of a diff that is kept


class Repository(NamedTuple):
    """A repository at the start of a run.

    Attributes:
        root: folder of the repository.
        commit: commit that is checked out.
        diff: diff from the commit to the files, with untracked Python files; empty: no change.
    """

    root: Path
    commit: str
    diff: str


def named_modules(config: Config) -> list[str]:
    """Return the modules that flags name, without the parts behind the first dot."""
    flat = config.to_flat()
    names = [name for value in map(flat.get, NAMED) for name in (value if isinstance(value, list) else [value])]
    return sorted({str(name).partition(":")[0].partition(".")[0] for name in names if ":" in str(name)})


def code_places(config: Config) -> list[Path]:
    """Return the folders of imported code: the package, the calling script, and the modules that flags name."""
    files = [getattr(sys.modules.get("__main__"), "__file__", None)]
    for module in named_modules(config):
        with contextlib.suppress(ImportError, ValueError):  # whoever imports it says what is wrong
            spec = importlib.util.find_spec(module)
            files += [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
        here = Path(f"{module}.py")
        files += [str(here)] if here.is_file() else []
    found = [Path(file).resolve() for file in files if file and os.path.exists(file)]
    return [PACKAGE.resolve(), *(path if path.is_dir() else path.parent for path in found)]


def look(places: Iterable[Path], environment: Mapping[str, str]) -> list[Repository]:
    """Return the repositories that contain these folders; empty if git is missing or answers too late.

    Args:
        places: folders of code.
        environment: environment variables for git, copied before the start changes them.
    """
    found: dict[Path, Repository] = {}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git = partial(_git, environment)
        for place in places:
            root = git(place, "rev-parse", "--show-toplevel").strip()
            if root and Path(root) not in found:
                commit = git(place, "rev-parse", "--verify", "--quiet", "HEAD").strip()
                changed = git(place, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD") if commit else ""
                names = git(Path(root), "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py").split("\0")
                found[Path(root)] = Repository(Path(root), commit, changed + "".join(_new_files(Path(root), names)))
    return list(found.values())


def _git(environment: Mapping[str, str], place: Path, *words: str) -> str:
    """Return the output of git in a folder; empty if git fails or is missing."""
    if (git := shutil.which("git")) is None:
        return ""
    done = subprocess.run(  # noqa: S603 (no shell; the words are ours)
        [git, "-C", str(place), "-c", "core.fsmonitor=false", "-c", "core.quotePath=false", *words],
        env={**environment, "GIT_OPTIONAL_LOCKS": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=GIT_SECONDS,
        check=False,
    )
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def _new_files(root: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield diffs that create the untracked Python files, in the form of `git apply`."""
    for name in names:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if not name or (root / name).is_symlink() or (root / name).stat().st_size > MOST_BYTES:
                continue
            lines = (root / name).read_text(encoding="utf-8").splitlines(keepends=True)
            if lines and lines[-1].endswith("\n"):
                yield f"diff --git a/{name} b/{name}\nnew file mode 100644\n"
                yield from difflib.unified_diff([], lines, "/dev/null", f"b/{name}")


class CodeWatch:
    """Examines the code in a thread while the start waits for other things."""

    def __init__(self, places: Sequence[Path]) -> None:
        self._found: list[Repository] = []
        environment = dict(os.environ)
        self._thread = threading.Thread(target=self._look, args=(places, environment), name="code watch", daemon=True)
        self._thread.start()

    def keep(self, directory: Path) -> None:
        """Write the code into the folder of the run, unless the last start has written the same.

        `code/starts.jsonl` has the time and, for every repository, root, commit and name of the diff's file. A failure
        to write costs the run nothing.
        """
        self._thread.join(GIT_SECONDS)
        found = [] if self._thread.is_alive() else self._found
        folder = RunFolder(directory)
        try:
            if any(path.is_symlink() for path in folder.code.glob("*")):
                return  # the folder came from elsewhere, and they may lead anywhere
            repositories = [self._kept(folder, one) for one in found]
            if repositories and repositories != _last(folder):
                append_json_line(folder.code_starts, {"time": time.time(), "repositories": repositories})
        except OSError as error:
            log.warning("commit and changes of the code are not kept: %s", error.strerror)

    def _look(self, places: Sequence[Path], environment: Mapping[str, str]) -> None:
        self._found = look(places, environment)

    @staticmethod
    def _kept(folder: RunFolder, one: Repository) -> dict[str, str | None]:
        """Write the diff of a repository under the name of its hash; return the entry of the repository."""
        with own_folder(folder.code, make=True):
            pass  # it is there from now on, also where nothing is written into it but the note of a start
        noted: dict[str, str | None] = {"root": str(one.root), "commit": one.commit or None, "diff": None}
        content = one.diff.encode(errors="replace")
        if len(content) > MOST_BYTES:
            return noted | {"left_out": f"a diff of {len(content)} bytes"}
        if content:
            name = noted["diff"] = f"{hashlib.sha256(content).hexdigest()[:16]}.diff"
            replace_own(folder.code / name, content)
        return noted


def _last(folder: RunFolder) -> Any:
    """Return the repositories of the last recorded start; None if not readable."""
    try:
        with open_own(folder.code_starts) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_BYTES))
            return json.loads(file.read().splitlines()[-1])["repositories"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, IndexError):
        return None
