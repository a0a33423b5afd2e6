import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from appo.algorithms.runtime.memory.heartbeat import Activity, Pulse
from appo.algorithms.runtime.processes.process import LOST, cause_of_death, crash_report, exit_code_of, failure_of
from appo.algorithms.runtime.processes.restarts import (
    BACKOFF_SECONDS,
    MAX_FAULTS,
    MAX_FIRST_RESETS,
    MAX_FUTILE,
    MAX_IDLE_DEATHS,
    REVIVAL_SECONDS,
    SERVER_SECONDS,
    Death,
    Limits,
    Revival,
    SeatHistory,
)
from appo.algorithms.runtime.processes.strays import process_of
from appo.utils.errors import AppoError, CheckpointError, EnvironmentFailure, NumericsError, SpaceMismatch, UsageError

KILLED = Death("killed", own_fault=False)
RAISED = Death("raised", own_fault=True, exit_code=3)
LIMITS = Limits(restart=True, reset_seconds=10.0, step_seconds=20.0, work_seconds=30.0)


def delays(history: SeatHistory, death: Death, count: int, *, worked: bool, lived_seconds: float) -> list[float | None]:
    return [history.delay(death, worked=worked, lived_seconds=lived_seconds) for _ in range(count)]


def test_what_is_killed_while_it_works_is_replaced_at_once_and_for_ever() -> None:
    assert delays(SeatHistory(), KILLED, 1000, worked=True, lived_seconds=0.1) == [0.0] * 1000


def test_what_dies_without_having_worked_is_replaced_later_and_later_and_given_up() -> None:
    found = delays(SeatHistory(), KILLED, MAX_IDLE_DEATHS, worked=False, lived_seconds=0.1)
    assert found[-1] is None
    assert found[:5] == list(BACKOFF_SECONDS[1:])
    assert sum(delay for delay in found if delay) < 10


def test_a_unit_of_work_forgives_all_deaths_before() -> None:
    history = SeatHistory()
    delays(history, KILLED, MAX_IDLE_DEATHS - 1, worked=False, lived_seconds=0.1)
    assert history.delay(KILLED, worked=True, lived_seconds=0.1) == 0.0
    assert None not in delays(history, KILLED, MAX_IDLE_DEATHS - 1, worked=False, lived_seconds=0.1)


def test_what_fails_by_itself_soon_after_every_start_is_given_up_though_it_works() -> None:
    assert delays(SeatHistory(), RAISED, MAX_FAULTS, worked=True, lived_seconds=59.0) == [0.0, 0.0, None]
    assert delays(SeatHistory(), RAISED, 1000, worked=True, lived_seconds=61.0) == [0.0] * 1000


@pytest.mark.parametrize("ending", ["SIGSEGV", "exit code 7", "hang", ""])
def test_a_first_reset_is_tried_three_times_more(ending: str) -> None:
    death, history = Death("gone", own_fault=bool(ending), ending=ending), SeatHistory()
    found = [history.delay_at_start(death) for _ in range(MAX_FIRST_RESETS + 2)]
    assert found == [0.1, 0.2, 0.5, None, None]
    assert history.delay(death, worked=True, lived_seconds=1.0) == 0.0  # forgotten when the run has begun


def test_what_an_environment_raises_in_its_first_reset_is_for_the_user_to_see() -> None:
    assert SeatHistory().delay_at_start(replace(RAISED, said=True)) is None


def test_kills_do_not_count_as_faults() -> None:
    history = SeatHistory()
    for death in (RAISED, KILLED, RAISED, KILLED, KILLED):
        assert history.delay(death, worked=True, lived_seconds=1.0) == 0.0


@pytest.mark.parametrize("kind", [UsageError, NumericsError, CheckpointError, SpaceMismatch])
def test_what_another_life_would_repeat_is_given_up_at_once(kind: type[AppoError]) -> None:
    told = failure_of("actor_0", kind("no"))
    assert told.lasting
    assert SeatHistory().delay(replace(RAISED, lasting=told.lasting), worked=True, lived_seconds=1e6) is None
    assert not failure_of("actor_0", EnvironmentFailure("no")).lasting


