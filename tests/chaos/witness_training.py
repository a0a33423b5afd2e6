"""train_appo.py with a learner that writes down what it trains on."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from algorithms.appo.appo import train
    from algorithms.appo.config import parse_train
    from algorithms.cli import run_command
    from tests.chaos.witness import WitnessAPPO

    sys.exit(run_command(lambda: train(parse_train(sys.argv[1:]), WitnessAPPO)))
