"""Learning under fire: samples to a goal in CartPole while processes of the run are killed, and without kills.

    python -m benchmarks.promises.under_fire [--seeds 1 2 3] [--goal=450] [--kill_seconds=2] [--json=FILE]
        [flags of appo train]

Every `kill_seconds` on average the benchmark kills a random process of the run: an actor, the policy worker, the
learner or the fork server, whose death ends all others. All trained samples count, also samples that a learner's death
reverts. For each seed both runs take place in turn; the result compares the medians over seeds.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from appo.algorithms.cli import run_command
from appo.utils.run_folder import RunFolder
from benchmarks.promises.marked_run import marked_run
from benchmarks.shared import measuring, promises
from benchmarks.shared.promises import Figure
from benchmarks.shared.runs import RunError
from tests.chaos.killer import kill, roles_of

MOST_RATIO = 1.3
MOST_ENV_STEPS, MOST_SECONDS = 5_000_000, 300.0
POLL_SECONDS = 0.05
VICTIMS = ("actor", "policy_worker", "learner", "fork_server")


class Learned(NamedTuple):
    """A run that reached the goal."""

    samples: int
    lost: int  # samples reverted by a learner's death
    seconds: float
    kills: int
    restarts: int


class Fire:
    """Kills a process of a run from time to time, for the first time after the start of training.

    Args:
        marker: marker in the environment of the run's processes.
        main: process id of main, which is spared.
        kill_seconds: mean time between two kills, varied between a half and one and a half; 0: no kills.
        seed: seed of times and choices.
    """

    def __init__(self, marker: str, main: int, kill_seconds: float, seed: int) -> None:
        self.marker, self.main, self.kill_seconds = marker, main, kill_seconds
        self.kills = 0
        self._rng = random.Random(seed)  # noqa: S311 (no secret)
        self._due: float | None = None

    def tick(self, now: float, *, trains: bool) -> None:
        """Kill a process if the next kill is due at `now`, a monotonic time."""
        if not (self.kill_seconds and trains):
            return
        if self._due is not None and now >= self._due:
            roles = roles_of(self.marker, self.main)
            victims = sorted((role, pid) for pid, role in roles.items() if role.startswith(VICTIMS))
            if victims:
                kill(self._rng.choice(victims)[1])
                self.kills += 1
        if self._due is None or now >= self._due:
            self._due = now + self.kill_seconds * self._rng.uniform(0.5, 1.5)


def learn(goal: float, kill_seconds: float, seed: int, words: Sequence[str]) -> Learned:
    """Train to the goal.

    Raises:
        RunError: the run failed, or missed the goal in time.
    """
    with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder:
        marker, log_path, run = uuid4().hex, Path(folder, "output.log"), Path(folder, "run")
        given = [
            f"--train_dir={folder}", "--experiment=run", f"--seed={seed}", "--env=CartPole-v1", "--inference=central",
            f"--train_until_return={goal}", f"--train_for_env_steps={MOST_ENV_STEPS}",
            f"--train_for_seconds={MOST_SECONDS}", *words,
        ]  # fmt: skip
        begin = time.monotonic()
        with marked_run(given, marker, log_path, end_seconds=MOST_SECONDS) as process:
            fire = Fire(marker, process.pid, kill_seconds, seed)
            while process.poll() is None:
                trains = bool(RunFolder(run).read_status().get("totals", {}).get("samples"))
                fire.tick(time.monotonic(), trains=trains)
                time.sleep(POLL_SECONDS)
        status: dict[str, Any] = RunFolder(run).read_status()
        if not str(status.get("reason")).startswith("the mean return has reached"):
            raise RunError(f"seed {seed} has not come to {goal:g}", log_path.read_text(errors="replace"))
        totals = status["totals"]
        seconds = time.monotonic() - begin
        return Learned(totals["samples"], totals["lost"], seconds, fire.kills, totals["restarts"])


def measure(arguments: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """Train all seeds with and without kills."""
    clean: list[Learned] = []
    fired: list[Learned] = []
    for seed in arguments.seeds:
        for learned, kill_seconds in ((clean, 0.0), (fired, arguments.kill_seconds)):
            learned.append(learn(arguments.goal, kill_seconds, seed, words))
            name = "with kills" if kill_seconds else "without"
            print(f"seed {seed}, {name}: {learned[-1]}", flush=True)
    ratio = statistics.median(one.samples for one in fired) / statistics.median(one.samples for one in clean)
    kills = sum(one.kills for one in fired)
    what = f"samples to {arguments.goal:g}, {kills} kills in {len(fired)} runs, to those without"
    runs = {"clean": [one._asdict() for one in clean], "fired": [one._asdict() for one in fired]}
    return promises.result_of([Figure(what, ratio, MOST_RATIO, "times")], **runs)


def main() -> int:
    parser = argparse.ArgumentParser(description="Learning while processes are killed.")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5], help="seeds (default 1 2 3 4 5)")
    parser.add_argument("--goal", type=float, default=450.0, help="mean return (default 450)")
    parser.add_argument("--kill_seconds", type=float, default=2.0, help="mean seconds between two kills (default 2)")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments, words = parser.parse_known_args()
    results = {" ".join(["cartpole", *words]): measure(arguments, words)}
    measuring.save(arguments.json, "under_fire", results)
    return promises.show(results)


if __name__ == "__main__":
    sys.exit(run_command(main))
