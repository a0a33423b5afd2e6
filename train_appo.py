"""Train a policy by asynchronous PPO: `python train_appo.py --env=CartPole-v1`, `--help` lists all flags."""

import sys

if __name__ == "__main__":
    try:
        from algorithms.cli import run_command, train
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(run_command(lambda: train(sys.argv[1:])))
