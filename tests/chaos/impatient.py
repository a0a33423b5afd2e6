"""train_appo.py that waits 15 seconds, not two minutes, for its fork server."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2] / "src")
    from appo.algorithms.cli import run, run_command
    from appo.algorithms.runtime.processes import fork_server

    fork_server.ANSWER_SECONDS = 15.0
    sys.exit(run_command(lambda: run("train", sys.argv[1:])))
