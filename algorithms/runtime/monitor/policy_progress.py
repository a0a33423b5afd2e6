"""Counters and statistics of one policy, in main."""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from appo.algorithms.runtime.messages import LARGEST, EpisodesDone, PolicyTraits
from appo.algorithms.runtime.monitor.curves import EPISODES
from appo.utils.metrics import short_number
from appo.utils.values import ABSURD, shown
from appo.utils.windows import RateMeter, RunningStatistic

log = logging.getLogger(__name__)

MOST_NAMES = 256
LONGEST_NAME = 200
LONG = 1_000_000
"""Env steps without the end of an episode that the console mentions."""
T = TypeVar("T")
COUNTERS = ("env_steps", "samples", "discarded")  # of a learner
HEAD = ("elapsed_seconds", "policy", *COUNTERS)  # of a record in metrics.jsonl, before TensorBoard tags
SMALLEST = ("_min",)
LATEST = ("learning_rate", "rollbacks", "skipped_in_a_row", "replay_ratio", "reproduction_steps")
"""Ends of tags of training, beside `LARGEST`, whose figure over several reports is no mean."""


class Names:
    """Names of reported figures: the first names, up to a limit, are accepted; figures of later names are dropped.

    An accepted name stays in memory and in every record until the end: a name per episode would fill both.
    """

    def __init__(self, most: int = MOST_NAMES, of_what: str = "statistics of environments (--max_stats_names)") -> None:
        self.most, self.of_what = most, of_what
        self._known: set[str] = set()
        self._is_said = False

    def known(self, values: Mapping[str, T]) -> dict[str, T]:
        """Return the values with accepted names, new names included up to the limits."""
        return {name: value for name, value in values.items() if name in self._known or self._take(name)}

    def _take(self, name: str) -> bool:
        if len(self._known) < self.most and len(str(name)) <= LONGEST_NAME:
            self._known.add(name)
            return True
        if not self._is_said:
            self._is_said = True
            log.warning(
                "%s have more than %d names, or names of more than %d characters, such as %s: others than the first are"
                " left out",
                self.of_what,
                self.most,
                LONGEST_NAME,
                shown(str(name)[:LONGEST_NAME]),
            )
        return False


