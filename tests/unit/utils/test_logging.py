import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from appo.utils.log_files import shorten, tail
from tests.patience import HANG_SECONDS

ROOT = Path(__file__).parents[3]


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def test_main_prints_plain_lines_warnings_to_stderr():
    script = """
import logging
from appo.utils.logging import configure
configure("main", None, "INFO")
configure("main", None, "INFO")  # twice does not print twice
logging.getLogger("a").debug("hidden")
logging.getLogger("a").info("100 %% of %s", "it")
logging.getLogger("a").error("wrong")
"""
    child = run_python(script)
    assert (child.returncode, child.stdout, child.stderr) == (0, "100 % of it\n", "wrong\n")


def test_a_program_of_others_keeps_its_logging_and_recent_warnings_too():
    script = """
import logging, sys
from appo.utils.logging import kept_warnings, recent_warnings
if sys.argv[1:] == ["root"]:
    logging.basicConfig(format="theirs: %(message)s")
ours = logging.getLogger("appo.algorithms")
if sys.argv[1:] == ["ours"]:
    logging.getLogger("appo").addHandler(logging.StreamHandler())
ours.warning("before")
with kept_warnings(), kept_warnings():
    if sys.argv[1:] == ["late"]:
        logging.basicConfig(format="theirs: %(message)s")
    logging.getLogger("theirs").warning("no warning of ours")
    ours.info("hidden")
    ours.warning("within")
ours.warning("after")
print(*(line.partition(" ")[2] for line in recent_warnings()), len(logging.getLogger("appo").handlers))
"""
    said = ("before", "no warning of ours", "within", "after")
    for place, head, handlers in (
        ((), "", 0),
        (("root",), "theirs: ", 0),
        (("ours",), "", 1),
        (("late",), "theirs: ", 0),
    ):
        child = run_python(script, *place)
        assert (child.returncode, child.stdout) == (0, f"within {handlers}\n")
        printed = child.stderr.splitlines()
        assert [line.removeprefix("theirs: ") for line in printed] == list(said)
        assert all(line.startswith(head) for line in printed[place == ("late",) :])


def test_a_worker_writes_to_its_file_and_dumps_its_stacks_there(tmp_path):
    path = tmp_path / "logs" / "actor_1.log"
    script = """
import logging, os, signal, sys
from pathlib import Path
from appo.utils.logging import configure
configure("actor%1", Path(sys.argv[1]), logging.INFO)
logging.info("stepping %d", 7)
def stuck_here():
    os.kill(os.getpid(), signal.SIGUSR1)
stuck_here()
logging.info("goes on \\ud800")
os.abort()
"""
    child = run_python(script, str(path))
    assert (child.returncode, child.stdout, child.stderr) == (-signal.SIGABRT, "", "")
    text = path.read_text()
    assert "I actor%1: stepping 7\n" in text
    assert "in stuck_here" in text
    assert "I actor%1: goes on \\ud800\n" in text
    assert "Fatal Python error: Aborted" in text


def test_a_full_disk_or_a_closed_pipe_costs_log_lines_only(tmp_path):
    script = """
import logging, os, resource, sys
from pathlib import Path
from appo.utils.logging import configure
configure("actor_0", Path(sys.argv[1]), logging.INFO)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, -1))
for n in range(100):
    logging.info("line %d", n)
handler = logging.getLogger().handlers[0]
print(handler.dropped > 0)
"""
    child = run_python(script, str(tmp_path / "actor_0.log"))
    assert (child.returncode, child.stdout, child.stderr) == (0, "True\n", "")


@pytest.mark.parametrize("end", ["", "\n"])
def test_tail(tmp_path, end):
    path = tmp_path / "x.log"
    lines = [f"line {n} " + "é" * (n % 50) for n in range(5000)]
    path.write_text("\n".join(lines) + end)
    for count in (1, 2, 10, 4999, 5000, 6000):
        assert tail(path, count) == lines[-count:]
    assert tail(path, 0) == []


