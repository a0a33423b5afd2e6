from types import SimpleNamespace
from typing import Any

import pytest

from appo.algorithms.runtime.memory.heartbeat import Activity, Pulse
from appo.algorithms.runtime.processes.restarts import Death
from appo.algorithms.runtime.processes.stalls import Stall, StallWatch, all_wait_since, who_waits
from appo.algorithms.runtime.processes.supervisor import WorkerError


def pulse(activity: Activity, since: float, began: float) -> Pulse:
    return Pulse(activity, since, began, turns=1, peer=None, entered=0.0)


def test_the_line_says_who_waits_longest_and_what_others_want_of_it() -> None:
    pulses = {
        "actor_0": pulse(Activity.WAITING, 19.9, 12.0),
        "actor_1": pulse(Activity.WORKING, 11.0, 3.0),
        "learner_0": pulse(Activity.WAITING, 19.8, 11.5),
    }
    line = who_waits(pulses, {"learner_0": "holds 2 of 8 slots", "actor_0": ""}, {"actor_2": 21.5}, 20.0)
    assert line == (
        "actor_1 works since 9.0 s, learner_0 waits since 8.5 s (holds 2 of 8 slots), actor_0 waits since 8.0 s, "
        "actor_2 is started again in 1.5 s"
    )


def test_all_wait_only_when_nobody_is_missing_or_does_something() -> None:
    waiting = {"a": pulse(Activity.WAITING, 9.0, 3.0), "b": pulse(Activity.WAITING, 9.0, 5.0)}
    assert all_wait_since(waiting, complete=True) == 5.0
    assert all_wait_since(waiting, complete=False) is None
    assert all_wait_since(waiting | {"c": pulse(Activity.RESETTING, 1.0, 1.0)}, complete=True) is None


def test_a_slow_environment_is_no_reason_to_end() -> None:
    stall = Stall()
    stall.note(0.0, 0)
    assert not stall.hopeless(1e6, None)
    stall.deaths = 2
    assert not stall.hopeless(1e6, None)


def test_deaths_end_a_run_that_trains_nothing_for_much_longer_than_ever() -> None:
    stall = Stall()
    for now, progress in ((0.0, 5), (50.0, 6), (60.0, 7)):
        stall.note(now, progress)
    stall.deaths = 3
    assert not stall.hopeless(60.0 + 149.0, None)
    assert stall.hopeless(60.0 + 150.0, None)
    stall.note(61.0, 8)
    assert not stall.hopeless(1e6, None)


def test_that_all_wait_for_each_other_ends_the_run() -> None:
    stall = Stall()
    stall.note(100.0, 5)
    assert not stall.hopeless(159.0, 90.0)
    assert stall.hopeless(160.0, 90.0)
    assert not stall.hopeless(160.0, 110.0)


@pytest.mark.parametrize(
    ("died", "reason"),
    [
        (1.0, "nothing trained for 60 s: actor_0 waits since 61.0 s (wants a slot)"),
        (3.0, "nothing trained for 60 s: actor_0 was killed"),
    ],
)
def test_the_end_names_a_death_only_if_training_stopped_before_the_death(died: float, reason: str) -> None:
    progress: Any = SimpleNamespace(owes=lambda name: "wants a slot")
    trained = {1.0: 5, 2.0: 6, 3.0: 6, 62.0: 6}
    now = 0.0
    watch = StallWatch(progress, lambda: trained[now])
    supervisor: Any = SimpleNamespace(
        deaths=0, last_death=None, due={}, pulses=lambda: {"actor_0": pulse(Activity.WAITING, 1.0, 1.0)}
    )

    def run() -> None:
        nonlocal now
        for now in trained:
            if now == died:
                supervisor.deaths, supervisor.last_death = 1, Death("actor_0 was killed", own_fault=False)
            watch.look(supervisor, now)

    with pytest.raises(WorkerError) as caught:
        run()
    assert str(caught.value) == reason


def test_the_line_comes_later_and_later() -> None:
    stall = Stall()
    stall.note(0.0, 1)
    said = [now for now in range(200) if stall.worth_saying(float(now), 5.0)]
    assert said == [5, 10, 20, 40, 80, 160]
