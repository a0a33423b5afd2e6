"""Watch a trained policy: `python enjoy_appo.py --env=CartPole-v1`, `--help` lists all flags."""

import sys

from algorithms.cli import run, run_command

if __name__ == "__main__":
    sys.exit(run_command(lambda: run("enjoy", sys.argv[1:])))
