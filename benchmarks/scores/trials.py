"""Trainings behind docs/results.md, and returns of the trained policies."""

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
SAMPLE_EFFICIENT = {"algo": "auto", "preset": "sample_efficient"}
M = 1_000_000


class Trial(NamedTuple):
    """A training with an evaluation.

    Attributes:
        env: id of the environment.
        env_steps: budget in frames; 0: no limit.
        seconds: longest training; 0: no limit. Such a trial takes hours, and is trained only where it is named.
        flags: flags of the environment.
        episodes: episodes per mode.
        most_frames: frames per mode that end the evaluation of a policy that waits for ever; 0: no limit.
        mode: mode of acting that is compared with the goal, named before any run.
        goal: published mean return after as many env steps, which the mean plus its standard error shall reach; None:
            no goal.
    """

    env: str
    env_steps: int = 0
    seconds: int = 280
    flags: Mapping[str, object] = {}
    episodes: int = 20
    most_frames: int = 0
    mode: str = "most_probable"
    goal: float | None = None

    def training(self) -> dict[str, object]:
        """Return the flags of train_appo.py without the seed."""
        budget = {"train_for_env_steps": self.env_steps} if self.env_steps else {}
        limit = {"train_for_seconds": self.seconds} if self.seconds else {}
        return {"env": self.env, **self.flags, **budget, **limit}

    def evaluation(self) -> list[str]:
        """Return the flags of `appo evaluate`."""
        frames = {"max_num_frames": self.most_frames} if self.most_frames else {}
        return words_of({"episodes": self.episodes, **frames})


def _atari(env: str) -> Trial:
    """Return a trial of an Atari game, with twice the time."""
    return Trial(env, seconds=560, flags=NO_STICKY_ACTIONS, episodes=10, most_frames=400_000)


def _published(env: str, env_steps: int, goal: float) -> Trial:
    """Return a trial of the preset for as many env steps as behind a published figure."""
    return Trial(env, env_steps, seconds=900, flags=SAMPLE_EFFICIENT, episodes=100, goal=goal)


def _long(env: str, env_steps: int, goal: float) -> Trial:
    """Return a trial of hours on two cores."""
    return Trial(env, env_steps, seconds=0, flags=SAMPLE_EFFICIENT, episodes=100, goal=goal)


def _long_atari(env: str, env_steps: int, goal: float) -> Trial:
    flags = SAMPLE_EFFICIENT | NO_STICKY_ACTIONS
    return Trial(env, env_steps, seconds=0, flags=flags, episodes=20, most_frames=400_000, goal=goal)


PUBLISHED_STEPS = "_published"  # end of the name of a trial with as many env steps as a published figure
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
    # The presets anneal the learning rate to 0 over the budget of env steps, so runs must reach the budget.
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
    "cartpole_published": _published("CartPole-v1", 50_000, 490),
    "acrobot_published": _published("Acrobot-v1", M, -73.5),
    "mountain_car_continuous_published": _published("MountainCarContinuous-v0", 100_000, 93),
    "pendulum_published": _published("Pendulum-v1", 20_000, -172),  # a fifth suffices for SAC
    "lunar_lander_published": _published("LunarLander-v3", M, 250),
    "lunar_lander_continuous_published": _published("LunarLanderContinuous-v3", M, 271),
    "minigrid_door_key_published": _published("MiniGrid-DoorKey-5x5-v0", 100_000, 0.964),
    "minigrid_key_corridor_published": _published("MiniGrid-KeyCorridorS3R1-v0", 500_000, 0.949),
    "half_cheetah_published": _published("HalfCheetah-v5", M, 5784),
    "hopper_published": _published("Hopper-v5", M, 2609),
    "walker2d_published": _published("Walker2d-v5", M, 3589),
    "ant_published": _published("Ant-v5", M, 3258),
    "swimmer_published": _published("Swimmer-v5", M, 281),
    "reacher_published": _published("Reacher-v5", M, -4.1),
    "inverted_double_pendulum_published": _published("InvertedDoublePendulum-v5", M // 10, 9231),  # a tenth for SAC
    "bipedal_walker_published": _long("BipedalWalker-v3", 5 * M, 288),
    "humanoid_published": _long("Humanoid-v5", 3 * M, 1360),
    "vizdoom_defend_center_published": _long("VizdoomDefendCenter-v1", 4 * M, 24),
    "walker_walk_published": _long("dm_control/walker-walk-v0", 8 * M, 787),
    "cheetah_run_published": _long("dm_control/cheetah-run-v0", 8 * M, 566),
    "pong_published": _long_atari("ALE/Pong-v5", 10 * M, 20),
    "breakout_published": _long_atari("ALE/Breakout-v5", 10 * M, 51),
}


class Scored(NamedTuple):
    """Outcome of a run.

    Attributes:
        training, evaluation: words after `appo train`, without the seed, and after `appo evaluate RUN`.
        env_steps: frames trained on.
        samples: agent steps trained on.
        seconds: seconds of the training command, with start and end.
        played: mean, standard deviation and number of the returns by mode, `sampled` and `most_probable`; with several
            agents a return is the mean over the agents.
        shared: whether other programs used the machine, which makes the seconds too high.
    """

    training: str
    evaluation: str
    env_steps: int
    samples: int
    seconds: float
    played: dict[str, dict[str, Any]]
    shared: bool

    def line(self) -> str:
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
    """Several seeds in one mode.

    Attributes:
        mean: mean of the means of the seeds.
        deviation: deviation over seeds; with one seed, over episodes. None: no seed ended an episode.
        seeds: number of seeds that ended episodes.
        episodes: number of episodes of all seeds.
    """

    mean: float | None
    deviation: float | None
    seeds: int
    episodes: int


def summary(outcomes: Sequence[Mapping[str, Any]], mode: str) -> Summary:
    """Combine the outcomes of several seeds; a seed without a finished episode does not count."""
    found = [one["played"][mode] for one in outcomes if one["played"][mode]["episodes"]]
    if not found:
        return Summary(None, None, 0, 0)
    means = [one["mean"] for one in found]
    deviation = statistics.stdev(means) if len(means) > 1 else found[0]["std"]
    return Summary(statistics.fmean(means), deviation, len(means), sum(one["episodes"] for one in found))


def _shown(mean: float | None) -> str:
    return "none ended" if mean is None else f"{mean:.4g}"
