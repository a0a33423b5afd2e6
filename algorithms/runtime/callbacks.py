"""Callbacks: classes of the user, called by a run in actors for episodes and in main for reports."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.messages import EpisodesDone, LearnerReport
from appo.envs.spec import EpisodeStats, GroupEnv, StepRow
from appo.utils.errors import UsageError, text_of
from appo.utils.user_modules import find_function
from appo.utils.values import nearest

if TYPE_CHECKING:
    from appo.utils.tensorboard.writer import EventWriter

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Episode:
    """An episode of one agent.

    Attributes:
        env: number of the environment in the run.
        agent: number of the agent in its environment.
        policy: policy that acts.
        episode_return: sum of the unscaled rewards so far.
        length: env steps so far.
        terminated, truncated: how the episode ended.
        stats: statistics reported by the environment at the end.
        data: storage for the callback, empty at the start; all calls for this episode receive the same object.
    """

    env: int
    agent: int
    policy: int
    episode_return: float = 0.0
    length: int = 0
    terminated: bool = False
    truncated: bool = False
    stats: Mapping[str, float] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict, compare=False)


class Step(NamedTuple):
    """One step of all rows of a group. The arrays are read-only views, valid during the call.

    Attributes:
        first_env: number of the group's first environment in the run.
        num_agents: rows of each environment, side by side.
        observations: observations [R, *] by key, from before the actions.
        actions: sampled actions [R, A], in units of the policy, not mapped to bounds.
        rewards: unscaled rewards [R].
        num_frames: env steps [R] of the step.
        terminated, truncated, valid: flags [R]; where `valid` is False, an environment was reset and no step taken.
        policies: acting policies [R].
        episodes: episodes [R] of the rows, None without a step or in an episode begun with random steps; () unless a
            callback also overrides the start or end of episodes. Return and length are set at the end.
    """

    first_env: int
    num_agents: int
    observations: Mapping[str, Array]
    actions: Array
    rewards: Array
    num_frames: Array
    terminated: Array
    truncated: Array
    valid: Array
    policies: Array
    episodes: tuple[Episode | None, ...] = ()


class Trajectory(NamedTuple):
    """A trajectory handed over to learners: T steps of R rows. The arrays are views, valid during the call.

    Attributes:
        first_env, num_agents: as in `Step`.
        observations: observations [T+1, R, *] by key.
        first: flags [T+1, R] of steps that start an episode.
        actions: sampled actions [T, R, A].
        rewards: rewards [T, R] for learning, scaled and clipped.
        terminated, truncated, valid: flags [T, R].
        policies: acting policies [T+1, R].
        recorded: values [T, R, *] recorded by the algorithm in every step, by name.
    """

    first_env: int
    num_agents: int
    observations: Mapping[str, Array]
    first: Array
    actions: Array
    rewards: Array
    terminated: Array
    truncated: Array
    valid: Array
    policies: Array
    recorded: Mapping[str, Array]

    @property
    def values(self) -> Array:
        """Return the expected returns at acting, [T, R], as recorded by APPO."""
        return self.recorded["value"]

    @property
    def log_probabilities(self) -> Array:
        """Return log-probabilities of the actions, [T, R], as recorded by APPO."""
        return self.recorded["log_prob"]


class Callbacks:
    """The base class of callbacks: override the events to receive. An event without an override costs nothing.

    Every actor makes its own object, again after a restart. Main makes another.

    Args:
        config: all flags by name; an object given to `train` without flags receives the flags of the run.
        worker: number of the actor; None in main.
    """

    config: Mapping[str, Any] = MappingProxyType({})  # also in a subclass whose __init__ does not call this __init__
    worker: int | None = None

    def __init__(self, config: Mapping[str, Any] = MappingProxyType({}), worker: int | None = None) -> None:
        self.config, self.worker = config, worker

    def on_episode_start(self, episode: Episode) -> None:
        """In actors: an episode has begun with its first step."""

    def on_episode_step(self, step: Step) -> None:
        """In actors: a group has taken a step. This is the hot path: use arithmetic on whole arrays."""

    def on_episode_end(self, episode: Episode) -> Mapping[str, float] | None:
        """In actors: an episode has ended. Returned numbers are averaged as `stats/<name>`."""

    def on_postprocess_trajectory(self, trajectory: Trajectory) -> None:
        """In actors: a trajectory is full. Learners train on the arrays as changed here.

        The trajectory contains all agents of the group's environments, side by side. `first` and `policies` are
        read-only. A step made invalid counts as collected and is excluded from training.
        """

    def on_trajectory_end(self, trajectory: Trajectory) -> None:
        """In actors: a trajectory is full, and handed over next."""

    def on_episodes(self, episodes: EpisodesDone) -> None:
        """In main: episodes of a group have ended; the message contains every return and length."""

    def on_report(self, report: LearnerReport) -> None:
        """In main: a learner reports its work since the last report."""

    def on_summaries(
        self, policy: int, values: Mapping[str, Sequence[float]], env_steps: int, writer: "EventWriter | None"
    ) -> None:
        """In main, before writing a record. Write histograms and images beside the record.

        Args:
            policy: policy of the record.
            values: last `--stats_avg` values of reward, len and stats/<name>, oldest first; the record contains
                averages.
            env_steps: env steps of the record.
            writer: writer of the policy's TensorBoard files; None without `--tensorboard`.
        """

    def before_logging(self, policy: int, figures: dict[str, float]) -> None:
        """In main, before writing figures. Add figures under new tags; existing figures cannot be changed."""

    def on_train_result(self, policy: int, figures: dict[str, float]) -> None:
        """In main, before writing a record. Change, add or remove figures; the counters cannot be changed."""

    def on_end(self) -> None:
        """In actors and main: the run, or the life of the actor, ends in good order."""


OF_ACTORS = ("on_episode_start", "on_episode_step", "on_episode_end", "on_postprocess_trajectory", "on_trajectory_end")
EVENTS = tuple(name for name in vars(Callbacks) if name.startswith(("on_", "before_")))


class _FlagsOfRun(dict[str, Any]):
    """The flags of a run, given to an object that has none of its own."""


class Hooks:
    """The callbacks of one process. A method that raises is turned off with a warning; all others continue.

    Attributes:
        off: number of methods turned off, and of callbacks that could not be made.
    """

    def __init__(self, members: Iterable[Callbacks]) -> None:
        self.off = 0
        self._listeners: dict[str, list[Callbacks]] = {event: [] for event in EVENTS}
        for member in members:
            for event, listeners in self._listeners.items():
                if getattr(type(member), event) is not getattr(Callbacks, event):
                    listeners.append(member)

    @classmethod
    def make(
        cls, names: Sequence[str], config: Mapping[str, Any], worker: int | None, more: Iterable[Callbacks] = ()
    ) -> "Hooks":
        """Make the callbacks of these names, and add existing ones; what an actor cannot make is off.

        Raises:
            UsageError: main (`worker` None) cannot make a callback.
        """
        made, failed = [], 0
        for name in names:
            try:
                made.append(find_callbacks(name)(config, worker))
            except (Exception, SystemExit) as error:  # the user's code may raise anything
                if worker is None:  # the start of the run in main
                    text = f"{type(error).__name__}: {text_of(error)}"
                    raise UsageError(f"--callbacks={name} cannot be made: {text}") from error
                failed += 1
                log.warning("--callbacks=%s cannot be made and is off", name, exc_info=True)
        more = tuple(more)
        for one in more:
            if not one.config or isinstance(one.config, _FlagsOfRun):  # of its last run
                one.config = _FlagsOfRun(config)
        hooks = cls([*made, *more])
        hooks.off = failed
        return hooks

    def hears(self, *events: str) -> bool:
        """Return whether any callback overrides any of these events."""
        return any(self._listeners[event] for event in events)

    def tell(self, event: str, *arguments: object, read: Callable[[Any], Any] = lambda answer: answer) -> list[Any]:
        """Call all overrides of an event; return their answers, converted by `read`."""
        answers = []
        for listener in tuple(self._listeners[event]):
            try:
                answers.append(read(getattr(listener, event)(*arguments)))
            except (Exception, SystemExit) as error:  # the user's code may raise anything
                self.off += 1
                self._listeners[event].remove(listener)
                name = f"{type(listener).__module__}:{type(listener).__qualname__}.{event}"
                reason = f"{type(error).__name__}: {text_of(error)}"
                log.warning("callback %s is off: it raised %s", name, reason, exc_info=error)
        return answers


def find_callbacks(name: str) -> type[Callbacks]:
    """Find the class named by `--callbacks=package.module:Class`.

    Raises:
        UsageError: no class, not derived from `Callbacks`, or with a method of an unknown event.
    """
    found = find_function("callbacks", name)
    if not isinstance(found, type) or not issubclass(found, Callbacks):
        raise UsageError(f"--callbacks={name} is no class derived from appo.Callbacks")
    check_methods(found, f"--callbacks={name}")
    return found


def check_methods(kind: type[Callbacks], source: str) -> None:
    """Refuse a method that is named like an event and is none (UsageError)."""
    for method in dir(kind):
        if method.startswith(("on_", "before_")) and method not in EVENTS:
            raise UsageError(f"{source}: nobody calls its method {method}{nearest(method, EVENTS)}")


class EpisodeWatch:
    """Calls hooks for the steps and episodes of some rows.

    Args:
        num_rows: number of rows, R.
    """

    def __init__(self, hooks: Hooks, num_rows: int) -> None:
        self.hooks = hooks
        self._episodes: dict[int, Episode] = {}
        self._playing = np.zeros(num_rows, np.bool_)
        self._return, self._length = np.zeros(num_rows, np.float64), np.zeros(num_rows, np.int64)

    def see(self, step: Step, stats: Sequence[EpisodeStats], cut: Array | None = None) -> list[EpisodeStats]:
        """Call hooks for a step, with statistics of episodes ended in the step; return their answers as statistics.

        Hooks are not called for episodes of `cut` rows [R], whose begin is unknown.
        """
        answers: list[EpisodeStats] = []
        watches_episodes = self.hooks.hears("on_episode_start", "on_episode_end")
        if watches_episodes:
            self._note(step, cut)
        if self.hooks.hears("on_episode_step"):
            if watches_episodes:
                rows = enumerate(step.valid.tolist())
                step = step._replace(episodes=tuple(self._episodes.get(row) if taken else None for row, taken in rows))
            self.hooks.tell("on_episode_step", Step(*(read_only(part) for part in step)))
        if watches_episodes:
            for row in np.flatnonzero((step.terminated | step.truncated) & step.valid).tolist():
                if (episode := self._episodes.pop(row, None)) is not None:
                    episode.episode_return, episode.length = float(self._return[row]), int(self._length[row])
                    episode.terminated, episode.truncated = bool(step.terminated[row]), bool(step.truncated[row])
                    episode.stats = {
                        name: value for one in stats if one.row == row for name, value in one.stats.items()
                    }
                    found = self.hooks.tell("on_episode_end", episode, read=finite)
                    answers += [EpisodeStats(row, answer) for answer in found if answer]
        return answers

    def _note(self, step: Step, cut: Array | None) -> None:
        """Begin episodes with the first step in a row, and drop episodes ended by a failure of the environment."""
        begins = step.valid & ~self._playing
        self._return[begins] = self._length[begins] = 0
        for row in np.flatnonzero(begins if cut is None else begins & ~cut).tolist():
            env, agent = divmod(row, step.num_agents)
            self._episodes[row] = Episode(step.first_env + env, agent, int(step.policies[row]))
            self.hooks.tell("on_episode_start", self._episodes[row])
        self._playing[:] = step.valid & ~(step.terminated | step.truncated)
        self._return += np.where(step.valid, step.rewards, 0)
        self._length += np.where(step.valid, step.num_frames, 0)


class GroupHooks:
    """Calls hooks for the steps, episodes and trajectories of a group of environments in an actor.

    Args:
        first_row: number of the group's first row in the run.
        num_agents: rows of each environment.
    """

    def __init__(self, hooks: Hooks, trajectories: Trajectories, first_row: int, num_agents: int) -> None:
        self._hooks, self._trajectories = hooks, trajectories
        self._num_agents, self._first_env = num_agents, first_row // num_agents
        self._watch = EpisodeWatch(hooks, trajectories.valid.shape[2])

    def step(self, slot: int, step: int, row: StepRow, stats: Sequence[EpisodeStats], cut: Array) -> list[EpisodeStats]:
        """Call hooks for a step; return the statistics of episodes, the additions of callbacks included."""
        t = self._trajectories
        seen = Step(
            first_env=self._first_env,
            num_agents=self._num_agents,
            observations={key: array[slot, step] for key, array in t.obs.items()},
            actions=t.action[slot, step],
            rewards=row.reward,
            num_frames=row.num_frames,
            terminated=row.terminated,
            truncated=row.truncated if row.logical_end is None else row.truncated | row.logical_end,
            valid=t.valid[slot, step],
            policies=t.policy_id[slot, step],
        )
        return [*stats, *self._watch.see(seen, stats, cut)]

    def trajectory(self, slot: int) -> None:
        """Call hooks for a full trajectory, first the hooks that may change the trajectory."""
        if not self._hooks.hears("on_postprocess_trajectory", "on_trajectory_end"):
            return
        t = self._trajectories
        full = Trajectory(
            first_env=self._first_env,
            num_agents=self._num_agents,
            observations={key: array[slot] for key, array in t.obs.items()},
            first=read_only(t.first[slot]),
            actions=t.action[slot],
            rewards=t.reward[slot],
            terminated=t.terminated[slot],
            truncated=t.truncated[slot],
            valid=t.valid[slot],
            policies=read_only(t.policy_id[slot]),
            recorded={name: array[slot] for name, array in t.recorded.items()},
        )
        self._hooks.tell("on_postprocess_trajectory", full)
        self._hooks.tell("on_trajectory_end", Trajectory(*(read_only(part) for part in full)))


class HookedEnvs:
    """Environments played outside of a run, with callbacks for their steps and episodes."""

    def __init__(self, envs: GroupEnv, policy: int, hooks: Hooks) -> None:
        self.spec, self.num_rows, self.cut, self.said = envs.spec, envs.num_rows, envs.cut, envs.said
        self._envs, self._hooks, self._watch = envs, hooks, EpisodeWatch(hooks, envs.num_rows)
        self._policies = np.full(envs.num_rows, policy, np.int32)

    @property
    def rebuilds(self) -> int:
        """Return the number of environments made again so far."""
        return self._envs.rebuilds

    def reset(self, seeds: Sequence[int], obs: dict[str, Any]) -> None:
        """Write the first observations."""
        self._envs.reset(seeds, obs)

    def step(self, action: Array, row: StepRow) -> Sequence[EpisodeStats]:
        """Take a step, and call hooks for the step."""
        before = {key: array.copy() for key, array in row.obs.items()}
        stats = self._envs.step(action, row)
        seen = Step(
            first_env=0,
            num_agents=self.spec.num_agents,
            observations=before,
            actions=action,
            rewards=row.reward,
            num_frames=row.num_frames,
            terminated=row.terminated,
            truncated=row.truncated,
            valid=np.ones_like(row.first) if self.spec.same_step else ~row.first,
            policies=self._policies,
        )
        return [*stats, *self._watch.see(seen, stats)]

    def close(self) -> None:
        """Close the environments."""
        self._envs.close()
        self._hooks.tell("on_end")


def finite(answer: object) -> dict[str, float]:
    """Return the finite numbers in a user's answer, by name."""
    numbers: dict[str, float] = {}
    for name, value in answer.items() if isinstance(answer, Mapping) else ():
        with contextlib.suppress(TypeError, ValueError, OverflowError):  # Python's own integers have no end
            if not isinstance(value, str | bytes) and math.isfinite(number := float(value)):
                numbers[str(name)] = number
    return numbers


def read_only(part: Any) -> Any:
    """Return a read-only view of an array, or of a mapping of arrays; anything else unchanged."""
    if isinstance(part, Mapping):
        return {key: read_only(value) for key, value in part.items()}
    if not isinstance(part, np.ndarray):
        return part
    view = part.view()
    view.flags.writeable = False
    return view


COUNT = "callbacks_off"
"""Name, in reports of actors, of the number of callbacks turned off."""
