"""`appo tune`: mistakes, and a study that is killed and goes on."""

import ctypes
import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from appo.algorithms import cli
from appo.algorithms.run.config import resolve
from appo.utils.command_line import own_command
from appo.utils.errors import UsageError
from tests.patience import HANG_SECONDS

NEW = ("--env=CartPole-v1", "--trial_env_steps=1000")


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "appo tune needs a study"),
        (["../a", *NEW], "is no name for a folder"),
        (["a", "--env=CartPole-v1"], "the new study a needs --trial_env_steps=N or --trial_seconds=S"),
        (["a", *NEW, "--trial_seconds=1"], "are two budgets for one run"),
        (["a", "--trial_env_steps=1000"], "--env is required"),
        (["a", "--trial_env_steps=1000", "--env=CartPole-v9"], "there is no environment CartPole-v9"),
        (["a", *NEW, "--gama=1"], "unknown flag --gama; did you mean --gamma?"),
        (["a", *NEW, "--seed=1"], "seed is decided by appo tune"),
        (["a", *NEW, "--seeds=1,1"], "--seeds=1,1 has a seed twice"),
        (["a", *NEW, "--space=b.toml"], "cannot read b.toml"),
        (["a", *NEW, "--space=space.json", "--gamma=0.9"], "space.json: gamma is fixed by --gamma=0.9"),
        (
            ["a", "--env=CartPole-v1", "--trial_seconds=2", "--lockstep", "--device=cpu", "--lr_schedule=linear"],
            "trial 0: --lockstep and --deterministic_resume repeat no clock",
        ),
        (
            ["a", "--env=Pendulum-v1", "--algo=SAC", "--trial_env_steps=900", "--learning_starts=1000"],
            "trial 0: --train_for_env_steps=900 ends before the first update",
        ),
        (["a", *NEW, "--algo=Auto"], "--algo=Auto is none of .*, MARWIL, auto; did you mean auto?"),
        (["a", *NEW, "--space=twice.json"], "twice.json is damaged: gamma is there twice"),
        (["a", *NEW, "--algo=BC", "--input=d"], "--algo=BC plays no episodes"),
    ],
)
def test_mistakes_start_nothing(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "space.json").write_text('{"gamma": [0.9, 0.99]}')
    (tmp_path / "twice.json").write_text('{"gamma": [0.9, 0.99], "gamma": [0.8, 0.9]}')
    with pytest.raises(UsageError, match=message):
        cli.run("tune", words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["space.json", "twice.json"]


OWN_ENV = """
import os
from pathlib import Path
from gymnasium.envs.classic_control import CartPoleEnv

class Env(CartPoleEnv):
    def reset(self, **given):
        {reset}
        return super().reset(**given)
"""


def search(folder: Path, reset: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """A study of CartPole that does something in each reset, with one run at a time."""
    (folder / "own.py").write_text(OWN_ENV.format(reset=reset))
    command = own_command(["tune", "a", "--parallel=1", *words])
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


OWN = ("--env=own:Env", "--trial_env_steps=1000", "--seeds=1")


def test_a_new_seed_that_fails_leaves_the_results(tmp_path: Path) -> None:
    only = ("--trials=1", "--confirm_seeds=1", "--max_env_rebuilds=0")
    fails = 'folder = Path("train_dir/a"); assert not [*folder.glob("confirm*")], sorted(os.listdir(folder))'
    done = search(tmp_path, fails, *OWN, *only)
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads((tmp_path / "train_dir/a/summary.json").read_text())
    assert list(summary["confirmed"]) == ["2"]
    assert "'best.toml', 'confirm_0_seed-2'" in summary["confirmed"]["2"]["error"]  # the results so far are written
    assert f"trial 0 new seed 2 failed: {summary['confirmed']['2']['error']}" in done.stdout
    again = search(tmp_path, "pass")
    assert (again.returncode, "new seed" in again.stdout) == (0, False)


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_run_that_was_killed_begins_again_once(deaths: int, tmp_path: Path) -> None:
    dies = f"""runs, dead = (len([*Path().glob(name)]) for name in ("train_dir/a/trial*", "dead*"))
        if runs and dead < {deaths}:
            Path(f"dead{{dead}}").touch()
            os.kill(os.getpid(), 9)"""
    done = search(tmp_path, dies, *OWN, "--trials=1", "--confirm_seeds=0")
    cause = "the process was killed by SIGKILL, not by the kernel's out-of-memory killer"
    assert done.stdout.count(f"trial 0 seed 1: {cause}; the run begins again\n") == 1
    assert (done.returncode, cause in done.stderr) == ((0, False) if deaths == 1 else (1, True))


@pytest.mark.slow
def test_a_run_that_hangs_begins_again_once_with_its_stack(tmp_path: Path) -> None:
    limits = [f"--{what}_timeout_seconds={seconds}" for what, seconds in (("reset", 8), ("step", 3), ("work", 4))]
    hangs = """import time
        self.resets = getattr(self, "resets", 0) + 1
        [*Path().glob("train_dir/a/trial*")] and self.resets > 12 and time.sleep(1000)"""
    words = ["--env=own:Env", "--trial_env_steps=20000", "--seeds=1", "--trials=1", "--confirm_seeds=0"]
    done = search(tmp_path, hangs, *words, *limits)
    assert done.returncode == 1
    again = re.findall(r"trial 0 seed 1: nothing has happened for (15|150) s; the run begins again\n", done.stdout)
    assert len(again) == 1  # the longer limit before the first report
    assert re.search(r"error: trial 0 seed 1: nothing has happened for (15|150) s", done.stderr)
    assert "time.sleep" in done.stderr or "in reset" in done.stderr
    assert "has no effect" not in done.stdout


@pytest.mark.slow
def test_another_space_in_the_same_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text("gamma = [0.9, 0.99]\n")
    words = [*OWN, "--space=space.toml", "--trials=1", "--confirm_seeds=0"]
    assert search(tmp_path, "pass", *words).returncode == 0
    assert search(tmp_path, "pass", *words).returncode == 0
    (tmp_path / "space.toml").write_text("gamma = [0.9, 0.999]\n")
    done = search(tmp_path, "pass", *words)
    assert (done.returncode, done.stderr) == (
        2,
        "error: study a has another search space than space.toml: give another --study\n",
    )


def test_a_study_of_another_config_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("gamma = 0.9\n")
    study = {"asked": {"config": {"gamma": 0.9}}, "shared": {}, "preset": {}, "space": {"gamma": [0.9, 0.99]}}
    (tmp_path / "train_dir/a").mkdir(parents=True)
    (tmp_path / "train_dir/a/study.json").write_text(text := json.dumps(study))
    with pytest.raises(UsageError, match=r"study.json is damaged: .*gamma"):
        cli.run("tune", ["a", "--trust"])
    assert (tmp_path / "train_dir/a/study.json").read_text() == text
    whole = resolve({"env": "CartPole-v1"})[0].to_flat()
    (tmp_path / "train_dir/a/study.json").write_text(json.dumps(study | {"preset": whole}))
    (tmp_path / "c.toml").write_text("gamma = 0.99\n")
    with pytest.raises(UsageError, match="study a has other flags than --config: give another --study"):
        cli.run("tune", ["a", "--trust", "--config=c.toml"])


@pytest.mark.slow
def test_flags_without_an_effect_are_told(tmp_path: Path) -> None:
    done = search(tmp_path, "pass", *OWN, "--trials=1", "--confirm_seeds=0", "--policy_workers_per_policy=4")
    assert done.returncode == 0
    assert re.search("--policy_workers_per_policy.* has no effect", done.stdout)


def test_a_folder_that_is_taken_away_ends_the_study_with_a_line(tmp_path: Path) -> None:
    takes = """import ctypes
        if [*Path("train_dir/a").glob("trial_1*")]:
            Path("b").touch()
            ctypes.CDLL(None).renameat2(-100, b"train_dir/a", -100, b"b", 2)  # RENAME_EXCHANGE, at once"""
    Path("one").touch()
    Path("other").mkdir()
    if ctypes.CDLL(None).renameat2(-100, b"one", -100, b"other", 2):
        pytest.skip("this file system exchanges no names")
    done = search(tmp_path, takes, *OWN, "--trials=2")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: study a cannot be written: [Errno 20] Not a directory: ")


def trials_of(printed: str) -> set[int]:
    """The numbers of the trials that ended or went on."""
    return {int(number) for number in re.findall(r"^trial (\d+) seed", printed, re.MULTILINE)}


@pytest.mark.slow
def test_a_killed_study_goes_on_and_counts_every_trial_once(tmp_path: Path) -> None:
    folder, words = tmp_path / "train_dir/a", ["tune", "a", "--parallel=2"]
    first = [*words, *NEW, "--trials=6", "--seeds=1,2", "--confirm_seeds=1"]
    printed = ""
    for number, command in enumerate((first, words, words)):
        with subprocess.Popen(own_command(command), cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:  # kill at different moments: after one, two, three runs
                printed += line
                if len(re.findall("^trial", line)) and len(trials_of(printed)) > number:
                    break
            process.kill()
            assert process.wait(HANG_SECONDS) == -9
    done = subprocess.run(
        own_command(words), cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads((folder / "summary.json").read_text())
    trials = summary["trials"]
    assert len(trials) == sum(summary["states"].values()) == 6
    assert {one["state"] for one in trials} <= {"finished", "stopped"}
    winner = summary["winner"]
    assert len(trials[0]["runs"]) == len(trials[winner]["runs"]) == 2
    assert list(summary["confirmed"]) == ["3"]
    assert all(run["env_steps"] >= 1000 for one in trials for run in one["runs"])
    assert sorted(name for name in os.listdir(folder) if "seed" in name) == [f"confirm_{winner}_seed-3"]
    best = tomllib.loads((folder / "best.toml").read_text())
    assert best == summary["flags"]
    assert (best["env"], best["train_for_env_steps"], best["inference"]) == ("CartPole-v1", 1000, "serial")
    config, _ = resolve({"config": str(folder / "best.toml")})
    assert trials[winner]["changes"].items() <= config.to_flat().items()
    with pytest.raises(UsageError, match="study a has --trial_env_steps=1000, not 2000: give another --study"):
        cli.run("tune", ["a", "--trial_env_steps=2000"])
    settings = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(settings | {"shared": {"env": "other:Env"}}))
    with pytest.raises(UsageError, match="study a has no mark of yours, or was changed since: --trust"):
        cli.run("tune", ["a"])
