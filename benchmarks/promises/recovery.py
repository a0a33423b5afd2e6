"""How long training stops when a process is killed: from SIGKILL to the first batch that is trained with its successor.

    python -m benchmarks.promises.recovery [--trials=20] [--json=FILE] [flags of appo train]

A run is started in a scratch folder with the placement `central`, and one process at a time is killed. Training goes on
when its successor is ready, has done a unit of work (a trajectory of the actor, a reply of the policy worker) and a
batch is trained after that. The arena tells, 1 ms apart.

What main's file imports, every process imports again when it starts: as in train_appo.py, that is nothing here.
"""

import sys

if __name__ == "__main__":
    from appo.algorithms.cli import run_command
    from benchmarks.promises.recovering import main

    sys.exit(run_command(main))
