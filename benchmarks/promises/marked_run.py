"""A training run whose processes carry a marker, so that all of them can be found and killed."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from appo.algorithms.runtime.processes.prctl import bound_to_us
from benchmarks.shared.measuring import ROOT
from tests.chaos.killer import MARKER, kill, processes_of


@contextmanager
def marked_run(
    words: Sequence[str], marker: str, output: Path, *, end_seconds: float, only_errors: bool = False
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start train_appo.py; on exit kill all processes with the marker, and wait for main.

    Args:
        words: flags of train_appo.py.
        marker: value of the environment variable `MARKER`.
        output: file for stdout and stderr.
        end_seconds: longest wait for main after the kills.
        only_errors: whether stdout is dropped.
    """
    with output.open("wb") as log:
        main = subprocess.Popen(
            [sys.executable, str(ROOT / "train_appo.py"), *words], env=os.environ | {MARKER: marker}, cwd=ROOT,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL if only_errors else log, stderr=log,
            start_new_session=True, preexec_fn=bound_to_us(),  # noqa: PLW1509 (it calls the system alone)
        )  # fmt: skip
    try:
        yield main
    finally:
        for pid in processes_of(marker):
            kill(pid)
        main.wait(end_seconds)
