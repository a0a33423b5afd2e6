"""Programs that train: scripts, stdin, sessions and notebooks, with an environment that is defined in them."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pexpect
import pytest

from appo import Training, load_policy, train
from appo.utils.errors import UsageError
from tests.integration.elsewhere import completed
from tests.integration.runs import ROOT
from tests.patience import HANG_SECONDS

pytestmark = pytest.mark.slow  # processes, seconds each

MY_ENV = """
import gymnasium
import numpy as np

LENGTH = 10

class MyEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample(), {}
    def step(self, action):
        self.steps += 1
        return self.observation_space.sample(), float(action), self.steps == LENGTH, False, {}

"""
FLAGS = (
    "num_workers=2, num_envs_per_worker=4, rollout=8, batch_size=64, use_rnn=False, encoder_mlp_layers=(16,), seed=1,"
    " tensorboard=False, plot=False, train_for_env_steps=500"
)
SMALL: dict[str, Any] = {**eval(f"dict({FLAGS})"), "inference": "serial", "num_workers": 1}
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{ROOT}/src:{ROOT}",
    "OMP_NUM_THREADS": "1",
    "TERM": "dumb",
    "NO_COLOR": "1",
}
DONE = r"every policy has learned from \d+ env steps"
AGAIN = "which no file keeps: to resume it give env=MyEnv again, to enjoy it load_policy(..., env=MyEnv)"


def call_of(placement: str = "local", env: str = "MyEnv") -> str:
    return f"print(train(env={env}, experiment='mine', inference='{placement}', {FLAGS}).reason)"


def heredoc(folder: Path, text: str) -> "subprocess.CompletedProcess[str]":
    """What `python - <<EOF` says of a text."""
    return subprocess.run(
        [sys.executable, "-"], input=text, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True,
        timeout=HANG_SECONDS, check=False,
    )  # fmt: skip


def script(folder: Path, text: str) -> "subprocess.CompletedProcess[str]":
    (folder / "script.py").write_text(text)
    return subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True,
        timeout=HANG_SECONDS, check=False,
    )  # fmt: skip


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def steps_of(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "train_dir" / "mine" / "checkpoint_p0").glob("ckpt_*"))


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["local", "central"])
def test_python_from_stdin(tmp_path: Path, placement: str) -> None:
    done = heredoc(tmp_path, f"{MY_ENV}from appo import train\n{call_of(placement)}\n")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(DONE, done.stdout.strip())
    assert done.stderr.count("\n") == 1  # the one line about the class
    assert AGAIN in done.stderr
    assert steps_of(tmp_path)


@pytest.mark.slow
def test_a_later_run_has_the_class_and_the_variables_of_its_own_start(tmp_path: Path) -> None:
    sweep = """
import os
from appo import train
made = MyEnv.step
def step(self, action):
    print("step", LENGTH, os.environ.get("LEVEL"), flush=True)
    return made(self, action)
MyEnv.step = step
for LENGTH in (3, 4):
    os.environ["LEVEL"] = str(LENGTH)
    """
    call = call_of().replace("'mine'", "f'mine{LENGTH}'")
    done = heredoc(tmp_path, f"{MY_ENV}{sweep}{call}\n\n")
    assert done.returncode == 0, done.stderr
    for length in (3, 4):
        text = "".join(path.read_text() for path in (tmp_path / f"train_dir/mine{length}/logs").iterdir())
        assert set(re.findall(r"^step.*", text, re.MULTILINE)) == {f"step {length} {length}"}


@pytest.mark.slow
def test_modules_beside_the_script_are_found_by_commands_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "beside.py").write_text(MY_ENV)
    main = """
from appo import Training
if __name__ == "__main__":
    with Training(env="beside:MyEnv", experiment="mine", inference="serial", %s) as run:
        for report in run:
            print([one["episodes"] for one in run.evaluate(episodes=2)])
            break
