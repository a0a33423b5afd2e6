"""What main knows of a run: counters and statistics per policy, and where they are written."""

import math
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from algorithms.runtime.config import ENDLESS, LoggingConfig
from algorithms.runtime.console import Console, PlainLines
from algorithms.runtime.messages import (
    EpisodesDone,
    LearnerReport,
    Message,
    TimeReport,
    WorkerReport,
    WorkerRestarted,
)
from algorithms.runtime.performance import Machine, Performance, ProcessTimes, performance
from algorithms.runtime.summaries import CustomSummaries
from algorithms.runtime.tracking import Tracker
from algorithms.runtime.traits import Traits
from utils import cpu
from utils.metrics import (
    EventWriter,
    MetricsLog,
    duration,
    last_values,
    read_metrics,
    short_number,
    without_lost,
)
from utils.windows import RateMeter, RunningStatistic

FIRST_SUMMARY_SECONDS = 0.25
LONGEST_SHOWN_SECONDS = 2 * 24 * 3600.0  # a longer estimate only says that no budget was set
COUNTERS = ("env_steps", "samples", "discarded")
HEAD = ("elapsed_seconds", "policy", *COUNTERS)  # of a record in metrics.jsonl; TensorBoard tags follow


class PolicyProgress:
    """Counters and statistics of one policy.

    Attributes:
        totals: of its learner, see `LearnerReport`.
        episode_return, length: of its last episodes.
        stats: the same for statistics reported by the environment.
        frozen: it plays and never learns.
        adoptions: how often its weights were replaced by those of another policy.
    """

    def __init__(self, stats_avg: int, *, frozen: bool = False) -> None:
        self.stats_avg, self.frozen, self.adoptions = stats_avg, frozen, 0
        self.totals: dict[str, int] = {"env_steps": 0, "samples": 0, "discarded": 0, "updates": 0}
        self.version = 0
        self.episodes = 0
        self.episode_return, self.length = RunningStatistic(stats_avg), RunningStatistic(stats_avg)
        self.stats: dict[str, RunningStatistic] = {}
        self.metrics: dict[str, float] = {}
        self.env_step_rate, self.sample_rate, self.discard_rate = RateMeter(), RateMeter(), RateMeter()

    def add_episodes(self, done: EpisodesDone, policy: int) -> None:
        """Take in the episodes this policy played."""
        mine = done.policy == policy
        self.episodes += int(np.count_nonzero(mine))
        self.episode_return.append(done.episode_return[mine])
        self.length.append(done.length[mine])
        for owner, stats in done.stats:
            if owner == policy:
                for name, value in stats.items():
                    self.stats.setdefault(name, RunningStatistic(self.stats_avg)).append(value)

    def start_afresh(self, adoptions: int) -> None:
        """Its weights were replaced: what it has played says nothing of it any more."""
        self.adoptions = adoptions
        self.episode_return, self.length = RunningStatistic(self.stats_avg), RunningStatistic(self.stats_avg)
        self.stats.clear()

    @property
    def too_old(self) -> float:
        """Share of the samples that was discarded in the last seconds.

        A policy that does not learn, or not any more, discards all of them, whatever their age: then it is 0.
        """
        discarded, used = self.discard_rate.rates()[10.0], self.sample_rate.rates()[10.0]
        return discarded / (discarded + used) if used > 0 else 0.0

    def statistics(self) -> dict[str, RunningStatistic]:
        """Everything that is averaged over episodes, by the first part of its tags."""
        extra = {f"stats/{name}": statistic for name, statistic in self.stats.items()}
        return {"reward": self.episode_return, "len": self.length, **extra}

    def snapshot(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that the averages of a later start go on where they were."""
        windows = {name: statistic.values() for name, statistic in self.statistics().items()}
        return {"episodes": self.episodes, "adoptions": self.adoptions, "windows": windows}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the plain state of a checkpoint, with its `snapshot` as "progress"."""
        self.totals |= {name: int(state[name]) for name in self.totals if name in state}
        self.version = int(state.get("version", 0))
        kept = state.get("progress", {})
        self.episodes = int(kept.get("episodes", 0))
        traits = Traits.in_state(state) or Traits()
        self.adoptions = traits.adoptions
        played_with_these = kept.get("adoptions", 0) == traits.adoptions
        windows = dict(kept.get("windows", {})) if played_with_these else {"reward": (), "len": ()}
        self.episode_return.append(windows.pop("reward", ()))
        self.length.append(windows.pop("len", ()))
        for name, values in windows.items():
            self.stats.setdefault(name.removeprefix("stats/"), RunningStatistic(self.stats_avg)).append(values)

    def tags(self) -> dict[str, float]:
        """TensorBoard tag -> value, only what is known."""
        values = {"perf/version": float(self.version), "perf/episodes": float(self.episodes), **self.metrics}
        for name, statistic in self.statistics().items():
            if statistic.count:
                values |= {f"{name}/mean": statistic.mean, f"{name}/min": statistic.min, f"{name}/max": statistic.max}
        rates = {"env_steps_per_second": self.env_step_rate, "samples_per_second": self.sample_rate}
        values |= {f"perf/{name}": meter.rates()[10.0] for name, meter in rates.items()}
        return {tag: value for tag, value in values.items() if math.isfinite(value)}

    def line(self) -> str:
        """Progress, speed, lag and return."""
        rates = self.env_step_rate.rates()
        speed = "/".join("-" if math.isnan(rate) else short_number(rate) for rate in rates.values())
        parts = [f"env steps {short_number(self.totals['env_steps'])} at {speed}/s (10 s/1 min/5 min)"]
        if math.isfinite(samples := self.sample_rate.rates()[10.0]):
            parts.append(f"{short_number(samples)} samples/s")
        if (lag := self.metrics.get("train/policy_lag_mean")) is not None:
            parts.append(f"lag {lag:.1f}")
        if self.episode_return.count:
            parts.append(f"return {self.episode_return.mean:.2f} over {self.episode_return.count} episodes")
        return ", ".join(parts)


class Limits(NamedTuple):
    """When a start ends at the latest.

    Attributes:
        env_steps, samples: per policy, of all starts.
        seconds: of this start.
        collected: steps of all actors, for runs that only sample; None: no limit.
    """

    env_steps: int
    samples: float = math.inf
    seconds: float = math.inf
    collected: int | None = None

    def seconds_left(self, policies: Sequence[PolicyProgress], collected: int, elapsed_seconds: float) -> float:
        """Until the first of them is reached, at the speed of the last minute; infinity where that is not known.

        Env steps and samples are reached when the slowest policy has them.
        """
        trained = 0.0
        for progress in (one for one in policies if not one.frozen):
            env_steps = _seconds_to(self.env_steps - progress.totals["env_steps"], progress.env_step_rate)
            samples = _seconds_to(self.samples - progress.totals["samples"], progress.sample_rate)
            trained = max(trained, min(env_steps, samples))
        sampled = math.inf
        if self.collected is not None and collected:
            sampled = (self.collected - collected) / collected * elapsed_seconds
        return max(0.0, min(trained, sampled, self.seconds - elapsed_seconds))

    def share(self, policies: Sequence[PolicyProgress], collected: int, elapsed_seconds: float) -> float | None:
        """How much of the nearest of them is used up, from 0 to 1; None if none was set."""
        if all(getattr(self, name) >= endless for name, endless in ENDLESS.items()):
            return None
        learning = (p.totals for p in policies if not p.frozen)
        parts = [max(totals["env_steps"] / self.env_steps, totals["samples"] / self.samples) for totals in learning]
        sampled = collected / self.collected if self.collected else 0.0
        in_time = elapsed_seconds / self.seconds if self.seconds else 1.0
        return min(1.0, max(min(parts), sampled, in_time))


class Monitor:
    """Listens to all reports; writes metrics.jsonl and TensorBoard summaries, and lets the console show them.

    Args:
        directory: of the run.
        config: the logging flags.
        resumed: plain state of the checkpoint of every policy, with which this start goes on; {} where there is none.
        limits: of this start, for the estimate of the time left.
        machine: that it runs on; by default this one, without a GPU.
        frozen: policies that never learn.

    Attributes:
        console: what shows the run meanwhile: plain lines, unless it is given another one.
        started: monotonic time from which this start counts.
        elapsed_before: seconds of earlier starts, up to what was saved of them.
        tracker: is handed every record too, if there is one.
    """

    def __init__(
        self,
        directory: Path,
        config: LoggingConfig,
        resumed: Sequence[Mapping[str, Any]],
        limits: Limits,
        machine: Machine | None = None,
        frozen: Collection[int] = (),
    ) -> None:
        self.config, self.limits = config, limits
        self.console: Console = PlainLines(config.report_interval_seconds)
        self.custom = CustomSummaries(config.custom_summaries)
        self.policies = [PolicyProgress(config.stats_avg, frozen=policy in frozen) for policy in range(len(resumed))]
        self.workers: dict[str, dict[str, int]] = {}
        self.machine = machine or Machine(cpu.core_time())
        self.times: dict[str, ProcessTimes] = {}
        self.restarts = self.replaced = 0  # of processes that ended, and that asked for it
        self.tracker: Tracker | None = None
        path = directory / "metrics.jsonl"
        first_start = not (path.exists() and path.stat().st_size)
        self.metrics_log = MetricsLog(path)
        self.writers: list[EventWriter] = []
        self.started = time.monotonic()
        self.elapsed_before = max(float(s.get("progress", {}).get("elapsed_seconds", 0)) for s in resumed)
        for policy, state in enumerate(resumed):
            self.policies[policy].restore(state)
            if not first_start:  # says from where it goes on, see `without_lost`
                self.metrics_log.append(self.record(policy, self.started))
            if config.tensorboard:
                # Earlier files may hold what a crash took back; it would be a second curve beside the new one.
                purge_step = int(state["env_steps"]) if state else None if first_start else 0
                self.writers.append(EventWriter(directory / ".summary" / f"p{policy}", purge_step=purge_step))
                if state and not first_start:
                    self._show_again(policy, path)
        self._played = self._ended = False  # an episode of this start has; this start has
        self._summary_interval = FIRST_SUMMARY_SECONDS
        self._next_summary = self.started + FIRST_SUMMARY_SECONDS

    def elapsed_seconds(self, now: float) -> float:
        """How long all starts of the run have trained at this monotonic time."""
        return self.elapsed_before + now - self.started

    def snapshot(self, policy: int) -> dict[str, Any]:
        """What a checkpoint of a policy keeps of the reports, besides the learner's state."""
        elapsed_seconds = round(self.elapsed_seconds(time.monotonic()), 3)
        return {"elapsed_seconds": elapsed_seconds, **self.policies[policy].snapshot()}

    def handle(self, message: Message) -> None:
        """Take in a report."""
        match message:
            case EpisodesDone():
                for policy, progress in enumerate(self.policies):
                    progress.add_episodes(message, policy)
                if not self._played:
                    self._played, self._next_summary = True, -math.inf  # the first figures are awaited most
            case LearnerReport(policy, version, totals, metrics):
                progress = self.policies[policy]
                progress.version = version
                progress.totals |= totals
                progress.metrics |= metrics
                now = time.monotonic()
                progress.env_step_rate.add(now, totals["env_steps"])
                progress.sample_rate.add(now, totals["samples"])
                progress.discard_rate.add(now, totals["discarded"])
            case WorkerReport(worker, totals):
                self.workers[worker] = self.workers.get(worker, {}) | totals
            case TimeReport(process):
                self.times.setdefault(process, ProcessTimes()).add(message)
            case WorkerRestarted(retired=True):
                self.replaced += 1
            case WorkerRestarted():
                self.restarts += 1

    def tick(self, now: float) -> None:
        """Write what is due at this monotonic time."""
        if now >= self._next_summary:
            self.write_summaries(now)
            self._summary_interval = min(2 * self._summary_interval, self.config.experiment_summaries_interval)
            self._next_summary = now + self._summary_interval
        self.console.tick(now, self)

    def write_summaries(self, now: float) -> None:
        """A record of every policy for metrics.jsonl and TensorBoard."""
        found = self.performance()
        for policy in range(len(self.policies)):
            record = self.record(policy, now) | (found.tags() if found else {})
            record |= self.custom(policy, record)
            self.metrics_log.append(record)
            if self.tracker is not None:
                self.tracker.add(policy, record)
            if self.writers:
                self._show(policy, record)

    def _show(self, policy: int, record: Mapping[str, Any]) -> None:
        tags = {tag: value for tag, value in record.items() if tag not in HEAD}
        tags |= {f"perf/{name}": record[name] for name in ("samples", "discarded")}
        self.writers[policy].add(int(record["env_steps"]), tags)

    def _show_again(self, policy: int, path: Path) -> None:
        """All curves of an earlier start at the env steps from which this one goes on.

        TensorBoard's own loader does not heed a purge: it forgets a point only when another of its curve comes at or
        before its step.
        """
        earlier = [r for r in without_lost(read_metrics(path)) if r["policy"] == policy]
        self._show(policy, last_values(earlier))

    def record(self, policy: int, now: float) -> dict[str, float]:
        """The counters of a policy, then its figures by TensorBoard tag."""
        progress = self.policies[policy]
        counters = {name: progress.totals[name] for name in COUNTERS}
        head = {"elapsed_seconds": round(self.elapsed_seconds(now), 3), "policy": policy, **counters}
        return {**head, **self._replaced(), **progress.tags()}

    def figures(self, policy: int) -> dict[str, float]:
        """The counters and tags of a policy now, as a record of metrics.jsonl has them."""
        return self.record(policy, time.monotonic())

    def line(self) -> str:
        """One line: progress, speed, lag, return and time left."""
        now, several = time.monotonic(), len(self.policies) > 1
        parts = [f"policy {i}: " * several + p.line() for i, p in enumerate(self.policies)]
        if not any(p.totals["samples"] for p in self.policies) and self.workers:
            collected, per_second = self._collected(), self._collected() / (now - self.started)
            parts.append(f"collected {short_number(collected)} steps, {short_number(per_second)}/s")
        if rebuilds := self._of_actors("rebuilds"):
            parts.append(f"{rebuilds} env rebuilds, see logs")
        seconds = self.seconds_left(now)
        left = "" if seconds is None else f"{', ' if len(parts) == 1 else ' | '}{duration(seconds)} left"
        return " | ".join(parts) + left

    def seconds_left(self, now: float) -> float | None:
        """An estimate of how long this start goes on from this monotonic time; None: no end is in sight."""
        seconds = self.limits.seconds_left(self.policies, self._collected(), now - self.started)
        return seconds if seconds < LONGEST_SHOWN_SECONDS else None

    def _collected(self) -> int:
        return self._of_actors("collected")

    def _of_actors(self, name: str) -> int:
        return sum(totals.get(name, 0) for totals in self.workers.values())

    def _replaced(self) -> dict[str, float]:
        """How often processes were started again, actors replaced that grew, and environments made again."""
        rebuilds = self._of_actors("rebuilds")
        return {"perf/restarts": self.restarts, "perf/actors_replaced": self.replaced, "perf/env_rebuilds": rebuilds}

    def performance(self) -> Performance | None:
        """How the run spends its time, and how near it is to the limit; None while nothing is known of it."""
        too_old = max(progress.too_old for progress in self.policies)
        return performance([times.window() for times in self.times.values()], self.machine, too_old)

    def totals(self) -> dict[str, int]:
        """Counters of the whole run, summed over workers and policies."""
        sums: dict[str, int] = {"restarts": self.restarts, "actors_replaced": self.replaced}
        learners = ((name, value) for p in self.policies for name, value in p.totals.items())
        actors = ((f"actors_{name}", value) for totals in self.workers.values() for name, value in totals.items())
        for name, value in (*learners, *actors):
            sums[name] = sums.get(name, 0) + value
        return sums

    def write_last(self) -> None:
        """Write the last summaries: before the last checkpoint, from whose time a later start goes on."""
        self._ended = True
        self.write_summaries(time.monotonic())

    def close(self) -> None:
        """Write the last summaries, if that is not done yet, and close the files."""
        self.console.close()
        if not self._ended:
            self.write_last()
        self.metrics_log.close()
        for writer in self.writers:
            writer.close()
        if self.tracker is not None:
            self.tracker.close()


def _seconds_to(left: float, meter: RateMeter) -> float:
    """How long so many more take at the speed of the last minute."""
    rate = meter.rates()[60.0]
    return 0.0 if left <= 0 else left / rate if rate > 0 else math.inf