def test_a_gpu_without_memory_is_a_lack_of_resources() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")
    assert isinstance(error, torch.cuda.OutOfMemoryError)
    told = failure_of("learner_0", error)
    assert (told.exit_code, told.lasting) == (5, False)  # another program's memory may be free again
    assert told.summary.startswith("the GPU has too little free memory: lower --microbatch_size or --batch_size")
    assert told.summary.endswith("(CUDA out of memory. Tried to allocate 2.00 GiB.)")
    assert "OutOfMemoryError: CUDA out of memory" in told.traceback
    assert failure_of("learner_0", RuntimeError("out of memory")).exit_code == 1


@pytest.mark.parametrize(
    ("activity", "is_actor", "limit", "words"),
    [
        (Activity.RESETTING, True, 10.0, "actor: the first reset of its environments took longer than 11 s"),
        (Activity.WORKING, True, 20.0, "actor: a step of its environments takes longer than 21 s"),
        (Activity.WORKING, False, 30.0, "learner: hangs in its work for 31 s"),
        (Activity.WAITING, True, 20.0, "actor: gives no sign of life for 21 s"),
        (Activity.WAITING, False, 30.0, "learner: gives no sign of life for 31 s"),
        (Activity.STARTING, False, 30.0, "learner: gives no sign of life for 31 s"),
    ],
)
def test_what_takes_too_long_hangs(activity: Activity, is_actor: bool, limit: float, words: str) -> None:
    name = words.partition(":")[0]
    pulse = Pulse(activity, since=100.0, began=0.0, turns=1, peer=None, entered=0.0)
    assert LIMITS.hang(name, pulse, 100.0 + limit, is_actor=is_actor) is None
    assert LIMITS.hang(name, pulse, 101.0 + limit, is_actor=is_actor) == Death(
        words, True, 3 if is_actor else 1, ending="hang"
    )


@pytest.mark.parametrize(("step", "work", "limit"), [(0.1, 600.0, 20.0), (120.0, 600.0, 120.0), (120.0, 5.0, 5.0)])
def test_an_actor_that_waits_may_be_silent_for_a_while_however_fast_its_steps_are(
    step: float, work: float, limit: float
) -> None:
    limits = Limits(restart=True, reset_seconds=10.0, step_seconds=step, work_seconds=work)
    assert limits.of(Activity.WAITING, is_actor=True) == limit


def test_nobody_hangs_while_all_are_paused() -> None:
    pulse = Pulse(Activity.WORKING, since=100.0, began=90.0, turns=1, peer=2, entered=99.0)
    assert pulse.not_before(99.5) == pulse._replace(began=99.5, entered=99.5)
    assert LIMITS.hang("actor", pulse.not_before(1000.0), 1001.0, is_actor=True) is None


def test_who_asks_for_a_successor_gets_one_at_once_and_has_not_failed() -> None:
    history = SeatHistory()
    assert delays(history, Death("", False, retired=True), 100, worked=False, lived_seconds=1.0) == [0.0] * 100
    assert (history.idle_deaths, history.faults) == (0, 0)


def test_what_goes_down_with_the_fork_server_is_not_to_blame() -> None:
    history = SeatHistory()
    for _ in range(100):
        assert history.delay(Death("", False, collateral=True), worked=False, lived_seconds=0.0) == SERVER_SECONDS
    assert (history.idle_deaths, history.faults) == (0, 0)


def test_what_runs_beside_is_started_again_later_and_later_and_given_up_if_that_is_in_vain() -> None:
    revival, now, waits = Revival("it", Path("log")), 100.0, []
    revival.began(now)
    while True:
        line = revival.ended(now, 1)
        if revival.due is None:
            break
        assert line == f"it ended with exit code 1; starting it again (restart {len(waits) + 1}), see log"
        waits.append(revival.due - now)
        assert not revival.is_due(revival.due - 0.01)
        now = revival.due
        assert revival.is_due(now)
        revival.began(now)
    assert waits == list(REVIVAL_SECONDS)
    assert len(waits) == MAX_FUTILE - 1
    assert "not started again" in line
    assert revival.plain() == {"state": "given up", "restarts": 5}
    assert not revival.is_due(1e12)


