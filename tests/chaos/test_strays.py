"""What environments start in sessions of their own, and what games leave in /dev/shm and /tmp, goes with a run."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from appo.algorithms.runtime.processes.strays import SWEEP_AGE_SECONDS
from tests import shared_memory
from tests.chaos.runs import TrainingRun, kill, processes_of

pytestmark = pytest.mark.slow  # processes, seconds each

STRAY = "tests.chaos.hostile_env:Straying"
GONE_SECONDS = 10.0
NOBODYS = ("bare", "forked")  # known by their parents alone, which have ended
KINDS = ("session", "twice", "bare", "forked", "script", "chain")
FLAGS = ("--inference=central", "--restart_workers=True")


def strays(folder: Path) -> set[int]:
    """Living ones that an environment has noted, by number and start."""
    found = set()
    for path in folder.glob("stray-*"):
        pid, started = map(int, path.name.split("-")[1:])
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if words[0] not in "ZX" and int(words[19]) == started:
                found.add(pid)
    return found


def wait_until(condition: Callable[[], object], what: str, seconds: float = GONE_SECONDS) -> float:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + seconds, what
        time.sleep(0.01)
    return time.monotonic() - begin


def start(folder: Path, kind: str, *flags: str) -> TrainingRun:
    return TrainingRun(folder, *FLAGS, *flags, "--env_kwargs", f"kind={kind}", f"folder={folder}", env=STRAY)


def settled(run: TrainingRun, folder: Path, count: int = 4, *, may_stay: bool = False) -> set[int]:
    """The strays of a run that trains: one of each environment. None of them ends of itself, or hears a signal."""
    run.wait_for_env_steps()
    run.wait_until(lambda: len(strays(folder)) >= count, "strays")
    if "janitor" in run.roles().values():
        wait_for_looks(run)
    for pid in strays(folder):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
    if may_stay:  # then that of the process that tries the environment first may live until the run ends
        return {pid for pid in strays(folder) if (folder / f"owner-{pid}").read_text().startswith("actor_")}
    run.wait_until(lambda: len(strays(folder)) == count, "as many strays as environments", GONE_SECONDS)
    return strays(folder)


def wait_for_looks(run: TrainingRun, looks: int = 3) -> None:
    """Wait until the janitor has gone to sleep so many times: it does after each look at processes and names."""

    def sleeps() -> int:
        text = Path(f"/proc/{run.pid_of('janitor')}/status").read_text()
        return int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    before = sleeps()
    run.wait_until(lambda: sleeps() >= before + looks, "look of the janitor")


@pytest.fixture(autouse=True)
def _none_stays(tmp_path: Path) -> object:
    yield
    for pid in strays(tmp_path):
        kill(pid)


@pytest.mark.parametrize("kind", ["session", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_none_outlives_the_normal_end_of_a_run(tmp_path: Path, kind: str) -> None:
    with start(tmp_path, kind, "--train_for_seconds=10") as run:
        settled(run, tmp_path, may_stay=kind in NOBODYS)
        assert run.wait().exit_code == 0
        assert strays(tmp_path) == set()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("session", marks=pytest.mark.slow),
        "twice",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[2:]),
    ],
)
def test_none_outlives_main(tmp_path: Path, kind: str) -> None:
    with start(tmp_path, kind) as run:
        settled(run, tmp_path, may_stay=kind in NOBODYS)
        kill(run.process.pid)
        seconds = wait_until(lambda: not strays(tmp_path), "strays")
        run.seconds_until_gone(GONE_SECONDS)
    print(f"gone after {seconds:.2f} s")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_none_outlives_its_actor_and_those_of_another_stay(tmp_path: Path, kind: str) -> None:
    with start(tmp_path, kind, "--num_workers=2", "--num_envs_per_worker=1") as run:
        before = settled(run, tmp_path, 2, may_stay=kind in NOBODYS)
        of_actor = {pid for pid in before if (tmp_path / f"owner-{pid}").read_text() == "actor_0"}
        assert len(of_actor) == 1
        known = strays(tmp_path)
        kill(min(pid for pid, name in run.roles().items() if name == "actor_0"))  # what it has forked has its log, too
        if kind not in NOBODYS:  # those go with the run
            wait_until(lambda: not of_actor & strays(tmp_path), "stray of the actor")
        run.wait_until(lambda: len(strays(tmp_path) - known) == 1, "one of the next life")
        wait_for_looks(run)
        assert before - of_actor <= strays(tmp_path)
        run.interrupt()
        assert run.wait().exit_code == 130
        assert strays(tmp_path) == set()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["session", "twice", "script"])  # main may be killed before a look at the next lives
@pytest.mark.parametrize("role", ["fork_server", "janitor", "actor_0"])
def test_none_is_left_when_main_is_killed_after_another_process(tmp_path: Path, role: str, kind: str) -> None:
    with start(tmp_path, kind) as run:
        settled(run, tmp_path)
        killed = min(pid for pid, name in run.roles().items() if name == role)
        kill(killed)
        run.wait_until(
            lambda: len(roles := run.roles()) > 8 and killed not in roles and role in roles.values(), "another one"
        )
        wait_for_looks(run)
        kill(run.process.pid)
        wait_until(lambda: not strays(tmp_path), "strays")
        run.seconds_until_gone(GONE_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["session", "twice", "script"])
@pytest.mark.parametrize("how", ["end", "kill"])
def test_none_outlives_a_run_in_one_process(tmp_path: Path, kind: str, how: str) -> None:
    with start(tmp_path, kind, "--inference=serial", "--train_for_seconds=10") as run:
        settled(run, tmp_path, may_stay=True)  # main tries the environment itself
        if how == "kill":
            kill(run.process.pid)
        else:
            assert run.wait().exit_code == 0
        wait_until(lambda: not strays(tmp_path), "strays")


# --- what games leave


def games(run: TrainingRun, actor: str) -> list[int]:
    """The actor and its games, which have its log for their output."""
    return [pid for pid, name in run.roles().items() if name == actor]


@pytest.mark.parametrize("how", ["one by one", pytest.param("by group", marks=pytest.mark.slow)])
def test_an_actor_and_its_games_that_are_killed_at_once_leave_no_name(tmp_path: Path, how: str) -> None:
    pytest.importorskip("vizdoom")
    names = shared_memory.names()
    with TrainingRun(tmp_path, "--inference=central", "--hidden_size=16", env="VizdoomBasic-v1") as run:
        run.wait_for_env_steps()
        wait_for_looks(run)
        left = shared_memory.names() - names
        assert len(left) >= 12
        found = games(run, "actor_0")
        assert len(found) >= 3
        if how == "by group":
            os.killpg(min(found), signal.SIGKILL)
        else:
            for pid in reversed(found):
                kill(pid)
        run.wait_until(lambda: len(left - shared_memory.names()) == 6, "names that go")
        assert list((run.temporary).glob("vizdoom-*")) == []
        run.interrupt()
        assert run.wait().exit_code == 130
        assert run.left_behind() == list(run.temporary.glob("vizdoom-*")) == []
    shared_memory.assert_none_abandoned(names, GONE_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("spared", ["main", "janitor", "nobody"])
def test_games_that_are_killed_with_everything_leave_no_name(tmp_path: Path, spared: str) -> None:
    """Where nobody is left to remove them, the next start does, or the janitor of any run that lives."""
    pytest.importorskip("vizdoom")
    names = shared_memory.names()
    flags = ("--inference=central", "--hidden_size=16", "--save_every_sec=1")
    with TrainingRun(tmp_path, *flags, env="VizdoomBasic-v1") as run:
        run.wait_for_env_steps()
        wait_for_looks(run)
        assert len(shared_memory.names() - names) >= 12
        for pid, role in reversed(run.roles().items()):
            if role != spared:
                kill(pid)
        if spared == "main":
            run.wait_until(lambda: len(games(run, "actor_0")) >= 3, "other games")
            run.interrupt()
            assert run.wait().exit_code == 130
        run.seconds_until_gone(GONE_SECONDS)
    if spared == "nobody":
        ended = time.time()
        # A game that has just made a name may not have mapped it yet: younger ones stay.
        wait_until(lambda: time.time() > ended + SWEEP_AGE_SECONDS, "age", 2 * SWEEP_AGE_SECONDS)
        with TrainingRun(tmp_path, "--inference=local", "--train_for_seconds=3", "--experiment=other") as other:
            assert other.wait().exit_code == 0
    shared_memory.assert_none_abandoned(names, 30.0)
    assert processes_of(run.marker) == []
