import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from appo.utils.errors import DirectoryInUse, UsageError
from appo.utils.lock import RunLock
from tests.patience import HANG_SECONDS

ROOT = Path(__file__).parents[3]
HOLD = """
import subprocess, sys
from pathlib import Path
from appo.utils.lock import RunLock
lock = RunLock(Path(sys.argv[1])).acquire()
child = subprocess.Popen(["sleep", "1000"], close_fds=False)  # a worker that outlives its parent holds nothing
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_second_lock_is_refused_and_names_the_holder(tmp_path):
    path = tmp_path / "CartPole_1" / ".lock"
    with RunLock(path):
        with pytest.raises(DirectoryInUse) as error:
            RunLock(path).acquire()
        pattern = rf"run CartPole_1 is in use by pid {os.getpid()} on host {re.escape(socket.gethostname())} since 20.*"
        assert re.fullmatch(pattern, str(error.value))
        assert error.value.exit_code == 75
        assert json.loads(path.read_text())["pid"] == os.getpid()
    with RunLock(path):
        pass


def test_releasing_twice_is_harmless_and_keeps_the_file(tmp_path):
    path = tmp_path / ".lock"
    lock = RunLock(path).acquire()
    lock.release()
    lock.release()
    assert path.exists()
    lock.acquire().release()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff\xfe"])
def test_a_holder_that_wrote_nothing_sensible_is_still_a_holder(tmp_path, content):
    path = tmp_path / ".lock"
    with RunLock(path):
        path.write_bytes(content)
        with pytest.raises(DirectoryInUse, match="in use by another process"):
            RunLock(path).acquire()


def test_old_content_does_not_lock(tmp_path):
    path = tmp_path / ".lock"
    path.write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "long ago, in a longer line than ours" * 3}))
    with RunLock(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_place_that_cannot_be_written_is_a_usage_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write in"):
        RunLock(tmp_path / "file" / "run" / ".lock").acquire()


def test_kill_9_of_the_holder_frees_the_lock_at_once(tmp_path):
    path = tmp_path / ".lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        grandchild = int(holder.stdout.readline())
        try:
            with pytest.raises(DirectoryInUse, match=f"pid {holder.pid} "):
                RunLock(path).acquire()
            holder.send_signal(signal.SIGKILL)
            holder.wait(timeout=HANG_SECONDS)
            RunLock(path).acquire().release()
        finally:
            os.kill(grandchild, signal.SIGKILL)


@pytest.mark.parametrize("how", ["removed", "renamed", "replaced", "with its folder"])
def test_a_lock_whose_file_goes_away_is_taken_again(tmp_path, how):
    path = tmp_path / "run" / ".lock"
    with RunLock(path) as lock:
        lock.renew()  # nothing to do
        assert lock.is_in_place()
        if how == "with its folder":
            os.rename(path.parent, tmp_path / "elsewhere")
        elif how == "renamed":
            os.rename(path, path.with_name("other"))
        else:
            path.unlink()
        if how == "replaced":
            path.touch()
        assert not lock.is_in_place()
        RunLock(path).acquire().release()
        lock.renew()
        assert lock.is_in_place()
        with pytest.raises(DirectoryInUse, match=f"pid {os.getpid()} "):
            RunLock(path).acquire()
    RunLock(path).acquire().release()


def test_a_lock_that_somebody_else_has_taken_meanwhile_stays_theirs(tmp_path):
    path = tmp_path / ".lock"
    with RunLock(path) as lock:
        path.unlink()
        with RunLock(path), pytest.raises(DirectoryInUse):
            lock.renew()
        assert not lock.is_in_place()
        lock.renew()
        assert lock.is_in_place()
