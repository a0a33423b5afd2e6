"""Real Ray on this machine: two nodes play for the head, with exact counts and a clean end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import gymnasium
import pytest

from appo.algorithms.run.config import parse_train
from appo.algorithms.run.machines.forecast import Forecast, Sums, learners_text
from appo.algorithms.run.placement import Sampling
from appo.algorithms.run.tuning.choice import Costs
from tests.integration.runs import ROOT, Run, command_line, run_command, train
from tests.patience import HANG_SECONDS, patient

needs_ray = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")]
FLAGS: dict[str, object] = {
    "env": "CartPole-v1",
    "preset": "none",
    "ray": "local:2",
    "num_workers": 1,
    "num_envs_per_worker": 8,
    "rollout": 16,
    "batch_size": 256,
    "use_rnn": False,
    "encoder_mlp_layers": 16,
    "reset_timeout_seconds": 600,
}
ACTS = "bridge: machines that act (2): 0 "


def processes() -> dict[int, str]:
    """Command lines of all processes."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def of_rays() -> set[str]:
    """What Ray or a machine would leave behind: processes and folders."""
    running = {f"{pid} {line}" for pid, line in processes().items() if "raylet" in line or "gcs_server" in line}
    return running | {str(path) for path in Path("/tmp").glob("appo-ray-*")}


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + patient(seconds)
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def check_counts(run: Run) -> None:
    totals = run.totals
    assert totals["actors_collected"] == totals["samples"] + totals["discarded"] + totals["in_flight"]
    assert totals["actors_sent"] == totals["trajectories"] == totals["released"] + totals["held"]


@contextlib.contextmanager
def started(directory: Path, **flags: object) -> Iterator[tuple["subprocess.Popen[str]", Callable[[], str]]]:
    """A run with two machines that act; and its output so far."""
    log = directory.with_suffix(".log")
    with log.open("w") as output:
        words = command_line(directory, **{**FLAGS, **flags})
        run = subprocess.Popen([sys.executable, str(ROOT / "train_appo.py"), *words], stdout=output, stderr=output)
        try:
            wait_until(lambda: ACTS in log.read_text() or run.poll() is not None, HANG_SECONDS)
            assert run.poll() is None, log.read_text()
            yield run, log.read_text  # type: ignore[misc]
        finally:
            run.kill()
            run.wait(HANG_SECONDS)


