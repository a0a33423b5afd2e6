import pytest

from appo.algorithms.runtime.messages import (
    ActionRequest,
    ActionsReady,
    Address,
    Begin,
    EpisodesDone,
    Message,
    SlotReleased,
    Stop,
    TrajectoryReady,
    WorkerReport,
    WorkerRetires,
)
from appo.algorithms.runtime.sampling import actor_worker as module
from appo.algorithms.runtime.sampling import leak_watch
from appo.algorithms.runtime.sampling.actor_worker import ActorWorker
from appo.algorithms.runtime.sampling.env_group import EnvGroup
from appo.algorithms.runtime.sampling.leak_watch import LeakWatch
from tests.unit.runtime.groups import Played


def worker_of(*groups: EnvGroup, pause_seconds: float = 0.0) -> ActorWorker:
    for group in groups:
        group.reset()
    return ActorWorker(Address("actor", 4), groups, pause_seconds)


def told(worker: ActorWorker, message: Message) -> list[Message]:
    return list(worker.handle(message))


def test_begin_makes_every_group_ask() -> None:
    groups = [Played().group, Played(generation=2).group]
    groups[1].plan = groups[1].plan.__class__(index=1, slots=range(2), start=0, generation=2)
    worker = worker_of(*groups)
    assert told(worker, Begin()) == [ActionRequest(0, 0, 0, 0, 0), ActionRequest(0, 1, 0, 0, 2)]
    assert not worker.pending()
    told(worker, ActionsReady(0, 1, 0, 0, 2))
    assert worker.pending()
    assert list(worker.work()) == [ActionRequest(0, 1, 0, 1, 2)]
    assert not worker.pending()


@pytest.mark.parametrize(
    "stale",
    [
        ActionsReady(0, 0, 0, 1, 7),  # an earlier step
        ActionsReady(0, 0, 0, 3, 7),  # a later one
        ActionsReady(0, 0, 1, 2, 7),  # another slot
        ActionsReady(0, 0, 0, 2, 6),  # of the actor before it died
        ActionsReady(1, 0, 0, 2, 7),  # a policy that was not asked
    ],
)
def test_a_reply_that_is_not_current_is_dropped(stale: ActionsReady) -> None:
    played = Played(generation=7)
    worker = worker_of(played.group)
    told(worker, Begin())
    for step in range(2):
        told(worker, ActionsReady(0, 0, 0, step, 7))
        list(worker.work())
    assert told(worker, stale) == []
    assert not worker.pending()
    told(worker, ActionsReady(0, 0, 0, 2, 7))
    assert worker.pending()


def test_a_reply_that_comes_twice_is_one_step() -> None:
    worker = worker_of(Played().group)
    told(worker, Begin())
    reply = ActionsReady(0, 0, 0, 0, 0)
    told(worker, reply)
    told(worker, reply)
    assert list(worker.work()) == [ActionRequest(0, 0, 0, 1, 0)]
    told(worker, reply)
    assert not worker.pending()


def test_a_group_steps_when_its_last_policy_has_answered() -> None:
    played = Played(num_policies=3, rows=30)
    worker = worker_of(played.group)
    requests = told(worker, Begin())
    assert requests == [ActionRequest(policy, 0, 0, 0, 0) for policy in range(3)]
    for request in reversed(requests):
        assert not worker.pending()
        told(worker, ActionsReady(*request))
        told(worker, ActionsReady(*request))
    assert worker.pending()


def test_releases_go_to_the_group_of_the_slot() -> None:
    played = Played(slots=1)
    worker = worker_of(played.group)
    messages = told(worker, Begin())
    for step in range(4):
        told(worker, ActionsReady(0, 0, 0, step, 0))
        messages = list(worker.work())
    assert messages[-1] == TrajectoryReady(0, 0, 1, 0)
    assert told(worker, SlotReleased(0, 0, 1)) == [ActionRequest(0, 0, 0, 0, 0)]
    assert told(worker, SlotReleased(0, 0, 1)) == []


def run_to_the_end(worker: ActorWorker, steps: int) -> None:
    """Answer and release at once, for one group of one policy."""
    todo = told(worker, Begin())
    while steps:
        message = todo.pop(0)
        if isinstance(message, ActionRequest):
            told(worker, ActionsReady(*message))
            todo += list(worker.work())
            steps -= 1
        elif isinstance(message, TrajectoryReady):
            todo += told(worker, SlotReleased(message.policy, message.slot, message.sequence))


