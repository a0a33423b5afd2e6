"""An examination of an environment: repeatability, times of steps, leaks, and sizes of observations and rewards."""

import contextlib
import gc
import hashlib
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from appo.algorithms.run.config import Config
from appo.algorithms.run.tuning.measure import enter, send_failures
from appo.envs.config import EnvConfig
from appo.envs.make import make_first, make_group
from appo.envs.masks import random_action
from appo.envs.precision import watched
from appo.envs.spec import MASK_KEY, Array, GroupEnv, StepRow, step_row
from appo.utils.system import limits
from appo.utils.system.memory import held_bytes

REPEATED_STEPS, REPEATING_SECONDS = 200, 2.0
STEPPING_SECONDS, MOST_STEPS = 4.0, 200_000
WARM_UP_SHARE = 0.3  # share of the time; afterwards memory and files should not grow
SEED = 7
MOST_REWARDS = 10_000  # sizes kept for the median


class Examination(NamedTuple):
    """The findings of an examination.

    Attributes:
        repeated: number of steps taken twice, from equal seeds and with equal actions.
        differs_at: first repeated step with a different result, 0 for the reset; None if all were equal.
        num_steps, episodes: number of timed steps, and of episodes of agents that ended in these steps.
        episode_steps: mean steps of an agent in these episodes; 0 without episodes.
        median_seconds, slow_seconds, longest_seconds: seconds of a step: median, 99th percentile, maximum.
        reset_seconds: median seconds of steps that reset; None without resets.
        grown_steps, grown_bytes, grown_files: steps after warming up, with growth of memory and open files.
        shown: least and largest number per observation key, without the mask.
        lost: lines about numbers of observations that storing changes.
        said: known keys found in infos.
        usual_reward, largest_reward: median and largest size of the rewards that were not 0; 0 if all were 0.
    """

    repeated: int
    differs_at: int | None
    num_steps: int
    episodes: int
    episode_steps: float
    median_seconds: float
    slow_seconds: float
    longest_seconds: float
    reset_seconds: float | None
    grown_steps: int
    grown_bytes: int
    grown_files: int
    shown: Mapping[str, tuple[float, float]] = {}
    lost: tuple[str, ...] = ()
    usual_reward: float = 0.0
    largest_reward: float = 0.0
    said: tuple[str, ...] = ()


class Scales:
    """The sizes of the observations and rewards of an environment, in bounded memory.

    Attributes:
        shown: least and largest number per observation key, without the mask.
    """

    def __init__(self, envs: GroupEnv) -> None:
        keys = [key for key, one in envs.spec.observations.items() if key != MASK_KEY and 0 not in one.shape]
        self.shown = dict.fromkeys(keys, (np.inf, -np.inf))
        self._sizes, self._largest = list[float](), 0.0

    def look(self, row: StepRow) -> None:
        """Add a step."""
        for key, (low, high) in self.shown.items():
            self.shown[key] = min(low, float(row.obs[key].min())), max(high, float(row.obs[key].max()))
        sizes = np.abs(row.reward[row.reward != 0]).tolist()
        self._largest = max(self._largest, *sizes, 0.0)
        self._sizes += sizes[: MOST_REWARDS - len(self._sizes)]

    @property
    def rewards(self) -> tuple[float, float]:
        """Return median and largest size of the rewards that were not 0."""
        return (float(np.median(self._sizes)) if self._sizes else 0.0), self._largest


