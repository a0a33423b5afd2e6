import json
import math
import os
import struct
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from appo.utils import failpoints, metrics
from appo.utils.metrics import (
    BLOCK_BYTES,
    LONGEST_LINE,
    MetricsLog,
    read_metrics,
    sampled_lines,
    short_number,
    without_lost,
)
from appo.utils.tensorboard.summaries import DIFFERS
from appo.utils.tensorboard.writer import EventWriter
from appo.utils.windows import RateMeter, RunningStatistic
from tests.patience import HANG_SECONDS

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _disarm():
    yield
    failpoints.arm("")


def events(directory: Path) -> list:
    """Every event of every file of a directory, in the order in which TensorBoard reads them; checks the framing."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    found = []
    for path in sorted(directory.glob("events.out.tfevents.*")):
        content, place = path.read_bytes(), 0
        while place < len(content):
            header = content[place : place + 8]
            (length,), start = struct.unpack("<Q", header), place + 12
            record = content[start : start + length]
            assert struct.unpack("<I", content[place + 8 : start]) == (masked_crc32c(header),)
            assert struct.unpack("<I", content[start + length : start + length + 4]) == (masked_crc32c(record),)
            found.append(Event.FromString(record))
            place = start + length + 4
    return found


def run_python(script: str, *arguments: str) -> str:
    child = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


# --- metrics.jsonl


def test_records_come_back_in_order_and_reopening_appends(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    assert log.append({"env_steps": 1, "policy": 0, "reward/mean": 1.5, "note": "é\n", "flag": True, "none": None})
    log.close()
    log = MetricsLog(path)
    assert log.append({"env_steps": np.int64(2), "a": np.float32(0.5), "b": np.float64("nan"), "c": -math.inf})
    log.close()
    assert read_metrics(path) == [
        {"env_steps": 1, "policy": 0, "reward/mean": 1.5, "note": "é\n", "flag": True, "none": None},
        {"env_steps": 2, "a": 0.5, "b": None, "c": None},
    ]
    assert path.read_bytes().count(b"\n") == 2
    assert read_metrics(tmp_path / "missing.jsonl") == []


@pytest.mark.parametrize("torn", [b"{", b'{"env_steps": 3', b'{"reward/me', b"\xff\xfe", b"[1]", b"x" * 200_000])
def test_a_torn_last_line_is_ignored_by_readers_and_cut_off_by_the_next_writer(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"env_steps":1}\n{"env_steps":2}\n' + torn)
    assert read_metrics(path) == [{"env_steps": 1}, {"env_steps": 2}]
    log = MetricsLog(path)
    log.append({"env_steps": 3})
    log.close()
    assert path.read_bytes() == b'{"env_steps":1}\n{"env_steps":2}\n{"env_steps":3}\n'


def test_a_file_that_is_one_torn_line_is_begun_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x" * 70_000)
    MetricsLog(path).close()
    assert path.read_bytes() == b""


def write_lines(path: Path, count: int, policies: int = 1) -> list[bytes]:
    lines = [
        json.dumps({"policy": i % policies, "env_steps": i, "elapsed_seconds": i, "reward/mean": i, "more": "x" * 40})
        for i in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return [f"{line}\n".encode() for line in lines]


def test_small_files_are_read_whole_and_of_larger_ones_blocks_at_equal_distances(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = write_lines(path, 60_000)
    size = path.stat().st_size
    assert size > 20 * BLOCK_BYTES
    with path.open("rb") as file:
        assert list(sampled_lines(file)) == lines
        assert list(sampled_lines(file, start=len(lines[0]))) == lines[1:]
        found = list(sampled_lines(file, 8 * BLOCK_BYTES))
    places = [json.loads(line)["env_steps"] for line in found]
    assert places == sorted(set(places))  # in their order, none twice
    assert (places[0], places[-1]) == (0, 59_999)
    assert set(found) < set(lines)
    assert 0.9 * 8 * BLOCK_BYTES < sum(map(len, found)) < 8 * (BLOCK_BYTES + len(lines[-1]))
    starts = [place for before, place in zip([-2, *places], places, strict=False) if place != before + 1]
    assert len(starts) == 8
    assert max(b - a for a, b in pairwise(starts)) < 1.1 * 60_000 / 7


@pytest.mark.parametrize("length", [LONGEST_LINE, LONGEST_LINE + 1, 3 * LONGEST_LINE + 17])
def test_lines_that_are_too_long_are_passed_over(tmp_path, length):
    path = tmp_path / "metrics.jsonl"
    for content, expected in (
        (b"{}\n" + b"x" * length + b"\n[]\n", [b"{}\n", b"[]\n"]),
        (b"x" * length, []),
        (b"x" * length + b"\n{}", [b"{}"]),
    ):
        path.write_bytes(content)
        with path.open("rb") as file:
            assert list(sampled_lines(file)) == expected


def test_of_many_records_every_second_of_each_policy_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, 1000, policies=2)
    assert len(read_metrics(path)) == 1000
    monkeypatch.setattr(metrics, "MOST_RECORDS", 100)
    found = read_metrics(path, ("policy", "env_steps"))
    assert all(set(record) == {"policy", "env_steps"} for record in found)
    assert 50 <= len(found) <= 100
    for policy in range(2):
        own = [record["env_steps"] for record in found if record["policy"] == policy]
        assert len(own) >= 25
        assert own == sorted(own)
        assert max(b - a for a, b in pairwise(own)) <= 64
        assert own[-1] > 900
    monkeypatch.setattr(metrics, "MOST_RECORDS", 8)
    assert len(read_metrics(path)) <= 1 + 8 // 8


def test_as_many_policies_as_records_are_kept_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "MOST_RECORDS", 100)
    path = tmp_path / "metrics.jsonl"
    write_lines(path, 5000, policies=5000)
    assert len(read_metrics(path, ("policy",))) <= 100


@pytest.mark.parametrize("torn", [b"x" * (LONGEST_LINE + 5), bytes(2 * LONGEST_LINE)])
def test_what_is_longer_than_any_record_is_ended_and_not_cut(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a":1}\n' + torn)
    log = MetricsLog(path)
    assert log.append({"a": 2})
    log.close()
    assert path.read_bytes() == b'{"a":1}\n' + torn + b'\n{"a":2}\n'
    assert read_metrics(path) == [{"a": 1}, {"a": 2}]


def test_records_that_a_crash_took_back_are_left_out():
    def records(*pairs: tuple[int, int]) -> list[dict]:
        return [
            {"policy": policy, "env_steps": env_steps, "elapsed_seconds": env_steps / 10, "n": n}
            for n, (policy, env_steps) in enumerate(pairs)
        ]

    crashed = records((0, 10), (1, 5), (0, 20), (0, 30), (1, 50), (0, 20), (1, 40), (0, 25), (1, 45), (0, 22), (0, 22))
    assert [record["n"] for record in without_lost(crashed)] == [0, 1, 2, 5, 6, 8, 9, 10]
    assert without_lost(records((0, 1), (0, 1), (0, 2))) == records((0, 1), (0, 1), (0, 2))
    assert without_lost([]) == []
    late, resumed = records((0, 20), (0, 20))  # the same env steps, some of the time spent again
    assert without_lost([late | {"elapsed_seconds": 2.5}, resumed]) == [resumed]


FULL_DISK_FOR_THE_LOG = """
import resource, sys
from pathlib import Path
from appo.utils.metrics import MetricsLog
log = MetricsLog(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1))
first = [log.append({"n": n}) for n in range(200)]
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
print(sum(first), log.dropped, log.append({"n": 200}))
"""


def test_a_full_disk_costs_the_log_records_and_nothing_else(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kept, dropped, recovered = run_python(FULL_DISK_FOR_THE_LOG, str(path)).split()
    assert int(kept) + int(dropped) == 200
    assert int(kept) >= 100
    assert recovered == "True"
    lines = path.read_text().splitlines()
    assert [json.loads(line)["n"] for line in lines] == [*range(int(kept)), 200]  # no half line in between


# --- TensorBoard


def test_events_are_what_tensorboard_reads(tmp_path):
    writer = EventWriter(tmp_path / "p0", purge_step=7)
    writer.add(10, {"reward/mean": 1.5, "train/loss": np.float32(-0.25)})
    writer.add(np.int64(11), {"train/loss": math.nan})
    assert writer.close(timeout=HANG_SECONDS)
    assert (writer.written, writer.dropped) == (2, 0)
    version, purge, first, second = events(tmp_path / "p0")
    assert version.file_version == "brain.Event:2"
    assert (purge.step, purge.session_log.status) == (7, purge.session_log.START)
    assert first.step == 10
    assert {value.tag: value.simple_value for value in first.summary.value} == {"reward/mean": 1.5, "train/loss": -0.25}
    assert abs(first.wall_time - time.time()) < 100
    assert second.step == 11
    assert math.isnan(second.summary.value[0].simple_value)


def test_flags_are_entered_into_tensorboards_table_of_runs(tmp_path: Path) -> None:
    flags = {"gamma": 0.9, "use_rnn": False, "env": "a/b", "layers": [8, 8], "horizon": None}
    writer = EventWriter(tmp_path)
    writer.describe(flags, first={"use_rnn", "gone"})
    writer.add(3, {"reward/mean": 1.0})
    assert writer.close(timeout=HANG_SECONDS)
    _, table, figure = events(tmp_path)
    assert [value.tag for value in table.summary.value] == ["_hparams_/experiment", "_hparams_/session_start_info"]
    assert figure.summary.value[0].tag == "reward/mean"
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    contents = [value.metadata.plugin_data for value in table.summary.value]
    assert {content.plugin_name for content in contents} == {"hparams"}
    columns, values = (HParamsPluginData.FromString(content.content) for content in contents)
    assert [info.name for info in columns.experiment.hparam_infos] == list(flags)
    marked = [info.name for info in columns.experiment.hparam_infos if info.SerializeToString().endswith(DIFFERS)]
    assert marked == ["use_rnn"]
    assert next(info.name.tag for info in columns.experiment.metric_infos) == "reward/mean"
    found = values.session_start_info.hparams
    assert (found["gamma"].number_value, found["use_rnn"].bool_value, found["env"].string_value) == (0.9, False, "a/b")
    assert (found["layers"].string_value, found["horizon"].string_value) == ("[8, 8]", "null")


def test_without_resume_nothing_is_purged_and_nothing_to_write_makes_no_file(tmp_path):
    writer = EventWriter(tmp_path / "a")
    writer.add(1, {"x": 1})
    assert writer.close(timeout=HANG_SECONDS)
    assert len(events(tmp_path / "a")) == 2
    assert EventWriter(tmp_path / "b").close(timeout=HANG_SECONDS)
    assert not (tmp_path / "b").exists()


def test_a_slow_disk_delays_nobody_and_drops_the_oldest(tmp_path, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr("appo.utils.tensorboard.writer.failpoint", lambda place: answers.wait(HANG_SECONDS))
    writer = EventWriter(tmp_path, capacity=10)
    for step in range(1000):  # ends although the disk does not answer
        writer.add(step, {"x": step})
    assert not writer.close(timeout=0)
    answers.set()
    assert writer.close(timeout=HANG_SECONDS)
    assert writer.written + writer.dropped == 1000
    steps = [event.step for event in events(tmp_path)[1:]]
    assert len(steps) == writer.written
    assert steps == sorted(steps)
    assert steps[-10:] == list(range(990, 1000))
    writer.add(1000, {"x": 0})  # too late: counted, not an error
    assert writer.written + writer.dropped == 1001


def test_after_a_failed_write_a_new_file_is_begun_and_purges_nothing_twice(tmp_path, monkeypatch):
    monkeypatch.setattr("appo.utils.tensorboard.writer._RETRY_SECONDS", 0.01)
    writer = EventWriter(tmp_path, purge_step=3)
    deadline = time.monotonic() + HANG_SECONDS
    for step in range(5):
        if step == 2:
            failpoints.arm("events.write:enospc@1")
        writer.add(step, {"x": step})
        while writer.written + writer.dropped <= step:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    assert writer.close(timeout=HANG_SECONDS)
    assert (writer.written, writer.dropped) == (4, 1)
    assert len(list(tmp_path.iterdir())) == 2
    found = events(tmp_path)
    assert [event.step for event in found if event.HasField("summary")] == [0, 1, 3, 4]
    assert sum(event.HasField("session_log") for event in found) == 1


FULL_DISK_FOR_EVENTS = """
import resource, sys, time
from pathlib import Path
from appo.utils.tensorboard import writer as module
module._RETRY_SECONDS = 0.02
writer = module.EventWriter(Path(sys.argv[1]), capacity=100)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), -1))
slowest = 0.0
for step in range(20_000):
    start = time.perf_counter()
    writer.add(step, {"reward/mean": step, "train/loss": 0.5})
    slowest = max(slowest, time.perf_counter() - start)
