"""The checks of tests/chaos find what they are for."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from appo.utils import checkpoint_files
from tests.chaos.invariants import find_falling, find_unaccounted, lost_checkpoints, read_saves
from tests.chaos.killer import zombies_of
from tests.chaos.witness import SCALE, broken_steps, columns, traces
from tests.patience import HANG_SECONDS

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
    own, deadline = {os.getpid()}, time.monotonic() + HANG_SECONDS
    while child.pid not in zombies_of(own):
        assert time.monotonic() < deadline
    assert child.wait(HANG_SECONDS) == 0
    child.stdout.close()
    assert child.pid not in zombies_of(own)


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
