"""Watch a trained policy: `python enjoy_appo.py --env=CartPole-v1`, `--help` lists all flags."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # In the place of this script's folder, whose `utils` and `envs` would hide modules of the user's with these names.
    sys.path[0] = str(Path(__file__).resolve().parent / "src")
    from appo.algorithms.cli import run, run_command

    sys.exit(run_command(lambda: run("enjoy", sys.argv[1:])))
