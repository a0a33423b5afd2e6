"""Ctrl-C and its like, at any moment: what was learned is saved, the exit code tells, and nobody prints a traceback."""

import signal
import sys
import time
from pathlib import Path

import pytest

from appo.utils import checkpoint_files
from appo.utils.system.interrupts import SAME_PRESS_SECONDS
from tests.chaos.runs import HOSTILE, TrainingRun, checkpoint_steps, kill
from tests.integration.runs import LINGERING
from tests.patience import in_time, patient

END_SECONDS = 25.0  # the promise is 5
STOPPING = "\nstopping: saving what was learned; Ctrl-C again ends at once without saving\n"


def interrupted_run(folder: Path, number: int, *flags: str, env: str = "CartPole-v1", after: int = 500) -> str:
    """Signal a run that has reported some env steps; it must have saved at least those. Its stderr."""
    with TrainingRun(folder, *flags, env=env) as run:
        run.wait_for_env_steps(after)
        reported = run.env_steps()
        run.interrupt(number)
        ended = run.wait()
        run.seconds_until_gone(END_SECONDS)
        print(f"{signal.Signals(number).name} {' '.join(flags)}: ended after {ended.seconds:.2f} s")
    assert ended.exit_code == {signal.SIGINT: 130, signal.SIGTERM: 143}[signal.Signals(number)]
    assert ended.seconds < patient(END_SECONDS)
    assert "Traceback" not in ended.stderr
    loaded = checkpoint_files.load(run.directory / "checkpoint_p0")
    assert loaded is not None
    assert not loaded.found.damaged
    assert checkpoint_steps(run.directory)[-1] >= reported
    return in_time(ended.stderr)


@pytest.mark.parametrize(
    "placement", ["central", *(pytest.param(placement, marks=pytest.mark.slow) for placement in ("local", "serial"))]
)
def test_ctrl_c_saves(tmp_path: Path, placement: str) -> None:
    assert interrupted_run(tmp_path, signal.SIGINT, f"--inference={placement}") == STOPPING


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["serial", "local"])
def test_sigterm_saves_though_an_environment_takes_all_signals(tmp_path: Path, placement: str) -> None:
    kwargs = ["--env_kwargs", "fault=take_signals", "where=reset"]
    assert interrupted_run(tmp_path, signal.SIGTERM, f"--inference={placement}", *kwargs, env=HOSTILE) == ""


@pytest.mark.slow
def test_ctrl_c_saves_though_an_environment_hangs(tmp_path: Path) -> None:
    stamp = tmp_path / "stamp"
    kwargs = ["--env_kwargs", "fault=hang", "at=1000", "process=actor_1", f"stamp={stamp}"]
    with TrainingRun(tmp_path, "--inference=local", *kwargs, env=HOSTILE) as run:
        run.wait_until(stamp.exists, "hang")
        reported = run.env_steps()
        run.interrupt()
        ended = run.wait()
        run.seconds_until_gone(END_SECONDS)
        print(f"with a hanging environment: ended after {ended.seconds:.2f} s")
    assert (ended.exit_code, in_time(ended.stderr)) == (130, STOPPING)
    assert ended.seconds < patient(END_SECONDS)
    assert checkpoint_steps(run.directory)[-1] >= max(reported, 1)


@pytest.mark.slow
def test_a_ctrl_c_that_comes_twice_is_one(tmp_path: Path) -> None:
    """From the terminal and from who has started us, such as timeout, which tells its child and then all its group."""
    with TrainingRun(tmp_path, "--inference=local") as run:
        run.wait_for_env_steps()
        reported = run.env_steps()
        run.interrupt()
        run.interrupt()
        ended = run.wait()
        run.seconds_until_gone(END_SECONDS)
    assert (ended.exit_code, in_time(ended.stderr)) == (130, STOPPING)
    assert checkpoint_steps(run.directory)[-1] >= reported


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    """Though an environment hangs, so that the first one is still waiting."""
    stamp = tmp_path / "stamp"
    kwargs = ["--env_kwargs", "fault=hang", "at=500", "process=actor_1", f"stamp={stamp}"]
    program = (sys.executable, str(LINGERING))  # the first Ctrl-C still waits when the second one comes
    with TrainingRun(tmp_path, "--inference=local", *kwargs, env=HOSTILE, program=program) as run:
        run.wait_until(stamp.exists, "hang")
        run.interrupt()
        run.wait_until(lambda: in_time(run.stderr) == STOPPING, "answer to the first Ctrl-C")
        answered = time.monotonic()
        run.wait_until(lambda: time.monotonic() - answered > SAME_PRESS_SECONDS, "time for another press")
        run.interrupt()
        ended = run.wait()
        run.seconds_until_gone(END_SECONDS)
        print(f"second Ctrl-C: ended after {ended.seconds:.2f} s")
    assert (ended.exit_code, in_time(ended.stderr)) == (130, STOPPING)
    assert ended.seconds < patient(10.0)  # the promise is 1 to 2


@pytest.mark.slow
def test_ctrl_c_during_start_up(tmp_path: Path) -> None:
    for offset in (0.0, 0.2, 0.7, 1.5, 3.0):
        folder = tmp_path / str(offset)
        folder.mkdir()
        with TrainingRun(folder, "--inference=local", "--num_workers=1") as run:
            run.wait_until(lambda run=run: run.stdout, "sign of life")
            time.sleep(offset)  # the moment is the subject; the outcome must not depend on it
            run.interrupt()
            ended = run.wait()
            run.seconds_until_gone(END_SECONDS)
            print(f"Ctrl-C {offset} s after the start: ended after {ended.seconds:.2f} s, {ended.stderr!r}")
        assert "Traceback" not in ended.stderr
        assert ended.exit_code == 130
        assert len(ended.stderr.splitlines()) <= 2
        assert ended.seconds < patient(END_SECONDS)


@pytest.mark.slow
def test_a_closed_terminal_and_a_reader_that_leaves_are_survived(tmp_path: Path) -> None:
    """SIGHUP to everybody, and stdout a pipe that nobody reads any more, as with `| head -1`."""
    flags = ["--inference=local", "--train_for_env_steps=8000"]
    with TrainingRun(tmp_path, *flags, piped=True) as run:
        assert run.process.stdout is not None
        assert run.process.stdout.readline().startswith(b"env preset: ")
        run.process.stdout.close()
        run.wait_for_env_steps()
        run.interrupt(signal.SIGHUP)
        for pid in run.roles():
            kill(pid, signal.SIGHUP)
        ended = run.wait()
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert checkpoint_steps(run.directory)[-1] >= 8000