deadline = time.monotonic() + 30
while not writer.dropped and time.monotonic() < deadline:
    time.sleep(0.001)
lost, before = writer.dropped, writer.written
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
step = 20_000
while writer.written == before and time.monotonic() < deadline:
    writer.add(step, {"reward/mean": step})
    step += 1
    time.sleep(0.01)
print(slowest, lost, writer.close(30), writer.written + writer.dropped == step, writer.written > before)
"""


@pytest.mark.parametrize("limit_bytes", [0, 3000])
def test_a_full_disk_neither_blocks_nor_kills_and_writing_goes_on_when_there_is_space(tmp_path, limit_bytes):
    slowest, lost, *rest = run_python(FULL_DISK_FOR_EVENTS, str(tmp_path), str(limit_bytes)).split()
    assert float(slowest) < 30.0  # it takes microseconds; a blocked queue takes for ever
    assert int(lost) > 0
    assert rest == ["True", "True", "True"]


def test_the_writer_loads_no_torch_and_leaves_tensorboardx_to_be_imported_by_others(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from appo.utils.tensorboard.writer import EventWriter
writer = EventWriter(Path(sys.argv[1]))
writer.describe({"gamma": 0.9})
writer.close()
assert writer.written == 1
assert "torch" not in sys.modules and "tensorboardX" not in sys.modules
sys.modules["torch"] = None  # an import that fails, as on a machine without it; and quick
from tensorboardX import SummaryWriter
EventWriter(Path(sys.argv[1])).close()
print(SummaryWriter.__name__)
"""
    assert run_python(script, str(tmp_path)).strip() == "SummaryWriter"


