"""Train a policy by asynchronous PPO: `python train_appo.py --env=CartPole-v1`, `--help` lists all flags."""

import sys

from algorithms.cli import run_command, train

if __name__ == "__main__":
    sys.exit(run_command(lambda: train(sys.argv[1:])))
