"""Wrong command lines, each answered by one line, and commands started from foreign directories."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.integration.elsewhere import completed
from tests.patience import in_time

Train = Callable[..., "subprocess.CompletedProcess[str]"]
ROOT = Path(__file__).resolve().parents[2]
CARTPOLE = "--env=CartPole-v1"
HOSTILE = "--env=tests.chaos.hostile_env:Hostile"
FAST = (
    "--num_workers=1",
    "--num_envs_per_worker=2",
    "--rollout=8",
    "--batch_size=64",
    "--num_batches_per_iteration=1",
    "--use_rnn=False",
    "--encoder_mlp_layers=16",
    "--train_for_env_steps=500",
)


def start(
    cwd: Path, *argv: str, script: str = "train_appo.py", hidden: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a script of the repository in another directory."""
    return completed(cwd, [sys.executable, ROOT / script, *argv], hidden)


def assert_one_line(result: subprocess.CompletedProcess[str], *expected: str) -> None:
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stdout
    for words in expected:
        assert words in result.stderr


GOOD_MODULE = "class Env:\n    pass\n\n\nNUMBER = 3\n"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([CARTPOLE, "--lerning_rate=1"], "did you mean --learning_rate?"),
        (["--env=good_module:Envv"], "did you mean Env?"),
    ],
)
def test_a_process_with_a_wrong_command_line_ends_with_one_line_and_exit_2(
    tmp_path: Path, argv: list[str], expected: str
) -> None:
    (tmp_path / "good_module.py").write_text(GOOD_MODULE)
    assert_one_line(start(tmp_path, *argv), expected)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([CARTPOLE, "--inference=centrl"], "did you mean central?"),
        (["--env=CartPol-v1"], "did you mean CartPole-v1"),
        (["--env=CartPole-v77"], "CartPole-v77"),
        ([CARTPOLE, "--batch_size=1000", "--rollout=32"], "--batch_size=1000 is not a multiple of --rollout=32"),
        (["--env=no_such_package.module:Env-v0"], "there is no module no_such_package"),
        (["--env=good_module:NUMBER"], "good_module:NUMBER is a int"),
        ([CARTPOLE, "--train_dir=file/below"], "file/below: Not a directory"),
        ([CARTPOLE, "--train_dir=/proc/nowhere"], "cannot write the run to"),
        ([CARTPOLE, "--experiment=../elsewhere"], "--experiment=../elsewhere"),
        ([CARTPOLE, "--experiment=a/.."], "--experiment=a/.."),
        ([CARTPOLE, "--num_envs_per_worker=-1"], "--num_envs_per_worker must be at least 0, got -1"),
        ([CARTPOLE, "--num_workers=-3"], "--num_workers must be at least 0, got -3"),
        ([CARTPOLE, "--gamma=high"], "--gamma must be a finite number, got high"),
        ([CARTPOLE, "--rollout=3.5"], "--rollout must be a whole number, got 3.5"),
        ([CARTPOLE, "--experiment"], "--experiment"),
        ([CARTPOLE, "--num_envs_per_worker=3", "--worker_num_splits=2"], "--num_envs_per_worker=3"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(
    tmp_path: Path, train_here: Train, argv: list[str], expected: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "good_module.py").write_text(GOOD_MODULE)
    assert_one_line(train_here(*argv), expected)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("1 / 0", "importing bad_module raised ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "importing bad_module raised SystemExit: 3"),
    ],
)
def test_a_module_that_raises_is_shown_below_the_line(
    tmp_path: Path, train_here: Train, code: str, expected: str
) -> None:
    (tmp_path / "bad_module.py").write_text(f"{code}\n")
    result = train_here("--env=bad_module:Env-v0")
    line, *trace = result.stderr.splitlines()
    assert (result.returncode, line) == (2, f"error: bad_module:Env-v0: {expected}")
    assert f'  File "{tmp_path}/bad_module.py", line 1, in <module>' in trace


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert_one_line(start(tmp_path, CARTPOLE), "cannot write the run to", "not writable")


@pytest.mark.parametrize(
    ("placement", "space", "expected"),
    [
        ("local", "text", "observation space Text"),
        pytest.param("serial", "graph", "observation space Graph", marks=pytest.mark.slow),
        pytest.param("local", "sequence_action", "its length varies from step to step", marks=pytest.mark.slow),
        pytest.param("serial", "integer_action", "MultiDiscrete is supported", marks=pytest.mark.slow),
    ],
)
def test_spaces_that_cannot_be_learned_from_are_named(
    train_here: Train, placement: str, space: str, expected: str
) -> None:
    result = train_here(HOSTILE, f"--inference={placement}", "--env_kwargs", f"space={space}")
    assert_one_line(result, expected)


def test_an_environment_that_refuses_its_arguments(train_here: Train) -> None:
    result = train_here(CARTPOLE, "--inference=local", "--env_kwargs", "colour=green")
    assert_one_line(result, "--env_kwargs", "colour")