# --- windows


def test_a_rate_needs_two_times_and_forgets_what_is_older_than_its_window():
    window = RateMeter((10.0,))
    assert math.isnan(window.rates()[10.0])
    window.add(100.0, 0)
    assert math.isnan(window.rates()[10.0])
    window.add(100.0, 50)
    assert math.isnan(window.rates()[10.0])
    window.add(105.0, 500)
    assert window.rates()[10.0] == 100.0
    window.add(110.0, 500)
    window.add(115.0, 500)
    assert window.rates()[10.0] == 0.0
    window.add(117.0, 1700)  # from 105, the last point at or before 107, on
    assert window.rates()[10.0] == 100.0


def test_three_windows_of_one_count():
    meter = RateMeter()
    assert all(math.isnan(rate) for rate in meter.rates().values())
    count = 0.0
    for second in range(601):
        count += 10 if second <= 550 else 1000
        meter.add(1000.0 + second, count)
    assert meter.rates() == {10.0: 1000.0, 60.0: (10 * 10 + 50 * 1000) / 60, 300.0: (250 * 10 + 50 * 1000) / 300}


def test_the_rate_of_a_silent_count_falls():
    window = RateMeter((10.0,))
    for second in range(21):
        window.add(second, 100.0 * second)
    assert window.rates(25.0)[10.0] == 100.0  # as a long update is silent
    assert window.rates(35.0)[10.0] == 1000 / 25
    assert window.rates(110.0)[10.0] == 10.0


