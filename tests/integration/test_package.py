"""The wheel: built, installed without the repository in reach, and used from a directory full of bad names."""

import json
import shutil
import sys
import sysconfig
import zipfile
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.promises import check_promises, train_toy
from tests.integration.elsewhere import OURS, run

ROOT = Path(__file__).parents[2]
FOLDERS = ("algorithms", "envs", "utils")
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "src", "tests", "benchmarks", *FOLDERS)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, as building leaves its traces in the source tree."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", source / "dist", source, cwd=source)
    (wheel,) = (source / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def binaries(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment that has the wheel, and after it the dependencies of this environment."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home.parent)
    (packages,) = home.glob("lib/python*/site-packages")
    # A path file names a folder whose own path files are not read: an editable install there stays out of sight.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    offline = ("--no-deps", "--no-index", "--quiet")
    run(sys.executable, "-m", "pip", f"--python={home / 'bin/python'}", "install", *offline, wheel, cwd=home.parent)
    return home / "bin"


def test_the_wheel_holds_one_typed_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"appo"}
    assert {"appo/py.typed", "appo/utils/synonyms.toml"} < set(names)
    own = {f"appo/{path.name}" for path in (ROOT / "src/appo").glob("*.py")}
    below = {f"appo/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == own | below


def test_the_console_script_explains_itself(binaries: Path, tmp_path: Path) -> None:
    printed = run(binaries / "appo", "--help", cwd=tmp_path)
    assert printed.startswith("usage: appo COMMAND")
    assert "  train " in printed
    assert "  enjoy " in printed
    assert "--learning_rate" in run(binaries / "appo", "train", "--help", cwd=tmp_path)
    assert run(binaries / "appo", "--version", cwd=tmp_path) == "appo 0.1.0\n"


def test_the_installed_packages_are_used(binaries: Path, tmp_path: Path) -> None:
    code = "import appo.algorithms, appo.envs, appo.utils as u; print(appo.__file__, u.__file__, sep='\\n')"
    for line in run(binaries / "python", "-c", code, cwd=tmp_path).splitlines():
        assert Path(line).is_relative_to(binaries.parent)


@pytest.mark.parametrize("inference", [pytest.param("local", marks=pytest.mark.slow), "central"])
def test_two_updates_beside_a_strangers_modules(binaries: Path, tmp_path: Path, inference: str) -> None:
    for name in FOLDERS:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported from the working directory')\n")
    workers = (f"--inference={inference}", "--num_workers=1", "--num_envs_per_worker=4")
    two_updates = ("--rollout=16", "--batch_size=64", "--num_batches_per_iteration=1", "--ppo_epochs=1")
    budget = ("--train_for_env_steps=128", "--seed=1", "--experiment=first")
    run(binaries / "appo", "train", "--env=CartPole-v1", *workers, *two_updates, *budget, cwd=tmp_path)
    status = json.loads((tmp_path / "train_dir/first/status.json").read_text())
    assert status["state"] == "finished"
    assert status["totals"]["updates"] >= 2
    (checkpoint,) = (tmp_path / "train_dir/first/checkpoint_p0").glob("ckpt_*")
    assert {path.name for path in checkpoint.iterdir()} == {
        "MANIFEST.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_toy_keeps_all_promises_without_the_repository(
    binaries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FOLDERS:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported from the working directory')\n")
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    program = (str(binaries / "appo"), "train")
    check_promises(partial(train_toy, tmp_path, seconds=600.0, program=program, cwd=tmp_path), kills=5)
