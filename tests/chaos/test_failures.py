"""Whatever fails, and nobody is replaced: the run ends soon, says why in the end, and saves what was learned."""

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.chaos.runs import HOSTILE, RAISED, Ended, TrainingRun, checkpoint_steps, last_line
from tests.patience import in_time, patient

END_SECONDS = 25.0  # the promise is 5


def hostile(folder: Path, placement: str, *kwargs: str, flags: tuple[str, ...] = ()) -> tuple[Ended, float]:
    """How a run with a hostile environment ended, and how long after the fault."""
    stamp = folder / "stamp"
    words = [f"--inference={placement}", "--restart_workers=False", *flags, "--env_kwargs", f"stamp={stamp}", *kwargs]
    with TrainingRun(folder, *words, env=HOSTILE) as run:
        ended = run.wait()
        seconds = time.monotonic() - float(stamp.read_text())
        run.seconds_until_gone(END_SECONDS)
    print(f"{placement} {' '.join(kwargs)}: exit {ended.exit_code}, {seconds:.2f} s after the fault")
    assert seconds < patient(END_SECONDS)
    return ended, seconds


@pytest.mark.parametrize(
    ("placement", "where", "at", "process"),
    [
        # The first of them already in the process that tries the environment.
        *(pytest.param("local", "init", 1, process, marks=pytest.mark.slow) for process in ("", "actor_1")),
        pytest.param("local", "reset", 1, "actor_0", marks=pytest.mark.slow),
        ("central", "step", 300, "actor_1"),
        pytest.param("serial", "step", 300, "", marks=pytest.mark.slow),
    ],
)
def test_an_environment_that_raises_ends_the_run_with_its_traceback_last(
    tmp_path: Path, placement: str, where: str, at: int, process: str
) -> None:
    words = ("fault=raise", f"where={where}", f"at={at}", f"process={process}")
    ended, _ = hostile(tmp_path, placement, *words)
    assert ended.exit_code == 3
    assert last_line(ended.stderr) == RAISED
    first, *_ = in_time(ended.stderr).splitlines()
    assert first.startswith("error: ")
    assert "raised HostileError: out of cheese" in first
    assert ended.stderr.count("Traceback (most recent call last)") == 1
    if process:
        assert f"error: {process}: " in ended.stderr
    if where == "step":
        assert len(checkpoint_steps(tmp_path / "train_dir" / "run")) == 1


@pytest.mark.parametrize(
    ("fault", "where", "exit_code", "words"),
    [
        ("segfault", "step", 1, "actor_1 was killed by SIGSEGV"),
        ("sys_exit", "step", 3, "actor_1: tests.chaos.hostile_env:Hostile raised SystemExit: bye"),
        ("missing_key", "step", 3, "speed"),
        ("keyboard_interrupt", "reset", 3, "Hostile raised KeyboardInterrupt: of the environment"),
        ("os_exit", "step", 1, "actor_1 ended unexpectedly with exit code 7"),
        ("shape", "step", 3, "position"),
        ("dtype", "step", 3, "position"),
        ("no_dict", "step", 3, "Hostile"),
    ],
)
@pytest.mark.slow
def test_other_ways_in_which_an_environment_ends_a_run(
    tmp_path: Path, fault: str, where: str, exit_code: int, words: str
) -> None:
    at = 200 if where == "step" else 2
    ended, _ = hostile(tmp_path, "local", f"fault={fault}", f"where={where}", f"at={at}", "process=actor_1")
    assert ended.exit_code == exit_code
    assert words in ended.stderr.splitlines()[0]
    assert ended.stderr.startswith("error: actor_1")
    if fault == "segfault":  # the Python stack of a crash in C code
        assert "Fatal Python error: Segmentation fault" in ended.stderr
        assert "string_at" in ended.stderr


@pytest.mark.slow
def test_an_environment_that_crashes_when_it_is_tried(tmp_path: Path) -> None:
    ended, _ = hostile(tmp_path, "local", "fault=segfault", "where=init")
    assert ended.exit_code == 3
    assert "the process that tried the environment was killed by SIGSEGV" in ended.stderr.splitlines()[0]
    assert "string_at" in ended.stderr


@pytest.mark.parametrize(("where", "process"), [("init", ""), ("reset", "actor_0")])
@pytest.mark.slow
def test_an_environment_that_hangs_at_the_start_is_named_with_its_stack(
    tmp_path: Path, where: str, process: str
) -> None:
    words, limit = ("fault=hang", f"where={where}", f"process={process}"), math.ceil(patient(5))
    ended, _ = hostile(tmp_path, "local", *words, flags=(f"--reset_timeout_seconds={limit}",))
    assert ended.exit_code == 3
    if process:
        late = f"error: actor_0: the first reset of its environments took longer than {limit} s"
        assert ended.stderr.startswith(late)
    else:
        assert ended.stderr.startswith(f"error: making the environment took longer than {limit} s")
    assert "hostile_env.py" in ended.stderr
    assert "in _hang" in ended.stderr


