"""Commit and changes of the user's code, from real repositories of git."""

import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from appo.algorithms.run.config import Config
from appo.algorithms.run.directory import code
from appo.algorithms.run.directory.code import CodeWatch, code_places, look
from appo.utils.errors import PACKAGE
from tests.patience import HANG_SECONDS, require_programs_in

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")

WHO = ("-c", "user.name=a", "-c", "user.email=a@b")


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *WHO, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def _plain_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the user's settings, nor a repository around the folder, nor a slow machine decide."""
    monkeypatch.setattr(code, "GIT_SECONDS", float(HANG_SECONDS))
    places = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    for name, value in (places | {"GIT_CONFIG_NOSYSTEM": "1"}).items():
        monkeypatch.setenv(name, value)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "my_env.py").write_text("SIZE = 1\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def kept(run: Path, *places: Path) -> list[dict[str, list[dict[str, str | None]]]]:
    """What the starts of a run have noted, after one more."""
    watch = CodeWatch(places)
    watch.keep(run)
    path = run / "code" / "starts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_what_is_committed_has_a_commit_and_no_diff(repository: Path, run: Path) -> None:
    ((start),) = kept(run, repository, repository)
    commit = git(repository, "rev-parse", "HEAD")
    assert start["repositories"] == [{"root": str(repository), "commit": commit, "diff": None}]
    assert start["time"] > 0


def test_a_diff_makes_the_files_from_the_commit(repository: Path, run: Path, tmp_path: Path) -> None:
    """Changed, staged and new files, those of folders included."""
    (repository / "my_env.py").write_text("SIZE = 2\n")
    (repository / "part").mkdir()
    (repository / "part" / "__init__.py").write_text("")
    (repository / "part" / "other.py").write_text("# ä\nWIDTH = 3\n")
    (repository / "notes.txt").write_text("no code\n")
    ((start),) = kept(run, repository / "part")
    ((found),) = start["repositories"]
    diff = run / "code" / str(found["diff"])
    again = tmp_path / "again"
    git(tmp_path, "clone", "-q", str(repository), str(again))
    git(again, "apply", str(diff))
    assert (again / "my_env.py").read_text() == "SIZE = 2\n"
    assert (again / "part" / "other.py").read_text() == "# ä\nWIDTH = 3\n"
    assert not (again / "notes.txt").exists()


def test_a_start_is_noted_when_the_code_has_changed(repository: Path, run: Path) -> None:
    assert len(kept(run, repository)) == len(kept(run, repository)) == 1
    (repository / "my_env.py").write_text("SIZE = 2\n")
    first, second = kept(run, repository)
    assert first["repositories"] != second["repositories"]
    git(repository, "commit", "-q", "-a", "-m", "second")
    assert [one["repositories"][0]["diff"] is None for one in kept(run, repository)] == [True, False, True]


def test_only_the_end_of_the_notes_of_starts_is_read(repository: Path, run: Path) -> None:
    notes = run / "code" / "starts.jsonl"
    assert len(kept(run, repository)) == 1
    line = notes.read_bytes()
    with notes.open("r+b") as file:  # far more than there is memory, none of it on disk
        file.seek(1 << 42)
        file.write(b"\n" + line)
    CodeWatch([repository]).keep(run)
    assert notes.stat().st_size == (1 << 42) + 1 + len(line)


def test_without_a_repository_nothing_is_noted(tmp_path: Path, run: Path) -> None:
    assert kept(run, tmp_path) == []
    assert not (run / "code").exists()


def test_a_repository_without_a_commit_is_its_files(tmp_path: Path, run: Path) -> None:
    (tmp_path / "a.py").write_text("A = 1\n")
    git(tmp_path, "init", "-q")
    ((start),) = kept(run, tmp_path)
    ((found),) = start["repositories"]
    assert found["commit"] is None
    assert "+A = 1" in (run / "code" / str(found["diff"])).read_text()


def test_programs_that_a_repository_names_are_not_started(repository: Path, tmp_path: Path) -> None:
    require_programs_in(tmp_path)
    mark, program = tmp_path / "mark", tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    (repository / ".gitattributes").write_text("*.py diff=own\n")
    (repository / "my_env.py").write_text("SIZE = 2\n")
    for name in ("core.fsmonitor", "core.pager", "diff.external", "diff.own.command", "diff.own.textconv"):
        git(repository, "config", name, str(program))
    (found,) = look([repository], os.environ)
    assert "+SIZE = 2" in found.diff
    assert not mark.exists()


def test_a_diff_that_is_too_large_is_left_out(repository: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "MOST_BYTES", 100)
    (repository / "my_env.py").write_text("SIZE = 2\n" * 100)
    ((start),) = kept(run, repository)
    ((found),) = start["repositories"]
    assert (found["diff"], str(found["left_out"]).startswith("a diff of ")) == (None, True)


def test_links_in_a_folder_from_elsewhere_are_not_followed(repository: Path, run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("")
    (run / "code").mkdir()
    (run / "code" / "starts.jsonl").symlink_to(other)
    kept(run, repository)
    assert other.read_text() == ""


def test_places_are_those_of_modules_that_flags_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("an_env", "a_network"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
        monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "alone.py").write_text("")
    flags = {"env": "an_env.part:Env", "encoder_custom": "a_network:Net", "callbacks": ["alone:One", "nowhere:Two"]}
    found = code_places(Config.from_flat(flags))
    assert found[0] == PACKAGE.resolve()
    assert {tmp_path / "an_env", tmp_path / "a_network", tmp_path} <= set(found)
    assert tmp_path not in code_places(Config.from_flat({"env": "CartPole-v1"}))


def test_git_has_the_environment_of_the_start_whatever_becomes_of_it_meanwhile(
    repository: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start sets and removes variables in another thread; to go through them then would fail."""
    begun, seen, call = threading.Event(), list[dict[str, str]](), subprocess.run

    def noting(*words: Any, env: dict[str, str], **rest: Any) -> Any:
        assert begun.wait(HANG_SECONDS)
        seen.append(env)
        return call(*words, env=env, **rest)

    monkeypatch.setattr(code.subprocess, "run", noting)
    watch = CodeWatch([repository])
    monkeypatch.setenv("APPO_SET_LATER", "1")
    begun.set()
    watch.keep(run)
    assert len(seen) == 4
    assert not any("APPO_SET_LATER" in one for one in seen)
