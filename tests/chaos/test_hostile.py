"""Every way in which an environment may misbehave, what becomes of the run, and the one line that says it."""

import json
import re
import resource
from pathlib import Path

import pytest

from appo.algorithms.tools.replay_incident import ReplayConfig, replay
from appo.envs.incidents import Incident
from appo.utils.metrics import read_metrics
from tests.chaos.invariants import find_unaccounted
from tests.chaos.runs import HOSTILE, RAISED, Ended, TrainingRun, last_line

GONE_SECONDS = 25.0
END_SECONDS = 90.0
MOST_FILES = 256

pytestmark = pytest.mark.slow


def run_of(folder: Path, *kwargs: str, env_steps: int = 1500) -> tuple[TrainingRun, Ended, dict[str, int]]:
    """A run of two actors with a hostile environment, how it ended, and its last counters."""
    hangs = any(word.startswith("fault=hang") for word in kwargs)
    flags = ("--inference=local", f"--step_timeout_seconds={4 if hangs else 60}", f"--train_for_env_steps={env_steps}")
    words = ("--env_kwargs", f"stamp={folder / 'stamp'}", *kwargs)
    with TrainingRun(folder, *flags, *words, env=HOSTILE) as run:
        ended = run.wait(END_SECONDS)
        run.seconds_until_gone(GONE_SECONDS)
        assert run.left_behind() == []
    status = run.directory / "status.json"  # gone with its folder where the run has never begun
    totals = json.loads(status.read_text()).get("totals", {}) if status.exists() else {}
    return run, ended, totals


@pytest.mark.parametrize(
    "words",
    [
        ("fault=raise", "at=30"),
        ("fault=raise", "where=reset", "at=1"),
        ("fault=raise", "where=reset", "at=2"),
        ("fault=sys_exit", "at=30"),
        ("fault=sys_exit", "where=reset", "at=2"),
        ("fault=keyboard_interrupt", "at=30"),
        ("fault=memory_error", "at=30"),
        ("fault=recursion", "at=30"),
        ("fault=stop_iteration", "at=30"),
        ("fault=nan", "at=30"),
        ("fault=nan", "where=reset", "at=2"),
        ("fault=nan_reward", "at=30"),
        ("fault=inf_reward", "at=30"),
    ],
    ids=" ".join,
)
def test_it_is_made_again_and_nothing_else_happens(tmp_path: Path, words: tuple[str, ...]) -> None:
    run, ended, totals = run_of(tmp_path, "once=True", "process=actor_1", "length=10", *words)
    assert ended.exit_code == 0, ended.stderr
    if words[0] in ("fault=nan", "fault=nan_reward", "fault=inf_reward"):
        assert ended.stderr == ""  # no code raised: there is no traceback to show
    else:
        assert re.match(rf"actor_1: env \d is made again: {re.escape(HOSTILE)} raised ", ended.stderr)
        assert "hostile_env.py" in ended.stderr
        assert ended.stderr.count("is made again") == ended.stderr.count("Traceback") == 1
    assert (totals["actors_rebuilds"], totals["restarts"]) == (1, 0)
    (incident,) = (run.directory / "incidents").iterdir()
    assert incident.name == "env_actor_1_0.json"
    assert json.loads(incident.read_text())["flags"]["env"] == HOSTILE


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("fault=os_exit", "at=30"), "ended unexpectedly with exit code 7"),
        (("fault=segfault", "at=30"), "was killed by SIGSEGV"),
        (("fault=abort", "at=30"), "was killed by SIGABRT"),
        (("fault=kill_itself", "at=30"), "was killed by SIGKILL, not by the kernel's out-of-memory killer"),
        (("fault=hang", "at=30"), "takes longer than 4 s"),
        (("fault=hang_in_c", "at=30"), "takes longer than 4 s"),
        (("fault=hang", "where=reset", "at=2"), "takes longer than 4 s"),
        (("fault=hang_in_a_message", "at=30"), "takes longer than 4 s"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_its_actor_is_started_again(tmp_path: Path, words: tuple[str, ...], line: str) -> None:
    # Alone, the other actor needs seconds for the rest: the run does not end before the fault is noticed.
    run, ended, totals = run_of(tmp_path, "once=True", "process=actor_1", "length=10", "pause=0.005", *words)
    assert ended.exit_code == 0, ended.stderr
    (said,) = ended.stderr.splitlines()
    assert said.startswith("actor_1")
    assert line in said
    assert said.endswith("; starting it again (restart 1)")
    assert (totals["actors_rebuilds"], totals["restarts"]) == (0, 1)
    if words[0] in ("fault=hang", "fault=hang_in_c"):  # who stands stopped writes no stack
        assert f"in _{words[0].removeprefix('fault=')}" in (run.directory / "logs" / "actor_1.log").read_text()
    incidents = list((run.directory / "incidents").glob("*.json"))
    if words[0] == "fault=kill_itself":  # as the kernel does, of whose doings no environment is suspected
        assert incidents == []
        return
    (incident,) = (Incident.read(path) for path in incidents)
    at = 30 if words[-1] == "at=30" else None
    assert (incident.ended_process, incident.place) == (True, "step" if at else "reset")
    assert incident.message in said
    assert len(incident.actions) == incident.num_steps == 10


@pytest.mark.parametrize(
    ("fault", "exit_code", "line"),
    [
        ("segfault", 1, "reproduced: its process ended with SIGSEGV (in step "),
        ("hang", 3, "reproduced: nothing has happened for 10 s (in step "),
    ],
)
def test_what_takes_its_process_with_it_can_be_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, exit_code: int, line: str
) -> None:
    flags = ("--inference=local", "--auto_tune=False", "--restart_workers=False", "--step_timeout_seconds=1")
    with TrainingRun(tmp_path, *flags, "--env_kwargs", f"fault={fault}", "at=60", "length=1000", env=HOSTILE) as run:
        ended = run.wait(END_SECONDS)
    assert ended.exit_code == exit_code, ended.stderr
    path, *_ = sorted((run.directory / "incidents").iterdir())
    assert f"what led to it is in {path}" in ended.stdout
    assert replay(ReplayConfig(str(path), hang_seconds=10.0)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{line}60)"