def test_tail_of_nothing(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\nlast")
    assert tail(tmp_path / "missing", 3) == []
    assert tail(tmp_path / "empty", 3) == []
    assert tail(tmp_path / "binary", 1) == ["last"]


# --- logs that grow

MOST = 1 << 16


def lines(count: int, start: int = 0) -> bytes:
    return b"".join(b"line %07d\n" % number for number in range(start, start + count))


def test_a_log_that_is_short_enough_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "actor_0.log"
    path.write_bytes(content := lines(1000))
    assert not shorten(path, MOST)
    assert path.read_bytes() == content


@pytest.mark.parametrize("count", [4100, 10_000, 300_000])
def test_of_a_long_log_the_beginning_and_the_newest_lines_are_kept(tmp_path: Path, count: int) -> None:
    path = tmp_path / "actor_0.log"
    path.write_bytes(content := lines(count))
    assert shorten(path, MOST)
    kept = path.read_bytes()
    head, mark, end = kept.partition(b"\n[left out: ")
    assert mark
    assert (head, len(head)) == (content[: MOST // 8], MOST // 8)
    newest = end.partition(b"]\n")[2]
    assert content.endswith(newest)
    assert newest.startswith(b"line ")  # a whole one
    assert MOST * 3 // 8 - 13 <= len(newest) <= MOST * 3 // 8
    assert not shorten(path, MOST)


def test_the_beginning_stays_the_same_however_often_a_log_is_shortened(tmp_path: Path) -> None:
    path = tmp_path / "actor_0.log"
    for start in range(0, 100_000, 5000):
        with path.open("ab") as file:
            file.write(lines(5000, start))
        shorten(path, MOST)
        assert path.stat().st_size <= MOST * 0.75
        assert path.read_bytes().startswith(lines(600))
        assert path.read_bytes().endswith(b"line %07d\n" % (start + 4999))
    assert path.read_bytes().count(b"[left out") == 1


@pytest.mark.parametrize("content", [b"x" * 10 * MOST, b"\0" * 3 * MOST, b"\n" * 2 * MOST, b"\xff\xfe" * MOST])
def test_a_log_without_lines_is_shortened_too(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "actor_0.log"
    path.write_bytes(content)
    assert shorten(path, MOST)
    assert MOST // 2 - 1 <= path.stat().st_size <= MOST // 2 + 100


def test_a_log_that_is_nearly_all_hole_is_shortened_at_once(tmp_path: Path) -> None:
    path = tmp_path / "actor_0.log"
    path.write_bytes(b"begin\n")
    os.truncate(path, 1 << 40)
    assert shorten(path, MOST)
    assert path.stat().st_size < MOST


def test_whoever_prints_goes_on_at_the_new_end_and_every_line_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "actor_0.log"
    script = """
import os, sys
for number in range(200_000):
    while os.fstat(1).st_size > 1 << 18:
        pass  # until it is shortened
    os.write(1, b"line %07d\\n" % number)
open(sys.argv[1], "x").close()
sys.stdin.read()  # a line that is written in the instant of a cut is lost, so the last one waits
os.write(1, b"line 0200000\\n")
"""
    written = tmp_path / "written"
    with path.open("ab") as output:
        writer = subprocess.Popen([sys.executable, "-c", script, written], stdin=subprocess.PIPE, stdout=output)
    times = 0
    while not written.exists() and writer.poll() is None:
        times += shorten(path, MOST)
    writer.communicate(timeout=HANG_SECONDS)
    assert (writer.returncode, times > 5) == (0, True)
    shorten(path, MOST)
    head, _, end = path.read_bytes().partition(b"\n[left out: ")
    assert head == lines(1000)[: MOST // 8]
    numbers = [int(line[5:]) for line in end.partition(b"]\n")[2].splitlines()]
    assert all(len(line) == 12 for line in end.partition(b"]\n")[2].splitlines())
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == 200_000


def test_a_crash_between_copying_and_cutting_costs_nothing_of_the_end(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "actor_0.log"
    path.write_bytes(content := lines(20_000))

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", crash)
        with pytest.raises(KeyboardInterrupt):
            shorten(path, MOST)
    assert path.read_bytes().endswith(content[-MOST:])
    assert shorten(path, MOST)
    assert path.read_bytes().endswith(content[-MOST // 4 :])


def test_no_file_of_others_is_shortened(tmp_path: Path) -> None:
    other = tmp_path / "diary"
    other.write_bytes(content := lines(10_000))
    (tmp_path / "link.log").symlink_to(other)
    os.link(other, tmp_path / "hard.log")
    for name in ("link.log", "hard.log"):
        with pytest.raises(OSError, match=r"link|names"):
            shorten(tmp_path / name, MOST)
    assert other.read_bytes() == content


# --- logs that go away


FOLLOW = """
import logging, os, shutil, sys
from pathlib import Path
from appo.utils.logging import configure, follow_log
path, how = Path(sys.argv[1]), sys.argv[2]
configure("actor_1", path, logging.INFO)
stream = logging.getLogger().handlers[0].stream
own = os.open(path.parent.parent / "own", os.O_CREAT | os.O_WRONLY)
os.dup2(stream.fileno(), 1)
os.dup2(own if how == "redirected" else stream.fileno(), 2)
print("before", flush=True)
logging.info("first")
follow_log()
os.rename(path.parent, path.parent.parent / "away") if how == "renamed" else shutil.rmtree(path.parent)
logging.info("into nowhere")
follow_log()
made = path.parent.exists()
path.parent.mkdir()
follow_log()
follow_log()
logging.info("second")
os.write(1, b"after\\n")
os.write(2, b"error\\n")
os.kill(os.getpid(), 10)
os._exit(100 if made else len(os.listdir("/proc/self/fd")))
"""


@pytest.mark.parametrize("how", ["removed", "renamed", "redirected"])
def test_a_process_whose_log_goes_away_goes_on_in_a_new_one(tmp_path: Path, how: str) -> None:
    path = tmp_path / "logs" / "actor_1.log"
    child = run_python(FOLLOW, str(path), how)
    assert child.stdout + child.stderr == ""
    assert child.returncode <= 7, child.returncode  # nothing is left open, and main makes the folder again
    text = path.read_text()
    assert "I actor_1: second\n" in text
    assert "after\n" in text
    assert "follow" not in text
    assert "most recent call first" in text  # stacks are dumped there
    assert "nowhere" not in text
    assert ("error\n" in text) == (how != "redirected")
    assert (tmp_path / "own").read_text() == ("error\n" if how == "redirected" else "")
