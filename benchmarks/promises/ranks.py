"""Several learners of one policy: learning with 1, 2 and 4 ranks, and ranks that are killed, stopped or cut off.

    python -m benchmarks.promises.ranks [--only curves kills stop interface] [--quick] [--seeds 1 2 3] [--json=FILE]

- `curves`: env steps of CartPole to a mean return of 475 with 1, 2 and 4 ranks. The mean is of the last 100 episodes of
  all ranks together, from the `metrics.jsonl` of each rank.
- `kills`: two ranks, rank 1 killed every ten seconds for five minutes, and the same run without kills.
- `stop`: SIGSTOP for all processes of rank 1 for 30 seconds.
- `interface`: a network interface that does not exist.
"""

import argparse
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from appo.algorithms.cli import run_command
from appo.utils.metrics import read_metrics
from appo.utils.run_folder import RunFolder
from benchmarks.shared import promises
from benchmarks.shared.promises import Figure
from benchmarks.shared.runs import RunError
from tests.chaos.invariants import find_falling
from tests.chaos.killer import kill
from tests.chaos.runs import TrainingRun, checkpoint_steps
from tests.integration.runs import Run

SIZES = (1, 2, 4)
GOAL, EASY_GOAL = 475.0, 40.0
MOST_SECONDS, END_SECONDS, RETURN_SECONDS = 900.0, 60.0, 120.0
POLL_SECONDS = 0.2
TERMINATED = 128 + signal.SIGTERM
FLAGS = ("--log_format=plain", "--no_plot", "--experiment_summaries_interval=0.2", "--save_best_after=-1",
         "--save_every_sec=100000", "--train_for_env_steps=20000000")  # fmt: skip


class Learned(NamedTuple):
    """A run that reached the goal.

    Attributes:
        env_steps: env steps of all ranks to the goal.
        seconds: seconds from the first batch to the goal.
        mean_return: mean return at the end.
        kills: number of kills.
        wrong: broken rules about counts, checkpoints and the end.
    """

    env_steps: int
    seconds: float
    mean_return: float
    kills: int
    wrong: list[str]


def started(folder: str, size: int, seed: int, *flags: str) -> TrainingRun:
    """Start a training of CartPole with several ranks; returns are of the last 100 episodes of all ranks."""
    few = f"--stats_avg={100 // size}"
    return TrainingRun(Path(folder), f"--num_learners={size}", f"--seed={seed}", few, *FLAGS, *flags, small=())


def folder_of(run: TrainingRun, rank: int) -> Path:
    """Return the folder of a rank."""
    return RunFolder(run.directory).rank(rank) if rank else run.directory


def newest(run: TrainingRun, rank: int) -> Mapping[str, Any]:
    """Return the newest record of a rank; empty before the first one."""
    return (read_metrics(folder_of(run, rank) / "metrics.jsonl") or [{}])[-1]


def output(run: TrainingRun) -> str:
    return run.stdout + run.stderr


def is_there(run: TrainingRun, rank: int) -> bool:
    """Return whether a rank has come again after the last loss in the log."""
    words = re.findall(rf"rank {rank} \(pid \d+ on \S+\) is (gone|there)", output(run))
    return not words or words[-1] == "there"


def watch(run: TrainingRun, holds: Callable[[float], bool], seconds: float, what: str) -> None:
    """Call a function with the monotonic time until the result is true.

    Raises:
        RunError: the run ended, or the time is over.
    """
    deadline = time.monotonic() + seconds
    while not holds(now := time.monotonic()):
        if run.process.poll() is not None or now > deadline:
            raise RunError(f"no {what}, exit code {run.process.poll()}", output(run))
        time.sleep(POLL_SECONDS)


