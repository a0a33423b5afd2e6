"""The monitor of a run in main: counters and statistics per policy, written to files, trackers and the console."""

import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.callbacks import COUNT, Hooks, finite
from appo.algorithms.runtime.config import LoggingConfig
from appo.algorithms.runtime.custom_summaries import CustomSummaries
from appo.algorithms.runtime.disk import DiskThread
from appo.algorithms.runtime.messages import (
    EpisodesDone,
    LearnerReport,
    Message,
    OutputReport,
    TimeReport,
    WorkerReport,
    WorkerRestarted,
)
from appo.algorithms.runtime.monitor.console import Console, PlainLines
from appo.algorithms.runtime.monitor.overview import Overview, memory
from appo.algorithms.runtime.monitor.performance import Machine, Performance, ProcessTimes, performance
from appo.algorithms.runtime.monitor.policy_progress import COUNTERS, HEAD, Names, PolicyProgress, elapsed_before
from appo.algorithms.runtime.monitor.tracking import Tracker
from appo.utils.logging import recent_warnings
from appo.utils.metrics import MetricsLog, duration, last_values, read_metrics, short_number, without_lost
from appo.utils.run_folder import RunFolder
from appo.utils.system.machine import core_time
from appo.utils.system.usage import Usage
from appo.utils.tensorboard.writer import EventWriter
from appo.utils.windows import RateMeter

log = logging.getLogger(__name__)

FIRST_SUMMARY_SECONDS = 0.25
SOON_SECONDS, FIRST_MINUTES = 5.0, 5  # longest time between summaries in the first minutes, when users watch most
MOST_WARNINGS = 10  # new ones a minute: a thousand environments can fail in a thousand ways at once
EARLIER = "earlier segments"  # a name among those of workers
CLOSE_SECONDS = 3.0  # to write the remaining figures


class Companion(Protocol):
    """A process beside training."""

    def look(self, now: float) -> None:
        """Restart the process if it has ended and the restart is due at monotonic time `now`."""

    def plain(self) -> dict[str, object]:
        """Return the entry of the process in status.json."""


