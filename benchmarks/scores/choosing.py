"""Whether `appo doctor` names the algorithm that reaches a return first, with cheap and with slow steps.

    python -m benchmarks.scores.choosing [--seeds 1 2 3] [--task NAME ...] [--most_seconds=900] [--add] [--json=FILE]

For each seed the doctor chooses between APPO and SAC for `Reach`, then both train until the mean return of the last 20
episodes is `GOAL`; the seconds are those of the whole commands. The benchmark
proves the arithmetic only if the true ratio of steps is near the assumed ratio; the report contains the numbers of
samples of both. The exit code is 1 if a named algorithm was not the faster one.
"""

import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from appo.algorithms.cli import run_command
from appo.utils.command_line import own_command
from appo.utils.metrics import read_metrics
from benchmarks.shared import runs, seeds
from benchmarks.shared.workloads import words_of

ALGORITHMS = ("APPO", "SAC")
GOAL = -12.0  # a hand-written controller returns -7, no action -38, random actions -40
EPISODE_STEPS = 50
TASKS: Mapping[str, float] = {"50us": 50e-6, "2ms": 2e-3}  # seconds of a step
# An update of SAC with 256x256 takes so long that a step of 2 ms would be no clear case.
REACH: Mapping[str, object] = {"env": "benchmarks.scores.choosing:Reach", "encoder_mlp_layers": "64,64"}


class Reach(gymnasium.Env[Any, Any]):
    """A mass in the plane that shall reach the origin and stay there; the reward is minus the distance.

    A step computes until its thread has used the seconds: a simulator occupies its core, sleeping would leave the core
    to the learner, and time on a clock would pass while other processes have the core.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)  # position, velocity
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, step_seconds: float = 0.0) -> None:
        self.step_seconds = step_seconds

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.position, self.velocity, self.steps = self.np_random.uniform(-1, 1, 2), np.zeros(2), 0
        return np.append(self.position, self.velocity).astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        end = time.thread_time() + self.step_seconds
        self.velocity = 0.9 * self.velocity + 0.1 * np.clip(action, -1, 1)
        self.position = self.position + 0.1 * self.velocity
        self.steps += 1
        shown = np.append(self.position, self.velocity).astype(np.float32)
        while time.thread_time() < end:
            pass
        return shown, -math.hypot(*self.position), False, self.steps == EPISODE_STEPS, {}


class Compared(NamedTuple):
    """Outcome of a seed: the doctor's choice, and by algorithm seconds, samples, and whether the goal was reached."""

    named: str
    text: str
    seconds: dict[str, float]
    samples: dict[str, int]
    reached: dict[str, bool]
    right: bool

    def line(self) -> str:
        figures = [f"{algo} {self.samples[algo]:,} samples in {one:.1f} s" for algo, one in self.seconds.items()]
        return f"{', '.join(figures)}; the doctor named {self.named}: {'right' if self.right else 'WRONG'}"


def is_faster(named: str, seconds: Mapping[str, float], reached: Mapping[str, bool]) -> bool:
    """Return whether the named algorithm reached the goal, before all others that did."""
    return reached[named] and all(seconds[named] <= seconds[algo] for algo in seconds if reached[algo])


def named_by_doctor(flags: Mapping[str, object], prefix: Sequence[str]) -> tuple[str, str]:
    """Return the algorithm in the line of the doctor, and the line (RunError: the doctor failed)."""
    output = runs.run_to_end(own_command(["doctor", *words_of(flags), "--json"]), prefix)
    (text,) = [check["text"] for check in json.loads(output)["checks"] if check["name"] == "algorithm"]
    if not (found := re.match(r"--algo=(\w+) reaches a return", text)):
        raise runs.RunError("the doctor compared nothing", text)
    return found[1], text


def compare(step_seconds: float, seed: int, most_seconds: int, prefix: Sequence[str]) -> Compared:
    flags = {**REACH, "env_kwargs": json.dumps({"step_seconds": step_seconds})}
    named, text = named_by_doctor(flags, prefix)
    limits = {"train_until_return": GOAL, "stats_avg": 20, "train_for_seconds": most_seconds, "seed": seed}
    seconds, samples, reached = dict[str, float](), dict[str, int](), dict[str, bool]()
    for algo in ALGORITHMS:
        with runs.finished({"algo": algo, **flags, **limits}, prefix) as run:
            last = read_metrics(run.directory / "metrics.jsonl")[-1]
            reached[algo] = run.has_reached_goal()
        seconds[algo], samples[algo] = run.seconds, last["samples"]
    return Compared(named, text, seconds, samples, reached, is_faster(named, seconds, reached))


def main() -> int:
    parser = seeds.parser_of("The choice of the doctor against the clock.", TASKS, "--task")
    parser.add_argument("--most_seconds", type=int, default=900, help="seconds that end a run (default 900)")
    arguments = parser.parse_args()
    most, prefix = arguments.most_seconds, arguments.prefix
    results = seeds.train_all("choosing", arguments, lambda name, seed: compare(TASKS[name], seed, most, prefix))
    return os.EX_OK if all(one["right"] for of in results.values() for one in of["seeds"].values()) else 1


if __name__ == "__main__":
    sys.exit(run_command(main))