def learn(size: int, seed: int, goal: float, kill_seconds: float = 0.0, least_seconds: float = 0.0) -> Learned:
    """Train to the goal, at least some seconds, while rank 1 is killed every `kill_seconds`; 0: no kills.

    Raises:
        RunError: the run missed the goal in time, or ended by itself.
    """
    counted = range(1 if kill_seconds else size)  # a killed rank reports old returns
    reached: list[tuple[int, float]] = []
    kills, begun = 0, 0.0
    with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder, started(folder, size, seed) as run:

        def done(now: float) -> bool:
            nonlocal kills, begun
            records = [newest(run, rank) for rank in counted]
            if not begun:
                begun = now if records[0].get("env_steps") else 0.0
                return False
            means = [record.get("reward/mean") for record in records]
            if not reached and None not in means and statistics.fmean(means) >= goal:  # type: ignore[type-var]
                reached.append((records[0]["env_steps"], now - begun))
            if kill_seconds and now - begun >= kill_seconds * (kills + 1) and kills * kill_seconds < least_seconds:
                kill(int(RunFolder(folder_of(run, 1)).read_status()["pid"]))
                kills += 1
            return bool(reached) and now - begun >= least_seconds

        watch(run, done, MOST_SECONDS, f"mean return of {goal:g}")
        wrong = [] if not checkpoint_steps(run.directory) else ["a checkpoint was written before the end"]
        watch(run, lambda now: is_there(run, 1), RETURN_SECONDS, "return of rank 1")
        mean = float(newest(run, 0)["reward/mean"])
        run.process.send_signal(signal.SIGTERM)
        wrong += complaints(run, run.wait(END_SECONDS).exit_code)
    print(f"{size} ranks, seed {seed}: {reached[0]}, {kills} kills, {mean:.0f} at the end, {wrong}", flush=True)
    return Learned(*reached[0], mean, kills, wrong)


def complaints(run: TrainingRun, exit_code: int) -> list[str]:
    """Return the broken rules of an ended run, by the files of rank 0."""
    of_run = Run(run.directory)
    totals = of_run.totals
    equal = {
        "exit code": (exit_code, TERMINATED),
        "env steps, samples": (totals["env_steps"], totals["samples"]),
        "env steps, of the checkpoint": (totals["env_steps"], of_run.state()["env_steps"]),
        "trajectories received, sent": (totals["trajectories"], totals["actors_sent"]),
        "trajectories released + held, received": (totals["released"] + totals["held"], totals["trajectories"]),
        "starts of rank 0, by the log": (output(run).count("saved run"), 0),
    }
    wrong = [f"{name}: {a}, {b}" for name, (a, b) in equal.items() if a != b]
    return wrong + find_falling(of_run.metrics, ("env_steps", "samples", "perf/version"))


def curves(given: argparse.Namespace) -> dict[str, Any]:
    """Compare the env steps to the goal; the slowest seed of a single rank is the limit for the median of several."""
    sizes, seeds, goal = (SIZES[:2], given.seeds[:1], EASY_GOAL) if given.quick else (SIZES, given.seeds, GOAL)
    found: dict[int, list[Learned]] = {size: [] for size in sizes}
    for seed in seeds:
        for size, of_size in found.items():
            of_size.append(learn(size, seed, goal))
    steps = {size: [one.env_steps for one in of_size] for size, of_size in found.items()}
    figures = [
        Figure(
            f"env steps to {goal:g}, {size} ranks, median of {len(seeds)} seeds (at most the most of one rank)",
            statistics.median(steps[size]),
            max(steps[1]),
        )
        for size in sizes
    ]
    return promises.result_of(figures, runs={size: [one._asdict() for one in ones] for size, ones in found.items()})