class Monitor:
    """Collects all reports; writes metrics.jsonl and TensorBoard summaries, and updates the console.

    Args:
        resumed: plain state of the checkpoint of every policy; {} without a checkpoint.
        budget: budget of the run, for the estimate of the remaining time.
        machine: machine of the run; by default the local machine without a GPU.
        frozen: policies that never learn.

    Attributes:
        policies: counters and statistics per policy.
        workers: worker -> counters of the worker.
        console: display of the run; plain lines unless replaced.
        started: monotonic time of the start.
        elapsed_before: saved seconds of earlier starts.
        trackers: trackers, which receive every record.
        beside: processes beside training by name, restarted after an end.
        disk: thread that writes the records.
        usage: meter of the machine's load, which is part of every record.
        output: counts of the written dataset; {} without a dataset.
    """

    def __init__(
        self,
        directory: Path,
        config: LoggingConfig,
        resumed: Sequence[Mapping[str, Any]],
        budget: Budget,
        machine: Machine | None = None,
        frozen: Collection[int] = (),
        hooks: Hooks | None = None,
    ) -> None:
        self.config, self.budget, self.hooks = config, budget, hooks or Hooks(())
        self._has_hooks = hooks is not None
        self.console: Console = PlainLines(config.report_interval_seconds)
        self.custom = CustomSummaries(config.custom_summaries, hooks)
        names = Names(config.max_stats_names)
        self._figures = Names(1000, "figures of learners, callbacks and summaries")
        self.policies = [
            PolicyProgress(config.stats_avg, frozen=policy in frozen, names=names, figures=self._figures)
            for policy in range(len(resumed))
        ]
        self.workers: dict[str, dict[str, int]] = {}
        self.output: dict[str, int] = {}
        self.machine = machine or Machine(core_time())
        self.times: dict[str, ProcessTimes] = {}
        self.collect_rate = RateMeter()  # steps of all actors, trained or not
        self.restarts = self.replaced = 0  # restarts after deaths, and replacements of retired actors
        self.trackers: list[Tracker] = []
        self.beside: dict[str, Companion] = {}
        self.usage = Usage()
        self.disk = DiskThread("files")
        folder = RunFolder(directory)
        first_start = not (folder.metrics.exists() and folder.metrics.stat().st_size)
        most_bytes = config.max_metrics_mb << 20
        self.metrics_log = MetricsLog(folder.metrics, most_bytes)
        self.writers: list[EventWriter] = []
        self.started = time.monotonic()
        self.elapsed_before = elapsed_before(resumed)
        for policy, state in enumerate(resumed):
            self.policies[policy].restore(state)
            if not first_start:  # the record from which the run continues, see `without_lost`
                self.metrics_log.append(self.record(policy, self.started))
            if config.tensorboard:
                # Earlier files may contain training lost in a crash, which would be a second curve.
                purge_step = int(state["env_steps"]) if state else None if first_start else 0
                writer = EventWriter(folder.summaries(policy), purge_step=purge_step, most_bytes=most_bytes // 4)
                self.writers.append(writer)
                if state and not first_start:
                    # TensorBoard's loader ignores a purge: a point disappears only if its curve gets a new point at or
                    # before its step.
                    earlier = [r for r in without_lost(read_metrics(folder.metrics)) if r["policy"] == policy]
                    self._show(policy, last_values(earlier))
        self._traces: set[str] = set()  # logged tracebacks and warnings
        self._minute, self._of_minute = -math.inf, 0  # its beginning, and new warnings since
        self._has_said_absurd = False
        self._played = self._ended = False  # whether an episode has ended; whether the start has
        self._summary_interval = FIRST_SUMMARY_SECONDS
        self._next_summary = self.started + FIRST_SUMMARY_SECONDS

    def elapsed_seconds(self, now: float) -> float:
        """Return the seconds of training of all starts at monotonic time `now`."""
        return self.elapsed_before + now - self.started

    def snapshot(self, policy: int) -> dict[str, Any]:
        """Return the statistics of a policy for a checkpoint, beside the learner's state."""
        return {"elapsed_seconds": round(self.elapsed_seconds(time.monotonic()), 3), **self.policies[policy].snapshot()}

    def handle(self, message: Message) -> None:
        """Add a report."""
        match message:
            case EpisodesDone():
                self._add_episodes(message)
            case LearnerReport(policy, version, totals, metrics):
                progress = self.policies[policy]
                progress.version = version
                progress.learned(totals, metrics)
                now = time.monotonic()
                progress.env_step_rate.add(now, totals["env_steps"])
                progress.sample_rate.add(now, totals["samples"])
                progress.discard_rate.add(now, totals["discarded"])
                self.hooks.tell("on_report", message)
            case WorkerReport(worker, totals, raised):
                for text in raised:
                    self._warn(worker, text)
                self.workers[worker] = self.workers.get(worker, {}) | totals
                self.collect_rate.add(time.monotonic(), self.collected)
            case OutputReport(totals):
                self.output = totals
            case TimeReport(process):
                self.times.setdefault(process, ProcessTimes()).add(message)
            case WorkerRestarted(retired=True):
                self.replaced += 1
            case WorkerRestarted():
                self.restarts += 1

    def _warn(self, worker: str, text: str) -> None:
        """Log a warning once for all workers, but no more than `MOST_WARNINGS` a minute."""
        head, _, trace = text.partition("\n")
        key = trace or head.partition(" is ")[0]  # without numbers, which differ between workers
        if key in self._traces:
            return
        if (now := time.monotonic()) - self._minute > 60:
            self._minute, self._of_minute = now, 0
        self._of_minute += 1
        if self._of_minute <= MOST_WARNINGS:
            self._traces.add(key)
            log.warning("%s: %s%s", worker, head, f"\n{trace}" * bool(trace))
        elif self._of_minute == MOST_WARNINGS + 1:
            log.warning("further warnings of this minute are in the logs of the workers alone")

    def _add_episodes(self, done: EpisodesDone) -> None:
        for policy, progress in enumerate(self.policies):
            progress.add_episodes(done, policy)
        self.hooks.tell("on_episodes", done)
        if not self._played:
            self._played, self._next_summary = True, -math.inf  # users wait for the first figures

    def tick(self, now: float) -> None:
        """Write summaries, check processes and update the console, if due at monotonic time `now`."""
        if now >= self._next_summary:
            self.write_summaries(now)
            longest = self.config.experiment_summaries_interval
            if now - self.started < 60 * FIRST_MINUTES:
                longest = min(longest, SOON_SECONDS)
            self._summary_interval = min(2 * self._summary_interval, longest)
            self._next_summary = now + self._summary_interval
        for companion in self.beside.values():
            companion.look(now)
        self.console.tick(now, self.overview)

    def write_summaries(self, now: float) -> None:
        """Write a record of every policy to metrics.jsonl and TensorBoard."""
        absurd = [(policy, figures) for policy, one in enumerate(self.policies) if (figures := one.absurd())]
        if absurd and not self._has_said_absurd:
            self._has_said_absurd = True
            log.warning("policy %d: nothing can be learned from such numbers: %s", *absurd[0])
        found = self.performance()
        machine = {f"perf/{name}": value for name, value in self.usage.read().items()}
        for policy in range(len(self.policies)):
            record = self.record(policy, now) | (found.tags() if found else {}) | machine | memory.tags(now)
            self.policies[policy].recorded()
            own = frozenset(record)
            record |= self.custom(policy, record)
            record = self._after_callbacks(policy, record)
            if record.keys() - own:
                added = self._figures.known({name: record[name] for name in record.keys() - own})
                record = {name: value for name, value in record.items() if name in own or name in added}
            self.disk.do(partial(self.metrics_log.append, record))
            for tracker in self.trackers:
                tracker.add(policy, record)
            if self.writers:
                self._show(policy, record)

    def _after_callbacks(self, policy: int, record: dict[str, float]) -> dict[str, float]:
        """Call the callbacks for summaries and results; return the record with the figures of callbacks."""
        hooks = self.hooks
        if hooks.hears("on_summaries"):
            values = {name: one.values() for name, one in self.policies[policy].statistics().items()}
            writer = self.writers[policy] if self.writers else None
            hooks.tell("on_summaries", policy, values, int(record["env_steps"]), writer)
        if not hooks.hears("on_train_result"):
            return record
        figures, counters = dict(record), {name: record[name] for name in HEAD}
        hooks.tell("on_train_result", policy, figures)
        return counters | {tag: value for tag, value in finite(figures).items() if tag not in counters}

    def _show(self, policy: int, record: Mapping[str, Any]) -> None:
        tags = {tag: value for tag, value in record.items() if tag not in HEAD}
        tags |= {f"perf/{name}": record[name] for name in ("samples", "discarded")}
        self.writers[policy].add(int(record["env_steps"]), tags)

    def record(self, policy: int, now: float) -> dict[str, float]:
        """Return the counters of a policy, then the figures by TensorBoard tag."""
        progress = self.policies[policy]
        counters = {name: progress.totals[name] for name in COUNTERS}
        head = {"elapsed_seconds": round(self.elapsed_seconds(now), 3), "policy": policy, **counters}
        callbacks = {f"perf/{COUNT}": self._callbacks_off()} if self._has_hooks else {}
        replaced = {
            "perf/restarts": self.restarts,
            "perf/actors_replaced": self.replaced,
            "perf/env_rebuilds": self._of_actors("rebuilds"),
        }
        rate = self.collect_rate.rates(now)[10.0]
        collected = {"perf/collected_per_second": rate} if math.isfinite(rate) else {}
        output = {f"output/{name}": count for name, count in self.output.items()}
        return {**head, **replaced, **progress.tags(now), **collected, **callbacks, **output}

    def overview(self, now: float) -> Overview:
        """Return the overview of the run at monotonic time `now`."""
        totals = self.totals()
        return Overview(
            elapsed_seconds=round(self.elapsed_seconds(now), 3),
            seconds_left=self.seconds_left(now),
            share=self.budget.share(self.policies, self.collected, now - self.started),
            env_steps=totals["env_steps"],
            samples=totals["samples"],
            discarded=totals["discarded"],
            restarts=self.restarts,
            env_rebuilds=totals.get("actors_rebuilds", 0),
            memory_bytes=memory.read(now),
            performance=self.performance(),
            policies=tuple(self.record(policy, now) for policy in range(len(self.policies))),
            warnings=recent_warnings(),
            line=self.line(),
        )

    def status(self) -> dict[str, object]:
        """Return the entries of status.json: the overview, totals, returns and processes beside training."""
        now = time.monotonic()
        means = [p.episode_return.mean if p.episodes else math.nan for p in self.policies]
        return {
            **self.overview(now).plain(),
            "seconds": round(now - self.started, 3),  # since the start
            "totals": self.totals(),
            "return_mean": [mean if math.isfinite(mean) else None for mean in means],
            "beside": {name: companion.plain() for name, companion in self.beside.items()},
        }

    def line(self) -> str:
        """Return one line with progress, speed, lag, return and remaining time."""
        now, several = time.monotonic(), len(self.policies) > 1
        parts = [f"policy {i}: " * several + p.line(now) for i, p in enumerate(self.policies)]
        if not any(p.totals["samples"] for p in self.policies) and self.workers:
            per_second = self.collected / (now - self.started)
            parts.append(f"collected {short_number(self.collected)} steps, {short_number(per_second)}/s")
        if rebuilds := self._of_actors("rebuilds"):
            parts.append(f"{rebuilds} env rebuilds, see logs")
        seconds = self.seconds_left(now)
        left = "" if seconds is None else f"{', ' if len(parts) == 1 else ' | '}{duration(seconds)} left"
        off = self._callbacks_off() if self._has_hooks else 0
        return " | ".join(parts) + left + (f" | {off} callbacks are off, see logs" if off else "")

    def seconds_left(self, now: float) -> float | None:
        """Estimate the remaining seconds at monotonic time `now`; None if the end is days away or unknown."""
        seconds = self.budget.seconds_left(self.policies, self.collected, now - self.started)
        return seconds if seconds < 2 * 24 * 3600.0 else None

    @property
    def collected(self) -> int:
        """Return the steps of all actors since the start."""
        return self._of_actors("collected")

    @property
    def stepped(self) -> int:
        """Return the steps of all actors since the start, with steps of incomplete trajectories."""
        return max(self.collected, sum(times.collected for times in self.times.values()))

    def _callbacks_off(self) -> int:
        return self.hooks.off + self._of_actors(COUNT)

    def begin_segment(self) -> None:
        """Keep the totals of workers whose successors count from 0."""
        sums = Counter[str]()
        for totals in self.workers.values():
            sums.update({name: count for name, count in totals.items() if name != COUNT})
        self.workers = {EARLIER: dict(sums)}

    def _of_actors(self, name: str) -> int:
        return sum(totals.get(name, 0) for totals in self.workers.values())

    def performance(self) -> Performance | None:
        """Return the use of time in the run; None before the first environment or learner step."""
        too_old = max(progress.too_old for progress in self.policies)
        return performance([times.window() for times in self.times.values()], self.machine, too_old)

    def totals(self) -> dict[str, int]:
        """Return the counters of the run, summed over workers and policies."""
        sums: dict[str, int] = {"restarts": self.restarts, "actors_replaced": self.replaced}
        learners = ((name, value) for p in self.policies for name, value in p.totals.items())
        actors = ((f"actors_{name}", value) for totals in self.workers.values() for name, value in totals.items())
        for name, value in (*learners, *actors, *((f"output_{name}", value) for name, value in self.output.items())):
            sums[name] = sums.get(name, 0) + value
        return sums

    def write_last(self) -> None:
        """Write the last summaries, before the last checkpoint, from which a resume continues."""
        self._ended = True
        self.write_summaries(time.monotonic())

    def close(self, *, with_last: bool = True) -> None:
        """Write the last summaries if missing and `with_last`, and close files and trackers."""
        self.console.close()
        if with_last and not self._ended:
            self.write_last()
        deadline = time.monotonic() + CLOSE_SECONDS
        if self.disk.finish("writing figures", CLOSE_SECONDS):  # else the thread still needs the file
            self.metrics_log.close()
        if lost := self.metrics_log.dropped:
            log.warning("%d records of metrics.jsonl are lost: the disk did not take them", lost)
        for writer in self.writers:
            writer.close(max(0.0, deadline - time.monotonic()))
        deadline = time.monotonic() + 5.0
        for tracker in self.trackers:  # all trackers send at once
            tracker.end()
        for tracker in self.trackers:
            tracker.close(max(0.0, deadline - time.monotonic()))
        self.hooks.tell("on_end")
