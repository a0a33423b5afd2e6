"""`appo doctor` as a person calls it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import ROOT
from tests.patience import HANG_SECONDS

MAIN = "import sys; from appo.algorithms.cli import main; sys.exit(main())"


def run(cwd: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", MAIN, "doctor", *argv]
    environment = {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )


@pytest.mark.slow
def test_an_environment_is_examined_and_flags_are_recommended_that_exist(tmp_path: Path) -> None:
    done = run(tmp_path, "--env=CartPole-v1", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    names = [check["name"] for check in found["checks"]]
    sizes = ["observations", "rewards"]
    assert names[-9:] == ["env", "seeding", "episodes", "step time", "leaks", *sizes, "recommended", "algorithm"]
    assert {check["state"] for check in found["checks"] if check["name"] in ("seeding", "episodes", "leaks")} == {"ok"}
    assert found["recommended"]["num_workers"] >= 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_the_kind_of_observation_decides_is_recommended_too(tmp_path: Path) -> None:
    done = run(tmp_path, "--env=appo.envs.toys.spaces:Spaces", "--learning_rate=0.5", "--inference=serial", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    texts = {check["name"]: check["text"] for check in found["checks"]}
    assert texts["settings"].startswith("kind of observation: no preset for appo.envs.toys.spaces:Spaces, ")
    recommended = found["recommended"]
    assert (recommended["use_rnn"], recommended["encoder_mlp_layers"]) == (False, [64, 64])
    assert "learning_rate" not in recommended
    assert recommended["num_workers"] == 1  # a single process plays


@pytest.mark.slow
def test_an_environment_that_cannot_be_made_is_bad(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import gymnasium\n\n\ndef Broken():\n    raise ValueError('out of cheese')\n")
    done = run(tmp_path, "--env=mine:Broken")
    assert done.returncode == 1
    traceback = done.stderr.splitlines()  # of the user's own code
    assert (traceback[0], traceback[-1]) == ("Traceback (most recent call last):", "ValueError: out of cheese")
    assert [line for line in traceback if ", in " in line] == [f'  File "{tmp_path}/mine.py", line 5, in Broken']
    last, verdict = done.stdout.splitlines()[-2:]
    assert last.startswith("bad   env ")
    assert "out of cheese" in last
    assert verdict == "training will not work before what is bad has changed"


@pytest.mark.slow
def test_statistics_of_the_environment_are_a_finding(tmp_path: Path) -> None:
    done = run(tmp_path, "--env=tests.unit.envs.test_wrappers:normalized_both", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    [finding] = [check for check in json.loads(done.stdout)["checks"] if "statistics of its own" in check["text"]]
    assert (finding["name"], finding["state"]) == ("env", "note")
    assert "(NormalizeReward, NormalizeObservation)" in finding["text"]
