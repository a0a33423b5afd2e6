"""The policy of actor-critics: which random numbers it draws, and that every way of acting records the same things."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from appo.algorithms.models.actor_critic import ActorCritic
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.ops.distributions import ActionDistribution
from appo.algorithms.ops.numpy_twins import ActionSampler
from appo.algorithms.parts.stochastic_policy import StochasticPolicy
from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.playing.player import Player, cheapest
from appo.envs.spec import ActionPart, ActionSpec
from tests.unit.models.cases import env_spec_of, model_of
from tests.unit.runtime.worlds import world_of

ROWS, GROUPS = 3, 4
N = ROWS * GROUPS
MIXED = (ActionPart("categorical", 4), ActionPart("gaussian", 2))


@pytest.fixture(autouse=True)
def as_it_is_called() -> Iterator[None]:
    with torch.inference_mode():
        yield


def policy_of(*parts: ActionPart) -> tuple[StochasticPolicy, ActorCritic]:
    spec = env_spec_of(*parts)
    model = model_of(spec)
    model.set_return_statistics(3.0, 2.0)
    return StochasticPolicy(FlatModule(model), spec), model


def inputs_of(policy: StochasticPolicy) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    torch.manual_seed(1)
    obs = {key: torch.randn(N, *one.shape) for key, one in policy.spec.observations.items()}
    return obs, torch.zeros(N, dtype=torch.bool), torch.randn(N, policy.rnn_state_size)


def test_everything_that_is_recorded_fits_the_action() -> None:
    policy, model = policy_of(*MIXED)
    inputs = inputs_of(policy)
    logits, value, state = model.act(*inputs)
    for whole_groups in (False, True):
        recorded, after = policy.act(*inputs, None, policy.random(5, ROWS), whole_groups=whole_groups)
        assert sorted(recorded) == ["action", "log_prob", "logits", "value"]
        assert torch.equal(recorded["logits"], logits)
        assert torch.equal(recorded["value"], value * 2.0 + 3.0)
        assert torch.equal(after, state)
        expected = ActionDistribution(policy.spec.action.parts, logits).log_prob(recorded["action"])
        torch.testing.assert_close(recorded["log_prob"], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(policy.final(*inputs)["final_value"], value * 2.0 + 3.0)


def test_whole_groups_are_drawn_one_after_the_other_and_other_rows_by_torch() -> None:
    policy, _ = policy_of(*MIXED)
    inputs, random = inputs_of(policy), policy.random(5, ROWS)
    before = random.generator.get_state()
    recorded, _ = policy.act(*inputs, None, random, whole_groups=True)
    assert torch.equal(random.generator.get_state(), before)
    sampler = ActionSampler(MIXED, ROWS, np.random.default_rng(5))
    action, log_prob = np.empty((ROWS, 3), np.float32), np.empty(ROWS, np.float32)
    for group in range(GROUPS):
        rows = slice(group * ROWS, (group + 1) * ROWS)
        sampler.sample(recorded["logits"][rows].numpy(), action, log_prob)
        assert np.array_equal(recorded["action"][rows], action)
        assert np.array_equal(recorded["log_prob"][rows], log_prob)
    torch_drawn, _ = policy.act(*inputs, None, random)
    generator = torch.Generator().manual_seed(5)
    distribution = ActionDistribution(MIXED, recorded["logits"])
    assert torch.equal(torch_drawn["action"], distribution.sample(generator))


@pytest.mark.parametrize("whole_groups", [False, True])
def test_the_best_action_takes_no_random_number(whole_groups: bool) -> None:
    policy, _ = policy_of(*MIXED)
    inputs, random = inputs_of(policy), policy.random(5, ROWS)
    before = random.generator.get_state()
    recorded, _ = policy.act(*inputs, None, None, greedy=True, whole_groups=whole_groups)
    best = ActionDistribution(MIXED, recorded["logits"]).mode()
    assert torch.equal(recorded["action"], best)
    assert torch.equal(random.generator.get_state(), before)
    only_means = torch.tensor([False, True, True])
    mixed, _ = policy.act(*inputs, None, random, greedy=only_means, whole_groups=whole_groups)
    sampled, _ = policy.act(*inputs, None, policy.random(5, ROWS))
    assert torch.equal(mixed["action"][:, 1:], best[:, 1:])
    assert torch.equal(mixed["action"][:, 0], sampled["action"][:, 0])
    assert not torch.equal(mixed["action"][:, 0], best[:, 0])


@pytest.mark.parametrize("seed", [0, -1, 2**63])
def test_every_seed_of_torch_is_one(seed: int) -> None:
    policy, _ = policy_of(*MIXED)
    inputs = inputs_of(policy)
    for whole_groups in (False, True):
        first, again = (
            policy.act(*inputs, None, policy.random(seed, ROWS), whole_groups=whole_groups)[0] for _ in range(2)
        )
        assert torch.equal(first["action"], again["action"])


def test_who_acts_without_torch() -> None:
    spec = env_spec_of(*MIXED)
    world = world_of(spec)
    plain = StochasticPolicy(FlatModule(model_of(spec, use_rnn=False)), spec)
    assert plain.fast(world.trajectories, plain.random(1, ROWS)) is not None
    memory = StochasticPolicy(FlatModule(model_of(spec, use_rnn=True)), spec)
    assert memory.fast(world.trajectories, memory.random(1, ROWS)) is None
    masked = replace(spec, action=ActionSpec((ActionPart("categorical", 4),)), action_mask=4)
    careful = StochasticPolicy(plain.flat, masked)
    assert careful.fast(world.trajectories, careful.random(1, ROWS)) is None


class Stubborn(StochasticPolicy):
    """Repeats its first choice."""

    def act(self, *inputs: Any, **how: Any) -> tuple[dict[str, Tensor], Tensor]:
        """Act as ever, but for the action."""
        recorded, state = super().act(*inputs, **how)
        return recorded | {"action": torch.zeros_like(recorded["action"])}, state


def test_a_subclass_acts_as_it_says() -> None:
    spec = replace(env_spec_of(ActionPart("categorical", 4)), num_agents=1)
    policy = Stubborn(FlatModule(model_of(spec, use_rnn=False)), spec)
    assert policy.fast(world_of(spec).trajectories, policy.random(1, ROWS)) is None
    player = Player(policy, spec, EvaluationConfig(), seed=3)
    assert cheapest(player, 5, deterministic=False) is player
    obs = {"obs": np.ones((1, 5), np.float32)}
    assert not any(player.act(obs, np.zeros(1, np.bool_)).any() for _ in range(20))


def test_what_is_not_recorded_is_left_out() -> None:
    policy, _ = policy_of(*MIXED)
    careful = StochasticPolicy(policy.flat, policy.spec, {"log_prob": None, "value": None, "final_value": None})
    inputs = inputs_of(policy)
    for whole_groups in (False, True):
        every, _ = policy.act(*inputs, None, policy.random(5, ROWS), whole_groups=whole_groups)
        found, _ = careful.act(*inputs, None, careful.random(5, ROWS), whole_groups=whole_groups)
        assert sorted(found) == ["action", "log_prob", "value"]
        assert all(torch.equal(value, every[name]) for name, value in found.items())


def test_the_twin_without_torch_fills_what_there_is() -> None:
    spec = env_spec_of(*MIXED)
    whole, short = world_of(spec), world_of(spec)
    del short.trajectories.recorded["logits"]
    policy = StochasticPolicy(FlatModule(model_of(spec, use_rnn=False)), spec)
    for world in (whole, short):
        t = world.trajectories
        t.obs["obs"][1, 2] = np.linspace(-1, 1, t.obs["obs"][1, 2].size).reshape(t.obs["obs"][1, 2].shape)
        fast = policy.fast(t, policy.random(3, t.valid.shape[2]))
        assert fast is not None
        fast.act(1, 2, version=7)
        some = np.arange(t.valid.shape[2]) == 0
        fast.act_in(some, 1, 3, version=8)
    for name in ("log_prob", "value"):
        assert np.array_equal(whole.trajectories.recorded[name], short.trajectories.recorded[name])
        assert whole.trajectories.recorded[name][1, 2].all()
    assert np.array_equal(whole.trajectories.action, short.trajectories.action)
    assert (short.trajectories.policy_version[1, 2] == 7).all()