def test_a_window_holds_only_its_points():
    window = RateMeter((10.0,))
    for point in range(10_000):
        window.add(point * 0.1, point)
    assert len(window._windows[10.0]) <= 103
    assert window.rates()[10.0] == pytest.approx(10.0)


def test_a_statistic_is_of_the_last_values_however_they_come():
    rng = np.random.default_rng(0)
    statistic, values = RunningStatistic(7), []
    assert statistic.count == 0
    assert math.isnan(statistic.mean)
    assert math.isnan(statistic.min)
    assert math.isnan(statistic.max)
    for size in [0, 1, 3, 7, 2, 20, 0, 5, 8, 14]:
        batch = rng.normal(size=size)
        statistic.append(batch)
        values.extend(batch)
        last = values[-7:]
        assert statistic.count == len(last)
        assert statistic.total == len(values)
        assert statistic.values() == last
        if last:
            assert statistic.mean == pytest.approx(np.mean(last), abs=1e-12)
            assert (statistic.min, statistic.max) == (min(last), max(last))
    statistic.append(5)
    assert statistic.total == len(values) + 1
    assert statistic.max == max([*values[-6:], 5])
    with pytest.raises(ValueError, match="at least 1"):
        RunningStatistic(0)


# --- a bound for both


def numbers(path: Path, policy: int = 0) -> list[int]:
    return [record["env_steps"] for record in read_metrics(path) if record["policy"] == policy]