@pytest.mark.parametrize("content", ['{"env": "CartPole-v1", ', "", "[1, 2]", '{"env": "CartPole-v1", "rollout": "x"}'])
def test_a_damaged_configuration_of_the_run(tmp_path: Path, train_here: Train, content: str) -> None:
    path = tmp_path / "train_dir" / "a" / "config.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert_one_line(train_here(CARTPOLE, "--experiment=a"))
    assert path.read_text() == content


@pytest.mark.slow
def test_a_checkpoint_of_another_model_and_changed_flags(tmp_path: Path) -> None:
    flags = [CARTPOLE, *FAST, "--experiment=a", "--inference=serial"]
    assert start(tmp_path, *flags).returncode == 0
    assert_one_line(start(tmp_path, *flags, "--encoder_mlp_layers=32"), "encoder_mlp_layers", "16", "32")
    # The same, should config.json have been edited by hand.
    path = tmp_path / "train_dir" / "a" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"encoder_mlp_layers": [32]}))
    more = "--train_for_env_steps=1000"
    assert_one_line(start(tmp_path, *flags, "--encoder_mlp_layers=32", more), "another model")
    assert len(list((tmp_path / "train_dir" / "a" / "checkpoint_p0").glob("ckpt_*"))) == 1


MY_ENV = """
import gymnasium
import numpy as np
from utils import REWARD


class MyEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_count = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.step_count += 1
        return self.observation_space.sample(), REWARD, self.step_count == 10, False, {}
"""


@pytest.mark.parametrize(
    "placement", [pytest.param(placement, marks=pytest.mark.slow) for placement in ("central", "local", "serial")]
)
def test_an_environment_of_a_directory_with_modules_named_as_ours(tmp_path: Path, placement: str) -> None:
    """Theirs are for the user's modules and ours for us, in every process; those that nobody imports do no harm."""
    for name in ("envs.py", "algorithms.py"):
        (tmp_path / name).write_text("raise RuntimeError('a stranger was imported')\n")
    (tmp_path / "utils.py").write_text("REWARD = 1.0\n")
    (tmp_path / "my_env.py").write_text(MY_ENV)
    result = start(tmp_path, "--env=my_env:MyEnv", *FAST, f"--inference={placement}", hidden=["PYTHONPATH"])
    assert (result.returncode, result.stderr) == (0, "")
    status = json.loads((tmp_path / "train_dir" / "MyEnv_1" / "status.json").read_text())
    assert status["state"] == "finished"
    assert 8.0 < status["return_mean"][0] <= 10.0  # first episodes are shorter: they begin with uncounted random steps


WITH_FILES = ("utils.py", "envs/__init__.py", "algorithms.py")
PROGRAM = """
import sys

import appo
from env_of_mine import MyEnv
from {module} import REWARD

if __name__ == "__main__":
    flags = dict(rollout=8, batch_size=64, num_batches_per_iteration=1, train_for_env_steps=500)
    flags |= dict(plot=False, auto_tune=False)
    result = appo.train(env="env_of_mine:MyEnv", experiment="mine", num_workers=1, inference=sys.argv[1], **flags)
    print(result.report.env_steps >= 500, REWARD, MyEnv.__module__, sys.modules["{module}"].__file__)
"""


@pytest.mark.parametrize(
    ("others", "placement"),
    [
        (WITH_FILES, "central"),
        pytest.param(WITH_FILES, "serial", marks=pytest.mark.slow),
        pytest.param(("utils/rewards.py",), "serial", marks=pytest.mark.slow),
        pytest.param(("utils/rewards.py",), "central", marks=pytest.mark.slow),
    ],
)
def test_a_program_imports_its_own_modules_beside_appo(tmp_path: Path, placement: str, others: tuple[str, ...]) -> None:
    """The first module holds the reward, which the environment imports in actors too; the others do no harm."""
    for name in others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("REWARD = 1.0\n")
    module = others[0].removesuffix(".py").replace("/", ".")
    (tmp_path / "env_of_mine.py").write_text(MY_ENV.replace("from utils", f"from {module}"))
    (tmp_path / "program.py").write_text(PROGRAM.format(module=module))
    done = completed(tmp_path, [sys.executable, "program.py", placement], ["PYTHONPATH"])
    assert (done.returncode, in_time(done.stderr)) == (0, "")
    assert done.stdout.splitlines()[-1] == f"True 1.0 env_of_mine {tmp_path / others[0]}"


