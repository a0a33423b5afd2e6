"""Whoever is killed, hangs or fails is replaced, and the run goes on: nothing is lost silently or counted twice."""

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from appo.utils.metrics import read_metrics
from tests.chaos.invariants import find_falling, find_unaccounted, lost_checkpoints, tolerance
from tests.chaos.runs import HOSTILE, RAISED, ROOT, Ended, TrainingRun, checkpoint_steps, kill, last_line

GONE_SECONDS = 25.0
SAVE_OFTEN = "--save_every_sec=1"


def restarts(run: TrainingRun) -> int:
    return status(run)["totals"].get("restarts", 0)


def status(run: TrainingRun) -> dict:
    return json.loads((run.directory / "status.json").read_text())


def check_invariants(run: TrainingRun, slack: int = 0) -> dict[str, int]:
    """What holds after every run, whoever has died in it; the last totals."""
    assert find_falling(read_metrics(run.directory / "metrics.jsonl")) == []
    totals = status(run)["totals"]
    assert find_unaccounted({}, totals, slack) == []
    found = sorted((run.directory / "checkpoint_p0").glob("ckpt_*"))
    assert found
    assert lost_checkpoints(found) == []
    return totals


def replace(run: TrainingRun, role: str) -> None:
    """Kill a process, and wait until its successor's work, or work for it, has been trained on."""
    before = restarts(run)
    kill(run.pid_of(role))
    run.wait_until(lambda: restarts(run) > before, f"restart of {role}")
    run.wait_for_env_steps(run.env_steps() + 300)


