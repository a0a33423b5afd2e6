"""A run ends soon after it has saved, whatever has become of its processes and of its disk."""

import signal
import time
from pathlib import Path

import pytest

from appo.utils.system.interrupts import SAME_PRESS_SECONDS
from tests.chaos.runs import TrainingRun, checkpoint_steps, kill
from tests.patience import patient

GONE_SECONDS = 25.0
LEAVES_SECONDS = 10.0
TERMINATED, INTERRUPTED = 143, 130


def left(run: TrainingRun, number: int) -> int:
    """Signal main alone; its exit code, once all others are gone and what was reported is saved."""
    reported = run.env_steps()
    kill(run.process.pid, number)
    ended = run.wait()
    run.seconds_until_gone(GONE_SECONDS)
    print(f"ended after {ended.seconds:.2f} s")
    assert ended.seconds < patient(LEAVES_SECONDS)
    assert "Traceback" not in ended.stderr
    assert checkpoint_steps(run.directory)[-1] >= reported
    return ended.exit_code


@pytest.mark.slow
@pytest.mark.parametrize(
    "role",
    ["fork_server", "janitor", "tracker", "actor_0"],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_main_leaves_though_a_process_stands_stopped(tmp_path: Path, role: str, number: int) -> None:
    with TrainingRun(tmp_path, "--inference=central") as run:
        run.wait_for_env_steps()
        kill(run.pid_of(role), signal.SIGSTOP)
        assert left(run, number) == (INTERRUPTED if number == signal.SIGINT else TERMINATED)


@pytest.mark.slow
def test_a_run_that_has_reached_its_goal_ends_though_the_fork_server_stands_stopped(tmp_path: Path) -> None:
    with TrainingRun(tmp_path, "--inference=local", "--train_for_seconds=6") as run:
        run.wait_for_env_steps()
        kill(run.pid_of("fork_server"), signal.SIGSTOP)
        ended = run.wait()
        run.seconds_until_gone(GONE_SECONDS)
    assert ended.exit_code == 0
    assert ended.seconds < patient(6 + LEAVES_SECONDS)


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGUSR2, signal.SIGQUIT, signal.SIGALRM, signal.SIGXCPU)],
)
def test_other_signals_save_as_sigterm_does(tmp_path: Path, number: int) -> None:
    """Also when all processes get them, as from a scheduler that warns."""
    before = signal.signal(number, signal.SIG_DFL)  # a shell in the background hands SIGQUIT down as one to be ignored
    try:
        started = TrainingRun(tmp_path, "--inference=central")
    finally:
        signal.signal(number, before)
    with started as run:
        run.wait_for_env_steps()
        for pid in run.roles():
            if pid != run.process.pid:
                kill(pid, number)
        assert left(run, number) == TERMINATED
        assert f"ended by {signal.Signals(number).name}" in run.stdout
        assert "starting it again" not in run.stderr


@pytest.mark.slow
def test_the_signal_for_stacks_ends_nothing(tmp_path: Path) -> None:
    """To main alone, as `scancel --signal=USR1` sends it, and to all its processes."""
    with TrainingRun(tmp_path, "--inference=central") as run:
        run.wait_for_env_steps()
        for pid in (*run.roles(), run.process.pid):
            kill(pid, signal.SIGUSR1)
        run.wait_until(lambda: "most recent call first" in run.stderr, "stacks of main")
        before = run.env_steps()
        run.wait_until(lambda: run.env_steps() > before, "env steps")
        assert "starting it again" not in run.stderr
        assert left(run, signal.SIGTERM) == TERMINATED


@pytest.mark.slow
def test_a_disk_that_does_not_answer_stops_neither_supervision_nor_ctrl_c(tmp_path: Path) -> None:
    """Figures and status cannot be written, checkpoints can."""
    with TrainingRun(tmp_path, "--inference=central", failpoints="disk.files:sleep=1000@20") as run:
        run.wait_for_env_steps()
        run.wait_until(lambda: "the disk has not answered" in run.stderr, "line about the disk")
        killed = run.pid_of("actor_0")
        kill(killed)
        run.wait_until(lambda: "starting it again (restart 1)" in run.stderr, "restart")
        run.wait_until(lambda: {"actor_0", "actor_1"} <= set(run.roles().values()), "actors")
        assert left(run, signal.SIGINT) == INTERRUPTED


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_though_the_last_checkpoint_is_never_written(tmp_path: Path) -> None:
    with TrainingRun(tmp_path, "--inference=local", failpoints="disk.checkpoint:sleep=1000") as run:
        run.wait_for_env_steps()
        kill(run.process.pid, signal.SIGINT)
        run.wait_until(lambda: "saving what was learned: the disk has not answered" in run.stderr, "line")
        said = time.monotonic()
        run.wait_until(lambda: time.monotonic() - said > SAME_PRESS_SECONDS, "time for another press")
        kill(run.process.pid, signal.SIGINT)
        ended = run.wait()
        run.seconds_until_gone(GONE_SECONDS)
    assert ended.exit_code == INTERRUPTED
    assert ended.seconds < patient(LEAVES_SECONDS)
    assert "ended without saving" in ended.stdout
    assert checkpoint_steps(run.directory) == []
