"""Pause of training after a kill: from SIGKILL to the first batch trained with the successor.

    python -m benchmarks.promises.recovery [--trials=20] [--json=FILE] [flags of appo train]

The benchmark starts a run in a scratch folder with the placement `central` and kills one process at a time. A pause
ends when the successor is ready, has done a unit of work (a trajectory of the actor, a reply of the policy worker), and
a batch was trained afterwards. The benchmark reads the arena every millisecond.

Every process imports the imports of main's file again at its start. This file, like train_appo.py, imports nothing.
"""

import sys

if __name__ == "__main__":
    from appo.algorithms.cli import run_command
    from benchmarks.promises.recovering import main

    sys.exit(run_command(main))
