"""Where callbacks are told: in place of the objects of a run that would otherwise take note in silence.

So a run without callbacks has not even a branch for them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from algorithms.runtime.arena import Array
from algorithms.runtime.callbacks import EpisodeWatch, Hooks, Step, Trajectory, finite, read_only
from algorithms.runtime.env_group import EnvGroup
from algorithms.runtime.episodes import Episodes
from algorithms.runtime.messages import EpisodesDone, LearnerReport, Message
from algorithms.runtime.monitor import Monitor
from algorithms.runtime.summaries import CustomSummaries
from envs.spec import EpisodeStats, GroupEnv, StepRow

COUNT = "callbacks_off"
"""What actors call the number of callbacks that have raised, in their reports."""


class ToldEpisodes(Episodes):
    """The episodes of a group, in the place of those it has.

    Args:
        group: whose they are.
        hooks: of its actor.
    """

    def __init__(self, group: EnvGroup, hooks: Hooks) -> None:
        super().__init__(group.envs.num_rows)
        self.count = group.episodes.count
        self._group, self._hooks, self._watch = group, hooks, EpisodeWatch(hooks, group.envs.num_rows)
        self._num_agents = group.envs.spec.num_agents
        self._first_env = group.plan.index * group.envs.num_rows // self._num_agents

    def record(self, row: StepRow, valid: Array, policy: Array, stats: Sequence[EpisodeStats]) -> None:
        """Tell of the step that the group has just taken, too."""
        slot, step, t = self._group.slot, self._group.step, self._group.trajectories
        seen = Step(
            first_env=self._first_env,
            num_agents=self._num_agents,
            observations={key: array[slot, step] for key, array in t.obs.items()},
            actions=t.action[slot, step],
            rewards=row.reward,
            num_frames=row.num_frames,
            terminated=row.terminated,
            truncated=row.truncated,
            valid=valid,
            policies=policy,
        )
        super().record(row, valid, policy, [*stats, *self._watch.see(seen, stats)])

    def flush(self, now: bool = False) -> Iterator[EpisodesDone]:
        """Tell of the trajectory that is handed over, too: whoever asks for no report at once has filled one."""
        if not now and self._hooks.hears("on_trajectory_end"):
            self._hooks.tell("on_trajectory_end", self._trajectory())
        yield from super().flush(now)

    def _trajectory(self) -> Trajectory:
        slot, t = self._group.slot, self._group.trajectories
        arrays = (t.first, t.action, t.reward, t.terminated, t.truncated, t.valid, t.policy_id)
        behaviour = (t.behavior_value, t.behavior_log_prob)
        observations = {key: array[slot] for key, array in t.obs.items()}
        whole = (observations, *(array[slot] for array in (*arrays, *behaviour)))
        return Trajectory(self._first_env, self._num_agents, *(read_only(part) for part in whole))


class ToldSummaries(CustomSummaries):
    """What callbacks add to the figures of a policy, after the function that flags name.

    Args:
        name: of that function, or empty.
        hooks: of main.
    """

    def __init__(self, name: str, hooks: Hooks) -> None:
        super().__init__(name)
        self._hooks = hooks

    def __call__(self, policy: int, statistics: Mapping[str, float]) -> dict[str, float]:
        """New figures; those that are there are not changed."""
        found = super().__call__(policy, statistics)
        figures = {**statistics, **found}
        self._hooks.tell("before_logging", policy, figures)
        return found | {tag: value for tag, value in finite(figures).items() if tag not in statistics}


class TellingMonitor(Monitor):
    """A monitor that tells of reports, and counts callbacks that are off."""

    _hooks = Hooks(())

    def listen(self, hooks: Hooks) -> None:
        """Tell these from now on."""
        self._hooks, self.custom = hooks, ToldSummaries(self.custom.name, hooks)

    def handle(self, message: Message) -> None:
        """Take in a report."""
        super().handle(message)
        if isinstance(message, LearnerReport):
            self._hooks.tell("on_report", message)

    def record(self, policy: int, now: float) -> dict[str, float]:
        """That of every monitor, and how many callbacks are off."""
        return super().record(policy, now) | {f"perf/{COUNT}": self._off()}

    def line(self) -> str:
        """That of every monitor."""
        off = self._off()
        return super().line() + (f" | {off} callbacks are off, see logs" if off else "")

    def close(self) -> None:
        """Write what is left; then the run is over for hooks too."""
        super().close()
        self._hooks.tell("on_end")

    def _off(self) -> int:
        return self._hooks.off + self._of_actors(COUNT)


class ToldEnvs:
    """Environments that are played outside of a run.

    Args:
        envs: those.
        policy: that plays them.
        hooks: are told.
    """

    def __init__(self, envs: GroupEnv, policy: int, hooks: Hooks) -> None:
        self.spec, self.num_rows = envs.spec, envs.num_rows
        self._envs, self._hooks, self._watch = envs, hooks, EpisodeWatch(hooks, envs.num_rows)
        self._policies = np.full(envs.num_rows, policy, np.int32)

    @property
    def rebuilds(self) -> int:
        """Environments made again so far."""
        return self._envs.rebuilds

    def reset(self, seeds: Sequence[int], obs: dict[str, Any]) -> None:
        """Write the first observations."""
        self._envs.reset(seeds, obs)

    def step(self, action: Array, row: StepRow) -> Sequence[EpisodeStats]:
        """Take a step, and tell of it."""
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
        """Close the environments; nothing more happens."""
        self._envs.close()
        self._hooks.tell("on_end")
