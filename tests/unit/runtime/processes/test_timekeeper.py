import pytest

from appo.algorithms.runtime.messages import TimeReport
from appo.algorithms.runtime.processes import timekeeper as module
from appo.algorithms.runtime.processes.timekeeper import Timekeeper
from appo.utils.timing import ENV, INFERENCE, PhaseClock

SECOND = 1_000_000_000


class World:
    """A process whose wall and CPU time, and that of what it has started, pass as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.children = 50 * SECOND, 7.0
        self.clock = PhaseClock(lambda: self.now, lambda: self.now)
        monkeypatch.setattr(module, "clock", self.clock)
        monkeypatch.setattr(module, "Descendants", lambda: self)

    def cpu_seconds(self) -> float:
        return self.children

    def spend(self, phase: int, seconds: int) -> None:
        self.clock.enter(phase)
        self.now += seconds * SECOND


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_games_work_for_the_environments_of_the_process_that_started_them(world: World) -> None:
    keepers = [Timekeeper("actor_0", "actor", runs_environments=runs) for runs in (True, False)]
    world.children += 4.0
    for keeper in keepers:  # what was before counts for nothing
        keeper.begin()
    world.clock.collected, world.clock.trained = 12, 5
    world.spend(ENV, 3)
    world.spend(INFERENCE, 1)
    world.children += 2.0
    seconds = {"env": 3.0, "inference": 1.0}
    for keeper, games in zip(keepers, (2.0, 0.0), strict=True):
        cpu_seconds = {"env": 3.0 + games, "inference": 1.0}
        assert keeper.report() == TimeReport("actor_0", "actor", 50 * SECOND, seconds, cpu_seconds, 12, 5)


def test_a_report_is_due_when_the_last_one_is_a_second_old(world: World) -> None:
    keeper = Timekeeper("learner_0", "learner", runs_environments=False)
    due = []
    for tenth in range(1, 31):
        world.now += SECOND // 10
        world.clock.enter(ENV)
        if keeper.due():
            due.append(tenth)
            keeper.report()
    assert due == [10, 20, 30]
