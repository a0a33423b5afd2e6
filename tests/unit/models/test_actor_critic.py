import math
from itertools import product

import pytest
import torch

from appo.algorithms.models.actor_critic import PolicyHead
from appo.algorithms.ops.distributions import ActionDistribution
from appo.envs.spec import ActionPart, EnvSpec, ObservationSpec
from tests.unit.models.cases import (
    CATEGORICAL,
    CORES,
    GAUSSIAN,
    IMAGE,
    MIXED,
    VECTOR,
    act_through,
    env_spec_of,
    model_of,
    observation,
)

ENCODINGS: dict[str, tuple[dict[str, ObservationSpec], dict[str, object]]] = {
    "mlp": ({"obs": VECTOR}, {}),
    "mlp_residual": ({"obs": VECTOR}, {"encoder_subtype": "mlp_residual", "encoder_mlp_layers": (16, 16)}),
    "mlp_no_statistics": ({"obs": VECTOR}, {"normalize_input": False}),
    "convnet_simple": ({"obs": IMAGE}, {"obs_scale": 255.0}),
    "convnet_atari": ({"obs": IMAGE}, {"obs_scale": 255.0, "encoder_subtype": "convnet_atari"}),
    "resnet_impala": ({"obs": IMAGE}, {"obs_scale": 255.0, "encoder_type": "resnet"}),
    "dict": ({"image": IMAGE, "speed.x": VECTOR}, {}),
}
HEADS: dict[str, tuple[tuple[ActionPart, ...], dict[str, object]]] = {
    "categorical": (CATEGORICAL, {}),
    "gaussian": (GAUSSIAN, {}),
    "gaussian_free": (GAUSSIAN, {"adaptive_stddev": False}),
    "mixed": (MIXED, {}),
    "mixed_free": (MIXED, {"adaptive_stddev": False}),
}


# Every encoder and every core with every head once; the whole product is slow.
QUICK_SHAPES = {(*pair, "mixed") for pair in product(ENCODINGS, ("none", "lstm2"))} | {
    ("mlp", *pair) for pair in product(CORES, HEADS)
}


@pytest.mark.parametrize(
    ("encoding", "core", "head", "shared"),
    [
        pytest.param(*case, marks=[] if case[:3] in QUICK_SHAPES else pytest.mark.slow)
        for case in product(ENCODINGS, CORES, HEADS, [True, False])
    ],
)
def test_shapes(encoding: str, core: str, head: str, shared: bool) -> None:
    observations, flags = ENCODINGS[encoding]
    parts, head_flags = HEADS[head]
    env_spec = env_spec_of(*parts, **observations)
    model = model_of(env_spec, actor_critic_share_weights=shared, **flags, **CORES[core], **head_flags)
    vectors = {"none": 0, "gru": 1, "lstm": 2, "gru2": 2, "lstm2": 4}[core] * (1 if shared else 2)
    assert model.rnn_state_size == 8 * vectors

    first, state = torch.tensor([True, False, False]), torch.zeros(3, model.rnn_state_size)
    logits, value, after = model.act(observation(env_spec, 3), first, state)
    assert logits.shape == (3, env_spec.action.num_logits)
    assert value.shape == (3,)
    assert after.shape == state.shape

    first, state = torch.zeros(3, 2, dtype=torch.bool), torch.zeros(1, 2, model.rnn_state_size)
    logits, value = model.unroll(observation(env_spec, 3, 2), first, state, recurrence=2)
    assert logits.shape == (2, 2, env_spec.action.num_logits)
    assert value.shape == (3, 2)
    assert {tensor.dtype for tensor in (logits, value, after)} == {torch.float32}