"""
    (tmp_path / "code" / "script.py").write_text(main % FLAGS)
    done = completed(tmp_path, [sys.executable, "code/script.py"])
    assert (done.returncode, done.stdout) == (0, "[2, 2]\n"), done.stderr


@pytest.mark.slow
def test_a_command_of_python(tmp_path: Path) -> None:
    done = completed(tmp_path, [sys.executable, "-c", f"{MY_ENV}from appo import train\n{call_of()}"])
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(DONE, done.stdout.strip())


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["python", "ipython"])
def test_a_session(tmp_path: Path, shell: str) -> None:
    """The same by hand: a class is typed, then `train` is called with it."""
    words = (
        ["-q", "-i"] if shell == "python" else ["-m", "IPython", "--no-banner", "--simple-prompt", "--no-confirm-exit"]
    )
    prompt = ">>> " if shell == "python" else r"In \[\d+\]: "
    environment = ENVIRONMENT | {"IPYTHONDIR": str(tmp_path / "ipython")}
    session = pexpect.spawn(
        sys.executable,
        words,
        cwd=str(tmp_path),
        env=environment,
        encoding="utf-8",
        timeout=HANG_SECONDS,
        echo=False,
    )
    session.expect(prompt)
    for block in MY_ENV.strip().split("\n\n"):
        for line in (*block.splitlines(), ""):
            session.sendline(line)
    session.sendline("from appo import train")
    session.sendline(call_of())
    session.expect(DONE)
    session.sendline("exit()")
    session.expect(pexpect.EOF)
    session.close()
    assert session.exitstatus == 0
    assert steps_of(tmp_path)


GUARD = 'if __name__ == "__main__":'
BODY = f"from appo import train\n\n{GUARD}\n    {call_of()}\n"


@pytest.mark.slow
def test_a_script_with_a_guard(tmp_path: Path) -> None:
    done = script(tmp_path, MY_ENV + BODY)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(DONE, done.stdout.strip())


def test_a_script_without_a_guard_says_what_to_do_in_its_last_line(tmp_path: Path) -> None:
    """Before any process is started, and in the words of the script: its own line."""
    done = script(tmp_path, f"{MY_ENV}from appo import train\n{call_of()}\n")
    number = (MY_ENV + "from appo import train\n").count("\n") + 1
    assert done.returncode == 1
    assert last_line(done.stderr) == (
        f"appo.utils.errors.UsageError: line {number} of script.py trains, and every worker process, which imports"
        f" script.py, would train there again: put what it does under `{GUARD}`"
    )
    assert not (tmp_path / "train_dir").exists()


def test_a_network_on_stdin_says_what_to_do_in_its_last_line(tmp_path: Path) -> None:
    flags = "env='CartPole-v1', encoder_custom='__main__:Net', inference='local'"
    done = heredoc(tmp_path, f"class Net: ...\nfrom appo import train\ntrain({flags})\n")
    assert done.returncode == 1
    assert last_line(done.stderr) == (
        "appo.utils.errors.UsageError: --encoder_custom=__main__:Net: worker processes cannot import a notebook, a"
        ' session or stdin: put it into a file my_module.py and give encoder_custom="my_module:Net", or train with'
        ' inference="serial"'
    )


# In this process: what becomes of a run whose environment no file keeps.


def local_class() -> type[gymnasium.Env[Any, Any]]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(MY_ENV, names)
    found: type[gymnasium.Env[Any, Any]] = names["MyEnv"]
    return found


def test_a_run_goes_on_and_its_policy_plays_where_the_class_is_given_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = SMALL | {"train_dir": tmp_path, "experiment": "mine"}
    first = train(flags, env=local_class())
    assert AGAIN in caplog.text
    assert len([record for record in caplog.records if "no file keeps" in record.getMessage()]) == 1
    assert first.directory.name == "mine"
    more = train(flags, env=local_class(), train_for_env_steps=1000)
    assert more.report.env_steps >= 1000
    policy = load_policy(more.directory, env=local_class())
    observation, _ = policy.make_env().reset(seed=0)
    assert policy.act(observation) in (0, 1)


def test_without_the_class_one_line_says_that_it_is_needed(tmp_path: Path) -> None:
    flags = SMALL | {"train_dir": tmp_path / "runs", "experiment": "mine"}
    train(flags, env=local_class())
    words = [sys.executable, ROOT / "train_appo.py", f"--train_dir={tmp_path}/runs", "--experiment=mine"]
    said = completed(tmp_path, [*words, "--train_for_env_steps=1000"]).stderr
    needed = "the environment of this run was given as a class or function, MyEnv, which no file keeps: give it again"
    assert (said.count("\n"), needed in said) == (1, True)
    words = [sys.executable, ROOT / "enjoy_appo.py", f"--train_dir={tmp_path}/runs", "--experiment=mine", "--no_render"]
    said = completed(tmp_path, [*words, "--max_num_episodes=1"]).stderr
    assert (said.count("\n"), needed in said) == (1, True)
    (tmp_path / "my_module.py").write_text(MY_ENV)
    done = completed(tmp_path, [*words, "--max_num_episodes=1", "--env=my_module:MyEnv", "--json"])
    assert done.returncode == 0, done.stderr


def test_an_unnamed_run_is_called_by_the_class(tmp_path: Path) -> None:
    with Training(SMALL, env=local_class(), train_dir=tmp_path) as run:
        assert run.directory.name == "MyEnv_1"


def test_a_function_and_its_arguments(tmp_path: Path) -> None:
    """Of a function of a function, with what it has around it."""
    base, length = local_class(), 4

    class Shorter(base):  # type: ignore[misc,valid-type]
        def step(self, action: Any) -> Any:
            observation, reward, _, truncated, info = super().step(action)
            return observation, reward, self.steps == length, truncated, info

    def make(most: int) -> gymnasium.Env[Any, Any]:
        return gymnasium.wrappers.TransformReward(Shorter(), lambda reward: np.clip(reward, 0, most))

    result = train(SMALL, env=make, env_kwargs={"most": 1}, train_dir=tmp_path, stats_avg=10)
    assert result.directory.name == "make_1"
    (record,) = result.report.figures
    assert record["len/max"] == length


def test_an_environment_that_is_made_already_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is an object: give the class"):
        train(SMALL, env=local_class()(), train_dir=tmp_path)
