"""Saved runs, damaged at random: whatever a command meets in one, nothing foreign runs and nothing outside changes.

`APPO_FUZZ_RUNS=2000` tries so many mutations in place of 200, `APPO_FUZZ_SEED` others.
"""

import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from tests.chaos import fuzzing
from tests.chaos.killer import MARKER
from tests.chaos.runs import ROOT

RUNS, SEED = int(os.environ.get("APPO_FUZZ_RUNS", "200")), os.environ.get("APPO_FUZZ_SEED", "1")


@pytest.mark.slow
@pytest.mark.timeout(60 + 4 * RUNS)
def test_damaged_runs_do_no_harm_and_cost_little(tmp_path: Path) -> None:
    """Of every mutation: no foreign program, no file changed outside, no traceback, little time and memory."""
    command = [sys.executable, "-m", "tests.chaos.fuzzing", str(tmp_path / "fuzz"), str(RUNS), SEED]
    environment = os.environ | {MARKER: uuid4().hex, "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1].startswith(f"{RUNS} mutations, 0 with something wrong"), done.stdout[-5000:]
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_command_that_reads_runs_is_tried_alike() -> None:
    assert {words[0] for words in fuzzing.COMMANDS.values()} == {
        "runs", "top", "compare", "plot", "report", "enjoy", "evaluate", "match", "export",
        "hub", "replay", "train",
    }  # fmt: skip
    assert 2000 // len(fuzzing.COMMANDS) >= 100
