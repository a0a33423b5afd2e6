"""What must hold before any test runs."""

import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Examples are the same in every run, and none has a limit of time: a busy machine must not decide.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

# Whoever runs the suite in the background of a script makes it ignore Ctrl-C, and so every run it starts: the tests of
# Ctrl-C would wait for ever. A handler, unlike an ignored signal, is not handed on to a program that is started.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same on every machine: what only a GPU can show is in benchmarks/gpu_check.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Encoders divide images between threads, and tests of that say how many there are; two cores are soon oversubscribed.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Programs that tests start find the package and, as environments and algorithms of the user, modules of tests.
ROOT = Path(__file__).resolve().parents[1]
os.environ["PYTHONPATH"] = f"{ROOT}/src:{ROOT}"

# The key that marks runs as the user's own is one of the suite, not the one of whoever runs it. Processes that tests
# start inherit the place; a test that needs another one sets it.
_CONFIGURATION = tempfile.TemporaryDirectory(prefix="appo-tests-")
os.environ["XDG_CONFIG_HOME"] = _CONFIGURATION.name


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A place for configuration that cannot be written, whoever asks: it lies below a file."""
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "a-file"))


@pytest.fixture
def train_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., "subprocess.CompletedProcess[str]"]]:
    """`appo train` with these words, in `tmp_path` and in this process: a refusal needs no interpreter of its own."""
    from appo.algorithms.cli import run, run_command  # not before the settings above

    def train(*words: str) -> "subprocess.CompletedProcess[str]":
        capfd.readouterr()
        exit_code = run_command(lambda: run("train", words))
        return subprocess.CompletedProcess(words, exit_code, *capfd.readouterr())

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # a command appends the working directory
    yield train
    for path in tmp_path.glob("*.py"):  # modules of the test
        sys.modules.pop(path.stem, None)


@pytest.fixture(autouse=True)
def _folders_open_again() -> Iterator[None]:
    """Folders of runs that one test has closed to imports are those of code in another."""
    yield
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "_ClosedFolders"]


@pytest.fixture(autouse=True)
def _orphans_go_to_init() -> Iterator[None]:
    """After each test, this process adopts no orphans, although a command run by the test may have begun that.

    This process reaps no orphans, and thousands of zombies slow down every look at all processes.
    """
    yield
    from appo.algorithms.runtime.processes import prctl  # not before the settings above

    prctl.adopt_orphans(yes=False)


@pytest.fixture(autouse=True)
def _nothing_logs_to_streams_that_are_gone() -> Iterator[None]:
    """Handlers that a command of ours has set up in one test write to what that test has captured."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(before):
        if not type(handler).__module__.startswith("_pytest"):
            root.removeHandler(handler)
    root.setLevel(level)