def fill(log: MetricsLog, first: int, count: int, policies: int = 1, **more: object) -> None:
    for number in range(first, first + count):
        for policy in range(policies):
            assert log.append({"policy": policy, "env_steps": number, "elapsed_seconds": number / 10, **more})


@pytest.mark.parametrize("policies", [1, 2, 3])
def test_a_log_stays_below_its_bound_and_every_second_old_record_is_left_out(tmp_path, policies):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 50_000)
    for first in range(0, 5000, 50):
        fill(log, first, 50, policies)
        assert path.stat().st_size <= 50_000 + 100
    log.close()
    for policy in range(policies):
        found = numbers(path, policy)
        assert found == sorted(set(found))
        assert (found[0], found[-1]) == (0, 4999)
        assert len(found) > 50_000 * 0.4 / 70 / policies
        gaps = [b - a for a, b in pairwise(found)]
        assert gaps[-1] == 1
        assert max(gaps) <= 5 * 5000 / len(found)  # even over all of it
    assert [path.name] == os.listdir(tmp_path)


def test_of_a_log_that_is_thinned_readers_leave_out_the_same_lost_records(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 1 << 20)
    fill(log, 0, 400)
    fill(log, 301, 300)  # a crash took 99 records back
    fill(log, 550, 200)
    log.close()
    before = [record["env_steps"] for record in without_lost(read_metrics(path))]
    log = MetricsLog(path, path.stat().st_size)
    fill(log, 750, 1)
    log.close()
    records = read_metrics(path)
    assert len(records) < 700
    after = [record["env_steps"] for record in without_lost(records)]
    assert after == sorted(set(after))
    assert set(after) <= {*before, 750}
    assert [number for number in (301, 550) if number not in after] == []  # the marks
    assert len(after) < len(before)