@pytest.mark.parametrize(
    ("placement", "roles"),
    [
        pytest.param("central", ("actor_0", "policy_worker_0.0", "learner_0"), marks=pytest.mark.slow),
        pytest.param("central", ("learner_0", "fork_server", "janitor"), marks=pytest.mark.slow),
        pytest.param("local", ("actor_1", "learner_0", "fork_server"), marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_without_a_process_that_is_killed(tmp_path: Path, placement: str, roles: tuple[str, ...]) -> None:
    with TrainingRun(tmp_path, f"--inference={placement}", SAVE_OFTEN, "--use_rnn=True", "--hidden_size=8") as run:
        run.wait_for_env_steps()
        assert_the_kernel_kills_actors_first(run)
        for role in roles:
            if role == "janitor":
                kill(run.pid_of(role))
                run.wait_until(lambda: "janitor" in run.roles().values(), "another janitor")
            else:
                replace(run, role)
        run.interrupt()
        ended = run.wait()
        run.seconds_until_gone(GONE_SECONDS)
        assert run.left_behind() == []
    assert ended.exit_code == 130
    totals = check_invariants(run)
    assert totals["restarts"] >= len(roles) - ("janitor" in roles)
    for role in set(roles) - {"fork_server", "janitor"}:
        assert (
            f"{role} was killed by SIGKILL, not by the kernel's out-of-memory killer; starting it again (restart 1)"
            in ended.stderr
        )


def assert_the_kernel_kills_actors_first(run: TrainingRun) -> None:
    """When memory is short; policy workers are next, learners and main last."""
    own = int(Path("/proc/self/oom_score_adj").read_text())
    scores = {role: int(Path(f"/proc/{pid}/oom_score_adj").read_text()) - own for pid, role in run.roles().items()}
    for role, score in scores.items():
        kind = role.split("_")[0]
        assert score == min({"actor": 500, "policy": 200}.get(kind, 0), 1000 - own), scores
    assert {"main", "actor_0", "actor_1", "learner_0"} <= set(scores)


def first_reset(tmp_path: Path, fault: str, *words: str, placement: str = "local") -> tuple[TrainingRun, Ended]:
    """A run in which an actor of two does something in its first reset, once, and how it ended."""
    kwargs = (f"stamp={tmp_path / 'stamp'}", f"fault={fault}", "where=reset", "at=1", "process=actor_1", *words)
    seconds = 12 if "hang" in fault else 100
    flags = (f"--inference={placement}", f"--reset_timeout_seconds={seconds}", "--train_for_env_steps=1500")
    with TrainingRun(tmp_path, *flags, "--env_kwargs", *kwargs, env=HOSTILE) as run:
        ended = run.wait(100.0)
        run.seconds_until_gone(GONE_SECONDS)
        assert run.left_behind() == []
    return run, ended


@pytest.mark.parametrize(
    ("fault", "placement", "cause"),
    [
        ("os_exit", "local", "actor_1 ended unexpectedly with exit code 7"),
        pytest.param("kill_itself", "central", "actor_1 was killed by SIGKILL", marks=pytest.mark.slow),
        pytest.param("segfault", "local", "actor_1 was killed by SIGSEGV", marks=pytest.mark.slow),
        pytest.param("hang", "local", "actor_1: the first reset of its environments took", marks=pytest.mark.slow),
        pytest.param("hang_in_c", "central", "actor_1: the first reset of its", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_an_actor_that_is_lost_in_its_first_reset_is_started_again(
    tmp_path: Path, fault: str, placement: str, cause: str
) -> None:
    run, ended = first_reset(tmp_path, fault, "once=True", placement=placement)
    assert ended.exit_code == 0, ended.stderr
    totals = check_invariants(run)
    assert totals["restarts"] == 1
    assert totals["samples"] >= 1500
    (line,) = [line for line in ended.stderr.splitlines() if "starting it again (restart 1)" in line]
    assert cause in line


@pytest.mark.slow
def test_after_three_times_the_run_ends_as_if_it_had_been_the_first(tmp_path: Path) -> None:
    run, ended = first_reset(tmp_path, "segfault")
    assert ended.exit_code == 1
    again = [line for line in ended.stderr.splitlines() if "starting it again" in line]
    assert [re.findall(r"\(restart (\d)\)", line) for line in again] == [["1"], ["2"], ["3"]]
    (error,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert error == "error: actor_1 was killed by SIGSEGV"
    assert "string_at" in ended.stderr
    assert len(list((run.directory / "incidents").iterdir())) == 4
    assert checkpoint_steps(run.directory) == []


@pytest.mark.slow
def test_a_fork_server_that_has_stopped_is_replaced(tmp_path: Path) -> None:
    """It tells main of deaths and starts their successors: without it nothing could be started, and main would wait."""
    flags = ("--inference=central", "--step_timeout_seconds=2")
    program = (sys.executable, str(ROOT / "tests" / "chaos" / "impatient.py"))
    with TrainingRun(tmp_path, *flags, program=program) as run:
        run.wait_for_env_steps()
        stopped = run.pid_of("fork_server")
        kill(stopped, signal.SIGSTOP)
        kill(run.pid_of("actor_0"))
        run.wait_until(lambda: "fork_server" in run.roles().values() and stopped not in run.roles(), "another server")
        run.wait_until(lambda: {"actor_0", "actor_1", "learner_0"} <= set(run.roles().values()), "all processes")
        run.wait_for_env_steps(run.env_steps() + 2000)
        run.interrupt()
        ended = run.wait()
        run.seconds_until_gone(GONE_SECONDS)
    assert ended.exit_code == 130
    assert "the fork server did not answer within 15 s" in ended.stderr
    check_invariants(run, slack=tolerance(1))


@pytest.mark.slow
def test_a_run_goes_on_when_its_temporary_files_are_removed(tmp_path: Path) -> None:
    """The fork server's socket is one of them: without it nobody could be started again."""
    with TrainingRun(tmp_path, "--inference=central", SAVE_OFTEN) as run:
        run.wait_for_env_steps()
        assert len(run.left_behind()) == 1
        for entry in run.temporary.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        kill(run.pid_of("actor_0"))
        run.wait_until(lambda: {"actor_0", "actor_1", "learner_0"} <= set(run.roles().values()), "all processes")
        run.wait_for_env_steps(run.env_steps() + 2000)
        run.interrupt()
        ended = run.wait()
        run.seconds_until_gone(GONE_SECONDS)
        assert run.left_behind() == []
    assert ended.exit_code == 130
    check_invariants(run, slack=tolerance(1))


@pytest.mark.slow
def test_steps_of_an_actor_that_is_lost_when_the_run_is_interrupted_are_counted(tmp_path: Path) -> None:
    """It has not reported them, and nobody takes its place any more."""
    with TrainingRun(tmp_path, "--inference=local", SAVE_OFTEN) as run:
        run.wait_for_env_steps(20_000)
        kill(run.pid_of("actor_0"))
        run.interrupt()
        ended = run.wait()
    assert ended.exit_code == 130
    assert check_invariants(run, slack=tolerance(1))["actors_collected"] > 20_000


@pytest.mark.slow
def test_a_run_that_is_stopped_for_a_while_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Nobody hangs who was not allowed to run, in whatever order they wake up."""
    flags = ("--inference=central", "--step_timeout_seconds=5", "--work_timeout_seconds=5")
    with TrainingRun(tmp_path, *flags) as run:
        run.wait_for_env_steps()
        for main_first in (True, False):
            processes = sorted(run.roles(), key=lambda pid: (pid != run.process.pid) == main_first)
            for pid in processes:
                kill(pid, signal.SIGSTOP)
            time.sleep(6.5)  # the pause is the subject
            for pid in processes:
                kill(pid, signal.SIGCONT)
            run.wait_for_env_steps(run.env_steps() + 2000)
        run.interrupt()
        ended = run.wait()
        run.seconds_until_gone(GONE_SECONDS)
    assert ended.exit_code == 130
    assert "starting it again" not in ended.stderr
    assert check_invariants(run)["restarts"] == 0


RESTARTS = 200
MORE_MEMORY_KB = 5_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_restarts_leak_nothing(tmp_path: Path) -> None:
    """Not in main, nor in those who outlive the actors: their threads and open files are as many as after the first."""
    lasting = ("main", "fork_server", "janitor", "learner_0")
    with TrainingRun(tmp_path, "--inference=local", SAVE_OFTEN) as run:  # the thread that saves is there from the first
        run.wait_until(lambda: checkpoint_steps(run.directory), "checkpoint")
        kill_actors(run, 4)
        pids = pids_of(run, lasting)
        before, memory = {role: least_held(pid) for role, pid in pids.items()}, own_memory_kb(pids["main"])
        kill_actors(run, RESTARTS)
        # Who is killed while it holds the mutex of a queue takes the learner with it: not always the one from before.
        run.wait_until(
            lambda: {role: held(pid) for role, pid in pids_of(run, lasting).items()} == before, f"return to {before}"
        )
        more = own_memory_kb(pids["main"]) - memory
        run.interrupt()
        ended = run.wait()
    print(f"{RESTARTS} restarts: files and threads {before} as before, {more} kB more in main")
    assert ended.exit_code == 130
    assert more < MORE_MEMORY_KB
    restarts = [line for line in ended.stderr.splitlines() if "starting it again" in line]
    assert all("was killed by SIGKILL" in line or "blocked in its queue" in line for line in restarts)
    learners = sum(line.startswith("learner_0: blocked") for line in restarts)
    assert RESTARTS + 4 <= len(restarts) <= RESTARTS + 4 + learners
    assert check_invariants(run, slack=tolerance(RESTARTS))["restarts"] == len(restarts)


def pids_of(run: TrainingRun, roles: Collection[str]) -> dict[str, int]:
    """The processes that have these roles now."""
    return {role: pid for pid, role in run.roles().items() if role in roles}


def kill_actors(run: TrainingRun, times: int) -> None:
    """Kill both actors until they have been started again that often together."""
    goal = reported_restarts(run) + times
    while reported_restarts(run) < goal:
        before = reported_restarts(run)
        run.wait_until(lambda: {"actor_0", "actor_1"} <= set(run.roles().values()), "actors")
        for pid, role in run.roles().items():
            if role.startswith("actor"):
                kill(pid)
        run.wait_until(lambda before=before: reported_restarts(run) >= before + 2, "restart of both actors")
        run.wait_for_env_steps(run.env_steps() + 300)


def reported_restarts(run: TrainingRun) -> int:
    return max([record["perf/restarts"] for record in read_metrics(run.directory / "metrics.jsonl")], default=0)


def held(pid: int) -> tuple[int, int]:
    """Open files and threads of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def least_held(pid: int) -> tuple[int, int]:
    """The same without files that are open for a moment, such as a checkpoint's."""
    seen, deadline = [held(pid)], time.monotonic() + 1.0
    while time.monotonic() < deadline:
        seen.append(held(pid))
    return min(files for files, _ in seen), min(threads for _, threads in seen)


def own_memory_kb(pid: int) -> int:
    """What a process holds beside files and shared memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def hostile(folder: Path, *words: str, once: bool = True) -> tuple[TrainingRun, str, int]:
    """A run with a fault in one actor; the run, its stderr and its exit code.

    With a fault that comes again only that ends the run: the other actor alone never gets to the end of it.
    """
    kwargs = ["--env_kwargs", f"stamp={folder / 'stamp'}", f"once={once}", "process=actor_1", *words]
    patience = 1 if "fault=hang" in words else 60  # on a busy machine other steps may take a second
    flags = [
        "--inference=central",
        f"--step_timeout_seconds={patience}",
        f"--train_for_env_steps={2500 if once else 10**9}",
    ]
    with TrainingRun(folder, *flags, *kwargs, env=HOSTILE) as run:
        ended = run.wait()
        run.seconds_until_gone(GONE_SECONDS)
    return run, ended.stderr, ended.exit_code


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("poison_queues", "learner_0: blocked in its queue to actor_1 by a process that died in it; starting it again"),
        pytest.param(
            "hang",
            "actor_1: a step of its environments takes longer than 1 s; starting it again (restart 1)",
            marks=pytest.mark.slow,
        ),
        pytest.param("segfault", "actor_1 was killed by SIGSEGV; starting", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_after_a_fault(tmp_path: Path, fault: str, line: str) -> None:
    # Alone, the other actor needs ten seconds for the rest: the run does not end before the fault is noticed.
    run, stderr, exit_code = hostile(tmp_path, f"fault={fault}", "at=20", "pause=0.004")
    assert exit_code == 0, stderr
    assert line in stderr
    check_invariants(run)
    if fault == "hang":
        assert "in _hang" in (run.directory / "logs" / "actor_1.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["shape", "dtype", "missing_key", "no_dict"])
def test_an_environment_that_breaks_its_own_spaces_is_not_started_again(tmp_path: Path, fault: str) -> None:
    _, stderr, exit_code = hostile(tmp_path, f"fault={fault}", "at=100", once=False)
    assert exit_code == 3
    assert "starting it again" not in stderr
    assert stderr.startswith("error: actor_1: tests.chaos.hostile_env:Hostile: observation")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raise", "sys_exit"])
def test_an_environment_that_fails_is_made_again_while_its_actor_goes_on(tmp_path: Path, fault: str) -> None:
    run, stderr, exit_code = hostile(tmp_path, f"fault={fault}", "at=100", "pause=0.002")
    assert exit_code == 0, stderr
    assert stderr.startswith("actor_1: env ")
    assert stderr.count("is made again: tests.chaos.hostile_env:Hostile raised") == stderr.count("Traceback") == 1
    totals = check_invariants(run)
    assert (totals["actors_rebuilds"], totals["restarts"]) == (1, 0)
    assert read_metrics(run.directory / "metrics.jsonl")[-1]["perf/env_rebuilds"] == 1
    assert "is made again: tests.chaos.hostile_env:Hostile raised" in (run.directory / "logs/actor_1.log").read_text()


@pytest.mark.slow
def test_an_environment_that_fails_soon_after_every_start_ends_the_run(tmp_path: Path) -> None:
    _, stderr, exit_code = hostile(tmp_path, "fault=raise", "at=1", once=False)
    assert exit_code == 3
    assert stderr.count("starting it again") == 2
    assert stderr.count("Traceback (most recent call last)") == 1
    assert last_line(stderr) == RAISED