def kills(given: argparse.Namespace) -> dict[str, Any]:
    """Compare runs of two ranks with and without kills."""
    goal, seeds, seconds = (EASY_GOAL, given.seeds[:1], 20.0) if given.quick else (GOAL, given.seeds, 300.0)
    clean = [learn(2, seed, goal) for seed in seeds]
    fired = [learn(2, seed, goal, kill_seconds=10.0, least_seconds=seconds) for seed in seeds]
    ratio = statistics.median(one.seconds for one in fired) / statistics.median(one.seconds for one in clean)
    number, least = sum(one.kills for one in fired), min(one.mean_return for one in fired)
    figures = [
        Figure(f"time to {goal:g} with a kill of rank 1 every 10 s, to the same without", ratio, 1.5, "times"),
        Figure(f"runs lost, counts or ends that are wrong, {number} kills", sum(len(o.wrong) for o in fired), 0),
        Figure("return missing to the goal at the end, worst seed", max(0.0, goal - least), 0.1 * goal),
    ]
    return promises.result_of(figures, clean=[o._asdict() for o in clean], fired=[o._asdict() for o in fired])


def stop(given: argparse.Namespace) -> dict[str, Any]:
    """Stop rank 1 several times; the pause is the longest time without a batch meanwhile."""
    times, seconds = (1, 12.0) if given.quick else (3, 30.0)
    pauses: list[float] = []
    returns: list[float] = []
    with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder, started(folder, 2, given.seeds[0]) as run:
        watch(run, lambda now: newest(run, 0).get("env_steps", 0) > 0, MOST_SECONDS, "first batch")
        for _ in range(times):
            group = int(RunFolder(folder_of(run, 1)).read_status()["pid"])
            os.killpg(group, signal.SIGSTOP)
            begin = time.monotonic()
            grown = [(begin, int(newest(run, 0)["env_steps"]))]

            def look(now: float, begin: float = begin, grown: list[tuple[float, int]] = grown) -> bool:
                if (steps := newest(run, 0)["env_steps"]) > grown[-1][1]:
                    grown.append((now, steps))
                return now - begin >= seconds

            try:
                watch(run, look, 2 * seconds, "end")
            finally:
                os.killpg(group, signal.SIGCONT)
            moments = [moment for moment, _ in grown] + [begin + seconds]
            pauses.append(max(b - a for a, b in pairwise(moments)))
            begin = time.monotonic()
            watch(run, lambda now: is_there(run, 1), RETURN_SECONDS, "return of rank 1")
            returns.append(time.monotonic() - begin)
            time.sleep(0.0 if given.quick else 5.0)
        run.process.send_signal(signal.SIGTERM)
        wrong = complaints(run, run.wait(END_SECONDS).exit_code)
    print(f"pauses {pauses}, returns after {returns}, {wrong}", flush=True)
    figures = [
        Figure(f"pause of the others when a rank is stopped, longest of {times}", max(pauses), 10.0, "s"),
        Figure("until the rank learns again when it continues", max(returns), 10.0, "s"),
        Figure("counts or ends that are wrong", len(wrong), 0),
    ]
    return promises.result_of(figures, pauses=pauses, returns=returns, wrong=wrong)


def interface(given: argparse.Namespace) -> dict[str, Any]:
    """Start two ranks with an interface that the machine lacks."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth77"
    begin = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder, started(folder, 2, 1) as run:
            ended = run.wait(RETURN_SECONDS)
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    print("\n".join(errors), flush=True)
    other = len(ended.stderr.splitlines()) - len(errors)
    named = [line for line in errors if re.match(r"error: .*rank \d.*GLOO_SOCKET_IFNAME=eth77", line)]
    figures = [
        Figure("a wrong interface: difference of the exit code from 2", abs(ended.exit_code - 2), 0),
        Figure("lines that name rank and interface, beside one", abs(len(named) - 1), 0),
        Figure("further lines on stderr", len(errors) - len(named) + other, 0),
    ]
    return promises.result_of(figures, errors=errors, seconds=time.monotonic() - begin)


PARTS = {"curves": curves, "kills": kills, "stop": stop, "interface": interface}


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # all that was started ends too
    return promises.ask("ranks", "Several learners of one policy.", PARTS)


if __name__ == "__main__":
    sys.exit(run_command(main))
