import json
import logging
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from appo.algorithms.runtime.budget import BENCHMARK, Budget
from appo.algorithms.runtime.config import LoggingConfig, RunConfig, SamplingConfig
from appo.algorithms.runtime.messages import EpisodesDone, LearnerReport, TimeReport, WorkerReport, WorkerRestarted
from appo.algorithms.runtime.monitor.monitor import FIRST_MINUTES, Monitor
from appo.algorithms.runtime.monitor.overview import MemoryMeter
from appo.algorithms.runtime.monitor.performance import Machine
from appo.algorithms.runtime.monitor.policy_progress import PolicyProgress
from tests.unit.utils.test_metrics import events

MILLION = Budget(1_000_000)


class Watched:
    """A monitor, and the clock it looks at."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.now = directory, 1000.0
        monkeypatch.setattr("appo.algorithms.runtime.monitor.monitor.time.monotonic", lambda: self.now)

    def monitor(self, num_policies: int = 1, *, budget: Budget = MILLION, **flags: object) -> Monitor:
        config = LoggingConfig(**{"tensorboard": False, **flags})  # type: ignore[arg-type]
        return Monitor(self.directory, config, [{}] * num_policies, budget)

    def records(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


def report(env_steps: int, policy: int = 0, version: int = 3, **metrics: float) -> LearnerReport:
    totals = {"env_steps": env_steps, "samples": env_steps // 4, "discarded": 5, "updates": 2}
    return LearnerReport(policy, version, totals, {f"train/{name}": value for name, value in metrics.items()})


def episodes(*done: tuple[int, float, int], stats: tuple[tuple[int, dict[str, float]], ...] = ()) -> EpisodesDone:
    policy, episode_return, length = zip(*done, strict=True)
    return EpisodesDone(np.array(policy, np.int32), np.array(episode_return), np.array(length), stats)


def test_returns_of_rows_that_explore_much_stand_apart(watched: Watched) -> None:
    monitor = watched.monitor()
    both = episodes((0, 1.0, 10), (0, 9.0, 30), (0, 3.0, 20))
    monitor.handle(both._replace(exploring=np.array([True, False, True])))
    tags = monitor.policies[0].tags()
    assert tags["perf/episodes"] == 3
    assert (tags["reward/mean"], tags["len/mean"], tags["reward_exploring/mean"]) == (9.0, 30.0, 2.0)
    assert monitor.policies[0].snapshot()["windows"]["reward_exploring"] == [1.0, 3.0]


def test_tags_of_one_policy(watched: Watched) -> None:
    monitor = watched.monitor()
    assert monitor.policies[0].tags() == {"perf/version": 0.0, "perf/episodes": 0.0}
    monitor.handle(episodes((0, 1.0, 10), (0, 4.0, 30), stats=((0, {"true_reward": 7.0}),)))
    monitor.handle(report(1000, loss=0.5, kl_divergence=math.nan))
    watched.now += 2.0
    monitor.handle(report(3000, version=9, loss=0.25, policy_lag_mean=1.5))
    assert monitor.policies[0].tags() == {
        "perf/version": 9.0,
        "perf/episodes": 2.0,
        "perf/env_steps_per_second": 1000.0,
        "perf/samples_per_second": 250.0,
        "train/loss": 0.375,
        "train/policy_lag_mean": 1.5,
        "reward/mean": 2.5, "reward/min": 1.0, "reward/max": 4.0, "reward/episodes": 2.0,
        "len/mean": 20.0, "len/min": 10.0, "len/max": 30.0,
        "stats/true_reward/mean": 7.0, "stats/true_reward/min": 7.0, "stats/true_reward/max": 7.0,
    }  # fmt: skip
    monitor.close()


def test_policies_have_episodes_of_their_own(watched: Watched) -> None:
    monitor = watched.monitor(2)
    monitor.handle(episodes((1, 1.0, 10), (0, 4.0, 30), (1, 3.0, 20), stats=((1, {"a": 7.0}), (0, {"b": 8.0}))))
    first, second = (p.tags() for p in monitor.policies)
    assert (first["reward/mean"], first["perf/episodes"], first["len/mean"]) == (4.0, 1.0, 30.0)
    assert (second["reward/mean"], second["perf/episodes"], second["len/mean"]) == (2.0, 2.0, 15.0)
    assert ("stats/b/mean" in first, "stats/a/mean" in first) == (True, False)
    assert ("stats/b/mean" in second, "stats/a/mean" in second) == (False, True)
    monitor.close()


def test_averages_forget_old_episodes(watched: Watched) -> None:
    monitor = watched.monitor(stats_avg=3)
    monitor.handle(episodes(*((0, float(value), 1) for value in range(10))))
    assert monitor.policies[0].tags()["reward/mean"] == 8.0
    assert monitor.policies[0].tags()["perf/episodes"] == 10.0
    monitor.close()


def test_line_of_one_policy(watched: Watched) -> None:
    monitor = watched.monitor()
    assert monitor.line() == "env steps 0 at -/-/-/s (10 s/1 min/5 min)"
    monitor.handle(report(0))
    watched.now += 10.0
    monitor.handle(report(400_000, policy_lag_mean=1.25))
    monitor.handle(episodes((0, 1.0, 10), (0, 4.5, 30)))
    assert monitor.line() == (
        "env steps 400k at 40k/40k/40k/s (10 s/1 min/5 min), 10k samples/s, lag 1.2, return 2.75 over 2 episodes, "
        "15 s left"
    )
    for budget, left in (
        (Budget(10_000_000), "4 min"),
        (Budget(400_000_000), "2.8 h"),
        (Budget(100_000), "0 s"),  # overrun
        (Budget(10_000_000, samples=300_000), "20 s"),  # of which 100k are there, at 10k/s
        (Budget(10_000_000, seconds=70.0), "60 s"),  # of which 10 are over
        (Budget(10_000_000, samples=300_000, seconds=70.0), "20 s"),
        (Budget(10_000_000, seconds=9.0), "0 s"),
        (Budget(10**10, seconds=4 * 3600.0), "4.0 h"),
    ):
        monitor.budget = budget
        assert monitor.line().endswith(f", {left} left")
    monitor.budget = Budget(10**10)
    assert "left" not in monitor.line()
    assert monitor.seconds_left(watched.now) is None
    monitor.close()


def test_the_line_says_between_what_the_lag_was(watched: Watched) -> None:
    monitor = watched.monitor()
    monitor.handle(report(400, policy_lag_mean=1.25, policy_lag_min=0.0, policy_lag_max=12.0))
    assert ", lag 1.2 (0 to 12)" in monitor.line()
    monitor.close()


def test_what_actors_collect_has_a_rate_whoever_trains_on_it(watched: Watched) -> None:
    monitor = watched.monitor(2)
    assert "perf/collected_per_second" not in monitor.record(0, watched.now)
    for actor in range(2):
        monitor.handle(WorkerReport(f"actor_{actor}", {"collected": 0}))
    watched.now += 4.0
    for actor in range(2):
        monitor.handle(WorkerReport(f"actor_{actor}", {"collected": 1000}))
    rates = [monitor.record(policy, watched.now)["perf/collected_per_second"] for policy in range(2)]
    assert rates == [500.0, 500.0]
    assert monitor.record(0, watched.now)["samples"] == 0
    monitor.close()


def test_records_have_the_memory_of_main_and_of_all_processes(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appo.utils.system.usage.family_memory_bytes", lambda: (40 << 20, 96 << 20))
    monkeypatch.setattr("appo.algorithms.runtime.monitor.monitor.memory", MemoryMeter())
    monitor = watched.monitor(tensorboard=True)
    monitor.close()
    record = watched.records()[-1]
    assert (record["perf/memory_mib"], record["perf/memory_main_mib"]) == (96.0, 40.0)
    (event,) = [e for e in events(watched.directory / ".summary" / "p0") if e.HasField("summary")]
    shown = {value.tag: value.simple_value for value in event.summary.value}
    assert (shown["perf/memory_mib"], shown["perf/memory_main_mib"]) == (96.0, 40.0)


def test_line_of_two_policies(watched: Watched) -> None:
    monitor = watched.monitor(2)
    monitor.handle(report(12_345, policy=1))
    assert monitor.line() == (
        "policy 0: env steps 0 at -/-/-/s (10 s/1 min/5 min) | policy 1: env steps 12.3k at -/-/-/s (10 s/1 min/5 min)"
    )
    monitor.close()


def test_the_slowest_policy_and_the_clock_decide_how_much_time_is_left(watched: Watched) -> None:
    monitor = watched.monitor(2, budget=Budget(1_000_000, seconds=3600.0))
    assert monitor.line().endswith(" | 60 min left")  # of the clock, before there is any speed
    for policy in range(2):
        monitor.handle(report(0, policy))
    watched.now += 10.0
    monitor.handle(report(1_000_000, policy=0))
    monitor.handle(report(500_000, policy=1))
    assert monitor.seconds_left(watched.now) == 10.0
    assert monitor.line().endswith("/s (10 s/1 min/5 min), 12.5k samples/s | 10 s left")
    monitor.close()


def test_policies_that_never_learn_hold_back_no_share_of_the_budget() -> None:
    learning, frozen = PolicyProgress(2), PolicyProgress(2, frozen=True)
    learning.totals["env_steps"] = 250_000
    assert MILLION.share([learning, frozen], 0, 0.0) == 0.25


def test_line_of_a_run_that_only_samples(watched: Watched) -> None:
    monitor = watched.monitor()
    watched.now += 10.0
    for actor, collected in enumerate((3_000_000, 2_000_000)):
        monitor.handle(WorkerReport(f"actor_{actor}", {"collected": collected, "episodes": 4}))
    assert monitor.line().endswith(" | collected 5M steps, 500k/s")
    for budget, left in ((Budget(10**10, collected=20_000_000), "30 s"), (Budget(10**10, seconds=17.0), "7 s")):
        monitor.budget = budget
        assert monitor.line().endswith(f" | collected 5M steps, 500k/s | {left} left")
    monitor.handle(report(4))
    assert "collected" not in monitor.line()
    monitor.close()


def test_every_report_says_where_the_time_goes(watched: Watched, caplog) -> None:
    monitor = Monitor(watched.directory, LoggingConfig(tensorboard=False), [{}, {}], Budget(1000), Machine(2))
    with caplog.at_level(logging.INFO):
        monitor.tick(watched.now)
        monitor.tick(watched.now + 10)
        assert len(caplog.records) == 1  # nothing is known yet
        for done in (1, 2):
            seconds = {"env": 3.0 * done, "training": 1.0 * done}
            monitor.handle(TimeReport("main", "main", 0, seconds, seconds, 2000 * done, 2000 * done))
        monitor.tick(watched.now + 20)
    assert [record.message for record in caplog.records[2:]] == [
        "time: main env 75% training 25%",
        "limit: 1000 samples/s, at 50%; one thread does it all, 75% environment; other placements use all 2 cores",
    ]
    assert [record["perf/limit_ratio"] for record in watched.records()[-2:]] == [0.5, 0.5]
    monitor.close()


def test_samples_that_are_too_old_are_those_of_policies_that_learn(watched: Watched) -> None:
    """A frozen policy discards all of its samples, whatever their age; so does one that has learned enough."""
    monitor = Monitor(watched.directory, LoggingConfig(tensorboard=False), [{}, {}], MILLION, Machine(2), frozen=[1])
    bottlenecks = []
    for done in (1, 2, 3):
        monitor.handle(TimeReport("main", "main", 0, {"env": 1.0 * done}, {"env": 1.0 * done}, 400 * done, 0))
        counts = {"samples": 300 * done, "discarded": 100 * max(0, done - 2)}, {"samples": 0, "discarded": 400 * done}
        for policy, totals in enumerate(counts):
            monitor.handle(LearnerReport(policy, 1, {"env_steps": 0, "updates": 0, **totals}, {}))
        watched.now += 1.0
        found = monitor.performance()
        assert found is not None
        bottlenecks.append(found.bottleneck)
    one_thread = "one thread does it all, 100% environment; other placements use all 2 cores"
    too_old = "14% of the samples are too old: fewer environments or a larger --max_policy_lag"
    assert bottlenecks == [one_thread, one_thread, too_old]
    monitor.close()


def test_totals_are_summed_over_workers_and_policies(watched: Watched) -> None:
    monitor = watched.monitor(2)
    for policy in range(2):
        monitor.handle(report(1000 * (policy + 1), policy))
    for _ in range(2):  # totals, not differences: the same again changes nothing
        monitor.handle(WorkerReport("actor_0", {"collected": 3, "sent": 1}))
        monitor.handle(WorkerReport("actor_1", {"collected": 4, "sent": 2}))
    for _ in range(2):
        monitor.handle(WorkerRestarted("actor_0", "it was killed"))
    monitor.handle(WorkerRestarted("actor_0", "it has grown", retired=True))
    assert monitor.totals() == {
        "restarts": 2, "actors_replaced": 1,
        "env_steps": 3000, "samples": 750, "discarded": 10, "updates": 4, "actors_collected": 7, "actors_sent": 3
    }  # fmt: skip
    monitor.close()


def test_what_only_a_worker_itself_knows_outlasts_a_report_of_its_counts(watched: Watched) -> None:
    monitor = watched.monitor()
    monitor.handle(WorkerReport("actor_0", {"collected": 3, "callbacks_off": 1}))
    monitor.handle(WorkerReport("actor_0", {"collected": 5}))
    assert monitor.workers == {"actor_0": {"collected": 5, "callbacks_off": 1}}
    monitor.close()


def test_new_warnings_are_shown_as_long_as_a_run_lasts_but_not_all_at_once(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = watched.monitor()
    for number in range(25):
        monitor.handle(WorkerReport("bridge", {}, (f"machine {number} is lost: node {number}", "machine 0 is lost")))
    more = "further warnings of this minute are in the logs of the workers alone"
    assert caplog.messages == [*(f"bridge: machine {n} is lost: node {n}" for n in range(10)), more]
    caplog.clear()
    watched.now += 61.0
    monitor.handle(WorkerReport("bridge", {}, ("machine 24 is lost: node 24", "machine 3 is lost")))
    assert caplog.messages == ["bridge: machine 24 is lost: node 24"]
    monitor.close()


def test_records_hold_the_counters_before_the_tags(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryMeter, "tags", lambda meter, now: {"perf/memory_mib": 3.0})
    monitor = watched.monitor(2)
    watched.now += 4.0
    monitor.handle(report(1000, loss=0.5))
    monitor.write_summaries(watched.now)
    monitor.close()
    first, second, *last = watched.records()
    assert list(first)[:5] == ["elapsed_seconds", "policy", "env_steps", "samples", "discarded"]
    assert 0.0 < first.pop("perf/machine_memory_percent") < 100.0
    assert first == {
        "elapsed_seconds": 4.0, "policy": 0, "env_steps": 1000, "samples": 250, "discarded": 5,
        "perf/version": 3.0, "perf/episodes": 0.0, "train/loss": 0.5,
        "perf/restarts": 0, "perf/actors_replaced": 0, "perf/env_rebuilds": 0, "perf/memory_mib": 3.0,
    }  # fmt: skip
    assert (second["policy"], second["env_steps"]) == (1, 0)
    assert [record["policy"] for record in last] == [0, 1]  # closing writes once more


def test_summaries_come_often_at_first_and_then_as_configured(watched: Watched, caplog) -> None:
    monitor = watched.monitor(experiment_summaries_interval=5.0, report_interval_seconds=10.0)
    written, lines = [], []
    with caplog.at_level(logging.INFO):
        for tenth in range(300):
            caplog.clear()
            monitor.tick(1000.0 + tenth / 10)
            if len(watched.records()) > len(written):
                written.append(tenth / 10)
            if caplog.records:
                lines.append(tenth / 10)
    assert written == [0.3, 0.8, 1.8, 3.8, 7.8, 12.8, 17.8, 22.8, 27.8]
    assert lines == [2.0, 12.0, 22.0]
    monitor.close()


@pytest.mark.parametrize("asked", [20.0, 200.0, pytest.param(2.0, marks=pytest.mark.slow)])
def test_in_the_first_minutes_figures_come_every_five_seconds(watched: Watched, asked: float) -> None:
    monitor = watched.monitor(experiment_summaries_interval=asked, tensorboard=True)
    written = [watched.now]
    for second in range(1000):
        before = len(watched.records())
        monitor.tick(watched.now + second)
        written += [watched.now + second] * (len(watched.records()) - before)
    pauses = [(after, after - before) for before, after in pairwise(written)]
    first_minutes = [pause for at, pause in pauses if at <= watched.now + 60 * FIRST_MINUTES]
    assert max(first_minutes) == min(5, asked)
    assert pauses[-1][1] == asked
    (writer,) = monitor.writers
    monitor.close()
    assert (writer.written, writer.dropped) == (len(written), 0)  # one is that of closing


@pytest.mark.parametrize("with_last", [True, False])
def test_no_figures_follow_where_another_run_has_begun(watched: Watched, with_last: bool) -> None:
    monitor = watched.monitor()
    monitor.handle(report(100, loss=1.0))
    monitor.close(with_last=with_last)
    assert len(watched.records()) == with_last


def test_tensorboard_gets_the_tags_at_env_steps(watched: Watched) -> None:
    monitor = watched.monitor(2, tensorboard=True)
    monitor.handle(report(1000, policy=1, loss=0.5))
    monitor.close()
    for policy in range(2):
        (file,) = (watched.directory / ".summary" / f"p{policy}").iterdir()
        assert (b"train/loss" in file.read_bytes()) == (policy == 1)
        assert b"perf/discarded" in file.read_bytes()


def test_the_first_figures_are_written_when_the_first_episode_has_ended(watched: Watched) -> None:
    monitor = watched.monitor(experiment_summaries_interval=100.0)
    monitor._next_summary = watched.now + 100.0  # later in a run whose episodes are long
    monitor.tick(watched.now)
    assert watched.records() == []
    for end in range(2):
        monitor.handle(episodes((0, 1.0, 10)))
        monitor.tick(watched.now + end / 10)
        (record,) = watched.records()
        assert (record["reward/mean"], record["perf/episodes"]) == (1.0, 1.0)
    monitor.close()


def saved(monitor: Monitor, policy: int, env_steps: int) -> dict[str, object]:
    """The plain state of a policy, as it comes back from its checkpoint."""
    state = {"env_steps": env_steps, "samples": env_steps // 4, "discarded": 3, "updates": 2, "version": 9}
    return json.loads(json.dumps(state | {"progress": monitor.snapshot(policy)}))


def test_a_resumed_run_goes_on_with_its_counters_averages_and_time(watched: Watched) -> None:
    first = watched.monitor(2, stats_avg=3)
    played = [(0, float(value), 10 * value) for value in range(5)]
    first.handle(episodes(*played, (1, 8.0, 80), stats=((0, {"a": 1.0}), (0, {"a": 2.0}), (1, {"b": 5.0}))))
    watched.now += 7.0
    states = [saved(first, 0, 500), saved(first, 1, 70)]
    first.close()
    watched.now += 1000.0  # between the starts nothing counts
    second = Monitor(watched.directory, LoggingConfig(tensorboard=False, stats_avg=3), states, Budget(1000))
    assert [p.totals["env_steps"] for p in second.policies] == [500, 70]
    assert second.policies[0].totals == {"env_steps": 500, "samples": 125, "discarded": 3, "updates": 2}
    tags = second.policies[0].tags()
    assert (tags["reward/mean"], tags["len/max"], tags["stats/a/mean"], tags["perf/episodes"]) == (3.0, 40.0, 1.5, 5.0)
    assert second.policies[1].tags()["stats/b/mean"] == 5.0
    # The first records say from where it goes on.
    first_of_second = watched.records()[2:]
    assert [(r["policy"], r["env_steps"], r["elapsed_seconds"]) for r in first_of_second] == [
        (0, 500, 7.0),
        (1, 70, 7.0),
    ]
    assert first_of_second[0]["reward/mean"] == 3.0
    # The window moves on: the oldest of it leaves first.
    second.handle(episodes((0, 10.0, 1)))
    assert second.policies[0].tags()["reward/mean"] == (3.0 + 4.0 + 10.0) / 3
    watched.now += 2.0
    second.write_summaries(watched.now)
    assert watched.records()[-1]["elapsed_seconds"] == 9.0
    second.close()


def test_a_run_that_had_reached_its_return_needs_no_new_window(watched: Watched) -> None:
    first = watched.monitor(stats_avg=3)
    first.handle(episodes((0, 9.0, 1), (0, 10.0, 1), (0, 11.0, 1)))
    state = saved(first, 0, 500)
    first.close()
    again = Monitor(watched.directory, LoggingConfig(tensorboard=False, stats_avg=3), [state], Budget(1000))
    assert budget_of(episode_return=10.0).reached(again.policies) == "the mean return has reached 10.00"
    again.close()
    wider = Monitor(watched.directory, LoggingConfig(tensorboard=False, stats_avg=4), [state], Budget(1000))
    assert budget_of(episode_return=10.0).reached(wider.policies) is None
    wider.close()


@pytest.mark.parametrize("heeds_purges", [True, False])
def test_what_a_crash_took_back_is_hidden_on_tensorboard(watched: Watched, heeds_purges: bool) -> None:
    def steps_of(states: list[dict[str, object]], env_steps: int) -> dict[str, list[int]]:
        """A start, and the steps of two curves that TensorBoard then shows.

        Its fast loader heeds no purge: it forgets points of a curve that a later one comes before or at.
        """
        monitor = Monitor(watched.directory, LoggingConfig(), states, Budget(10**6))
        monitor.handle(report(env_steps, loss=0.5))
        monitor.close()
        shown: dict[str, list[int]] = {"train/loss": [], "perf/version": []}
        for event in events(watched.directory / ".summary" / "p0"):
            for tag, steps in shown.items():
                repeats = tag in [value.tag for value in event.summary.value]
                if repeats or (event.HasField("session_log") and heeds_purges):
                    steps[:] = [step for step in steps if step < event.step] + [event.step] * repeats
        return shown

    assert steps_of([{}], 100) == {"train/loss": [100], "perf/version": [100]}
    assert steps_of([{}], 60) == {"train/loss": [60], "perf/version": [60]}  # killed before the first checkpoint
    assert steps_of([{"env_steps": 60}], 90) == {"train/loss": [60, 90], "perf/version": [60, 90]}
    assert steps_of([{"env_steps": 75}], 95)["train/loss"] == [60, 75, 95]
    assert steps_of([{"env_steps": 80}], 99)["train/loss"] == [60, 75, 80, 99]


def test_figures_of_the_users_are_added(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def doubled(policy: int, statistics: dict[str, float]) -> dict[str, float]:
        seen.append((policy, statistics["env_steps"]))
        return {"custom/double": 2 * statistics["env_steps"], "env_steps": -1, "custom/nan": math.nan}

    monkeypatch.setattr("tests.unit.runtime.test_summaries.figures", doubled)
    monitor = watched.monitor(2, custom_summaries="tests.unit.runtime.test_summaries:figures", tensorboard=True)
    monitor.handle(report(1000, policy=1))
    monitor.close()
    assert seen == [(0, 0), (1, 1000)]
    record = watched.records()[1]
    assert (record["custom/double"], record["env_steps"]) == (2000.0, 1000)
    assert "custom/nan" not in record
    (event,) = [e for e in events(watched.directory / ".summary" / "p1") if e.HasField("summary")]
    assert {v.tag: v.simple_value for v in event.summary.value}["custom/double"] == 2000.0


def budget_of(**limits: object) -> Budget:
    return Budget(
        **{"env_steps": 1000, "samples": 10**9, "seconds": 1e9, "episode_return": None, "collected": None} | limits
    )  # type: ignore[arg-type]


def spent(budget: Budget, monitor: Monitor, now: float) -> str | None:
    return budget.spent(monitor.policies, monitor.collected, now - monitor.started)


def test_a_run_ends_when_every_policy_has_its_env_steps(watched: Watched) -> None:
    monitor, budget = watched.monitor(2), budget_of()
    monitor.handle(report(1000, policy=0))
    monitor.handle(report(999, policy=1))
    assert spent(budget, monitor, watched.now) is None
    monitor.handle(report(1004, policy=1))
    assert spent(budget, monitor, watched.now) == "every policy has learned from 1000 env steps"
    monitor.close()


def test_a_run_ends_with_its_samples(watched: Watched) -> None:
    monitor = watched.monitor()
    monitor.handle(report(800))
    assert spent(budget_of(samples=201), monitor, watched.now) is None
    assert spent(budget_of(samples=200), monitor, watched.now) is not None
    monitor.close()


def test_a_run_ends_with_its_time(watched: Watched) -> None:
    monitor, budget = watched.monitor(), budget_of(seconds=2.5)
    assert spent(budget, monitor, watched.now + 2.4) is None
    assert spent(budget, monitor, watched.now + 2.5) == "2.5 seconds are over"
    monitor.close()


def test_a_run_that_only_samples_ends_with_what_all_actors_collected(watched: Watched) -> None:
    monitor, budget = watched.monitor(), budget_of(collected=100)
    monitor.handle(WorkerReport("actor_0", {"collected": 60}))
    assert spent(budget, monitor, watched.now) is None
    monitor.handle(WorkerReport("actor_1", {"collected": 40}))
    assert spent(budget, monitor, watched.now) == "100 steps are collected"
    monitor.close()


def test_actors_of_a_further_segment_add_to_those_before(watched: Watched) -> None:
    monitor = watched.monitor()
    for worker, collected in (("actor_0", 60), ("actor_1", 40)):
        monitor.handle(WorkerReport(worker, {"collected": collected, "rebuilds": 1, "callbacks_off": 1}))
    monitor.begin_segment()
    assert (monitor.collected, monitor.totals()["actors_rebuilds"]) == (100, 2)
    monitor.handle(WorkerReport("actor_0", {"collected": 5}))
    monitor.begin_segment()
    assert monitor.collected == 105
    assert "actors_callbacks_off" not in monitor.totals()  # those of the new actors are on
    monitor.close()


def resumed_at(env_steps: int, samples: int) -> PolicyProgress:
    progress = PolicyProgress(2)
    progress.restore({"env_steps": env_steps, "samples": samples, "discarded": 0, "updates": 1})
    return progress


def test_a_record_has_the_figures_of_all_reports_since_the_record_before(watched: Watched) -> None:
    monitor = watched.monitor()
    for loss, largest, smallest, rate in (
        (1.0, 3.0, 2.0, 0.1),
        (2.0, 2.0, 0.0, 0.2),
        (math.nan, math.nan, math.nan, 0.2),  # as of skipped updates
        (6.0, 1.0, 1.0, 0.3),
    ):
        monitor.handle(report(1, loss=loss, ratio_max=largest, policy_lag_min=smallest, learning_rate=rate))
    monitor.write_summaries(watched.now)
    monitor.handle(report(2, loss=8.0))
    monitor.write_summaries(watched.now)
    monitor.close()
    tags = ("train/loss", "train/ratio_max", "train/policy_lag_min", "train/learning_rate")
    before, after = ([record[tag] for tag in tags] for record in watched.records()[:2])
    assert before == [3.0, 3.0, 0.0, 0.3]
    assert after == [8.0, 3.0, 0.0, 0.3]  # those that were not reported anew are as before


def test_a_line_mentions_that_no_episode_has_ended() -> None:
    progress = resumed_at(5_000_000, 1_250_000)
    progress.learned({"env_steps": 6_000_000}, {})
    assert "no episode" not in progress.line()
    progress.learned({"env_steps": 6_000_001}, {})
    assert progress.line().endswith(", no episode has ended yet: see --horizon")
    progress.episodes = 1  # of an earlier start, or of other weights
    assert "no episode" not in progress.line()


def test_a_benchmark_counts_all_policies_since_this_start() -> None:
    budget, policies = Budget(10**10, benchmark=True), [resumed_at(5_000_000, 1_250_000), resumed_at(40, 10)]
    assert budget.spent(policies, 0, 0.0) is None  # what earlier starts have done does not count
    assert budget.share(policies, 0, 0.0) == pytest.approx(0.0, abs=1e-8)
    policies[0].totals |= {"env_steps": 6_500_000, "samples": 1_650_000}
    policies[1].totals |= {"env_steps": 400_039, "samples": 600_009}
    assert budget.spent(policies, 0, 1.0) is None
    assert budget.share(policies, 0, 1.0) == pytest.approx(0.999999, abs=1e-6)
    policies[1].totals["samples"] += 1
    assert budget.spent(policies, 0, 1.0) == "the benchmark is over: 1899999 env steps, 1000000 samples"
    policies[1].totals |= {"env_steps": 500_040, "samples": 10}
    assert budget.spent(policies, 0, 1.0) == "the benchmark is over: 2000000 env steps, 400000 samples"


def test_the_time_that_a_benchmark_takes_is_that_of_all_policies() -> None:
    budget, policies = Budget(10**10, benchmark=True), [resumed_at(0, 0), resumed_at(0, 0)]
    assert budget.seconds_left(policies, 0, 0.0) == math.inf
    for policy in policies:
        for seconds in (0.0, 10.0):
            policy.sample_rate.add(seconds, 1000 * seconds)
        policy.totals["samples"] = 10_000
    assert budget.seconds_left(policies, 0, 10.0) == (1_000_000 - 20_000) / 2000


def test_a_return_counts_when_every_policy_has_it_over_a_full_window(watched: Watched) -> None:
    monitor, budget = watched.monitor(2, stats_avg=3), budget_of(episode_return=10.0)
    monitor.handle(episodes((0, 20.0, 1), (0, 20.0, 1)))
    monitor.handle(episodes((1, 20.0, 1), (1, 9.0, 1), (1, 0.0, 1)))
    assert spent(budget, monitor, watched.now) is None
    monitor.handle(episodes((0, 0.0, 1)))
    assert spent(budget, monitor, watched.now) is None  # policy 1 is at 9.67
    monitor.handle(episodes((1, 21.0, 1)))
    assert spent(budget, monitor, watched.now) == "the mean return has reached 10.00"
    monitor.close()


def test_budgets_follow_the_flags() -> None:
    run = RunConfig(train_for_env_steps=10_000, train_for_seconds=60.0, train_until_return=3.0)
    assert Budget.of(run, SamplingConfig(), 4) == Budget(10_000, 2**62, 60.0, 3.0, None)
    assert Budget.of(run, SamplingConfig(sampler_only=True), 4).collected == 2500
    assert Budget.of(run, SamplingConfig(sampler_only=True), 3).collected == 3334
    long = RunConfig(train_for_env_steps=10**10)
    of_long = Budget.of(long, SamplingConfig(benchmark=True), 4)
    assert of_long == Budget(10**10, 2**62, long.train_for_seconds, None, None, benchmark=True)
    assert of_long.plain() == Budget.of(long, SamplingConfig(), 4).plain()
    assert Budget.of(long, SamplingConfig(benchmark=True, sampler_only=True), 4).collected == 500_000
    assert Budget.of(long, SamplingConfig(benchmark=True, sampler_only=True), 1).collected == BENCHMARK["samples"]
    assert Budget.of(run, SamplingConfig(benchmark=True), 4).env_steps == 10_000


# --- names without end


def names_of(record: dict[str, float]) -> set[str]:
    return {name.removesuffix("/mean") for name in record if name.startswith("stats/") and name.endswith("/mean")}


def test_known_statistics_go_on_when_an_environment_invents_names(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = watched.monitor(2, max_stats_names=3)
    for episode in range(1000):
        invented = {"known": float(episode), f"name_{episode}": 1.0}
        monitor.handle(episodes((0, 1.0, 10), (1, 1.0, 10), stats=((0, invented), (1, {f"other_{episode}": 2.0}))))
    monitor.write_summaries(watched.now)
    first, second = watched.records()
    assert names_of(first) == {"stats/known", "stats/name_0"}
    assert names_of(second) == {"stats/other_0"}
    assert first["stats/known/max"] == 999.0
    assert len(caplog.records) == 1
    assert "more than 3 names" in caplog.text
    assert [names_of(dict(policy)) for policy in monitor.overview(watched.now).policies] == [
        names_of(first), names_of(second)
    ]  # fmt: skip
    windows = monitor.policies[0].snapshot()["windows"]
    assert set(windows) == {"reward", "len", "stats/known", "stats/name_0"}
    monitor.close()


@pytest.mark.parametrize("name", ["x" * 201, "x" * 100_000, "\x1b[2J" * 100])
def test_names_longer_than_any_are_left_out(watched: Watched, caplog: pytest.LogCaptureFixture, name: str) -> None:
    monitor = watched.monitor()
    monitor.handle(episodes((0, 1.0, 10), stats=((0, {name: 1.0, "short": 2.0}),)))
    assert set(monitor.policies[0].stats) == {"short"}
    assert len(caplog.text) < 1500
    assert "\x1b" not in caplog.text
    monitor.close()


def test_windows_of_a_checkpoint_with_too_many_names_are_bounded(watched: Watched) -> None:
    config = LoggingConfig(tensorboard=False, max_stats_names=5)
    windows = {"reward": [1.0], "len": [2.0], **{f"stats/{n}": [3.0] for n in range(100)}}
    state = {"env_steps": 8, "samples": 2, "progress": {"episodes": 1, "elapsed_seconds": 1.0, "windows": windows}}
    monitor = Monitor(watched.directory, config, [state], MILLION)
    assert len(monitor.policies[0].stats) == 5
    assert monitor.policies[0].episode_return.mean == 1.0
    monitor.policies[0].start_afresh(1)
    monitor.handle(episodes((0, 1.0, 10), stats=((0, {"new": 1.0, "3": 2.0}),)))
    assert set(monitor.policies[0].stats) == {"3"}  # what was known stays known
    monitor.close()


def test_figures_that_learners_invent_are_bounded(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    monitor = watched.monitor()
    for number in range(3000):
        monitor.handle(report(number, **{f"f{number}": 1.0, "loss": float(number)}))
    assert monitor.policies[0].metrics["train/loss"] == pytest.approx(1499.5)
    assert len(monitor.policies[0].metrics) == 1000
    assert len(caplog.records) == 1
    monitor.close()


def test_figures_that_summaries_invent_are_bounded(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    monitor = watched.monitor()
    numbers = iter(range(10**6))
    monitor.custom = lambda policy, record: {f"custom/{next(numbers)}": 1.0 for _ in range(400)} | {"perf/version": 7.0}  # type: ignore[assignment]
    for _ in range(5):
        monitor.write_summaries(watched.now)
    counts = [sum(name.startswith("custom/") for name in record) for record in watched.records()]
    assert counts == [400, 400, 200, 0, 0]
    assert all(record["perf/version"] == 7.0 for record in watched.records())
    assert len(caplog.records) == 1
    monitor.close()


# --- numbers beyond reason


@pytest.mark.parametrize(
    ("metrics", "rewards", "said"),
    [
        ({"loss": 3.0, "learning_rate": 0.5, "skipped": 0.5}, 1e14, None),
        ({"loss": math.inf, "skipped": 0.25}, 1.0, None),  # some are skipped, others are not
        ({"learning_rate": 1e30}, 1.0, "train/learning_rate 1e+30"),
        ({"loss": 2.0}, -1e30, "reward/mean -1e+30"),
        ({"q_mean": -2e16, "td_error": 5e20}, 1.0, "train/q_mean -2e+16, train/td_error 5e+20"),
        ({"value_loss": math.inf, "skipped": 1.0}, 1.0, "every update was skipped, as train/value_loss is not finite"),
        ({"loss": 1.0, "skipped": 1.0}, 1.0, "every update was skipped, as its gradient is not finite"),
        ({"loss": 1.0, "skipped": 1.0, "skipped_in_a_row": 1}, 1.0, None),  # the only update of half a second
        (
            {"loss": 1.0, "skipped": 1.0, "skipped_in_a_row": 2},
            1.0,
            "every update was skipped, as its gradient is not finite",
        ),
    ],
)
def test_figures_beyond_reason_are_said_once(
    watched: Watched,
    caplog: pytest.LogCaptureFixture,
    metrics: dict[str, float],
    rewards: float,
    said: str | None,
) -> None:
    monitor = watched.monitor(2)
    for env_steps in (100, 200):
        monitor.handle(report(env_steps, policy=1, **metrics))
        monitor.handle(episodes((1, rewards, 10)))
        monitor.write_summaries(watched.now)
    lines = [record.getMessage() for record in caplog.records if "nothing can be learned" in record.getMessage()]
    assert lines == ([f"policy 1: nothing can be learned from such numbers: {said}"] if said else [])


def test_warnings_for_people_are_shown_once_whatever_the_worker_and_the_number(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = watched.monitor()
    for worker, number in (("actor_0", 3e38), ("actor_1", 2e37)):
        monitor.handle(WorkerReport(worker, {}, (f"Huge: observation key obs is as large as {number:.3g}: so",)))
    monitor.handle(WorkerReport("actor_1", {}, ("Huge: observation key other is as large as 3: so",)))
    assert [record.getMessage() for record in caplog.records] == [
        "actor_0: Huge: observation key obs is as large as 3e+38: so",
        "actor_1: Huge: observation key other is as large as 3: so",
    ]


def test_large_returns_are_short() -> None:
    progress = PolicyProgress(100)
    progress.add_episodes(episodes((0, 3e29, 10)), 0)
    assert "return 3e+29 over 1 episodes" in progress.line()
