"""Settings that the user names: of any file that is none, one line comes at once."""

import errno
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from appo.algorithms import cli
from appo.utils.errors import ResourceError, UsageError
from appo.utils.files import SETTINGS_BYTES, read_mapping, replaced_when_whole

AT_ONCE = 60.0
"""Seconds in which every case is refused, on a machine however busy; without bounds they take years."""


def bomb(levels: int, width: int) -> str:
    lines = ["env: CartPole-v1", "env_kwargs:", f"  v0: &v0 [{', '.join(['x'] * width)}]"]
    lines += [f"  v{n}: &v{n} [{', '.join([f'*v{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines)


def merging(levels: int) -> str:
    return "\n".join(["v0: &v0 {a: 1}", *(f"v{n}: &v{n} {{<<: [*v{n - 1}, *v{n - 1}]}}" for n in range(1, levels))])


ALIAS = "cannot use {path}: line {line} has the alias *{name}: write out what it stands for"
YAML: dict[str, tuple[str, str]] = {
    "aliases of aliases": (bomb(9, 9), ALIAS.format(path="{path}", line=4, name="v0")),
    "more of them": (bomb(40, 2), ALIAS.format(path="{path}", line=4, name="v0")),
    "merge keys": (merging(28), ALIAS.format(path="{path}", line=2, name="v0")),
    "one merge key": ("a: &k {gamma: 0.5}\nb:\n  <<: *k", ALIAS.format(path="{path}", line=3, name="k")),
    "in a list": ("callbacks: &c [a]\ncustom: *c", ALIAS.format(path="{path}", line=2, name="c")),
    "of itself": ("env_kwargs: &k\n  a: *k", ALIAS.format(path="{path}", line=2, name="k")),
    "as a key": ("a: &k b\n*k : c", ALIAS.format(path="{path}", line=2, name="k")),
    "of nothing": ("a: *k", ALIAS.format(path="{path}", line=1, name="k")),
}


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, ResourceError), (errno.EROFS, UsageError)])
def test_a_full_disk_is_no_wrong_name(tmp_path: Path, number: int, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=rf"^cannot write .*x: {os.strerror(number)}$"), replaced_when_whole(tmp_path / "x"):
        raise OSError(number, os.strerror(number))


@pytest.mark.parametrize(("text", "said"), YAML.values(), ids=YAML)
@pytest.mark.parametrize("name", ["flags.yaml", "flags.YML"])
def test_aliases_are_refused(tmp_path: Path, text: str, said: str, name: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    began = time.monotonic()
    with pytest.raises(UsageError) as refused:
        read_mapping(path)
    assert str(refused.value) == said.replace("{path}", str(path))
    assert time.monotonic() - began < AT_ONCE


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.json", '{"learning": {"gamma": 0.9, "gamma": 0.99}}'),
        ("x.yaml", "gamma: 0.9\nrollout: 8\ngamma: 0.99"),
        ("x.yaml", "learning: [{gamma: 0.9, rollout: 8, gamma: 0.99}]"),
    ],
)
def test_a_name_twice_is_refused(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=rf"{name} is damaged: gamma is there twice$"):
        read_mapping(tmp_path / name)


def test_deep_yaml_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("gamma:\n  " + "[" * 60_000)
    began = time.monotonic()
    with pytest.raises(UsageError, match=r"x\.yaml: line 2 is nested more than 64 times, no settings are$"):
        read_mapping(tmp_path / "x.yaml")
    assert time.monotonic() - began < AT_ONCE


def test_anchors_alone_and_merged_mappings_are_read(tmp_path: Path) -> None:
    (path := tmp_path / "x.yaml").write_text(
        "env: &e CartPole-v1\nlearning:\n  <<: {gamma: 0.5}\n  rollout: 8\nb: '*e'"
    )
    assert read_mapping(path) == {"env": "CartPole-v1", "learning": {"gamma": 0.5, "rollout": 8}, "b": "*e"}


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_PATH)  # a path has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def make_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


NO_FILE = "cannot use {path}: it is no plain file (a folder, pipe or device)"
LARGE = "cannot use {path}: it is larger than 256 KiB, no settings are"
NO_FILES: dict[str, tuple[Any, str]] = {
    "pipe": (make_pipe, NO_FILE),
    "folder": (Path.mkdir, NO_FILE),
    "socket": (make_socket, "cannot read {path}: No such device or address"),
    "device": (lambda path: path.symlink_to("/dev/zero"), NO_FILE),
    "terminal": (lambda path: path.symlink_to("/dev/ptmx"), NO_FILE),
    "too large": (lambda path: path.write_bytes(b" " * (SETTINGS_BYTES + 1)), LARGE),
    "sparse": (make_sparse, LARGE),
}


@pytest.mark.parametrize("suffix", ["", ".json", ".yaml", ".toml"])
@pytest.mark.parametrize(("make", "said"), NO_FILES.values(), ids=NO_FILES)
def test_what_is_no_file_of_settings_is_not_waited_on(tmp_path: Path, make: Any, said: str, suffix: str) -> None:
    make(path := tmp_path / f"x{suffix}")
    with pytest.raises(UsageError) as refused:
        read_mapping(path)
    assert str(refused.value) == said.replace("{path}", str(path))


@pytest.mark.parametrize("command", ["train", "doctor"])
@pytest.mark.parametrize("case", ["pipe", "bomb"])
def test_a_command_ends_with_one_line(
    tmp_path: Path, command: str, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flags.yaml"
    if case == "pipe":
        os.mkfifo(path)
    else:
        path.write_text(bomb(9, 9))
    words = [f"--config={path}", "--env=CartPole-v1"]
    assert cli.run_command(lambda: cli.run(command, words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: cannot use {path}: ")