class Walk:
    """Random steps in a group of environments."""

    def __init__(self, envs: GroupEnv) -> None:
        self.envs, self._random = envs, np.random.default_rng(0)
        self.row = step_row(envs.spec, envs.num_rows)

    def reset(self, seed: int) -> str:
        """Begin an episode; return a digest of the first observation."""
        self.envs.reset(range(seed, seed + self.envs.num_rows // self.envs.spec.num_agents), self.row.obs)
        return _digest(self.row.obs)

    def action(self) -> Array:
        """Draw a random allowed action."""
        spec, rows = self.envs.spec, self.envs.num_rows
        allowed: Array | list[None] = [None] * rows
        if spec.action_mask:
            allowed = np.not_equal(self.row.obs[MASK_KEY].reshape(rows, -1), 0)
        return np.concatenate([random_action(spec.action, mask, self._random) for mask in allowed])

    def step(self, action: Array) -> float:
        """Take a step; return the seconds."""
        begin = time.perf_counter()
        self.envs.step(action, self.row)
        return time.perf_counter() - begin

    def repeat(self, action: Array) -> str:
        """Take a step; return a digest of the results."""
        self.step(action)
        row = self.row
        return _digest(row.obs, row.reward, row.terminated, row.truncated, row.first)


def _digest(obs: Mapping[str, Array], *others: Array) -> str:
    parts = [*(obs[key] for key in sorted(obs)), *others]
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


def examine(config: EnvConfig) -> Examination:
    """Make an environment and step it for some seconds (UsageError, EnvironmentFailure: not made, or it raised)."""
    with contextlib.closing(make_first(config)) as envs:
        walk = Walk(envs)
        with watched(envs) as precision:
            repeated, differs_at = _repeat(walk)
        return _time(walk, repeated, differs_at)._replace(lost=precision.lines())


def _repeat(walk: Walk) -> tuple[int, int | None]:
    """Return the number of steps taken twice, and the first step with a different result."""
    shown, actions = [walk.reset(SEED)], list[Array]()
    deadline = time.perf_counter() + REPEATING_SECONDS / 2
    while len(actions) < REPEATED_STEPS and time.perf_counter() < deadline:
        actions.append(walk.action())
        shown.append(walk.repeat(actions[-1]))
    again = [walk.reset(SEED), *(walk.repeat(action) for action in actions)]
    differing = (step for step, (before, now) in enumerate(zip(shown, again, strict=True)) if before != now)
    return len(actions), next(differing, None)


def _time(walk: Walk, repeated: int, differs_at: int | None) -> Examination:
    steps: list[float] = []
    resets: list[float] = []
    episodes, ended_steps, warm = 0, 0, (0, 0, 0)
    walk.reset(SEED)  # episodes are seen from the beginning
    scales = Scales(walk.envs)
    length = np.zeros(len(walk.row.first), np.int64)
    begin = time.perf_counter()
    while (spent := time.perf_counter() - begin) < STEPPING_SECONDS and len(steps) < MOST_STEPS:
        if not warm[0] and (spent > WARM_UP_SHARE * STEPPING_SECONDS or len(steps) > WARM_UP_SHARE * MOST_STEPS):
            warm = _holds(len(steps) + len(resets))
        seconds = walk.step(walk.action())
        # An agent that takes no part begins an episode in every step.
        (resets if walk.row.first.all() else steps).append(seconds)
        ended = walk.row.terminated | walk.row.truncated
        length += walk.envs.spec.same_step | ~walk.row.first  # a step that only resets belongs to no episode
        scales.look(walk.row)
        episodes, ended_steps = episodes + int(ended.sum()), ended_steps + int(length[ended].sum())
        length[ended] = 0
    end = _holds(len(steps) + len(resets))
    median, slow = _quantiles(steps or resets)
    grown = [after - before for before, after in zip(warm, end, strict=True)] if warm[0] else [0, 0, 0]
    return Examination(
        repeated=repeated,
        differs_at=differs_at,
        num_steps=end[0],
        episodes=episodes,
        episode_steps=ended_steps / max(1, episodes),
        median_seconds=median,
        slow_seconds=slow,
        longest_seconds=max(steps or resets),
        reset_seconds=_quantiles(resets)[0] if resets else None,
        grown_steps=grown[0],
        grown_bytes=grown[1],
        grown_files=grown[2],
        shown=scales.shown,
        usual_reward=scales.rewards[0],
        largest_reward=scales.rewards[1],
        said=tuple(sorted(walk.envs.said)),
    )


def _holds(steps: int) -> tuple[int, int, int]:
    """Return steps so far, memory and open files."""
    gc.collect()
    return steps, held_bytes(), limits.num_open()


def _quantiles(seconds: Sequence[float]) -> tuple[float, float]:
    median, slow = np.quantile(seconds, [0.5, 0.99])
    return float(median), float(slow)


def crowd(config: EnvConfig, group_size: int, num_groups: int) -> int:
    """Make and reset the environments of an actor in this process; return their number.

    Raises:
        UsageError, EnvironmentFailure: the environments cannot be made side by side.
    """
    with contextlib.ExitStack() as made:
        for _ in range(num_groups):
            Walk(made.enter_context(contextlib.closing(make_group(config, group_size)))).reset(SEED)
    return group_size * num_groups


def send_examination(
    pipe: Connection, log_path: Path, config: Config, group_size: int = 1, num_groups: int = 1
) -> None:
    """Send an `Examination` of the environment, then the count of a `crowd`; or a `WorkerFailed` instead."""
    enter("probe", log_path)
    with send_failures(pipe):
        pipe.send(examine(config.env))
        pipe.send(crowd(config.env, group_size, num_groups))
