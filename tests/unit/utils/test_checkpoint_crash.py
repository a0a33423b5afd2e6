"""What is left when saving a checkpoint is killed, fails or runs out of disk at any of its points."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from appo.utils import failpoints
from appo.utils.checkpoint_files import checkpoint_name, clean_temporaries, load, save
from appo.utils.errors import ResourceError
from appo.utils.failpoints import FailpointError
from tests.patience import HANG_SECONDS
from tests.unit.utils.test_checkpoint_files import contents, save_step, temporaries

ROOT = Path(__file__).parents[3]
PLACES = ("open", "write", "fsync", "manifest", "dirsync", "rename", "parentsync", "prune")


@pytest.fixture(autouse=True)
def _disarm():
    yield
    failpoints.arm("")


CHILD = """
import sys
from pathlib import Path
from appo.utils.checkpoint_files import prune, save
parent, name, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
save(parent, name, {"model.safetensors": bytes([step]) * 2_200_000, "state.json": b'{"step": %d}' % step})
print("saved", flush=True)
prune(parent, 1)
"""
WITH_SMALL_FILES_ONLY = """
import resource
from appo.utils.errors import ResourceError
resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, -1))
try:
    exec(CHILD)
except ResourceError as error:
    print(error)
    raise SystemExit(error.exit_code)
"""


FORKS = """
import json, os, signal, sys, traceback
from appo.utils import checkpoint_files, failpoints

def run_child(code, failpoint, arguments, printed):
    for descriptor, file in enumerate(printed, start=1):
        os.dup2(file, descriptor)
    signal.alarm(int(sys.argv[2]))
    failpoints.arm(failpoint)
    sys.argv[1:] = arguments
    try:
        exec(code, {})
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)

code = sys.argv[1]
for line in sys.stdin:
    printed = [os.memfd_create("stdout"), os.memfd_create("stderr")]
    child = os.fork()
    if child == 0:
        run_child(code, *json.loads(line), printed)
    _, status = os.waitpid(child, 0)
    texts = [os.pread(file, 1 << 20, 0).decode() for file in printed]
    for file in printed:
        os.close(file)
    print(json.dumps([os.waitstatus_to_exitcode(status), *texts]), flush=True)
"""


class Ended(NamedTuple):
    """What is known of a process that has ended, or was killed."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def killed_at() -> Iterator[Callable[[str, Path, str, int], Ended]]:
    """Runs `CHILD` with an armed failpoint, each time in a process of its own: a fork of a single interpreter."""
    command = [sys.executable, "-c", FORKS, CHILD, str(HANG_SECONDS)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as forks:

        def killed(failpoint: str, parent: Path, name: str, step: int) -> Ended:
            print(json.dumps([failpoint, [str(parent), name, str(step)]]), file=forks.stdin, flush=True)
            return Ended(*json.loads(forks.stdout.readline()))

        yield killed


@pytest.mark.parametrize("place", PLACES)
def test_kill_at_every_point_of_saving_leaves_the_newest_or_the_previous(tmp_path, killed_at, place):
    for passage in range(1, 50):
        parent = tmp_path / str(passage)
        save_step(parent, 1)
        child = killed_at(f"ckpt.{place}:kill9@{passage}", parent, checkpoint_name(2), 2)
        loaded = load(parent)
        assert loaded is not None
        step = loaded.found.step
        assert loaded.files == contents(step)
        assert loaded.found.damaged == ()
        assert step == 2 if "saved" in child.stdout else step in (1, 2)
        clean_temporaries(parent)
        assert temporaries(parent) == []
        save_step(parent, 3)  # the next run goes on
        if child.returncode == 0:
            assert passage > 1, f"ckpt.{place} was never passed"
            return
        assert child.returncode == -signal.SIGKILL, child.stderr
    pytest.fail("the save never ended")


@pytest.mark.parametrize("place", PLACES[:-1])
def test_kill_while_a_checkpoint_of_the_same_name_is_replaced_leaves_the_old_or_the_new(tmp_path, killed_at, place):
    for passage in range(1, 50):
        parent = tmp_path / str(passage)
        save(parent, checkpoint_name(7), contents(1))
        child = killed_at(f"ckpt.{place}:kill9@{passage}", parent, checkpoint_name(7), 2)
        loaded = load(parent)
        assert loaded is not None
        assert loaded.files in ([contents(2)] if "saved" in child.stdout else [contents(1), contents(2)])
        if child.returncode == 0:
            assert temporaries(parent) == []
            return
        assert child.returncode == -signal.SIGKILL, child.stderr
    pytest.fail("the save never ended")


@pytest.mark.parametrize(
    ("action", "expected", "message"),
    [
        ("enospc", ResourceError, r"No space left on device \(\d+ MB free\)"),
        ("raise", FailpointError, "failpoint ckpt"),
    ],
)
def test_failure_at_every_point_of_saving_keeps_the_previous_and_leaves_no_rubbish(tmp_path, action, expected, message):
    save_step(tmp_path, 1)
    for place in PLACES[:-1]:
        for passage in range(1, 50):
            failpoints.arm(f"ckpt.{place}:{action}@{passage}")
            failure = ""
            try:
                save_step(tmp_path, 2)
            except expected as error:
                failure = str(error)
            if not failure:
                assert passage > 1, f"ckpt.{place} was never passed"
                break
            assert re.search(message, failure)
            assert temporaries(tmp_path) == []
            loaded = load(tmp_path)
            assert loaded is not None
            assert loaded.files == contents(loaded.found.step)
        shutil.rmtree(tmp_path / checkpoint_name(2))


def test_a_file_size_limit_is_reported_and_the_old_checkpoint_survives(tmp_path):
    save_step(tmp_path, 1)
    script = f"CHILD = {CHILD!r}\n{WITH_SMALL_FILES_ONLY}"
    child = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), checkpoint_name(2), "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert child.returncode == 5, child.stderr
    assert "cannot save" in child.stdout
    assert "File too large" in child.stdout
    assert temporaries(tmp_path) == []
    loaded = load(tmp_path)
    assert loaded is not None
    assert loaded.files == contents(1)
