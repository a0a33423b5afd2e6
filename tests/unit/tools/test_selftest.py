"""The checks of `appo selftest` find what they are for; that runs pass them is the business of tests/chaos."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from appo.algorithms.cli import parse, run_command
from appo.algorithms.tools.selftest.invariants import find_falling, find_unaccounted, lost_checkpoints, read_saves
from appo.algorithms.tools.selftest.killer import zombies_of
from appo.algorithms.tools.selftest.selftest import Outcome
from appo.utils import checkpoint_files
from appo.utils.command_line import own_command
from tests.chaos.witness import SCALE, broken_steps, columns, traces

TOTALS = {
    "env_steps": 900,
    "samples": 900,
    "discarded": 50,
    "in_flight": 10,
    "trajectories": 60,
    "released": 59,
    "held": 1,
    "actors_collected": 960,
    "actors_sent": 60,
    "actors_trajectories": 60,
}


def test_books_that_balance() -> None:
    assert find_unaccounted({}, TOTALS) == []
    later = TOTALS | {"env_steps": 1900, "samples": 1900, "discarded": 70}
    assert find_unaccounted({"env_steps": 1000, "samples": 1000, "discarded": 20}, later) == []


def test_books_that_do_not_balance() -> None:
    more = TOTALS | {"actors_collected": 976}
    assert find_unaccounted({}, more) == ["samples + discarded + in flight, collected: 960, 976"]
    assert find_unaccounted({}, more, slack=1) == []  # one trajectory has 16 or 17 steps
    assert len(find_unaccounted({}, TOTALS | {"actors_collected": 1000}, slack=1)) == 1
    assert find_unaccounted({}, TOTALS | {"env_steps": 901}, slack=9) == ["env steps, samples: 901, 900"]
    assert len(find_unaccounted({}, TOTALS | {"held": 0, "actors_sent": 61})) == 2


def test_numbers_that_fall_are_found() -> None:
    records = [{"env_steps": 1, "samples": 5}, {"env_steps": 3, "samples": None}, {"env_steps": 2, "samples": 5}]
    assert find_falling(records, ("env_steps", "samples")) == ["env_steps fell from 3 to 2"]


def test_checkpoints_that_were_promised_are_looked_for(tmp_path: Path) -> None:
    good, damaged, gone = (tmp_path / checkpoint_files.checkpoint_name(step) for step in (1, 2, 3))
    for path in (good, damaged):
        checkpoint_files.save(tmp_path, path.name, {"state.json": b"{}"})
    (damaged / "state.json").write_bytes(b"[]")
    log = f"saved {good}\nnot saved {gone}\nsaved {damaged}\nsaved {gone}\n"
    assert read_saves(log) == [(good, 1), (damaged, 2), (gone, 3)]
    wrong = lost_checkpoints(path for path, _ in read_saves(log))
    assert [line.split(":")[0] for line in wrong] == [str(damaged), str(gone)]


def test_zombies_are_found() -> None:
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "print(1)"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.read() == b"1\n"
    own, deadline = {os.getpid()}, time.monotonic() + 30.0
    while child.pid not in zombies_of(own):
        assert time.monotonic() < deadline
    assert child.wait(10.0) == 0
    child.stdout.close()
    assert child.pid not in zombies_of(own)


def test_a_line_per_promise() -> None:
    assert Outcome("it holds", [], "as seen").line() == f"pass  {'it holds':44}  as seen"
    assert Outcome("it holds", ["a", "b"], "as seen").line().endswith("  a; b")


def test_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("selftest", ["--kills=7", "--seed=3"])[0].kills == 7
    assert run_command(lambda: parse("selftest", ["--kils=7"])[0].kills) == 2
    assert capsys.readouterr().err == "error: unknown flag --kils; did you mean --kills?\n"


class TestWitness:
    """Three steps of two columns: in the second an episode ends, after which a step only resets."""

    trace = np.array([[[7, 0, 3], [8, 4, 7]], [[7, 0, 4], [8, 4, 8]], [[7, 0, 5], [8, 5, 0]], [[7, 0, 6], [8, 5, 1]]])
    first = np.array([[False, False], [False, False], [False, True], [False, False]])
    valid = np.array([[True, True], [True, False], [True, True]])

    def test_what_is_whole(self) -> None:
        assert broken_steps(self.trace, self.first, self.valid) == 0
        assert columns(self.trace, self.valid) == [(7, 0, 3), (8, 4, 7)]

    def test_a_late_start(self) -> None:
        trace, first, valid = self.trace.copy(), self.first.copy(), self.valid.copy()
        trace[:2, 0], first[:3, 0], valid[:2, 0] = 99, True, False
        assert broken_steps(trace, first, valid) == 0
        assert columns(trace, valid)[0] == (7, 0, 5)

    @pytest.mark.parametrize(("row", "column", "part"), [(1, 0, 0), (2, 0, 2), (2, 1, 1), (3, 1, 2)])
    def test_what_does_not_follow(self, row: int, column: int, part: int) -> None:
        trace = self.trace.copy()
        trace[row, column, part] += 1
        assert broken_steps(trace, self.first, self.valid) > 0

    def test_traces_are_exact_in_float32(self) -> None:
        seen = np.array([1.0, (2**24 - 1) * SCALE, 123456 * SCALE, 8 * SCALE], np.float32)
        assert traces(seen).tolist() == [2**24 - 1, 123456, 8]


DEADLINE_SECONDS = 100.0


def processes_with(text: str) -> list[int]:
    """Return living processes in whose environment a text stands."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize(
    "words",
    [
        ("selftest", "--kills=1000"),
        ("launch", "--name=a", "--", "--env=toy/Corridor-v0", "--inference=central", "--num_workers=2"),
    ],
    ids=["selftest", "launch"],
)
def test_a_command_that_is_ended_takes_its_runs_with_it(
    tmp_path: Path, words: tuple[str, ...], number: signal.Signals
) -> None:
    if words[0] == "launch" and number == signal.SIGHUP:
        pytest.skip("training goes on when its terminal is closed")
    marker, temporary = f"TMPDIR={tmp_path}/tmp", tmp_path / "tmp"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    command = subprocess.Popen(
        own_command(words), cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: any('"training"' in status.read_text() for status in tmp_path.glob("**/status.json")))
        assert len(processes_with(marker)) > 3
        command.send_signal(number)
        # A launch lets its runs save.
        assert command.wait(DEADLINE_SECONDS) == (143 if words[0] == "launch" and number == 15 else -number)
        wait_until(lambda: not processes_with(marker))
    finally:
        for pid in processes_with(marker):
            os.kill(pid, signal.SIGKILL)
    left = {path.name.rpartition("-")[0] for path in temporary.glob("appo-selftest-*")}
    assert left == ({"appo-selftest"} if words[0] == "selftest" and number == signal.SIGKILL else set())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
