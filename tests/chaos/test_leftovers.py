"""kill -9 of any process of a run: soon all others have gone, and nothing is left in memory, in /tmp or locked.

No process is replaced here. Every environment has started children of its own, which must go too.
"""

import random
import shutil
import sys
import time
from pathlib import Path

import pytest

from appo.utils import checkpoint_files
from appo.utils.lock import RunLock
from tests import shared_memory
from tests.chaos.hostile_env import NUM_CHILDREN
from tests.chaos.runs import (
    HOSTILE,
    ROOT,
    TRAIN,
    TrainingRun,
    checkpoint_steps,
    kill,
    last_line,
)
from tests.patience import in_time

GONE_SECONDS = 10.0  # the promise is 2
SPAWNING = ROOT / "tests" / "chaos" / "spawning.py"
AT_ONCE, GAME_KILLS = 3, 50
CENTRAL = ("main", "actor_0", "policy_worker_0.0", "learner_0", "fork_server")
SLOW = [
    ("central", "main", 50),
    *(("central", role, 20) for role in CENTRAL[1:]),
    *(("local", role, 20) for role in ("main", "actor_1", "learner_0", "fork_server")),
    *(("spawned", role, 20) for role in ("main", "policy_worker_0.0", "learner_0", "fork_server")),
]


