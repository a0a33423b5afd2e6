"""train_appo.py with a learner that writes down what it trains on."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from algorithms.cli import run_command
    from algorithms.run.config import parse_train
    from algorithms.run.main import train
    from tests.chaos.witness import WitnessRun

    sys.exit(run_command(lambda: train(parse_train(sys.argv[1:]), WitnessRun)))
