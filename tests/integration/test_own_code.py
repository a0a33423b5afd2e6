"""Whatever code of the user's raises, and wherever: its file and line are shown."""

import logging
import sys
from pathlib import Path

import pytest

from appo import Training
from appo.utils.errors import AppoError, EnvironmentFailure, UsageError
from appo.utils.tracebacks import traceback_of
from tests.integration.elsewhere import completed
from tests.integration.runs import ROOT, SMALL

pytestmark = pytest.mark.slow  # processes, seconds each

CODE = '''
import gymnasium
import numpy as np
import torch
from torch import nn

from appo import Callbacks


def helper(what):
    return {}[what]  # here


class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fault=""):
        self.fault, self.steps = fault, 0
        self.fail("init")

    def fail(self, where):
        if self.fault == where:
            helper(where)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.fail("reset")
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        self.fail("step")
        if self.steps in (30, 200):  # the latter is rare enough for it to be made again for ever
            self.fail(f"step {self.steps}")
        return self.observation_space.sample(), self.reward(action), self.steps % 10 == 0, False, {}

    def reward(self, action):
        self.fail("reward")
        return float(action)

    def close(self):
        self.fail("close")


class NeedsArguments(Env):
    def __init__(self, size, colour, shape="round"):
        super().__init__()


class CallsWrongly(Env):
    def __init__(self):
        NeedsArguments(1)


def build(size):
    return Env()


class OldReset(Env):
    def reset(self):
        return self.observation_space.sample(), {}


class WithoutOptions(Env):
    """Is never asked for more than a seed."""

    def reset(self, seed=None):
        return self.observation_space.sample(), {}


class Encoder(nn.Module):
    output_size = 2

    def __init__(self, observations, config):
        super().__init__()
        self.layer, self.calls = nn.Linear(2, 2), 0
        self.made()

    def made(self):
        pass

    def forward(self, obs):
        return self.layer(obs["obs"])


class RaisesWhenMade(Encoder):
    def made(self):
        helper("made")


class RaisesInForward(Encoder):
    def forward(self, obs):
        return super().forward(obs) @ torch.zeros(3, 3)  # here


class RaisesWhereItLearns(Encoder):
    def forward(self, obs):
        if torch.is_grad_enabled():
            helper("gradients")
        return super().forward(obs)


class OfEpisodes(Callbacks):
    def on_episode_end(self, episode):
        helper("episode")


class OfReports(Callbacks):
    def before_logging(self, policy, figures):
        helper("report")


class NotMade(Callbacks):
    def __init__(self, config, worker=None):
        helper("made")


def summaries(policy, figures):
    helper("summaries")


def mapping(*arguments):
    helper("mapping")
'''
ALGORITHM = """
from examples.reinforce import REINFORCE, REINFORCELearner


class Learner(REINFORCELearner):
    def learn(self, batch, progress):
        self.loss()
        yield

    def loss(self):
        raise ArithmeticError("no loss")


class Mine(REINFORCE):
    name = "Mine"

    def learner_class(self):
        return Learner
"""
FLAGS = {**SMALL, "env": "user_code:Env", "plot": False, "train_for_env_steps": 200}


@pytest.fixture(autouse=True)
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user's, in which a run is started."""
    path = tmp_path / "user_code.py"
    path.write_text(CODE)
    (tmp_path / "user_algorithm.py").write_text(ALGORITHM)
    (tmp_path / "does_not_compile.py").write_text("def (\n")
    (tmp_path / "fails.py").write_text("import gymnasium\n\n1 / 0  # here\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "user_code", raising=False)
    return path


def line_of(text: str) -> int:
    """Number of the first line of the user's code that holds a text."""
    return next(number for number, line in enumerate(CODE.splitlines(), 1) if text in line)


HELPER = line_of("return {}[what]")


def refused(**flags: object) -> AppoError:
    with pytest.raises(AppoError) as caught, Training({**FLAGS, **flags}, train_dir="runs") as run:
        list(run)
    return caught.value


@pytest.mark.parametrize("fault", ["init", "reset", "step", "reward"])
def test_an_environment_that_raises(user_code: Path, fault: str) -> None:
    error = refused(env_kwargs={"fault": fault})
    assert isinstance(error, EnvironmentFailure)
    shown = traceback_of(error).splitlines()
    assert shown[0] == "Traceback (most recent call last):"
    assert shown[1].startswith(f'  File "{user_code}", line ')  # frames of ours are left out
    assert f'  File "{user_code}", line {HELPER}, in helper' in shown
    assert shown[-1] == f"KeyError: '{fault}'"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"encoder_custom": "user_code:RaisesInForward"}, line_of("@ torch.zeros(3, 3)")),
        ({"encoder_custom": "user_code:RaisesWhenMade"}, HELPER),
    ],
)
def test_a_network_that_raises(user_code: Path, flags: dict[str, object], line: int) -> None:
    error = refused(**flags)
    assert (type(error), error.exit_code) == (UsageError, 2)
    assert f'  File "{user_code}", line {line}, in ' in traceback_of(error)


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ({"env": "fails:Env"}, 'fails.py", line 3, in <module>'),
        ({"env": "does_not_compile:Env"}, 'does_not_compile.py", line 1'),
        ({"encoder_custom": "fails:Encoder"}, 'fails.py", line 3, in <module>'),
        ({"callbacks": "fails:Callbacks"}, 'fails.py", line 3, in <module>'),
        ({"custom_summaries": "fails:summaries"}, 'fails.py", line 3, in <module>'),
        ({"policy_mapping": "fails:mapping", "num_policies": 2}, 'fails.py", line 3, in <module>'),
    ],
)
def test_a_module_that_cannot_be_imported(flags: dict[str, object], shown: str) -> None:
    assert shown in traceback_of(refused(**flags))


