"""Nobody waits for a disk longer than they can bear."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

import pytest

from appo.algorithms.runtime import disk
from appo.algorithms.runtime.disk import DiskThread, within

LONG_SECONDS = 60.0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """The disk answers when it is set."""
    event = threading.Event()
    yield event
    event.set()


def blocked(gate: threading.Event) -> DiskThread:
    """A thread whose disk does not answer, which has been noticed."""
    thread = DiskThread("test")
    assert thread.do(lambda: gate.wait(LONG_SECONDS), 0.0) is None
    assert thread.is_late
    return thread


def test_what_is_done_in_time_is_there_in_order() -> None:
    thread, done = DiskThread("test"), list[int]()
    assert [thread.do(lambda n=n: done.append(n) or n, LONG_SECONDS) for n in range(3)] == [0, 1, 2]
    assert done == [0, 1, 2]
    assert thread.finish("tests", LONG_SECONDS)
    assert thread.do(lambda: 5, LONG_SECONDS) == 5  # by another thread
    assert thread.finish("tests", LONG_SECONDS)


def test_a_thread_keeps_nothing_of_its_last_action_and_ends_with_its_owner() -> None:
    class Large:
        """Takes memory."""

    thread, large = DiskThread("tests"), Large()
    freed = weakref.ref(large)
    thread.do(partial(isinstance, large, Large), LONG_SECONDS)
    thread.do(int, LONG_SECONDS)  # so that the action before is over
    del large
    gc.collect()
    assert freed() is None
    (worker,) = (one for one in threading.enumerate() if one.name == "tests")
    del thread
    gc.collect()
    worker.join(LONG_SECONDS)
    assert not worker.is_alive()


def test_what_fails_says_so() -> None:
    thread = DiskThread("test")

    def fail() -> None:
        raise TimeoutError("of the action")

    with pytest.raises(TimeoutError, match="of the action"):
        thread.do(fail, LONG_SECONDS)
    assert not thread.is_late
    assert thread.finish("tests", LONG_SECONDS)


@pytest.mark.parametrize("in_own_thread", [False, True])
def test_an_action_that_ends_as_the_patience_ends_is_done(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch, in_own_thread: bool
) -> None:
    class EndsAtTheLook(Future[bool]):
        """Ends just before the caller looks whether the action is done."""

        def done(self) -> bool:
            gate.set()
            self.result(LONG_SECONDS)
            return super().done()

    monkeypatch.setattr(disk, "Future", EndsAtTheLook)
    if in_own_thread:
        assert within(0.0, lambda: gate.wait(LONG_SECONDS), False) is True
    else:
        thread = DiskThread("test")
        assert thread.do(lambda: gate.wait(LONG_SECONDS), 0.0) is True
        assert not thread.is_late
        assert thread.finish("tests", LONG_SECONDS)


def test_nobody_waits_for_a_disk_that_does_not_answer(gate: threading.Event) -> None:
    thread, done = blocked(gate), list[str]()
    begin = time.monotonic()
    for _ in range(100):
        thread.do(lambda: done.append("kept"), LONG_SECONDS)
        thread.do(lambda: done.append("left out"), LONG_SECONDS, keep=False)
    assert time.monotonic() - begin < LONG_SECONDS / 2
    assert thread.dropped == 100
    assert not thread.finish("tests", 0.0)
    gate.set()
    assert thread.do(lambda: done.append("by another thread"), LONG_SECONDS) is None


def test_what_waits_has_a_bound(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MOST_WAITING", 10)
    thread, done = blocked(gate), list[int]()
    for number in range(25):
        thread.do(lambda number=number: done.append(number))
    gate.set()
    assert thread.finish("tests", LONG_SECONDS)
    assert (done, thread.dropped) == (list(range(10)), 15)


def test_it_is_said_once_and_once_when_it_is_over(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    thread = blocked(gate)
    monkeypatch.setattr(disk, "LATE_SECONDS", 0.0)
    for _ in range(3):
        thread.do(lambda: None)
    gate.set()
    assert thread._newest is not None
    thread._newest.result(LONG_SECONDS)
    assert not thread.is_late
    assert [record.message.split(" ")[:4] for record in caplog.records] == [
        ["the", "disk", "has", "not"],
        ["the", "disk", "answers", "again,"],
    ]
    assert thread.finish("tests", LONG_SECONDS)


def test_the_end_of_a_run_says_what_it_waits_for(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    thread = blocked(gate)
    monkeypatch.setattr(disk, "LATE_SECONDS", 0.0)
    now, warning = time.monotonic(), disk.log.warning
    monkeypatch.setattr(disk.time, "monotonic", lambda: now)
    monkeypatch.setattr(disk.log, "warning", lambda *words: (warning(*words), gate.set()))
    assert thread.finish("saving what was learned")
    assert caplog.messages == ["saving what was learned: the disk has not answered for 0 s; Ctrl-C ends without it"]


def test_a_look_at_a_disk_that_does_not_answer_ends(gate: threading.Event) -> None:
    assert within(LONG_SECONDS, lambda: "content", "") == "content"
    assert within(0.01, lambda: gate.wait(LONG_SECONDS) and "content", "") == ""