def test_a_process_beside_that_is_killed_is_started_again_for_ever_but_not_at_once() -> None:
    revival, now, waits = Revival("it", Path("log")), 100.0, []
    for _ in range(100):
        revival.began(now)
        line = revival.ended(now + 1.0, -signal.SIGKILL)
        assert revival.due is not None
        waits.append(revival.due - now - 1.0)
        now = revival.due
    assert line == "it ended with SIGKILL; starting it again (restart 100), see log"
    assert waits == [*REVIVAL_SECONDS, *REVIVAL_SECONDS[-1:] * 95]
    for _ in range(MAX_FUTILE - 1):  # own ends count apart
        revival.began(now)
        assert "starting it again" in revival.ended(now + 1.0, 1)
        now += 1.0
    revival.began(now)
    assert "not started again" in revival.ended(now + 1.0, 1)


def test_a_long_life_beside_forgives_all_ends_before() -> None:
    revival, now = Revival("it", Path("log")), 100.0
    for restart in range(100):
        revival.began(now)
        assert revival.plain() == {"state": "running", "restarts": restart}
        revival.ended(now + 60.0, 1)
        assert revival.plain() == {"state": "ended", "restarts": restart}
        assert revival.due == now + 60.0 + REVIVAL_SECONDS[0]
        now = revival.due


def test_a_long_life_beside_does_not_forgive_starts_that_fail_after_it() -> None:
    revival, waits = Revival("it", Path("log")), list[float]()
    revival.began(100.0)
    revival.ended(now := 1000.0, 1)
    while revival.due is not None and len(waits) < 20:
        waits.append(revival.due - now)
        line = revival.not_started(now := revival.due, OSError("no memory"))
    assert waits == list(REVIVAL_SECONDS)
    assert line.startswith("it could not be started: no memory, as 6 times soon after its start: not started again")


@pytest.mark.parametrize(
    ("verdict", "line"),
    [
        (True, "actor_3 was killed by SIGKILL: out of memory (the kernel's count of such kills rose)"),
        (False, "actor_3 was killed by SIGKILL, not by the kernel's out-of-memory killer"),
        (None, "actor_3 was killed by SIGKILL (out of memory?)"),
    ],
)
def test_a_kill_is_called_by_its_cause(monkeypatch: pytest.MonkeyPatch, verdict: bool | None, line: str) -> None:
    monkeypatch.setattr("appo.algorithms.runtime.processes.process.kernel_kills.explain", lambda: verdict)
    assert cause_of_death("actor_3", -signal.SIGKILL) == line
    assert cause_of_death("actor_3", -signal.SIGTERM) == "actor_3 was killed by SIGTERM"
    assert cause_of_death("actor_3", -37) == "actor_3 was killed by signal 37"


def exits(code: int) -> None:
    os._exit(code)


def test_an_exit_code_is_that_of_a_lost_fork_server_only_if_the_server_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = multiprocessing.get_context("spawn").Process(target=exits, args=(255,))
    process.start()
    process.join()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert exit_code_of(process, 0) == exit_code_of(process, os.getpid()) == 255
    assert exit_code_of(process, ended.pid) == LOST
    looks = iter([process_of(os.getpid()), process_of(os.getpid()), None])  # its pipes have ended, and it has not yet
    monkeypatch.setattr("appo.algorithms.runtime.processes.process.process_of", lambda pid: next(looks))
    assert exit_code_of(process, os.getpid()) == LOST
    assert cause_of_death("actor_3", 255) == "actor_3 ended unexpectedly with exit code 255"
    assert "the fork server" in cause_of_death("actor_3", LOST)


def test_stacks_of_a_crash_are_shown_for_no_other_end(tmp_path: Path) -> None:
    log = tmp_path / "actor_0.log"
    log.write_text("before\nFatal Python error: Segmentation fault\n\nCurrent thread\n")
    assert crash_report(log, -signal.SIGSEGV).startswith("Fatal Python error: Segmentation fault\n")
    assert crash_report(log, -signal.SIGKILL) == crash_report(log, 7) == ""