@pytest.mark.parametrize(
    ("placement", "failpoint", "exit_code", "words"),
    [
        ("central", "learner.step:exit=7@4", 1, "learner_0 ended unexpectedly with exit code 7"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("central", "pw.forward:raise@40", 1, "policy_worker_0.0: FailpointError: failpoint pw.forward"),
                ("local", "learner.batch:raise@3", 1, "learner_0: FailpointError: failpoint learner.batch"),
                (
                    "local",
                    "learner.publish:kill9@5",
                    1,
                    "learner_0 was killed by SIGKILL, not by the kernel's out-of-memory killer",
                ),
                ("local", "actor.step:raise@40%w1", 1, "actor_1: FailpointError: failpoint actor.step"),
                ("serial", "learner.step:raise@4", 1, "FailpointError: failpoint learner.step"),
            )
        ),
    ],
)
def test_a_fault_of_our_own_ends_the_run_with_its_traceback_last(
    tmp_path: Path, placement: str, failpoint: str, exit_code: int, words: str
) -> None:
    with TrainingRun(tmp_path, f"--inference={placement}", "--restart_workers=False", failpoints=failpoint) as run:
        ended = run.wait()
        run.seconds_until_gone(END_SECONDS)
    assert ended.exit_code == exit_code
    assert words in ended.stderr
    if "raise" in failpoint:
        place = failpoint.partition(":")[0]
        assert last_line(ended.stderr) == f"appo.utils.failpoints.FailpointError: failpoint {place}"
    else:
        assert last_line(ended.stderr) == f"error: {words}"


@pytest.mark.slow
def test_what_an_environment_prints_does_not_reach_main(tmp_path: Path) -> None:
    kwargs = ["--env_kwargs", "fault=spam", "where=step", "at=20"]
    with TrainingRun(tmp_path, "--inference=local", *kwargs, "--train_for_env_steps=5000", env=HOSTILE) as run:
        ended = run.wait()
    assert ended.exit_code == 0
    assert ended.stderr == ""
    assert "xxx" not in ended.stdout
    log = (run.directory / "logs" / "actor_0.log").read_text()
    assert "x" * 500 in log
    assert "y" * 500 in log


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=pytest.mark.slow) for fault in ("hang", "raise", "sys_exit")]
)
def test_an_environment_that_fails_to_close_changes_nothing(tmp_path: Path, fault: str) -> None:
    kwargs = ["--env_kwargs", f"fault={fault}", "where=close", "process=actor"]
    with TrainingRun(tmp_path, "--inference=local", *kwargs, "--train_for_env_steps=2000", env=HOSTILE) as run:
        ended = run.wait()
        run.seconds_until_gone(END_SECONDS)
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert checkpoint_steps(run.directory)[-1] >= 2000


STREAM = ("--algo=PPO", "--microbatch_size=16", "--normalize_advantages=off")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [(), STREAM])
def test_updates_that_are_not_finite_end_the_run_with_one_line_and_what_is_needed_to_find_out_why(
    tmp_path: Path, algorithm: tuple[str, ...]
) -> None:
    # Rewards that are finite, but no sum of them is.
    words = ("--inference=local", "--max_skipped_updates=2", *algorithm, "--env_kwargs", "reward=3e38", "at=0")
    with TrainingRun(tmp_path, *words, env=HOSTILE) as run:
        ended = run.wait(120.0)
        run.seconds_until_gone(END_SECONDS)
    assert ended.exit_code == 4
    *warnings, line = ended.stderr.splitlines()  # a report before the end warns of such a return
    assert all(warning.startswith("policy 0: nothing can be learned from such numbers") for warning in warnings)
    assert line.startswith("error: learner_0: ")
    assert "updates in a row were not finite, also after 3 rollbacks" in line
    (incident,) = (run.directory / "incidents").iterdir()
    assert line.endswith(f"batch and weights are in {incident}")
    # Values in units of such returns may overflow; what the environment gave has not.
    assert set(json.loads((incident / "incident.json").read_text())["not_finite"]) <= {"recorded.value"}
    assert load_file(incident / "batch.safetensors")["reward"].max() == np.float32(3e38)
    assert all(np.isfinite(weights).all() for weights in load_file(incident / "model.safetensors").values())
    assert len(checkpoint_steps(run.directory)) == 1
