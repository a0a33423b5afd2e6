"""train_appo.py that waits ten minutes, not four seconds, for its workers to end."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2] / "src")
    from appo.algorithms.cli import run, run_command
    from appo.algorithms.runtime import runner

    runner.STOP_SECONDS = 600.0
    sys.exit(run_command(lambda: run("train", sys.argv[1:])))