def test_a_mistake_in_a_flag_has_no_traceback() -> None:
    """Nothing of the user's has raised: the line says all."""
    for flags in ({"env": "nothing:Env"}, {"env": "user_code:Envv"}, {"encoder_custom": "user_code:Nothing"}):
        assert traceback_of(refused(**flags)) == ""


@pytest.mark.parametrize(
    ("flags", "said", "trace"),
    [
        (
            {"callbacks": "user_code:OfEpisodes"},
            "callback user_code:OfEpisodes.on_episode_end is off",
            "KeyError: 'episode'",
        ),
        (
            {"callbacks": "user_code:OfReports"},
            "callback user_code:OfReports.before_logging is off",
            "KeyError: 'report'",
        ),
        (
            {"custom_summaries": "user_code:summaries"},
            "--custom_summaries=user_code:summaries failed",
            "KeyError: 'sum",
        ),
        ({"env_kwargs": {"fault": "step 30"}}, "is made again: user_code:Env raised KeyError", "KeyError: 'step 30'"),
    ],
)
def test_what_does_not_end_a_run_is_shown_all_the_same(
    user_code: Path, caplog: pytest.LogCaptureFixture, flags: dict[str, object], said: str, trace: str
) -> None:
    with caplog.at_level(logging.WARNING), Training({**FLAGS, **flags}, train_dir="runs") as run:
        list(run)
    assert run.result.exit_code == 0
    assert said in caplog.text
    assert f'  File "{user_code}", line {HELPER}, in helper' in caplog.text
    assert trace in caplog.text


def test_a_callback_that_main_cannot_make_ends_the_start(user_code: Path) -> None:
    message = "--callbacks=user_code:NotMade cannot be made: KeyError: 'made'"
    with (
        pytest.raises(UsageError, match=message) as failure,
        Training(FLAGS, callbacks="user_code:NotMade", train_dir="runs") as run,
    ):
        list(run)
    assert f'  File "{user_code}", line {HELPER}, in helper' in traceback_of(failure.value)


def test_an_environment_that_raises_when_it_is_closed(user_code: Path) -> None:
    with pytest.warns(UserWarning, match="raised KeyError in close") as caught:  # noqa: SIM117
        with Training(FLAGS, env_kwargs={"fault": "close"}, train_dir="runs") as run:
            list(run)
    assert f'  File "{user_code}", line {HELPER}, in helper' in str(caught[0].message)


def test_constructors_that_need_arguments_point_at_env_kwargs() -> None:
    error = refused(env="user_code:NeedsArguments")
    assert str(error).startswith("user_code:NeedsArguments needs arguments: --env_kwargs size=VALUE colour=VALUE (")
    assert (error.exit_code, traceback_of(error)) == (2, "")
    assert str(refused(env="user_code:NeedsArguments", env_kwargs={"size": 1})).startswith(
        "user_code:NeedsArguments needs arguments: --env_kwargs colour=VALUE ("
    )
    assert str(refused(env="user_code:build")).startswith("user_code:build needs arguments: --env_kwargs size=VALUE (")


def test_a_constructor_that_calls_something_wrongly_is_no_matter_of_env_kwargs(user_code: Path) -> None:
    error = refused(env="user_code:CallsWrongly")
    assert "env_kwargs" not in str(error)
    assert f'  File "{user_code}", line {line_of("NeedsArguments(1)")}, in __init__' in traceback_of(error)