def elapsed_before(resumed: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds of training in the plain states of checkpoints, one per policy; {} counts as 0."""
    return max(float(state.get("progress", {}).get("elapsed_seconds", 0)) for state in resumed)


def over_reports(tag: str, before: float, reports: int, value: float) -> float:
    """Return the figure of a tag over several reports: of the newest, `value`, and of `reports` others, `before`."""
    if not reports or not tag.startswith("train/") or tag.endswith(LATEST):
        return value
    if not math.isfinite(value):  # an update that was skipped, of which train/skipped tells
        return before
    if tag.endswith(LARGEST):
        return max(before, value)
    return min(before, value) if tag.endswith(SMALLEST) else before + (value - before) / (reports + 1)


class PolicyProgress:
    """Counters and statistics of one policy.

    Attributes:
        totals: totals of the learner, see `LearnerReport`.
        episode_return: returns of the last episodes.
        length: lengths of the last episodes.
        exploring: returns of the last episodes in rows that explore much, see `Algorithm.explores`.
        stats: environments' statistics of the last episodes, by name.
        metrics: metrics of the learner by tag, over its reports since the last record.
        adoptions: number of times the weights were replaced by the weights of another policy.
    """

    def __init__(
        self, stats_avg: int, *, frozen: bool = False, names: Names | None = None, figures: Names | None = None
    ) -> None:
        self.stats_avg, self.frozen = stats_avg, frozen
        self._names, self._figures = names or Names(), figures or Names()
        self.totals: dict[str, int] = {"env_steps": 0, "samples": 0, "discarded": 0, "updates": 0}
        self._restored: dict[str, int] = {}
        self.version = self.episodes = 0
        self.metrics: dict[str, float] = {}
        self._reports: Counter[str] = Counter()  # with a finite number, since the last record
        self.env_step_rate, self.sample_rate, self.discard_rate = RateMeter(), RateMeter(), RateMeter()
        self.start_afresh(adoptions=0)

    def add_episodes(self, done: EpisodesDone, policy: int) -> None:
        """Add the episodes that the policy with this index played."""
        mine = done.policy == policy
        self.episodes += int(np.count_nonzero(mine))
        if done.exploring is not None:  # returns of exploring rows do not measure the policy
            self.exploring.append(done.episode_return[mine & done.exploring])
            mine = mine & ~done.exploring
        self.episode_return.append(done.episode_return[mine])
        self.length.append(done.length[mine])
        for owner, stats in done.stats:
            if owner == policy:
                for name, value in self._names.known(stats).items():
                    self.stats.setdefault(name, RunningStatistic(self.stats_avg)).append(value)

    def learned(self, totals: Mapping[str, int], metrics: Mapping[str, float]) -> None:
        """Add a report of the learner."""
        self.totals |= totals
        for tag, value in self._figures.known(metrics).items():
            self.metrics[tag] = over_reports(tag, self.metrics.get(tag, value), self._reports[tag], value)
            self._reports[tag] += math.isfinite(value)

    def recorded(self) -> None:
        """Begin the metrics of the next record, which has those of this record until the learner reports again."""
        self._reports.clear()

    def start_afresh(self, adoptions: int) -> None:
        """Delete the statistics of episodes, which replaced weights played."""
        self.adoptions = adoptions
        self.recorded()
        self.episode_return, self.length, self.exploring = (RunningStatistic(self.stats_avg) for _ in range(3))
        self.stats: dict[str, RunningStatistic] = {}

    @property
    def too_old(self) -> float:
        """Return the share of samples discarded in the last ten seconds.

        The share is 0 for a policy that does not learn, or not any longer: all samples are discarded at any age.
        """
        discarded, used = self.discard_rate.rates()[10.0], self.sample_rate.rates()[10.0]
        return discarded / (discarded + used) if used > 0 else 0.0

    def statistics(self) -> dict[str, RunningStatistic]:
        """Return the statistics of episodes by the first part of the tag."""
        extra = {f"stats/{name}": statistic for name, statistic in self.stats.items()}
        apart = {"reward_exploring": self.exploring} if self.exploring.count else {}
        return {"reward": self.episode_return, "len": self.length, **apart, **extra}

    def snapshot(self) -> dict[str, Any]:
        """Return the statistics for a checkpoint, with which averages continue after a resume."""
        windows = {name: statistic.values() for name, statistic in self.statistics().items()}
        return {"episodes": self.episodes, "adoptions": self.adoptions, "windows": windows}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the plain state of a checkpoint, which contains a `snapshot` as "progress"."""
        self._restored = {name: int(state[name]) for name in self.totals if name in state}
        self.totals |= self._restored
        self.version = int(state.get("version", 0))
        kept = state.get("progress", {})
        self.episodes = int(kept.get("episodes", 0))
        traits = PolicyTraits.in_state(state)  # None also after --init_whole, which takes weights with their averages
        self.adoptions = traits.adoptions if traits else 0
        played_with_these = traits is None or kept.get("adoptions", 0) == traits.adoptions
        windows = dict(kept.get("windows", {})) if played_with_these else {"reward": (), "len": ()}
        self.episode_return.append(windows.pop("reward", ()))
        self.length.append(windows.pop("len", ()))
        self.exploring.append(windows.pop("reward_exploring", ()))
        stats = {name.removeprefix("stats/"): values for name, values in windows.items()}
        for name, values in self._names.known(stats).items():
            self.stats.setdefault(name, RunningStatistic(self.stats_avg)).append(values)

    def since_start(self, name: str) -> int:
        """Return a total without the restored part."""
        return self.totals[name] - self._restored.get(name, 0)

    def tags(self, now: float = -math.inf) -> dict[str, float]:
        """Return TensorBoard tag -> value, for known values, at monotonic time `now`."""
        values = {"perf/version": float(self.version), "perf/episodes": float(self.episodes), **self.metrics}
        if self.episode_return.count:
            values[EPISODES] = float(self.episode_return.count)
        for name, statistic in self.statistics().items():
            if statistic.count:
                values |= {f"{name}/mean": statistic.mean, f"{name}/min": statistic.min, f"{name}/max": statistic.max}
        rates = {"env_steps_per_second": self.env_step_rate, "samples_per_second": self.sample_rate}
        values |= {f"perf/{name}": meter.rates(now)[10.0] for name, meter in rates.items()}
        return {tag: value for tag, value in values.items() if math.isfinite(value)}

    def absurd(self) -> str:
        """Return the absurdly large figures of learning and returns in words; empty without any."""
        figures = {tag: value for tag, value in self.metrics.items() if tag.startswith("train/")}
        if self.episode_return.count:
            figures["reward/mean"] = self.episode_return.mean
        found = [f"{tag} {value:.3g}" for tag, value in figures.items() if ABSURD < abs(value) < math.inf]
        several = figures.get("train/skipped_in_a_row", math.inf) > 1  # a report may hold a single update
        if figures.get("train/skipped", 0.0) >= 1.0 and several:
            lost = (tag for tag, value in figures.items() if not math.isfinite(value))
            found.append(f"every update was skipped, as {next(lost, 'its gradient')} is not finite")
        return ", ".join(found)

    def line(self, now: float = -math.inf) -> str:
        """Return one line with progress, speed at monotonic time `now`, lag and return."""
        rates = self.env_step_rate.rates(now)
        speed = "/".join("-" if math.isnan(rate) else short_number(rate) for rate in rates.values())
        parts = [f"env steps {short_number(self.totals['env_steps'])} at {speed}/s (10 s/1 min/5 min)"]
        if math.isfinite(samples := self.sample_rate.rates(now)[10.0]):
            parts.append(f"{short_number(samples)} samples/s")
        if (lag := self.metrics.get("train/policy_lag_mean")) is not None:
            ends = [self.metrics.get(name) for name in ("train/policy_lag_min", "train/policy_lag_max")]
            least, most = (None if end is None else f"{end:.0f}" for end in ends)
            parts.append(f"lag {lag:.1f}" + (f" ({least} to {most})" if least and most else ""))
        if self.episode_return.count:
            mean, digits = self.episode_return.mean, ".2f" if abs(self.episode_return.mean) < ABSURD else ".4g"
            parts.append(f"return {mean:{digits}} over {self.episode_return.count} episodes")
        elif not self.episodes and self.since_start("env_steps") > LONG:
            parts.append("no episode has ended yet: see --horizon")
        return ", ".join(parts)