def start(folder: Path, placement: str) -> TrainingRun:
    """A run whose environments have children; `spawned` is `central` as on CUDA."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    spawned = placement == "spawned"
    inference = "central" if spawned else placement
    kwargs = (
        "--env_kwargs",
        "fault=start_children",
        "where=init",
        "pause=0.005",
    )  # the figure is not one of a busy machine
    program = (sys.executable, str(SPAWNING)) if spawned else TRAIN
    flags = (f"--inference={inference}", "--restart_workers=False")
    return TrainingRun(folder, *flags, *kwargs, env=HOSTILE, program=program)


@pytest.mark.parametrize(
    ("placement", "role", "trials"),
    [
        ("central", "main", 3),
        *(pytest.param("central", role, 1, marks=pytest.mark.slow) for role in ("actor_0", "learner_0")),
        *(pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.timeout(900)]) for case in SLOW),
    ],
)
def test_nothing_is_left_of_a_run_whose_process_is_killed(
    tmp_path: Path, placement: str, role: str, trials: int
) -> None:
    names, worst = shared_memory.names(), 0.0
    for first in range(0, trials, AT_ONCE):
        runs = [start(tmp_path / str(i), placement) for i in range(min(AT_ONCE, trials - first))]
        try:
            for run in runs:
                worst = max(worst, kill_and_check(run, role))
        finally:
            for run in runs:
                run.__exit__()
    shared_memory.assert_none_abandoned(names, GONE_SECONDS)
    print(f"{placement}, {role} killed {trials} times: all gone after at most {worst:.2f} s")


def kill_and_check(run: TrainingRun, role: str) -> float:
    """Seconds until everything has gone."""
    run.wait_until(lambda: run.seconds_of_training() > 2.0, "training")  # learners keep their state about every second
    assert list(run.roles().values()).count("sleep") == 4 * NUM_CHILDREN  # two actors with two environments each
    reported = run.env_steps()
    kill(run.pid_of(role))
    seconds = run.seconds_until_gone(GONE_SECONDS)
    ended = run.wait()
    RunLock(run.directory / ".lock").acquire().release()
    assert run.left_behind() == []
    if role == "main":
        assert (ended.exit_code, in_time(ended.stderr)) == (-9, "")
        return seconds
    assert ended.exit_code == 1
    assert last_line(ended.stderr).startswith("error: ")
    if role == "fork_server":
        assert "was lost: the fork server that started it has ended" in ended.stderr
    else:
        assert (
            in_time(ended.stderr) == f"error: {role} was killed by SIGKILL, not by the kernel's out-of-memory killer\n"
        )
    assert_saved(run, 1 if role in ("learner_0", "fork_server") else reported)
    return seconds


def assert_saved(run: TrainingRun, at_least: int) -> None:
    """One good checkpoint. A dead learner cannot be asked: of it, the state of about a second before remains."""
    loaded = checkpoint_files.load(run.directory / "checkpoint_p0")
    assert loaded is not None
    assert not loaded.found.damaged
    assert len(checkpoint_steps(run.directory)) == 1
    assert checkpoint_steps(run.directory)[0] >= at_least


@pytest.mark.slow
def test_nothing_is_left_of_a_run_that_is_killed_while_it_starts(tmp_path: Path) -> None:
    for role in ("tracker", "fork_server", "probe", "actor_1"):
        with TrainingRun(tmp_path, "--inference=local", env=HOSTILE) as run:
            run.wait_until(lambda run=run, role=role: role in run.roles().values(), role)
            kill(run.process.pid)
            seconds = run.seconds_until_gone(GONE_SECONDS)
            print(f"main killed when {role} had come: all gone after {seconds:.2f} s")


@pytest.mark.slow
def test_a_killed_run_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    flags = ["--inference=local", "--save_every_sec=1"]
    with TrainingRun(tmp_path, *flags) as run:
        run.wait_until(lambda: checkpoint_steps(run.directory), "checkpoint")
        kill(run.process.pid)
        run.seconds_until_gone(GONE_SECONDS)
    saved = checkpoint_steps(run.directory)[-1]
    with TrainingRun(tmp_path, *flags, f"--train_for_env_steps={saved + 2000}") as run:
        ended = run.wait()
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert f"resuming policy 0 at env step {saved} from" in ended.stdout
    assert checkpoint_steps(run.directory)[-1] >= saved + 2000


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nothing_is_left_of_50_runs_that_are_killed_while_games_are_played(tmp_path: Path) -> None:
    pytest.importorskip("vizdoom")
    names, rng, worst = shared_memory.names(), random.Random(1), 0.0
    flags = ("--inference=central", "--hidden_size=16", "--num_workers=1")
    for first in range(0, GAME_KILLS, AT_ONCE):
        folders = [tmp_path / str(number) for number in range(first, min(first + AT_ONCE, GAME_KILLS))]
        for folder in folders:
            folder.mkdir()
        runs = [TrainingRun(folder, *flags, env="VizdoomBasic-v1") for folder in folders]
        try:
            for run in runs:
                run.wait_for_env_steps()
                time.sleep(rng.uniform(0.0, 0.5))  # at any moment
                kill(run.process.pid)
                worst = max(worst, run.seconds_until_gone(GONE_SECONDS))
                assert run.wait().exit_code == -9
                assert run.left_behind() == []
        finally:
            for run in runs:
                run.__exit__()
    shared_memory.assert_none_abandoned(names, GONE_SECONDS)
    print(f"main killed {GAME_KILLS} times beside two games of VizDoom: all gone after at most {worst:.2f} s")


@pytest.mark.parametrize(
    "role", [pytest.param(role, marks=pytest.mark.slow) for role in ("actor_0", "main", "learner_0")]
)
def test_no_game_and_no_shared_memory_of_it_is_left_when_a_process_is_killed(tmp_path: Path, role: str) -> None:
    pytest.importorskip("vizdoom")
    names = shared_memory.names()
    flags = ("--inference=central", "--hidden_size=16", "--restart_workers=False")
    with TrainingRun(tmp_path, *flags, env="VizdoomBasic-v1") as run:
        run.wait_for_env_steps()
        assert len(shared_memory.names() - names) >= 4 * 3  # two actors with two games each
        kill(min(pid for pid, name in run.roles().items() if name == role))  # its games, later ones, have its log too
        run.seconds_until_gone(GONE_SECONDS)
    shared_memory.assert_none_abandoned(names, GONE_SECONDS)