class TestRay:
    pytestmark = needs_ray

    @pytest.fixture(autouse=True)
    def _nothing_is_left(self) -> Iterator[None]:
        before = of_rays()
        yield
        wait_until(lambda: of_rays() <= before)

    @pytest.mark.parametrize(
        "flags", [{}, {"ray_compression": "lz4"}, {"algo": "APEX", "batch_size": 32, "learning_starts": 1000}]
    )
    def test_machines_play_for_the_head(self, tmp_path: Path, flags: dict[str, object]) -> None:
        run = train(tmp_path / "run", **{**FLAGS, **flags}, train_for_env_steps=6_000)
        assert ACTS in run.stderr
        assert "bytes a sample: " in run.stdout
        check_counts(run)
        status = json.loads((run.directory / "status.json").read_text())
        assert status["totals"]["actors_episodes"] >= 1

    def test_a_lost_machine_costs_what_it_had_in_flight_and_comes_again(self, tmp_path: Path) -> None:
        with started(tmp_path / "run", train_for_env_steps=10**9) as (run, output):
            victim = next(pid for pid, line in processes().items() if line.startswith("ray::Machine"))
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda: "is lost: " in output(), HANG_SECONDS)
            wait_until(lambda: "machine 2 (" in output() and " joins" in output(), HANG_SECONDS)
            run.send_signal(signal.SIGTERM)
            assert run.wait(HANG_SECONDS) == 143
        check_counts(Run(tmp_path / "run"))

    def test_a_killed_head_leaves_nothing_and_resumes(self, tmp_path: Path) -> None:
        with started(tmp_path / "run", train_for_env_steps=10**9, save_every_sec=1) as (run, output):
            wait_until(lambda: "saved " in output(), HANG_SECONDS)
            run.kill()
        before = Run(tmp_path / "run").state()["env_steps"]
        train(tmp_path / "run", **FLAGS, train_for_env_steps=before + 2_000)
        assert Run(tmp_path / "run").totals["env_steps"] >= before + 2_000

    def test_modules_of_the_user_travel(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        text = "import gymnasium\n\nclass Maze(gymnasium.Wrapper):\n"
        text += "    def __init__(self):\n        super().__init__(gymnasium.make('CartPole-v1'))\n"
        (tmp_path / "own_maze.py").write_text(text)
        monkeypatch.chdir(tmp_path)
        flags = {**FLAGS, "env": "own_maze:Maze", "ray": "local:1"}
        run = train(tmp_path / "runs" / "run", **flags, train_for_env_steps=2_000)
        assert "bridge: machines that act (1): 0 " in run.stderr
        check_counts(run)

    def test_an_environment_that_a_machine_cannot_make_is_one_line(self, tmp_path: Path) -> None:
        flags = {**FLAGS, "env": "tests.integration.test_machines:not_on_ray"}
        run = run_command(tmp_path / "run", **flags, train_for_env_steps=100)
        assert run.returncode == 2
        last = run.stderr.strip().splitlines()[-1]
        assert "machine 0 (" in last or "machine 1 (" in last
        assert "no maze is here" in last


def not_on_ray() -> gymnasium.Env:
    """Makes CartPole, except on a machine of a Ray cluster."""
    if "RAY_RAYLET_PID" in os.environ:
        raise RuntimeError("no maze is here")
    return gymnasium.make("CartPole-v1")


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "ppo": ({"algo": "PPO"}, "PPO lets actors wait while the learner trains"),
    "a3c": ({"algo": "A3C"}, "A3C differentiates beside its actors"),
    "policies": ({"num_policies": 2}, "machines are for one policy"),
    "lockstep": ({"lockstep": True}, "--lockstep lets actors wait"),
    "serial": ({"inference": "serial"}, "--inference=serial has no process for the bridge"),
    "output": ({"output": "steps"}, "--output writes what actors of this machine play"),
    "number": ({"ray": "local:0"}, "local:N needs a number of nodes from 1 to 64"),
    "no number": ({"ray": "local"}, "--ray=local: local:N needs a number of nodes from 1 to 64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_flags_without_a_meaning_are_refused_in_one_line(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from appo.algorithms import cli

    flags, why = REFUSED[case]
    few = {name: FLAGS[name] for name in ("env", "preset", "ray")}
    words = command_line(tmp_path / "run", **{**few, **flags})
    assert cli.run_command(lambda: cli.run("train", words)) == 2
    assert why in capsys.readouterr().err.strip().splitlines()[-1]


def test_the_local_path_loads_no_ray(tmp_path: Path) -> None:
    code = "import sys; from appo.algorithms import cli; cli.run('train', sys.argv[1:]); print('ray' in sys.modules)"
    flags = {**FLAGS, "ray": "", "inference": "serial", "train_for_env_steps": 300}
    words = command_line(tmp_path / "run", **flags)
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=HANG_SECONDS, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_a_forecast_names_the_part_that_limits() -> None:
    small = Forecast(here=100.0, machine=50.0, learner=1000.0, wire=10_000.0)
    assert [small.rate(n) for n in (1, 2, 4)] == [150.0, 200.0, 300.0]
    assert small.limit(4) == "the number of machines"
    slow = Forecast(here=100.0, machine=50.0, learner=1000.0, wire=60.0)
    assert ([slow.rate(n) for n in (1, 2, 4)], slow.limit(2)) == ([150.0, 160.0, 160.0], "the network")
    full = Forecast(here=100.0, machine=500.0, learner=1000.0, wire=10_000.0)
    assert ([full.rate(n) for n in (1, 2, 4)], full.limit(4)) == ([600.0, 1000.0, 1000.0], "the learner")
    assert full.line() == (
        "predicted 100 samples/s here, 600, 1000, 1000 with 1, 2, 4 machines like this one, where the limit is the"
        " learner (learner 1000, network 10k samples/s)"
    )


def test_a_forecast_of_learners_names_the_part_that_limits() -> None:
    assert Sums(4, 1_000_000, 1e9).seconds == pytest.approx(0.001 + 0.006)  # 2 * 3/4 of 4 MB
    assert Sums(2, 1_000_000, 1e8).seconds == pytest.approx(0.001 + 0.04)
    quick = Forecast(here=100.0, machine=0.0, learner=1000.0, wire=10_000.0)
    assert (quick.rate_of_learners(2), "limit is the actors" in quick.line_of_learners(2)) == (200.0, True)
    slow = Forecast(here=600.0, machine=0.0, learner=1000.0, wire=1000.0)
    assert (slow.rate_of_learners(4), "limit is the learners" in slow.line_of_learners(4)) == (2000.0, True)
    narrow = Forecast(here=600.0, machine=0.0, learner=1000.0, wire=250.0)
    assert narrow.line_of_learners(2) == (
        "predicted 400 samples/s, the limit is the sums of gradients (samples/s of each rank without the sums 600, of"
        " training alone 1000, of the sums alone 250)"
    )


def test_the_line_of_several_learners_goes_by_what_was_measured() -> None:
    """Updates of 100 samples in two epochs: 50 samples a sum of 2 ms are 25,000 a second."""
    config = parse_train(["--env=CartPole-v1", "--batch_size=100", "--rollout=10", "--ppo_epochs=2", "--preset=none"])
    costs, sums = Costs(((1, 1e-5),), ((1, 1e-5),), ((1, 1e-5),), 0), Sums(2, 250_000)
    unknown = "2 learners: a sum of gradients, 1M bytes, takes about 2 ms"
    assert learners_text(None, Sampling("local", 1, 8, 1), config, 1, 2, sums).startswith(f"{unknown}, and limits")
    text = learners_text(costs, Sampling("local", 1, 8, 1), config, 1, 2, sums)
    assert text.startswith(f"{unknown}; predicted ")
    assert "the limit is the sums of gradients" in text
    assert text.endswith("of training alone 90k, of the sums alone 25k)")
