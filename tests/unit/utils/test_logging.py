import signal
import subprocess
import sys
from pathlib import Path

import pytest

from utils.logging import tail

ROOT = Path(__file__).parents[3]


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_main_prints_plain_lines_warnings_to_stderr():
    script = """
import logging
from utils.logging import configure
configure("main", None, "INFO")
configure("main", None, "INFO")  # twice does not print twice
logging.getLogger("a").debug("hidden")
logging.getLogger("a").info("100 %% of %s", "it")
logging.getLogger("a").error("wrong")
"""
    child = run_python(script)
    assert (child.returncode, child.stdout, child.stderr) == (0, "100 % of it\n", "wrong\n")


def test_a_worker_writes_to_its_file_and_dumps_its_stacks_there(tmp_path):
    path = tmp_path / "logs" / "actor_1.log"
    script = """
import logging, os, signal, sys
from pathlib import Path
from utils.logging import configure
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
from utils.logging import configure
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