def test_a_reset_without_a_seed_is_explained() -> None:
    error = refused(env="user_code:OldReset")
    assert str(error) == (
        "user_code:OldReset: reset takes no seed: it must read `def reset(self, *, seed=None, options=None)` and begin"
        " with `super().reset(seed=seed)`, as gymnasium's environments do"
    )
    assert error.exit_code == 3
    with Training(FLAGS, env="user_code:WithoutOptions", train_dir="runs") as run:
        list(run)


# The same where workers are processes, by the command line and by a program.


def started(folder: Path, *words: str) -> str:
    """Standard error of a run that does not begin."""
    flags = {**FLAGS, "encoder_mlp_layers": 16, "inference": "local", "train_for_env_steps": 10**6}
    given = [f"--{name}={value}" for name, value in flags.items()]
    done = completed(folder, [sys.executable, ROOT / "train_appo.py", *given, *words])
    assert done.returncode in (1, 2, 3), done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["local", "central", "serial"])
@pytest.mark.parametrize(
    ("words", "last"),
    [
        (["--encoder_custom=user_code:RaisesInForward"], "RuntimeError: mat1 and mat2"),
        (["--encoder_custom=user_code:RaisesWhenMade"], "KeyError: 'made'"),
        (["--encoder_custom=user_code:RaisesWhereItLearns"], "KeyError: 'gradients'"),
        (["--env_kwargs", "fault=init"], "KeyError: 'init'"),
        (["--env_kwargs", "fault=reset"], "KeyError: 'reset'"),
        (["--env_kwargs", "fault=step"], "KeyError: 'step'"),
        (["--policy_mapping=user_code:mapping", "--num_policies=2"], "KeyError: 'mapping'"),
        (["--algo=user_algorithm:Mine"], "ArithmeticError: no loss"),
    ],
)
def test_commands(user_code: Path, placement: str, words: list[str], last: str) -> None:
    said = started(user_code.parent, f"--inference={placement}", *words)
    assert f'File "{user_code.parent}/user_' in said
    assert said.strip().splitlines()[-1].startswith(last)


def test_a_command_whose_network_raises_in_a_process_of_its_own(user_code: Path) -> None:
    said = started(user_code.parent, "--encoder_custom=user_code:RaisesInForward").splitlines()
    assert said[0].startswith("error: ")
    assert "--encoder_custom=user_code:RaisesInForward failed: RuntimeError: mat1 and mat2" in said[0]
    line = line_of("@ torch.zeros(3, 3)")
    assert said[1:3] == ["Traceback (most recent call last):", f'  File "{user_code}", line {line}, in forward']
    assert said[-1].startswith("RuntimeError: mat1 and mat2")


def test_a_program_sees_the_traceback_of_a_process_of_ours(user_code: Path) -> None:
    """As a note of the error, which Python and notebooks print below it."""
    error = refused(inference="local", env_kwargs={"fault": "init"})
    (note,) = error.__notes__
    assert f'  File "{user_code}", line {HELPER}, in helper' in note


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"callbacks": "user_code:OfEpisodes"}, "callback user_code:OfEpisodes.on_episode_end is off"),
        ({"env_kwargs": {"fault": "step 200"}}, "is made again: user_code:Env raised KeyError"),
    ],
)
def test_main_shows_what_code_in_actors_has_raised(
    user_code: Path, caplog: pytest.LogCaptureFixture, flags: dict[str, object], said: str
) -> None:
    many = {**FLAGS, "inference": "local", "num_workers": 2, "train_for_env_steps": 20_000}
    with caplog.at_level(logging.WARNING), Training({**many, **flags}, train_dir="runs") as run:
        list(run)
    shown = [record.getMessage() for record in caplog.records if said in record.getMessage()]
    assert len(shown) == 1  # however many actors it happens in
    assert shown[0].startswith("actor_")
    assert f'  File "{user_code}", line {HELPER}, in helper' in shown[0]


@pytest.mark.slow
def test_doctor_shows_where_an_environment_raises(user_code: Path) -> None:
    words = [sys.executable, "-c", "import sys; from appo.algorithms.cli import main; sys.exit(main())", "doctor"]
    done = completed(user_code.parent, [*words, "--env=user_code:Env", "--env_kwargs", "fault=init"])
    assert f'  File "{user_code}", line {HELPER}, in helper' in done.stderr
    assert "user_code:Env raised KeyError: 'init'" in done.stdout
