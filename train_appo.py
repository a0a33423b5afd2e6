"""Train a policy by asynchronous PPO: `python train_appo.py --env=CartPole-v1`, `--help` lists all flags."""

import sys

if __name__ == "__main__":
    try:
        from algorithms.cli import run, run_command
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(run_command(lambda: run("train", sys.argv[1:])))
