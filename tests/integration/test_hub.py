"""Bundles for the Hugging Face Hub, with a module that takes the place of its library."""

import importlib.machinery
import json
import math
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from appo import load_policy
from appo.algorithms import cli
from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.playing.saved_run import SavedRun, load_run
from appo.algorithms.tools.flags import HubConfig
from appo.algorithms.tools.hub import ALLOWED, make_bundle, model_card, names_in
from appo.utils.errors import CheckpointError, ResourceError, UsageError
from appo.utils.run_folder import RunFolder
from tests.integration.enjoying import copied, enjoyed


class FakeHub:
    """One repository in a folder, and all that was asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, []
        self.fails = False

    def create_repo(self, *, repo_id: str, exist_ok: bool, private: bool) -> None:
        if self.fails:
            raise ConnectionError("no network")
        self.asked.append(("create", repo_id, private))

    def upload_folder(
        self,
        *,
        repo_id: str,
        folder_path: str,
        allow_patterns: list[str],
        delete_patterns: list[str],
        commit_message: str,
    ) -> None:
        for name in names_in(self.folder):
            if name not in allow_patterns and any(fnmatchcase(name, pattern) for pattern in delete_patterns):
                (self.folder / name).unlink()
        for name in allow_patterns:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(folder_path, name), self.folder / name)

    def list_repo_files(self, repo_id: str) -> list[str]:
        return names_in(self.folder)

    def hf_hub_download(self, repo_id: str, filename: str, *, local_dir: str) -> str:
        self.asked.append(("download", filename))
        target = Path(local_dir, filename)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.folder / filename, target)
        return str(target)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "remote")
    fake.folder.mkdir()
    module: Any = ModuleType("huggingface_hub")
    module.__spec__ = importlib.machinery.ModuleSpec("huggingface_hub", None)
    module.HfApi, module.hf_hub_download = lambda: fake, fake.hf_hub_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return fake


def test_what_is_uploaded_comes_back_and_plays(
    runs: Path, tmp_path: Path, fake: FakeHub, capfd: pytest.CaptureFixture[str]
) -> None:
    video = tmp_path / "x.gif"
    video.write_bytes(b"GIF89a")
    old = fake.folder / "checkpoint_p0" / "ckpt_000009000000" / "state.json"  # of an earlier upload
    old.parent.mkdir(parents=True)
    old.write_text("{}")
    assert cli.run("hub", [str(runs / "cartpole"), "--repo=me/cart", f"--video={video}", "--private"]) == 0
    assert fake.asked == [("create", "me/cart", True)]
    names = names_in(fake.folder)
    assert {Path(name).name for name in names} == {
        "README.md", "config.json", "replay.gif", "MANIFEST.json", "model.safetensors", "optimizer.safetensors",
        "state.json",
    }  # fmt: skip
    kept = json.loads((fake.folder / "config.json").read_text())
    assert not {"train_dir", "input", "output"} & kept.keys()

    for stranger in ("evil.pkl", "setup.py", "checkpoint_p0/ckpt_000000000001/model.pt", ".gitattributes"):
        (fake.folder / stranger).parent.mkdir(parents=True, exist_ok=True)
        (fake.folder / stranger).write_bytes(b"\x80\x04.")
    fake.asked.clear()
    capfd.readouterr()
    assert cli.run("hub", ["--download=me/cart", f"--train_dir={tmp_path}"]) == 0
    assert [name for _, name in fake.asked] == names
    printed = capfd.readouterr().out
    assert "left out  evil.pkl\n" in printed
    assert printed.endswith("cart: a policy of CartPole-v1\n")
    assert sorted(path.name for path in (tmp_path / "cart").iterdir()) == [
        "README.md", "checkpoint_p0", "config.json", "replay.gif",
    ]  # fmt: skip
    here, there = load_policy(runs / "cartpole").get_weights(), load_policy(tmp_path / "cart").get_weights()
    assert all((here[name] == there[name]).all() for name in here)
    assert enjoyed(capfd, tmp_path, "--experiment=cart", "--max_num_episodes=1")["num_episodes"] == 1
    with pytest.raises(UsageError, match="already: give another --experiment"):
        cli.run("hub", ["--download=me/cart", f"--train_dir={tmp_path}"])


def link_to_file(target: Path, elsewhere: Path) -> None:
    (elsewhere / "secret").write_text("{}")
    target.symlink_to(elsewhere / "secret")


def link_to_folder(target: Path, elsewhere: Path) -> None:
    (elsewhere / target.name).write_text("{}")
    target.parent.rmdir()
    target.parent.symlink_to(elsewhere)


def pipe(target: Path, elsewhere: Path) -> None:
    os.mkfifo(target)


def nothing(target: Path, elsewhere: Path) -> None:
    """As a library that puts files elsewhere."""


def larger(target: Path, elsewhere: Path) -> None:
    target.touch()
    os.truncate(target, (4 << 30) + 1)


LEFT: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "a link": (link_to_file, "{name} is a link, and no link is followed here"),
    "in a link": (link_to_folder, "{folder} is a link, and no link is followed here"),
    "a pipe": (pipe, "{name} is no plain file"),
    "nothing": (nothing, "No such file or directory"),
    "too large": (larger, "it is too large"),
}


@pytest.mark.parametrize("name", ["config.json", "replay.mp4", "checkpoint_p0/ckpt_000000000001/state.json"])
@pytest.mark.parametrize(("leave", "said"), LEFT.values(), ids=LEFT)
def test_what_the_library_leaves_that_is_no_plain_file_is_refused(
    tmp_path: Path, fake: FakeHub, monkeypatch: pytest.MonkeyPatch, leave: Any, said: str, name: str
) -> None:
    elsewhere, folder = tmp_path / "elsewhere", Path(name).parent.name or "fetched"
    elsewhere.mkdir()
    for file in ("config.json", name):
        (fake.folder / file).parent.mkdir(parents=True, exist_ok=True)
        (fake.folder / file).write_text("{}")
    good = fake.hf_hub_download

    def download(repo_id: str, filename: str, *, local_dir: str) -> str:
        if filename != name:
            return good(repo_id, filename, local_dir=local_dir)
        target = Path(local_dir, filename)
        if leave is link_to_folder and target.parent.name == "fetched" and target.parent.exists():
            shutil.rmtree(target.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        leave(target, elsewhere)
        return str(target)

    monkeypatch.setattr(sys.modules["huggingface_hub"], "hf_hub_download", download)
    with pytest.raises(UsageError) as refused:
        cli.run("hub", ["--download=me/cart", f"--train_dir={tmp_path / 'runs'}"])
    why = said.format(name=Path(name).name, folder=folder)
    assert str(refused.value) == f"{name} is no plain file of at most 4 GiB: {why}"
    assert os.listdir(tmp_path / "runs") == []


def test_a_dry_run_needs_no_library_and_touches_nothing(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert cli.run("hub", [str(runs / "memory"), "--repo=me/memory", "--dry_run"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[-1].rpartition("/")[2] for line in lines[:-1]] == [
        "README.md", "MANIFEST.json", "model.safetensors", "optimizer.safetensors", "state.json", "config.json",
    ]  # fmt: skip
    assert lines[-1] == "dry run: nothing is uploaded to me/memory"
    assert cli.run("hub", [str(runs / "memory"), f"--output={tmp_path / 'kept'}", "--dry_run"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == f"dry run: nothing is uploaded, nor kept in {tmp_path / 'kept'}"
    assert list(tmp_path.iterdir()) == []


def test_the_card_can_be_read_and_names_nothing_private(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "host-of-mine")  # the real one may be a word of the card
    make_bundle(HubConfig(run=str(runs / "windowed"), repo="me/windowed"), tmp_path / "bundle")
    text = (tmp_path / "bundle" / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    metadata = yaml.safe_load(front)
    assert metadata["library_name"] == "appo"
    (result,) = metadata["model-index"][0]["results"]
    assert result["dataset"]["name"] == "tests.integration.enjoying:Windowed"
    assert result["metrics"][0]["type"] == "mean_reward"
    assert 'policy = load_policy("windowed")' in body
    assert "# tests.integration.enjoying:Windowed, learned by APPO" in body
    assert "Its own code is not part of this repository: `tests.integration.enjoying:Windowed`" in body
    assert "--train_for_env_steps=600" in body
    assert "--hidden_size=512" in body  # its default, but a kind of observation may have another one
    for private in (str(runs), str(tmp_path), socket.gethostname()):
        texts = [path for path in (tmp_path / "bundle").rglob("*") if path.suffix in (".md", ".json")]
        assert len(texts) == 4
        # As a word: numbers are kept as letters too, which spell any short name sooner or later.
        word = re.compile(rf"(?<![\w+/]){re.escape(private)}(?![\w+])")
        assert [path for path in texts if word.search(path.read_text())] == []


def test_the_card_of_a_run_from_datasets_claims_no_return(runs: Path) -> None:
    run = load_run(RunFolder(runs / "windowed"), EvaluationConfig())
    state = json.loads(run.files["state.json"])
    state["progress"]["windows"]["reward"] = []
    run = run._replace(
        config=replace(run.config, env=replace(run.config.env, env="")),
        files={**run.files, "state.json": json.dumps(state).encode()},
    )
    assert_without_returns(run)
    state["progress"]["windows"]["reward"] = [math.nan, math.inf]
    assert_without_returns(run._replace(files={**run.files, "state.json": json.dumps(state).encode()}))


def assert_without_returns(run: SavedRun) -> None:
    _, front, body = model_card(run, HubConfig(run="windowed")).split("---\n", 2)
    assert "model-index" not in yaml.safe_load(front)
    assert "| not measured | |" in body
    assert "appo enjoy --experiment=windowed --env=ID\n" in body
    assert 'load_policy("windowed", env=ID)' in body


def test_a_flag_that_names_a_folder_is_refused(runs: Path, tmp_path: Path) -> None:
    flags = {"env_kwargs": {"file": "/home/somebody/levels.json"}}
    run = copied(runs, "counter", tmp_path, "/600", config=flags)
    with pytest.raises(UsageError, match=r"would give away .*/home/somebody/levels\.json: change that flag"):
        make_bundle(HubConfig(run=str(run)), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_what_fails_leaves_no_folder_in_the_way(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = HubConfig(run=str(runs / "counter"), video=str(tmp_path / "x.gif"))
    with pytest.raises(UsageError, match=r"^--video=.*x\.gif: there is no such file$"):
        make_bundle(config, tmp_path / "bundle")
    (tmp_path / "x.gif").write_bytes(b"GIF89a")

    for error, kind in ((OSError(28, "No space left"), UsageError), (KeyboardInterrupt(), KeyboardInterrupt)):
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "copyfile", Mock(side_effect=error))
            with pytest.raises(kind):
                make_bundle(config, tmp_path / "bundle")
        assert not (tmp_path / "bundle").exists()
    make_bundle(config, tmp_path / "bundle")
    with pytest.raises(UsageError, match="File exists"):
        make_bundle(config, tmp_path / "bundle")
    assert (tmp_path / "bundle" / "replay.gif").read_bytes() == b"GIF89a"


def test_a_repository_that_lies_becomes_no_run(runs: Path, tmp_path: Path, fake: FakeHub) -> None:
    make_bundle(HubConfig(run=str(runs / "counter")), tmp_path / "bundle")
    shutil.copytree(tmp_path / "bundle", fake.folder, dirs_exist_ok=True)
    (model,) = fake.folder.rglob("model.safetensors")
    model.write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(CheckpointError, match="none of 1 checkpoints can be used"):
        cli.run("hub", ["--download=me/liar", f"--train_dir={tmp_path}"])
    (fake.folder / "config.json").write_text('{"no_such_flag": 1}')
    with pytest.raises(UsageError, match="unknown flag no_such_flag"):
        cli.run("hub", ["--download=me/liar", f"--train_dir={tmp_path}"])
    (fake.folder / "config.json").unlink()
    with pytest.raises(UsageError, match=r"holds no config\.json: it is no policy"):
        cli.run("hub", ["--download=me/liar", f"--train_dir={tmp_path}"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "remote"]


def test_a_folder_that_cannot_be_made_is_refused_before_the_hub_is_asked(tmp_path: Path, fake: FakeHub) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is not a folder"):
        cli.run("hub", ["--download=me/cart", f"--train_dir={tmp_path / 'file'}"])
    assert fake.asked == []
    (fake.folder / "config.json").touch()
    with pytest.raises(ResourceError, match="File name too long"):
        cli.run("hub", ["--download=me/cart", f"--train_dir={tmp_path / ('x' * 300)}"])


def test_a_hub_that_cannot_be_reached(runs: Path, fake: FakeHub) -> None:
    fake.fails = True
    with pytest.raises(ResourceError, match="the Hub: ConnectionError: no network"):
        cli.run("hub", [str(runs / "counter"), "--repo=me/x"])


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("README.md", True),
        ("checkpoint_p0/ckpt_000000000600/state.json", True),
        ("checkpoint_p0/ckpt_000000000600/../../state.json", False),
        ("../README.md", False),
        ("model.safetensors", False),
        ("checkpoint_p0/ckpt_000000000600/model.pt", False),
        ("replay.mp4.sh", False),
        ("README.md\n", False),
    ],
)
def test_names_that_travel(name: str, allowed: bool) -> None:
    assert bool(ALLOWED.fullmatch(name)) == allowed


UPLOADING = [
    "--repo=d/e",
    "--output=f",
    "--trust",
    "--policy_index=1",
    "--load_checkpoint_kind=best",
    "--video=x.gif",
    "--private",
]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs either a run to upload or --download"),
        (["a", "--download=b/c"], "needs either a run to upload or --download"),
        (["a"], "needs --repo=USER/NAME, --output=FOLDER or --dry_run"),
        (["a", "--repo=../c"], r"--repo=\.\./c is no name of a repository"),
        (["a", "--dry_run", "--video=x.exe"], r"the name must end in \.mp4 or \.gif"),
        *((["--download=b/c", word], f"^{word.partition('=')[0]} is for uploads: leave it out$") for word in UPLOADING),
        (["a", "--dry_run", "--private"], "^--private is for a repository: give --repo=USER/NAME$"),
        (["a", "--dry_run", "--experiment=b"], "^--experiment is for downloads: leave it out$"),
    ],
)
def test_wrong_words(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cli.parse("hub", words)