@pytest.mark.parametrize(
    ("encoding", "core", "shared", "recurrence"),
    [
        pytest.param(*case, marks=[] if case[0] == "mlp" or case[1:] == ("lstm", True, 4) else pytest.mark.slow)
        for case in product(ENCODINGS, CORES, [True, False], [8, 4, 1])
    ],
)
def test_unroll_repeats_what_act_computed(encoding: str, core: str, shared: bool, recurrence: int) -> None:
    observations, flags = ENCODINGS[encoding]
    env_spec = env_spec_of(**observations)
    model = model_of(env_spec, actor_critic_share_weights=shared, **flags, **CORES[core])
    acted = act_through(model, env_spec, steps=8, columns=4)
    assert acted.first.any()
    logits, value = model.unroll(acted.obs, acted.first, acted.rnn_state[:-1:recurrence], recurrence)
    torch.testing.assert_close(logits, acted.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(value, acted.value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("core", ["gru", "lstm"])
def test_an_ignored_first_would_be_seen(core: str) -> None:
    model, env_spec = model_of(**CORES[core]), env_spec_of()
    acted = act_through(model, env_spec, steps=8, columns=4)
    ignored = torch.zeros_like(acted.first)
    logits, value = model.unroll(acted.obs, ignored, acted.rnn_state[:1], 8)
    assert (value - acted.value).abs().max() > 1e-3
    assert (logits - acted.logits).abs().max() > 1e-3


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("core", [core for core in CORES if core != "none"])
def test_first_zeroes_the_state_exactly(core: str, shared: bool) -> None:
    model = model_of(actor_critic_share_weights=shared, **CORES[core])
    obs, first = observation(env_spec_of(), 2), torch.ones(2, dtype=torch.bool)
    stale = torch.full((2, model.rnn_state_size), math.nan)
    for got, expected in zip(
        model.act(obs, first, stale), model.act(obs, ~first, torch.zeros_like(stale)), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("shared", [True, False])
def test_no_gradient_reaches_the_stored_state(shared: bool) -> None:
    model = model_of(actor_critic_share_weights=shared)
    state = torch.rand(2, 3, model.rnn_state_size, requires_grad=True)
    logits, value = model.unroll(observation(env_spec_of(), 5, 3), torch.zeros(5, 3, dtype=torch.bool), state, 2)
    (logits.square().sum() + value.square().sum()).backward()
    assert state.grad is None
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_two_towers_share_nothing() -> None:
    model = model_of(actor_critic_share_weights=False)
    obs, first = observation(env_spec_of(), 3, 2), torch.zeros(3, 2, dtype=torch.bool)
    logits, _ = model.unroll(obs, first, torch.rand(1, 2, model.rnn_state_size), 2)
    logits.sum().backward()
    assert all(parameter.grad is None for parameter in model.critic.parameters())
    assert all(parameter.grad is not None for parameter in model.actor.parameters())


def test_the_state_of_the_actor_comes_first() -> None:
    model = model_of(actor_critic_share_weights=False)
    obs, first = observation(env_spec_of(), 2), torch.zeros(2, dtype=torch.bool)
    state = torch.zeros(2, model.rnn_state_size)
    logits, value, _ = model.act(obs, first, state)
    state[:, 8:] = 1.0
    other_logits, other_value, _ = model.act(obs, first, state)
    assert torch.equal(logits, other_logits)
    assert not torch.equal(value, other_value)


def test_observations_are_never_changed() -> None:
    """Sample Factory scaled its batch in place: the second epoch trained on obs / 255^2."""
    env_spec = env_spec_of(obs=ObservationSpec((3, 36, 36), "float32"))
    for normalize_input in (True, False):
        model = model_of(env_spec, use_rnn=False, obs_scale=255.0, normalize_input=normalize_input)
        obs, first = {"obs": torch.rand(3, 2, 3, 36, 36) * 255}, torch.zeros(3, 2, dtype=torch.bool)
        before = obs["obs"].clone()
        epochs = [model.unroll(obs, first, torch.empty(1, 2, 0), 2) for _ in range(2)]
        assert torch.equal(obs["obs"], before)
        assert torch.equal(epochs[0][0], epochs[1][0])
        assert torch.equal(epochs[0][1], epochs[1][1])


def test_constants_apply_to_the_key_obs_alone() -> None:
    env_spec = env_spec_of(obs=VECTOR, other=VECTOR)
    model = model_of(env_spec, use_rnn=False, obs_scale=10.0, obs_subtract_mean=2.0, normalize_input=False)
    plain = model_of(env_spec, use_rnn=False, normalize_input=False)
    obs, first, state = observation(env_spec, 3), torch.zeros(3, dtype=torch.bool), torch.empty(3, 0)
    scaled = {"obs": (obs["obs"] - 2.0) / 10.0, "other": obs["other"]}
    assert torch.equal(model.act(obs, first, state)[1], plain.act(scaled, first, state)[1])


def test_observation_statistics_standardise() -> None:
    env_spec = env_spec_of(obs=VECTOR, image=IMAGE)
    model = model_of(env_spec, use_rnn=False)
    assert model.normalized_keys == ("obs",)
    buffers = dict(model.named_buffers())
    mean, inv_std = torch.arange(5.0), torch.full((5,), 0.5)
    model.set_observation_statistics("obs", mean, inv_std)
    assert all(dict(model.named_buffers())[name] is buffer for name, buffer in buffers.items())
    plain = model_of(env_spec, use_rnn=False, normalize_input=False)
    obs, first, state = observation(env_spec, 3), torch.zeros(3, dtype=torch.bool), torch.empty(3, 0)
    scaled = {"obs": (obs["obs"] - mean) * inv_std, "image": obs["image"]}
    assert torch.equal(model.act(obs, first, state)[0], plain.act(scaled, first, state)[0])


@pytest.mark.parametrize("shape", [(3, 36, 40), (6,)])
@pytest.mark.parametrize("high", [255, 7, 1])
def test_bytes_are_divided_by_their_largest_value(shape: tuple[int, ...], high: int) -> None:
    """MiniGrid's one-hot pictures divided by 255 are as good as black."""
    model = model_of(env_spec_of(obs=ObservationSpec(shape, "uint8", high=high)), use_rnn=False)
    brightest = {"obs": torch.full((2, *shape), high, dtype=torch.uint8)}
    assert torch.equal(model.scaled(brightest)["obs"], torch.ones(2, *shape))


def test_the_action_mask_is_not_shown() -> None:
    mask = ObservationSpec((4,), "uint8")
    env_spec = EnvSpec({"obs": VECTOR, "action_mask": mask}, env_spec_of().action, action_mask=4)
    model = model_of(env_spec, use_rnn=False)
    assert model.keys == ("obs",)
    logits, _, _ = model.act(observation(env_spec, 2), torch.zeros(2, dtype=torch.bool), torch.empty(2, 0))
    assert torch.equal(logits, model.act(observation(env_spec_of(), 2), torch.zeros(2).bool(), torch.empty(2, 0))[0])


def test_values_in_reward_units() -> None:
    model = model_of()
    value = torch.tensor([-1.0, 0.0, 2.5])
    assert torch.equal(model.denormalize_value(value), value)
    model.set_return_statistics(3.0, torch.tensor(2.0))
    assert torch.equal(model.denormalize_value(value), torch.tensor([1.0, 3.0, 8.0]))
    assert torch.equal(model.normalize_value(model.denormalize_value(value)), value)
    assert {"return_mean", "return_std"} <= set(model.state_dict())


def test_heads_stay_in_float32_under_autocast() -> None:
    for core in CORES:
        model, env_spec = model_of(**CORES[core]), env_spec_of()
        obs, first = observation(env_spec, 3), torch.zeros(3, dtype=torch.bool)
        state = torch.zeros(3, model.rnn_state_size)
        exact = model.act(obs, first, state)
        with torch.autocast("cpu", torch.bfloat16):
            lowered = model.act(obs, first, state)
            logits, value = model.unroll(
                {"obs": obs["obs"].expand(3, 3, 5)}, first.expand(3, 3), state[None], recurrence=2
            )
        assert {tensor.dtype for tensor in (*lowered, logits, value)} == {torch.float32}
        torch.testing.assert_close(lowered, exact, rtol=0.05, atol=0.05)


def test_unroll_refuses_a_state_of_another_plan() -> None:
    model = model_of()
    obs, first = observation(env_spec_of(), 5, 3), torch.zeros(5, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"rnn_state: expected shape \[2, 3, 8\], got \[1, 3, 8\]"):
        model.unroll(obs, first, torch.zeros(1, 3, 8), 2)
    with pytest.raises(ValueError, match="recurrence 3 does not divide the 4 steps"):
        model.unroll(obs, first, torch.zeros(1, 3, 8), 3)


@pytest.mark.parametrize("adaptive", [True, False])
def test_standard_deviations_start_at_their_flag(adaptive: bool) -> None:
    env_spec = env_spec_of(*MIXED)
    torch.manual_seed(0)
    model = model_of(env_spec, adaptive_stddev=adaptive, initial_stddev=0.25)
    with torch.no_grad():
        model.policy_head.linear.weight.zero_()
    logits = model.policy_head(torch.randn(6, 8))
    is_log_stddev = torch.tensor([0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1]).bool()
    assert torch.equal(logits[:, is_log_stddev], torch.full((6, 3), math.log(0.25)))
    assert torch.equal(logits[:, ~is_log_stddev], torch.zeros(6, 8))


def test_a_free_standard_deviation_is_one_parameter_for_all_states() -> None:
    head = PolicyHead(8, MIXED, adaptive_stddev=False, initial_log_stddev=0.0)
    assert head.log_stddev.shape == (3,)
    assert head.linear.out_features == 8
    with torch.no_grad():
        head.log_stddev.copy_(torch.tensor([-1.0, 0.0, 1.0]))
    logits = head(torch.randn(4, 2, 8))
    assert torch.equal(logits[..., [2, 3, 10]], torch.tensor([-1.0, 0.0, 1.0]).expand(4, 2, 3))
    ActionDistribution(MIXED, logits).entropy().sum().backward()
    assert torch.equal(head.log_stddev.grad, torch.full((3,), 8.0))


def test_without_gaussian_parts_there_is_no_free_parameter() -> None:
    assert PolicyHead(8, CATEGORICAL, adaptive_stddev=False, initial_log_stddev=0.0).log_stddev is None


def test_all_parameters_and_buffers_are_float32() -> None:
    env_spec = env_spec_of(*MIXED, obs=VECTOR, image=IMAGE)
    model = model_of(env_spec, adaptive_stddev=False, use_spectral_norm=True, actor_critic_share_weights=False)
    assert {tensor.dtype for tensor in (*model.parameters(), *model.buffers())} == {torch.float32}
    assert len(model.state_dict()) == len([*model.parameters(), *model.buffers()])