def test_a_log_goes_on_where_it_was_thinned_and_is_thinned_by_the_next_start(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    fill(log, 0, 3000)
    log.close()
    large = path.stat().st_size
    log = MetricsLog(path, large // 4)
    fill(log, 3000, 10)
    assert large // 2 < path.stat().st_size < large  # halved at most at a time
    fill(log, 3010, 3000)
    log.close()
    assert path.stat().st_size <= large // 4
    assert numbers(path)[-3:] == [6007, 6008, 6009]


def test_of_a_log_far_beyond_its_bound_a_sample_is_left_with_the_first_and_the_last_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = b'{"elapsed_seconds":%d.5,"policy":0,"env_steps":%d,"more":"' + b"x" * 1000 + b'"}\n'
    count = 4 * metrics.READ_BYTES // 1040 + 1000
    with path.open("wb") as file:
        file.writelines(line % (number + 10**6, number + 10**6) for number in range(count))
    log = MetricsLog(path, 20_000)
    fill(log, 10**7, 1)
    assert path.stat().st_size <= metrics.READ_BYTES + 2000
    assert path.read_bytes().endswith(b'"env_steps":10000000,"elapsed_seconds":1000000.0}\n')
    found = numbers(path)
    assert found[0] == 10**6
    assert max(b - a for a, b in pairwise(found[:-1])) < count / 20


def test_lines_that_are_no_records_are_left_out_like_old_records(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        b"no record\n",
        b"[1]\n",
        b'{"elapsed_seconds":---,"policy":0}\n',
        b'{"elapsed_seconds": "1", "policy": 0}\n',
    ]
    path.write_bytes(b"".join(lines * 1000))
    log = MetricsLog(path, 20_000)
    fill(log, 0, 1)
    assert 0.5 < path.read_bytes().count(b"\n") / 4000 < 0.65
    assert path.read_bytes().endswith(b'"elapsed_seconds":0.0}\n')


def test_a_file_that_names_more_policies_than_there_are_is_thinned_as_one_curve(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(b'{"elapsed_seconds":%d.5,"policy":%d}\n' % (n, n) for n in range(10_000, 14_000)))
    log = MetricsLog(path, 20_000)
    fill(log, 0, 1)
    assert 0.5 < path.read_bytes().count(b"\n") / 4000 < 0.65


def test_a_process_killed_while_records_are_left_out_loses_none_and_its_file_is_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    fill(log := MetricsLog(path), 0, 2000)
    log.close()
    content = path.read_bytes()
    script = """
import os, sys
from pathlib import Path
from appo.utils import metrics
def killed(*_):
    yield b"half"
    os.kill(os.getpid(), 9)
metrics.thinned_lines = killed
log = metrics.MetricsLog(Path(sys.argv[1]), 1000)
log.append({"policy": 0, "env_steps": 2000, "elapsed_seconds": 200.0})
"""
    child = subprocess.run([sys.executable, "-c", script, str(path)], cwd=ROOT, timeout=HANG_SECONDS, check=False)
    assert child.returncode == -9
    assert path.read_bytes().startswith(content)
    assert numbers(path)[-1] == 2000
    assert len(os.listdir(tmp_path)) == 2
    MetricsLog(path).close()
    assert os.listdir(tmp_path) == [path.name]


def test_a_disk_that_takes_no_copy_costs_no_record(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 20_000)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(metrics, "replace_own", full)
        fill(log, 0, 1000)
    assert numbers(path) == list(range(1000))
    fill(log, 1000, 1000)
    log.close()
    assert path.stat().st_size < 60_000
    assert numbers(path)[-1] == 1999


def test_main_takes_no_more_memory_for_it(tmp_path):
    script = """
import sys
from pathlib import Path
from appo.utils.metrics import MetricsLog
def peak():  # of this program; getrusage begins with the peak of the parent
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
log = MetricsLog(Path(sys.argv[1]), 8 << 20)
record = {f"stats/{n}/mean": float(n) for n in range(500)}
log.append(record)
before = peak()
for n in range(800):
    log.append({"policy": 0, "env_steps": n, "elapsed_seconds": n, **record})
print(peak() - before)
"""
    grown_kib = int(run_python(script, str(tmp_path / "metrics.jsonl")))
    assert 0 <= grown_kib < 6 << 10
    assert (tmp_path / "metrics.jsonl").stat().st_size <= 9 << 20


@pytest.fixture
def _bytes_need_not_last(monkeypatch):
    """No event waits for the disk: tests of thousands of them read what files contain, not what a crash leaves."""
    monkeypatch.setattr("appo.utils.tensorboard.event_files.os.fsync", lambda descriptor: None)


def write_events(directory: Path, steps: range, tags: int = 20, **more: object) -> None:
    writer = EventWriter(directory, **more)
    for step in steps:
        writer.add(step, {f"a/{n}": float(step) for n in range(tags)})
        while writer.written <= step - steps.start:  # one event a batch, whatever the load: the result is one
            time.sleep(0.0001)
    assert writer.close()


def steps_of(directory: Path) -> list[int]:
    return [event.step for event in events(directory) if event.summary.value]


@pytest.mark.usefixtures("_bytes_need_not_last")
def test_event_files_stay_below_their_bound_and_every_second_old_event_is_left_out(tmp_path):
    write_events(tmp_path, range(2000), most_bytes=100_000)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 110_000
    found = steps_of(tmp_path)
    assert found == sorted(set(found))
    assert found[-1] == 1999
    assert len(found) > 100
    gaps = [b - a for a, b in pairwise(found)]
    assert gaps[-1] == 1
    assert max(gaps) <= 5 * 2000 / len(found)  # even over all of it
    assert len(list(tmp_path.iterdir())) < 30


@pytest.mark.usefixtures("_bytes_need_not_last")
def test_flags_and_purges_stay_in_thinned_event_files(tmp_path):
    writer = EventWriter(tmp_path, purge_step=7, most_bytes=50_000)
    writer.describe({"seed": 1})
    assert writer.close()
    write_events(tmp_path, range(500), most_bytes=50_000)
    found = events(tmp_path)
    assert [event.step for event in found if event.HasField("session_log")] == [7]
    tags = [value.tag for event in found for value in event.summary.value if value.tag.startswith("_hparams_")]
    assert len(tags) == 2


@pytest.mark.usefixtures("_bytes_need_not_last")
def test_event_files_of_earlier_starts_count_and_a_torn_one_is_thinned(tmp_path):
    write_events(tmp_path, range(1000))
    (old,) = tmp_path.iterdir()
    old.write_bytes(old.read_bytes()[:-5])
    write_events(tmp_path, range(1000, 1200), most_bytes=80_000)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 90_000
    assert steps_of(tmp_path)[-1] == 1199


@pytest.mark.usefixtures("_bytes_need_not_last")
@pytest.mark.parametrize("place", ["length", "content"])
def test_a_damaged_file_of_an_earlier_start_stays_and_others_are_thinned(tmp_path, place):
    write_events(tmp_path, range(500))
    (old,) = tmp_path.iterdir()
    content = bytearray(old.read_bytes())
    record = len(content) // 2 + content[len(content) // 2 :].find(b"a/0") - 60
    start = 0
    while start < record:  # of a record in the middle
        start += 16 + struct.unpack_from("<Q", content, start)[0]
    if place == "length":
        content[start + 3] ^= 1
    else:
        content[start + 12 : start + 40] = b"\xff" * 28
    old.write_bytes(content)
    leftover = tmp_path / f".{old.name}-123"
    leftover.write_bytes(b"half")
    writer = EventWriter(tmp_path, most_bytes=40_000)
    for step in range(1000):
        writer.add(step, {f"a/{n}": 1.0 for n in range(20)})
        while step % 25 == 24 and writer.written <= step:
            time.sleep(0.0001)
    assert writer.close()
    assert writer.dropped == 0
    assert old.read_bytes() == content
    assert not leftover.exists()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < len(content) + 40_000


@pytest.mark.usefixtures("_bytes_need_not_last")
def test_pictures_between_figures_are_thinned_like_them(tmp_path):
    writer = EventWriter(tmp_path, most_bytes=100_000)
    for step in range(300):
        writer.add(step, {"a": 1.0})
        writer.add_image("picture", np.random.default_rng(step).integers(0, 255, (16, 16, 3), np.uint8), step)
        while step % 10 == 9 and writer.written < 2 * step + 2:
            time.sleep(0.0001)
    assert writer.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 110_000
    kinds = [event.summary.value[0].tag for event in events(tmp_path) if event.summary.value]
    assert min(kinds.count("a"), kinds.count("picture")) > 40


@pytest.mark.usefixtures("_bytes_need_not_last")
def test_curves_of_one_point_each_are_thinned_too(tmp_path):
    writer = EventWriter(tmp_path, most_bytes=50_000)
    for step in range(2000):
        writer.add(step, {f"invented/{step}": 1.0})
        while step % 50 == 49 and writer.written <= step:
            time.sleep(0.0001)
    assert writer.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 55_000
    assert steps_of(tmp_path)[-1] == 1999


# --- files that go away


@pytest.mark.parametrize("how", ["removed", "renamed", "with its folder"])
def test_a_log_that_goes_away_is_written_anew_with_all_that_it_had(tmp_path, how):
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    log = MetricsLog(path)
    fill(log, 0, 5000)
    if how == "removed":
        path.unlink()
    elif how == "renamed":
        path.rename(tmp_path / "other")
    else:
        path.parent.rename(tmp_path / "other")
        fill(log, 5000, 1)  # there is no folder yet, and nothing is lost
        path.parent.mkdir()
    fill(log, 5001, 2)
    log.close()
    expected = [*range(5000), *([5000] * (how == "with its folder")), 5001, 5002]
    assert numbers(path) == expected


def test_a_log_goes_on_in_another_that_has_its_name_and_never_behind_a_link(tmp_path):
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    log = MetricsLog(path)
    fill(log, 0, 10)
    path.unlink()
    path.write_text('{"policy": 0, "env_steps": 77}\n')
    fill(log, 10, 1)
    assert numbers(path) == [77, 10]
    other.write_text("a diary\n")
    path.unlink()
    path.symlink_to(other)
    fill(log, 11, 1)
    assert other.read_text() == "a diary\n"
    path.unlink()
    fill(log, 12, 1)
    log.close()
    assert numbers(path) == [77, 10, 11, 12]


@pytest.mark.parametrize("how", ["file removed", "folder removed", "folder renamed"])
def test_events_go_on_in_a_new_file_when_theirs_goes_away(tmp_path, how):
    directory = tmp_path / "p0"
    writer = EventWriter(directory)
    writer.add(1, {"a": 1.0})
    while writer.written < 1:
        time.sleep(0.001)
    if how == "folder renamed":
        directory.rename(tmp_path / "elsewhere")
    else:
        (old,) = directory.iterdir()
        old.unlink()
        if how == "folder removed":
            directory.rmdir()
    writer.add(2, {"a": 2.0})
    assert writer.close()
    assert (writer.dropped, steps_of(directory)) == (0, [2])


def test_numbers_that_round_to_a_thousand_have_the_next_unit() -> None:
    numbers = (9_999, 12_345, 999_499, 999_500, 1_000_000, 999_600_000, 2e9)
    assert [short_number(one) for one in numbers] == ["9999", "12.3k", "999k", "1M", "1M", "1G", "2G"]
