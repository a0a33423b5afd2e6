"""`kill -9` of main and a restart, a hundred times: no checkpoint is lost, and every restart works without help.

    python -m benchmarks.promises.cycles [--cycles=100] [--at_once=2] [--seed=1] [--json=FILE]

The toy of `tests/chaos/promises.py` is trained in `at_once` folders. In each folder, a start resumes where the previous
start was killed, saves a new checkpoint, and is killed at a random moment. After every kill the benchmark checks that
all processes are gone, that the start began at the last checkpoint, that all saved checkpoints verify, and that no
counter fell.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from appo.algorithms.cli import run_command
from appo.utils.metrics import read_metrics, without_lost
from benchmarks.shared import measuring, promises
from benchmarks.shared.promises import Figure
from tests.chaos.invariants import LASTING, find_falling, lost_checkpoints, read_saves
from tests.chaos.killer import kill
from tests.chaos.promises import GONE_SECONDS, train_toy
from tests.chaos.runs import TrainingRun

LONGEST_SECONDS = 1500.0
LONGEST_WAIT_SECONDS = 1.2  # longer than the time between two checkpoints: a kill may come at any moment


class Cycle(NamedTuple):
    """A start that was killed."""

    seconds: float
    gone_seconds: float  # from the kill to the end of all processes
    wrong: list[str]


def cycle(folder: Path, promised: list[tuple[Path, int]], rng: random.Random) -> Cycle:
    """Start, wait for a new checkpoint and a random time, kill and check; add saved checkpoints to `promised`."""
    begin, before = time.monotonic(), promised[-1][1] if promised else 0
    recorded = len(read_metrics(folder / "train_dir" / "run" / "metrics.jsonl"))
    with train_toy(folder, LONGEST_SECONDS, rng.randrange(2**31)) as run:
        try:
            run.wait_until(lambda: any(steps > before for _, steps in read_saves(run.stdout)), "new checkpoint")
            time.sleep(rng.uniform(0.0, LONGEST_WAIT_SECONDS))
            kill(run.process.pid)
            gone_seconds = run.seconds_until_gone(GONE_SECONDS)
        except AssertionError as error:
            return Cycle(time.monotonic() - begin, 0.0, [str(error)])
        wrong = list(complaints(run, recorded, promised))
        promised += read_saves(run.stdout)
    return Cycle(time.monotonic() - begin, gone_seconds, wrong)


def complaints(run: TrainingRun, recorded: int, promised: Sequence[tuple[Path, int]]) -> Iterator[str]:
    """Yield the faults of a start, whose records follow the first `recorded` ones."""
    everything = read_metrics(run.directory / "metrics.jsonl")
    records, new = everything[recorded:], read_saves(run.stdout)
    begun, before = int(records[0]["env_steps"]), promised[-1][1] if promised else 0
    if begun < before:
        yield f"it began at {begun} env steps, {before} were saved"
    if "Traceback" in run.stdout + run.stderr:
        yield "there is a traceback in its output"
    yield from lost_checkpoints(path for path, _ in [*promised[-1:], *new])
    yield from find_falling(records)
    yield from find_falling(without_lost(everything), LASTING)


def repeated(folder: Path, cycles: int, seed: int) -> list[Cycle]:
    """Start repeatedly in one folder, until a check fails."""
    rng = random.Random(seed)  # noqa: S311 (no secret)
    promised: list[tuple[Path, int]] = []
    done: list[Cycle] = []
    while len(done) < cycles and not (done and done[-1].wrong):
        done.append(cycle(folder, promised, rng))
    if not done[-1].wrong:  # at the end verify all checkpoints as well
        done[-1].wrong.extend(lost_checkpoints(path for path, _ in promised))
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill main and resume, many times.")
    parser.add_argument("--cycles", type=int, default=100, help="number of kills in all (default 100)")
    parser.add_argument("--at_once", type=int, default=2, help="runs beside each other (default 2)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the moments (default 1)")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    at_once, begin = min(arguments.at_once, arguments.cycles), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder, ThreadPoolExecutor(at_once) as pool:
        folders = [Path(folder, str(number)) for number in range(at_once)]
        shares = [len(range(number, arguments.cycles, at_once)) for number in range(at_once)]
        for path in folders:
            path.mkdir()
        seeds = [arguments.seed * 1000 + number for number in range(at_once)]
        done = [one for of_folder in pool.map(repeated, folders, shares, seeds) for one in of_folder]
    wrong = [text for one in done for text in one.wrong]
    print("\n".join(wrong))
    missing = arguments.cycles - len(done) + sum(bool(one.wrong) for one in done)
    figures = [
        Figure(f"cycles that failed, of {arguments.cycles}", missing, 0),
        Figure("all processes gone after kill -9 of main, longest", max(one.gone_seconds for one in done), 1.0, "s"),
    ]
    seconds = time.monotonic() - begin
    print(f"{len(done)} cycles in {seconds:.0f} s")
    result = promises.result_of(figures, seconds=seconds, at_once=at_once)
    measuring.save(arguments.json, "cycles", {"toy": result})
    return promises.show({"toy": result})


if __name__ == "__main__":
    sys.exit(run_command(main))
