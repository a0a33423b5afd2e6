"""The trainings whose returns stand in docs/results.md, and the figures of a trained agent."""

import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from appo.utils.command_line import own_command
from appo.utils.metrics import read_metrics
from appo.utils.run_folder import RunFolder
from benchmarks.shared import runs
from benchmarks.shared.workloads import words_of

BENCHMARK = "scores"
NO_STICKY_ACTIONS = {"env_kwargs": "repeat_action_probability=0"}  # as in the environments of published figures


class Trial(NamedTuple):
    """A training, for how long, and how it is played afterwards.

    Attributes:
        env: its id.
        env_steps: budget, in frames; 0: only that of time.
        seconds: most that training may take.
        flags: of the environment.
        episodes: played in each mode.
        most_frames: at which playing ends in each mode, so that a policy that waits for ever ends too; 0: it does not.
    """

    env: str
    env_steps: int = 0
    seconds: int = 280
    flags: Mapping[str, object] = {}
    episodes: int = 20
    most_frames: int = 0

    def training(self) -> dict[str, object]:
        """The flags of train_appo.py but for the seed."""
        budget = {"train_for_env_steps": self.env_steps} if self.env_steps else {}
        return {"env": self.env, **self.flags, **budget, "train_for_seconds": self.seconds}

    def evaluation(self) -> list[str]:
        """The flags of `appo evaluate`."""
        frames = {"max_num_frames": self.most_frames} if self.most_frames else {}
        return words_of({"episodes": self.episodes, **frames})


def _atari(env: str) -> Trial:
    """A game of Atari, for twice as long."""
    return Trial(env, seconds=560, flags=NO_STICKY_ACTIONS, episodes=10, most_frames=400_000)


M = 1_000_000
TRIALS = {
    "cartpole": Trial("CartPole-v1", M, episodes=50),
    "acrobot": Trial("Acrobot-v1", M, episodes=50),
    "mountain_car_continuous": Trial("MountainCarContinuous-v0", M, episodes=50),
    "pendulum": Trial("Pendulum-v1", M, episodes=50),
    "frozen_lake": Trial("FrozenLake-v1", M, episodes=500),
    "cliff_walking": Trial("CliffWalking-v1", M, episodes=50, most_frames=50_000),
    "lunar_lander": Trial("LunarLander-v3", 3 * M, episodes=50),
    "lunar_lander_continuous": Trial("LunarLanderContinuous-v3", 3 * M, episodes=50),
    "bipedal_walker": Trial("BipedalWalker-v3", 5 * M),
    # The presets let the learning rate fall to 0 over the budget of env steps, so it must be one that is reached.
    "half_cheetah": Trial("HalfCheetah-v5", 3 * M),
    "reacher": Trial("Reacher-v5", M, episodes=50),
    "hopper": Trial("Hopper-v5", 3 * M),
    "walker2d": Trial("Walker2d-v5", 3 * M),
    "inverted_pendulum": Trial("InvertedPendulum-v5", 500_000),
    "inverted_double_pendulum": Trial("InvertedDoublePendulum-v5", 2 * M),
    "minigrid_empty_5x5": Trial("MiniGrid-Empty-5x5-v0", 50_000, episodes=100),
    "minigrid_empty": Trial("MiniGrid-Empty-8x8-v0", 150_000, episodes=100),
    "minigrid_door_key": Trial("MiniGrid-DoorKey-5x5-v0", 500_000, episodes=100),
    "vizdoom_basic": Trial("VizdoomBasic-v1", 400_000, episodes=50),
    "vizdoom_health_gathering": Trial("VizdoomHealthGathering-v1"),
    "vizdoom_defend_center": Trial("VizdoomDefendCenter-v1"),
    "pong": _atari("ALE/Pong-v5"),
    "breakout": _atari("ALE/Breakout-v5"),
    "pursuit": Trial("sisl/pursuit-v5"),
    "control_suite_cartpole": Trial("dm_control/cartpole-swingup-v0", M),
    "highway_fast": Trial("highway-fast-v0", 30_000),
    "envpool_cartpole": Trial("envpool:CartPole-v1", M, episodes=50),
}


class Scored(NamedTuple):
    """Outcome of a run.

    Attributes:
        training, evaluation: the words after `appo train`, but for the seed, and after `appo evaluate RUN`.
        env_steps: in frames, that were trained on.
        samples: steps of an agent that were trained on.
        seconds: of the command that trained, its start and its end included.
        played: by mode, `sampled` and `most_probable`: mean and standard deviation of the returns, and their number;
            of several agents, a return is their mean.
        shared: whether other programs used the machine meanwhile, so that the seconds are too many.
    """

    training: str
    evaluation: str
    env_steps: int
    samples: int
    seconds: float
    played: dict[str, dict[str, Any]]
    shared: bool

    def line(self) -> str:
        """For the terminal."""
        returns = ", ".join(f"{mode} {_shown(of['mean'])}" for mode, of in self.played.items())
        return f"{self.env_steps:,} env steps in {self.seconds:.0f} s; return {returns}"


def score(trial: Trial, seed: int, prefix: Sequence[str], *, shared: bool = False) -> Scored:
    """Train once, and play."""
    training, evaluation = trial.training(), trial.evaluation()
    with runs.finished({**training, "seed": seed}, prefix) as run:
        runs.run_to_end(own_command(["evaluate", str(run.directory), *evaluation]), prefix)
        totals = RunFolder(run.directory).read_status()["totals"]
        records = read_metrics(RunFolder(run.directory).results)
    played = {one["mode"]: {name: one[name] for name in ("mean", "std", "episodes")} for one in records}
    words = shlex.join(words_of(training)), shlex.join(evaluation)
    return Scored(*words, totals["env_steps"], totals["samples"], run.seconds, played, shared)


class Summary(NamedTuple):
    """Several seeds of one mode.

    Attributes:
        mean: of the means of the seeds.
        deviation: of those means, over seeds; with one seed, over its episodes. None: no seed has ended an episode.
        seeds: that have ended episodes.
        episodes: of all of them.
    """

    mean: float | None
    deviation: float | None
    seeds: int
    episodes: int


def summary(outcomes: Sequence[Mapping[str, Any]], mode: str) -> Summary:
    """Put the outcomes of several seeds together, leaving out those that have ended no episode."""
    found = [one["played"][mode] for one in outcomes if one["played"][mode]["episodes"]]
    if not found:
        return Summary(None, None, 0, 0)
    means = [one["mean"] for one in found]
    deviation = statistics.stdev(means) if len(means) > 1 else found[0]["std"]
    return Summary(statistics.fmean(means), deviation, len(means), sum(one["episodes"] for one in found))


def _shown(mean: float | None) -> str:
    return "none ended" if mean is None else f"{mean:.4g}"
