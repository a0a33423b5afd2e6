"""Returns learned from datasets alone: behaviour cloning, MARWIL and conservative Q-learning.

    python -m benchmarks.scores.offline_returns --datasets=FOLDER [--trial NAME ...] [--seeds 1 2 3 4 5] [--add]
        [--json=FILE] [--markdown=FILE]

For each environment the benchmark trains two policies with the preset, a good policy and a policy with a third of the
return. `appo record` writes at least 100,000 steps of both policies and of random actions into the folder; existing
datasets are reused. Then each trial learns from datasets without an environment, seed by seed, and the newest
checkpoint plays 100 episodes. Trials of the medium policy, whose recorded actions were sampled, play sampled actions;
all others play the most probable actions. The exit code is 1 if a goal is missed:

- BC from the expert reaches at least 0.95 of the expert's return;
- MARWIL from the medium policy beats BC from the medium policy by more than the interval of the difference over seeds;
- conservative Q-learning from all three datasets of LunarLander reaches at least 50 more than the medium policy.
"""

import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from appo.algorithms.cli import run_command
from appo.algorithms.ops.intervals import student_interval, welch_interval
from appo.utils.command_line import own_command
from appo.utils.metrics import read_metrics
from appo.utils.run_folder import RunFolder
from benchmarks.shared import markdown, runs, seeds
from benchmarks.shared.workloads import words_of

BENCHMARK = "offline_returns"
MOST_PROBABLE, SAMPLED = "most_probable", "sampled"
SEEDS = [1, 2, 3, 4, 5]
STEPS, EPISODES = 100_000, 100
SHARE_OF_EXPERT, ABOVE_MEDIUM = 0.95, 50.0
M = 1_000_000


class Task(NamedTuple):
    """An environment with the goals of its recorded policies.

    Attributes:
        env: id of the environment.
        expert, medium: mean returns that end training.
        env_steps: env steps that end training in any case.
        algo: algorithm of the recorded policies.
    """

    env: str
    expert: float
    medium: float
    env_steps: int
    algo: str = "APPO"


TASKS = {
    "cartpole": Task("CartPole-v1", expert=495, medium=60, env_steps=2 * M),
    "lunar_lander": Task("LunarLander-v3", expert=250, medium=50, env_steps=6 * M),
    "half_cheetah": Task("HalfCheetah-v5", expert=5000, medium=1500, env_steps=1 * M, algo="PPO"),
}
POLICIES = ("random", "medium", "expert")


class Trial(NamedTuple):
    """An algorithm and the datasets to learn from.

    Attributes:
        task: name of the environment.
        algo: value of the flag `--algo`.
        policies: names of the recorded policies.
        flags: flags of learning.
        mode: choice of actions in the evaluation.
    """

    task: str
    algo: str
    policies: tuple[str, ...]
    flags: Mapping[str, object]
    mode: str = MOST_PROBABLE

    def training(self, folder: Path) -> dict[str, object]:
        """Return the flags of train_appo.py without the seed; two hours end a run that would never end."""
        words = ",".join(str(folder / self.task / policy) for policy in self.policies)
        env = TASKS[self.task].env
        return {"algo": self.algo, "env": env, "input": words, "device": "cpu", "train_for_seconds": 7200, **self.flags}