MISFIT_ENV = """
import gymnasium
import numpy as np
from gymnasium import spaces

RIGHT = {"image": np.zeros((4, 4, 3), np.uint8), "speed": np.zeros(2, np.float32), "cell": 1, "bits": np.zeros(2, int)}
SHOWN = {
    "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "speed": spaces.Box(-1.0, 1.0, (2,), np.float32),
    "cell": spaces.Discrete(3),
    "bits": spaces.MultiBinary(2),
}


class Misfit(gymnasium.Env):
    observation_space = spaces.Dict(SHOWN)
    action_space = spaces.Discrete(2)

    def __init__(self, misfit="", at=50):
        self.misfit, self.at, self.count = misfit, at, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation(), {"action_mask": np.ones(2, np.int8)} if "mask" in self.misfit else {}

    def step(self, action):
        self.count += 1
        said = {"action_mask": np.array([1, int(self.count < self.at)])} if "mask" in self.misfit else {}
        if self.count == self.at:
            said = {"no_mask": {}, "large_mask": {"action_mask": np.ones(3)}}.get(self.misfit, said)
        return self.observation(), 1.0, self.count % 7 == 0, False, said

    def observation(self):
        if self.count != self.at:
            return RIGHT
        misfits = {
            "float": RIGHT | {"image": np.full((4, 4, 3), 0.5)},
            "shape": RIGHT | {"speed": np.zeros((1, 2), np.float32)},
            "missing": {key: value for key, value in RIGHT.items() if key != "speed"},
            "unknown": RIGHT | {"extra": 1},
            "choice": RIGHT | {"cell": 3},
            "bits": RIGHT | {"bits": np.array([0, 2])},
            "array": np.zeros(2),
        }
        return misfits.get(self.misfit, RIGHT)
"""
FIRST_CASES = {"float"}
MISFITS = {
    "float": "observation key image: expected a value that fits uint8, got float64",
    "shape": "observation key speed: expected shape (2,), got shape (1, 2)",
    "missing": "observation key speed: expected a value, got none",
    "unknown": "observation key extra: expected no such key, got a value",
    "choice": "observation key cell: expected a value that fits uint8, got int64 (choices are 0..2, got [3])",
    "bits": "observation key bits: expected a value that fits uint8, got int64 (bits are 0 or 1, got [[0, 2]])",
    "array": "observation: expected a dict, got ndarray",
    "no_mask": "info key action_mask: expected a mask, got none",
    "large_mask": "info key action_mask: expected 2 entries, got 3",
}


@pytest.mark.parametrize(
    ("placement", "misfit"),
    [
        pytest.param(
            placement, misfit, marks=[] if placement == "serial" and misfit in FIRST_CASES else pytest.mark.slow
        )
        for placement in ("serial", "local")
        for misfit in MISFITS
    ],
)
def test_an_observation_that_does_not_fit_ends_the_run_with_one_line(
    tmp_path: Path, placement: str, misfit: str
) -> None:
    (tmp_path / "misfit_env.py").write_text(MISFIT_ENV)
    argv = ["--env=misfit_env:Misfit", *FAST, f"--inference={placement}", "--env_kwargs", f"misfit={misfit}"]
    result = start(tmp_path, *argv)
    assert result.returncode == 3
    where = "actor_0: " if placement == "local" else ""
    stderr = in_time(result.stderr)
    assert stderr.startswith(f"error: {where}misfit_env:Misfit: {MISFITS[misfit]}"), stderr
    assert stderr.count("\n") == 1


STUBBORN = "--env=tests.unit.envs.stubborn:"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["Fixed", "--inference=serial", "--num_workers=1", "--num_envs_per_worker=4", "--worker_num_splits=1"],
         "Fixed was asked for 4 environments and made 8: if it makes no other number, --num_envs_per_worker=8"),
        (["Fixed"], "Fixed was asked for 1 environment and made 8"),
        (["Fixed", "--num_envs_per_worker=8", "--worker_num_splits=2", "--inference=central"], "asked for 4 "),
        (["OnePerProcess", "--num_envs_per_worker=4"], "not --num_envs_per_worker=4: --num_envs_per_worker=1"),
        (["OnePerProcess", "--num_envs_per_worker=4", "--inference=serial", "--auto_tune=False"], "allows one"),
    ],
)  # fmt: skip
def test_what_is_not_what_was_asked_for_is_one_line(tmp_path: Path, argv: list[str], words: str) -> None:
    assert_one_line(start(tmp_path, f"{STUBBORN}{argv[0]}", *argv[1:], "--train_for_env_steps=500"), words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "inference", "auto_tune"),
    [
        *(
            ("OnePerProcess", inference, tunes)
            for inference in ("local", "central", "serial")
            for tunes in (True, False)
        ),
        ("EndsProcess", "local", True),
        ("EndsProcess", "central", False),
    ],
)
def test_an_environment_that_allows_one_per_process_is_trained(
    tmp_path: Path, name: str, inference: str, auto_tune: bool
) -> None:
    flags = [
        "--rollout=8",
        "--batch_size=64",
        "--num_batches_per_iteration=1",
        "--train_for_env_steps=500",
        "--plot=False",
    ]
    argv = [f"{STUBBORN}{name}", *flags, f"--inference={inference}", f"--auto_tune={auto_tune}"]
    result = start(tmp_path, *argv)
    assert result.returncode == 0, result.stderr
    assert "allows one environment per process (of a second one: " in result.stderr
    assert " x 1 envs in 1 groups" in result.stdout