@pytest.mark.parametrize(
    ("fault", "flag", "line"),
    [
        ("leak_memory", "--actor_max_growth_mb=50", r"its memory has grown by \d+ MiB \(--actor_max_growth_mb=50\)"),
        ("leak_files", "--actor_max_growth_mb=0", rf"it has \d+ open files of {MOST_FILES}"),
    ],
)
def test_its_actor_is_replaced_in_good_order_before_it_takes_too_much(
    tmp_path: Path, fault: str, flag: str, line: str
) -> None:
    # 4 MiB or 10 open files with every episode, of which both environments together play about 8 a second.
    kwargs = ("process=actor_1", "where=reset", "at=-1", "pause=0.0025", f"fault={fault}")
    flags = ("--inference=local", "--train_for_seconds=20", "--train_for_env_steps=10000000", flag)
    with TrainingRun(tmp_path, *flags, "--env_kwargs", *kwargs, env=HOSTILE) as run:
        resource.prlimit(run.process.pid, resource.RLIMIT_NOFILE, (MOST_FILES, MOST_FILES))
        ended = run.wait(END_SECONDS)
        run.seconds_until_gone(GONE_SECONDS)
    assert ended.exit_code == 0, ended.stderr
    totals = json.loads((run.directory / "status.json").read_text())["totals"]
    said = ended.stderr.splitlines()
    assert len(said) == totals["actors_replaced"] >= 2
    assert all(re.fullmatch(rf"actor_1: {line}; starting it again \(restart \d\)", text) for text in said), said
    assert (totals["restarts"], totals["actors_rebuilds"]) == (0, 0)
    assert find_unaccounted({}, totals) == []
    assert read_metrics(run.directory / "metrics.jsonl")[-1]["perf/actors_replaced"] == len(said)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("fault=other_space", "where=init", "at=1"), "its observations have another space than those of the first"),
        (("fault=shape",), "observation key position: expected shape (3,), got shape (4,)"),
        (("fault=dtype",), "observation key position: expected a value that fits float32"),
        (("fault=missing_key",), "observation key speed: expected a value, got none"),
        (("fault=extra_key",), "observation key mass: expected no such key, got a value"),
        (("fault=no_dict",), "observation: expected a dict, got ndarray"),
        (("fault=shape", "where=reset", "at=2"), "observation key position: expected shape (3,), got shape (4,)"),
        (("fault=reset_alone", "where=reset", "at=2"), "reset must return (observation, info)"),
        (("fault=four_values",), "step must return (observation, reward, terminated, truncated, info)"),
        (("fault=text_reward",), "with a number as reward"),
        (("fault=array_reward",), "with a number as reward"),
        (("fault=raise", "where=init", "at=1"), "raised HostileError: out of cheese"),
        (("fault=raise", "at=1"), "raised HostileError: out of cheese"),
        (("fault=raise", "where=reset", "at=1"), "raised HostileError: out of cheese"),
        (("fault=sys_exit", "where=init", "at=1"), "raised SystemExit: bye"),
        (("reward=nan", "at=0"), "reward is not finite: nan"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_the_run_ends_and_says_why(tmp_path: Path, words: tuple[str, ...], line: str) -> None:
    # The other actor alone never gets to the end of the run: only the fault ends it, however often it has to come.
    _, ended, _ = run_of(tmp_path, "process=actor_1", "length=10", "at=30", *words, env_steps=10**9)
    assert ended.exit_code == 3
    (said,) = [text for text in ended.stderr.splitlines() if text.startswith("error: ")]
    assert re.match(rf"error: actor_[01]: {re.escape(HOSTILE)}", said)
    assert line in said
    if "HostileError" in line:
        assert last_line(ended.stderr) == RAISED
    assert ended.stderr.count("Traceback") <= 1


@pytest.mark.parametrize(
    "words",
    [
        ("fault=spam",),
        ("fault=warn",),
        ("fault=move",),
        ("fault=seed",),
        ("fault=thread",),
        ("fault=take_signals",),
        ("fault=take_signals", "where=init", "at=1"),
        ("fault=start_children",),
        ("fault=close_stdout",),
        ("fault=out_of_bounds",),
        ("fault=lists",),
        ("length=1000000000",),
        ("length=1",),
        ("fault=raise", "where=close", "at=1"),
        ("fault=sys_exit", "where=close", "at=1"),
        ("fault=os_exit", "where=close", "at=1"),
        ("fault=hang", "where=close", "at=1"),
    ],
    ids=" ".join,
)
def test_nothing_happens(tmp_path: Path, words: tuple[str, ...]) -> None:
    _, ended, totals = run_of(tmp_path, "process=actor", "length=10", "at=5", *words)
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert (totals["actors_rebuilds"], totals["restarts"]) == (0, 0)
    assert totals["env_steps"] >= 1500