CLONING: Mapping[str, object] = {"train_for_env_steps": 2 * M, "learning_rate": 1e-3, "lr_schedule": "linear"}
WEIGHTED: Mapping[str, object] = {**CLONING, "beta": 1.0}
LONGER: Mapping[str, object] = {"train_for_env_steps": 10 * M}
CONSERVATIVE: Mapping[str, object] = {
    "train_for_env_steps": 10 * M,
    "reward_scale": 0.1,
    "huber_loss": False,
    "cql_alpha": 0.1,
    "gamma": 0.99,
    "learning_rate": 3e-4,
    "lr_schedule": "linear",
    "batch_size": 512,
    "n_steps": 3,
    "target_update_interval": 500,
}
TRIALS = {
    **{f"{task}_bc_expert": Trial(task, "BC", ("expert",), CLONING) for task in TASKS},
    **{f"{task}_bc_medium": Trial(task, "BC", ("medium",), CLONING, SAMPLED) for task in TASKS},
    **{f"{task}_marwil_medium": Trial(task, "MARWIL", ("medium",), WEIGHTED, SAMPLED) for task in TASKS},
    # Two million steps do not reduce the deviation of sampled actions from 1 to the policy's 0.13.
    "half_cheetah_bc_medium": Trial("half_cheetah", "BC", ("medium",), {**CLONING, **LONGER}, SAMPLED),
    "half_cheetah_marwil_medium": Trial("half_cheetah", "MARWIL", ("medium",), {**WEIGHTED, **LONGER}, SAMPLED),
    "lunar_lander_cql_mixed": Trial("lunar_lander", "APEX", POLICIES, CONSERVATIVE),
}


class Recorded(NamedTuple):
    """A dataset: number of steps, and mean return of the recorded policy."""

    steps: int
    episodes: int
    mean_return: float


def record(task: str, policy: str, folder: Path, prefix: Sequence[str]) -> Recorded:
    """Train a policy and record a dataset, unless the dataset exists; return the description of the dataset.

    Raises:
        RunError: a command failed.
    """
    place, known = folder / task / policy, folder / task / f"{policy}.json"
    if not known.exists():
        shutil.rmtree(place, ignore_errors=True)  # remains of an interrupted recording
        place.parent.mkdir(parents=True, exist_ok=True)
        words = ["-o", str(place), f"--steps={STEPS}", "--seed=1", "--json"]
        if policy == "random":
            found = _said(["record", f"--env={TASKS[task].env}", *words], prefix)
        else:
            with runs.finished(policy_flags(task, policy), prefix) as run:
                found = _said(["record", str(run.directory), *words], prefix)
        known.write_text(json.dumps({name: found[name] for name in Recorded._fields}), encoding="utf-8")
    return Recorded(**json.loads(known.read_text()))


def policy_flags(task: str, policy: str) -> dict[str, object]:
    """Return the training flags of a recorded policy."""
    one = TASKS[task]
    # A mean over fewer episodes lags less behind the policy, which improves until the run ends.
    aim = {"train_until_return": one.medium, "stats_avg": 20}
    if policy == "expert":
        aim = {"train_until_return": one.expert, "stats_avg": 100}
    training = {"algo": one.algo, "env": one.env, "train_for_env_steps": one.env_steps, "seed": 1, "device": "cpu"}
    return training | aim


def _said(words: Sequence[str], prefix: Sequence[str]) -> dict[str, Any]:
    """Parse the JSON object in the last line of a command's output."""
    found: dict[str, Any] = json.loads(runs.run_to_end(own_command(words), prefix).splitlines()[-1])
    return found


class Learned(NamedTuple):
    """Outcome of a run.

    Attributes:
        training: words after `appo train`, without the seed.
        samples: steps read.
        seconds: seconds of training, with start and end.
        mean, std, episodes: statistics of the returns of the evaluation.
        behaviour: mean return of the recorded actions, by policy.
    """

    training: str
    samples: int
    seconds: float
    mean: float
    std: float
    episodes: int
    behaviour: dict[str, float]

    def line(self) -> str:
        acted = ", ".join(f"{policy} {value:.1f}" for policy, value in self.behaviour.items())
        return (
            f"{self.samples:,} steps read in {self.seconds:.0f} s; return {self.mean:.1f}; of those who acted: {acted}"
        )


def learn(trial: Trial, seed: int, folder: Path, prefix: Sequence[str]) -> Learned:
    """Learn once, and play."""
    behaviour = {policy: record(trial.task, policy, folder, prefix).mean_return for policy in POLICIES}
    flags = trial.training(folder)
    with runs.finished({**flags, "seed": seed}, prefix) as run:
        runs.run_to_end(own_command(["evaluate", str(run.directory), f"--episodes={EPISODES}"]), prefix)
        samples = RunFolder(run.directory).read_status()["totals"]["samples"]
        (played,) = [one for one in read_metrics(RunFolder(run.directory).results) if one["mode"] == trial.mode]
    shown = {**flags, "input": ",".join(trial.policies)}
    numbers = played["mean"], played["std"], played["episodes"]
    return Learned(" ".join(words_of(shown)), samples, run.seconds, *numbers, behaviour)


