"""Which growth of an actor is a leak: time and memory are made up here."""

import logging
from collections.abc import Callable

import pytest

from appo.algorithms.runtime.sampling import leak_watch
from appo.algorithms.runtime.sampling.leak_watch import MIB, LeakWatch

LIMIT = 100  # MiB


def replaced(
    monkeypatch: pytest.MonkeyPatch, grown: Callable[[int], float], lives_before: int = 0, seconds: int = 3000
) -> tuple[int, str] | None:
    """In which second of its life an actor asks for a successor that grows like that [MiB], and why."""
    watch, now = LeakWatch(LIMIT * MIB, "--flag", lives_before), 0
    monkeypatch.setattr(leak_watch.time, "monotonic", lambda: 5000.0 + now)
    monkeypatch.setattr(leak_watch, "held_bytes", lambda: int((300 + grown(now)) * MIB))
    monkeypatch.setattr(leak_watch.limits, "num_open", lambda: 0)
    while now < seconds:
        if reason := watch.reason():
            return now, reason
        now += 1
    return None


@pytest.mark.parametrize(("lives_before", "grown"), [(0, 114), (1, 127), (7, 202), (1000, 202)])
def test_what_leaks_all_the_time_may_grow_to_twice_the_limit_at_most(
    monkeypatch: pytest.MonkeyPatch, lives_before: int, grown: int
) -> None:
    """It passes the limit with the 101st MiB, and has then as many eighths of it as there were lives, and one."""
    reason = f"its memory has grown by {grown} MiB (--flag)"
    assert replaced(monkeypatch, float, lives_before) == (grown, reason)
    assert replaced(monkeypatch, lambda second: second // 10, lives_before) == (10 * grown, reason)


def test_what_an_environment_loads_late_is_no_leak(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert replaced(monkeypatch, lambda second: 300.0 * (second >= 3)) is None
    assert replaced(monkeypatch, lambda second: 300.0 * (second >= 400)) is None
    assert [record.getMessage() for record in caplog.records] == [
        "its memory has grown by 300 MiB (--flag) and grows no more: no leak"
    ] * 2


def test_a_leak_after_that_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = replaced(monkeypatch, lambda second: 300.0 * (second >= 400) + max(0, second - 2000))
    assert found == (2101, "its memory has grown by 101 MiB (--flag)")


def test_a_leak_in_large_steps_is_found_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first life takes one of them for warming up, and each life after it one more."""
    lives = [replaced(monkeypatch, lambda second: 110.0 * (second // 100), lives) for lives in range(3)]
    assert [life[0] if life else None for life in lives] == [200, 300, 400]


def test_memory_that_is_given_back_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replaced(monkeypatch, lambda second: 105.0 * (second % 10 == 9)) is None
