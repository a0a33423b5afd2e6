"""The policy of SAC: uniform at first, then of its distribution; what SAC refuses."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.models.policy_network import build_policy_network
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.sampling.policy import Follows
from appo.algorithms.sac.algorithm import SAC
from appo.algorithms.sac.config import SACConfig
from appo.algorithms.sac.policy import SACPolicy
from appo.envs.spaces import ActionForm, Space, spec_of
from appo.utils.errors import UsageError
from tests.unit.models.cases import config_of

BOX = spaces.Box(-2.0, 4.0, (2,))
SQUASHED = ActionForm(scaled=True, squashed=True)
OBSERVATION = spaces.Box(-1.0, 1.0, (5,))
SPEC = spec_of(OBSERVATION, BOX, form=SQUASHED)
ROWS = 4000


def act(policy: SACPolicy, **how: Any) -> torch.Tensor:
    obs = {"obs": torch.ones(ROWS, 5)}
    first, state, rows = torch.zeros(ROWS, dtype=torch.bool), torch.zeros(ROWS, 0), torch.arange(ROWS)
    with torch.inference_mode():
        return policy.act(obs, first, state, rows, policy.random(3, ROWS), **how)[0]["action"]


def policy_of(steps: int) -> SACPolicy:
    torch.manual_seed(1)
    network = build_policy_network(config_of(use_rnn=False, initial_stddev=0.1), SPEC)
    return SACPolicy(FlatModule(network), SPEC, steps)


def test_actions_are_uniform_until_as_many_steps_are_counted() -> None:
    policy = policy_of(100)
    assert isinstance(policy, Follows)
    for env_steps, deviation in ((0, 1 / 3**0.5), (99, 1 / 3**0.5), (100, 0.1)):
        policy.follow(env_steps)
        for whole_groups in (True, False):
            found = act(policy, whole_groups=whole_groups).tanh()
            assert found.isfinite().all()
            assert found.std(0).numpy() == pytest.approx([deviation] * 2, rel=0.05)
            assert found.mean(0).numpy() == pytest.approx([0.0] * 2, abs=0.05)


def test_a_trained_policy_draws_as_many_numbers_and_acts_uniformly_no_more() -> None:
    other = policy_of(100)
    trained = SACPolicy(other.flat, SPEC, 100, is_trained=True)
    trained.follow(0)
    assert act(trained).tanh().std() < 0.12
    other.follow(100)
    assert torch.equal(act(trained), act(other))


def test_players_never_act_uniformly() -> None:
    policy = policy_of(0)
    assert act(policy).tanh().std() < 0.12
    assert act(policy_of(100), greedy=True).std(0).max() == 0


FORMS = {"plain": ActionForm(scaled=True), "squashed": SQUASHED}


@pytest.mark.parametrize(
    ("action", "form", "words"),
    [
        (spaces.Discrete(3), "squashed", "needs continuous actions, the environment has choices: take APEX, PQN, APPO"),
        (spaces.Tuple((BOX, spaces.Discrete(3))), "squashed", "the environment has choices"),
        (BOX, "plain", "add --action_distribution=tanh_gaussian"),
        (spaces.Box(0.0, float("inf"), (2,)), "plain", "declare them by gymnasium.wrappers.TransformAction"),
        (spaces.Tuple((BOX, spaces.Box(-float("inf"), 1.0, (1,)))), "squashed", "needs actions between two bounds"),
    ],
)
def test_other_actions_are_refused_in_one_line(action: Space, form: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SAC().check(SACConfig(), spec_of(OBSERVATION, action, form=FORMS[form]))
    SAC().check(SACConfig(), SPEC)


class Unbounded(gymnasium.Env[Any, Any]):
    """Keeps the last action."""

    observation_space, action_space = OBSERVATION, spaces.Box(-float("inf"), float("inf"), (2,))
    action: list[float]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.action = action.tolist()
        return OBSERVATION.sample(), 0.0, False, False, {}


@pytest.mark.parametrize(
    ("wrap", "is_refused"),
    [
        (lambda env: env, True),
        (gymnasium.wrappers.ClipAction, True),
        (lambda env: gymnasium.wrappers.TransformAction(env, lambda action: action, BOX), False),
    ],
)
def test_the_advice_gives_bounds_to_numbers_without(wrap: Any, is_refused: bool) -> None:
    env = Unbounded()
    wrapped = wrap(env)
    with pytest.raises(UsageError, match="between two bounds") if is_refused else nullcontext():
        SAC().check(SACConfig(), spec_of(OBSERVATION, wrapped.action_space, form=SQUASHED))
    wrapped.step(np.array([-2.0, 4.0]))
    assert env.action == [-2.0, 4.0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"lr_schedule": "kl_adaptive_epoch"}, "--algo=SAC measures no KL divergence"),
        ({"n_steps": 3, "num_replay_shards": 2}, "--n_steps=3 is above --rollout=1"),
    ],
)
def test_contradictory_flags_are_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SAC().check(SACConfig(**flags), SPEC)


def test_a_memory_is_refused_with_the_cure() -> None:
    context = Context(SPEC, SACConfig(), config_of(use_rnn=True), "fp32", "cpu")
    with pytest.raises(UsageError, match=r"memory cannot learn: take --use_rnn=False$"):
        SAC().make_model(context)
    with pytest.raises(UsageError, match="--verify_reproduction"):
        SAC().make_model(replace(context, verify=True))


def test_one_update_owes_as_many_uses_as_a_step_has() -> None:
    config = SACConfig(updates_per_step=0.5)
    assert (config.uses_per_step, config.waiting_columns) == (128.0, 2)
    assert (SACConfig().waiting_columns, SACConfig(updates_per_step=20).waiting_columns) == (1, 1)
    one = config.one_update(64)
    assert (one.batch_size, one.uses_per_step) == (64, 1.0)