def test_stop_reports_what_is_left_and_closes_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    played = Played(slots=2)
    worker = worker_of(played.group)
    run_to_the_end(worker, 18)
    told(worker, ActionsReady(0, 0, played.group.slot, played.group.step, 0))
    closed: list[bool] = []
    monkeypatch.setattr(played.group.envs, "close", lambda: closed.append(True))
    episodes, report = told(worker, Stop())
    assert isinstance(episodes, EpisodesDone)
    assert len(episodes.policy) == played.group.episodes.count > 5
    collected = played.group.totals["collected"]
    assert report == WorkerReport(
        "actor_4",
        {"collected": collected, "reset_rows": 48 - collected, "trajectories": 4, "sent": 4, "released": 4}
        | {"rebuilds": 0, "episodes": len(episodes.policy)},
    )
    assert closed == [True]
    assert not worker.pending()


def test_reports_come_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    worker = worker_of(Played().group)
    told(worker, Begin())

    def reports(step: int) -> int:
        told(worker, ActionsReady(0, 0, 0, step, 0))
        return sum(isinstance(m, WorkerReport) for m in worker.work())

    assert reports(0) == 0
    now += 1.5 * module.REPORT_SECONDS
    assert reports(1) == 1
    assert reports(2) == 0


def test_who_has_grown_too_much_retires_between_two_trajectories(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    groups = [Played(slots=3).group, Played(slots=3).group]
    groups[1].plan = groups[1].plan.__class__(index=1, slots=range(3), start=0)
    worker = worker_of(*groups)
    worker.leaks = LeakWatch(0, "--flag")
    held = iter([100 << 20, 105 << 20, 107 << 20])
    monkeypatch.setattr(leak_watch, "held_bytes", lambda: next(held))
    told(worker, Begin())

    def step(index: int) -> list[Message]:
        group = groups[index]
        told(worker, ActionsReady(0, index, group.slot, group.step, 0))
        return list(worker.work())

    for _ in range(3):
        now += 1.5 * module.REPORT_SECONDS
        step(0)
    assert not any(isinstance(message, WorkerRetires) for message in step(1) + step(1))
    (last,) = [message for message in step(0) if not isinstance(message, EpisodesDone)]  # and no request
    assert last == TrajectoryReady(0, groups[0].previous, 1, 0)
    assert groups[0].slot == -1
    assert list(groups[0].release(SlotReleased(0, last.slot, 1))) == []
    closed: list[int] = []
    for index, group in enumerate(groups):
        monkeypatch.setattr(group.envs, "close", lambda index=index: closed.append(index))
    step(1)
    ready, report, retires = [message for message in step(1) if not isinstance(message, EpisodesDone)]
    assert ready == TrajectoryReady(0, groups[1].previous, 1, 0)
    assert isinstance(report, WorkerReport)
    assert report.totals["sent"] == 2
    assert retires == WorkerRetires("actor_4", "its memory has grown by 7 MiB (--flag)")
    assert closed == [0, 1]
    assert not worker.pending()


def test_who_has_opened_half_of_the_files_it_may_retires(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = LeakWatch(1 << 40, "")
    monkeypatch.setattr(leak_watch.limits, "limit", lambda: 100)
    for count, reason in ((50, None), (51, "it has 51 open files of 100")):
        monkeypatch.setattr(leak_watch.limits, "num_open", lambda count=count: count)
        assert watch.reason() == reason
    monkeypatch.setattr(leak_watch.limits, "limit", lambda: None)
    assert watch.reason() is None


def test_totals_are_summed_over_groups() -> None:
    groups = [Played().group, Played().group]
    groups[1].plan = groups[1].plan.__class__(index=1, slots=range(2), start=0)
    groups[0].totals["sent"], groups[1].totals["sent"] = 3, 4
    groups[0].episodes.count, groups[1].episodes.count = 10, 20
    assert worker_of(*groups).report().totals == {
        "collected": 0, "reset_rows": 0, "trajectories": 0, "sent": 7, "released": 0, "rebuilds": 0,
        "episodes": 30,
    }  # fmt: skip


def test_an_actor_rests_once_after_its_first_trajectories(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    worker = worker_of(Played().group, pause_seconds=10.0)
    told(worker, Begin())
    for step in range(4):
        told(worker, ActionsReady(0, 0, 0, step, 0))
        assert worker.pending()
        list(worker.work())
    told(worker, ActionsReady(0, 0, 1, 0, 0))
    assert not worker.pending()
    now += 9.0
    assert not worker.pending()
    now += 2.0
    assert worker.pending()
    list(worker.work())
    told(worker, ActionsReady(0, 0, 1, 1, 0))
    assert worker.pending()