class Row(NamedTuple):
    """Returns of the seeds of a trial, compared with the goal.

    Attributes:
        means: mean return of each seed, in the order of seeds.
        asked: goal in words; empty: no goal.
        reached: whether the goal is reached.
    """

    name: str
    means: tuple[float, ...]
    behaviour: Mapping[str, float]
    asked: str
    reached: bool

    def cells(self) -> tuple[str, ...]:
        trial, (mean, margin) = TRIALS[self.name], student_interval(self.means)
        shown = f"**{mean:,.1f}**" + (f" ± {margin:,.1f}" if math.isfinite(margin) else "")
        acted = ", ".join(f"{policy} {self.behaviour[policy]:,.1f}" for policy in trial.policies)
        each = ", ".join(f"{value:,.1f}" for value in self.means)
        verdict = "" if not self.asked else self.asked + ("" if self.reached else " (missed)")
        algo = trial.algo + " + CQL" * (trial.algo == "APEX")
        return TASKS[trial.task].env, algo, acted, trial.mode.replace("_", " "), each, shown, verdict


HEADS = (
    "environment",
    "algorithm",
    "dataset and its return",
    "actions",
    "return of each seed",
    "mean, 95 % interval",
    "asked for",
)


def rows(results: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return a row per trial, in the order of `TRIALS`."""
    means: dict[str, tuple[float, ...]] = {}
    behaviour: dict[str, Mapping[str, float]] = {}
    for name in TRIALS:
        by_seed = sorted(results.get(name, {}).get("seeds", {}).items(), key=lambda pair: int(pair[0]))
        if by_seed:
            means[name] = tuple(one["mean"] for _, one in by_seed)
            behaviour[name] = by_seed[0][1]["behaviour"]
    return [Row(name, means[name], behaviour[name], *_verdict(name, means, behaviour[name])) for name in means]


def _verdict(name: str, means: Mapping[str, tuple[float, ...]], behaviour: Mapping[str, float]) -> tuple[str, bool]:
    """Return the goal of a trial in words, and whether the goal is reached."""
    mean = fmean(means[name])
    if name.endswith("bc_expert"):
        wanted = SHARE_OF_EXPERT * behaviour["expert"]
        return f"≥ {wanted:,.1f}", mean >= wanted
    if name.endswith("cql_mixed"):
        wanted = behaviour["medium"] + ABOVE_MEDIUM
        return f"≥ {wanted:,.1f}", mean >= wanted
    cloned = name.replace("marwil", "bc")
    if "marwil" not in name or cloned not in means:
        return "", True
    found = welch_interval(means[cloned], means[name])
    if found is None:
        return "above BC: one seed tells nothing", True
    return f"above BC: {found.mean:+,.1f} ± {found.margin:,.1f}", found.mean - found.margin > 0


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table, with dates and commits."""
    return f"{markdown.table(HEADS, (row.cells() for row in rows(results)))}\n\n{markdown.measured(results)}\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = seeds.parser_of("Returns of what is learned from datasets.", TRIALS, "--trial")
    parser.set_defaults(seeds=SEEDS)
    parser.add_argument("--datasets", type=Path, required=True, help="folder of the datasets, which are kept")
    parser.add_argument("--markdown", type=Path, help="file for the table, which is printed in any case")
    arguments = parser.parse_args(argv)

    def learn_one(name: str, seed: int) -> Learned:
        return learn(TRIALS[name], seed, arguments.datasets.absolute(), arguments.prefix)

    results = seeds.train_all(BENCHMARK, arguments, learn_one)
    results = seeds.show(arguments, results, table)
    return int(not all(row.reached for row in rows(results)))


if __name__ == "__main__":
    sys.exit(run_command(main))
