import json
from pathlib import Path

import pytest

from appo.algorithms.runtime.monitor.curves import LONGEST_TRACE, Point, ReturnTraces, Trace, read_curve, value_at

CURVE = [Point(100, 1.0, 5.0), Point(200, 1.5, 15.0), Point(200, 2.0, 17.0), Point(400, 3.0, 7.0)]


def write_metrics(directory: Path, *records: tuple[float, int, int, float | None]) -> Path:
    """Seconds, policy, env steps and mean return of each."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [
        {"elapsed_seconds": seconds, "policy": policy, "env_steps": env_steps, "samples": env_steps, "discarded": 0}
        | ({} if value is None else {"reward/mean": value})
        for seconds, policy, env_steps, value in records
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_the_curve_of_a_resumed_run_is_one_without_what_was_lost(tmp_path: Path) -> None:
    first = [(3600.0, 0, 100, None), (7200.0, 0, 200, 4.0), (10800.0, 0, 300, 9.0)]
    second = [(9000.0, 0, 250, 5.0), (12600.0, 0, 350, 6.0)]  # killed at 300, gone on from 250
    curve = read_curve(write_metrics(tmp_path, *first, *second))
    assert curve == [Point(200, 2.0, 4.0), Point(250, 2.5, 5.0), Point(350, 3.5, 6.0)]


def test_of_several_policies_it_is_that_which_ends_best(tmp_path: Path) -> None:
    records = [(0.0, 0, 1, 90.0), (0.0, 1, 1, 1.0), (3600.0, 0, 2, 5.0), (3600.0, 1, 3, 6.0)]
    assert read_curve(write_metrics(tmp_path, *records)) == [Point(1, 0.0, 1.0), Point(3, 1.0, 6.0)]


def test_there_is_no_curve_where_there_is_nothing(tmp_path: Path) -> None:
    assert read_curve(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"policy":0,"env_steps":1,"elapsed_seconds":1,"reward/mean":"x"}\nnoise')
    assert read_curve(tmp_path) == []


@pytest.mark.parametrize(
    ("x", "expected"), [(99, None), (100, 5.0), (150, 10.0), (200, 17.0), (300, 12.0), (400, 7.0), (401, None)]
)
def test_values_between_the_reports(x: float, expected: float | None) -> None:
    assert value_at(CURVE, "env_steps", x) == expected


def test_values_by_time_and_of_no_curve() -> None:
    assert value_at(CURVE, "hours", 1.25) == 10.0
    assert value_at([], "hours", 1.0) is None


def test_a_trace_is_resampled_over_time() -> None:
    trace = Trace()
    assert trace.resample(4) == []
    for seconds, value in ((0, 1.0), (1, 3.0), (8, 5.0), (10, 7.0)):
        trace.add(seconds, value)
    assert trace.resample(1) == [4.0]
    assert trace.resample(5) == [2.0, 2.0, 2.0, 2.0, 6.0]


def test_a_trace_forgets_what_is_done_again() -> None:
    trace = Trace()
    for seconds, value in ((0, 1.0), (10, 2.0), (20, 3.0), (10, 4.0)):
        trace.add(seconds, value)
    assert (len(trace), trace.last, trace.resample(2)) == (2, 4.0, [1.0, 4.0])


def test_a_long_trace_keeps_its_shape_in_bounded_memory() -> None:
    trace = Trace()
    for seconds in range(3 * LONGEST_TRACE):
        trace.add(seconds, float(seconds))
    assert len(trace) <= LONGEST_TRACE
    width = 3 * LONGEST_TRACE / 64
    middles = [(part + 0.5) * width for part in range(64)]
    assert trace.resample(64) == pytest.approx(middles, abs=width / 4)


def test_the_trace_that_counts_is_that_of_the_best_policy() -> None:
    traces = ReturnTraces([{"policy": p, "elapsed_seconds": 1.0, "reward/mean": float(p)} for p in range(3)])
    traces.add({"policy": 1, "elapsed_seconds": 2.0, "reward/mean": 9.0})
    traces.add({"policy": [], "elapsed_seconds": None})
    assert traces.best().resample(2) == [1.0, 9.0]
    assert len(ReturnTraces().best()) == 0
    frozen = {"policy": 0, "elapsed_seconds": 1.0, "reward/mean": 9.0, "env_steps": 0}
    learning = {"policy": 1, "elapsed_seconds": 1.0, "reward/mean": 2.0, "env_steps": 50}
    damaged = {"policy": [0], "elapsed_seconds": 1.0, "reward/mean": 3.0, "env_steps": 50}
    assert ReturnTraces([frozen, learning, damaged]).best().last == 2.0
    assert ReturnTraces([frozen]).best().last == 9.0  # as in a run that only samples
