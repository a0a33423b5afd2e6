"""train_appo.py as it works on CUDA: every process with a network is spawned."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2] / "src")
    from appo.algorithms.cli import run, run_command
    from appo.algorithms.runtime.processes import fork_server

    fork_server.can_fork = lambda device, bells=0: False
    sys.exit(run_command(lambda: run("train", sys.argv[1:])))
