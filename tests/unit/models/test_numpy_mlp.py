"""The path without torch says what the torch model says, on weights as they are published."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from appo.algorithms.models.actor_critic import ActorCritic, PolicyHead, Tower
from appo.algorithms.models.build import build_model
from appo.algorithms.models.config import ModelConfig
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.models.numpy_mlp import MAX_WEIGHTS, has_numpy_twin, numpy_mlp, numpy_q_network
from appo.algorithms.models.q_network import build_q_network
from appo.algorithms.ops.distributions import ActionDistribution
from appo.algorithms.ops.numpy_twins import ActionSampler, is_supported
from appo.envs.spec import ActionPart, ActionSpec, EnvSpec, ObservationSpec

ROWS, TOLERANCE = 7, 1e-5
PLAIN = ModelConfig(use_rnn=False, encoder_mlp_layers=(16, 12), adaptive_stddev=False)
CHOICES = (ActionPart("categorical", 5),)
REALS = (ActionPart("gaussian", 3),)
MIXED = (
    ActionPart("gaussian", 2),
    ActionPart("categorical", 3),
    ActionPart("gaussian", 1),
    ActionPart("categorical", 2),
)
BINNED = (ActionPart("bins", 5), ActionPart("categorical", 3), ActionPart("bins", 2))
VECTOR = ObservationSpec((6,), "float32")
SEVERAL = EnvSpec({"a": VECTOR, "b": ObservationSpec((3, 2), "uint8"), "c": VECTOR}, ActionSpec(CHOICES))


def spec_of(parts: tuple[ActionPart, ...], observation: ObservationSpec = VECTOR) -> EnvSpec:
    return EnvSpec({"obs": observation}, ActionSpec(parts))


def flat_of(config: ModelConfig, spec: EnvSpec) -> FlatModule:
    """A model whose every weight is a view of a vector, with statistics that change what comes out."""
    torch.manual_seed(0)
    flat = FlatModule(build_model(config, spec))
    assert isinstance(flat.module, ActorCritic)
    flat.flat.add_(0.05 * torch.randn(len(flat.flat)))
    flat.module.set_return_statistics(3.0, 2.0)
    return flat


def observations(spec: ObservationSpec, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (ROWS, *spec.shape)
    if spec.dtype == "uint8":
        return rng.integers(256, size=shape, dtype=np.uint8)
    return (8 * rng.standard_normal(shape)).astype(spec.dtype)  # some beyond the clip


CASES = {
    "tanh": (replace(PLAIN, nonlinearity="tanh"), spec_of(CHOICES)),
    "relu": (replace(PLAIN, nonlinearity="relu"), spec_of(CHOICES)),
    "elu": (PLAIN, spec_of(CHOICES)),
    "towers apart": (replace(PLAIN, actor_critic_share_weights=False), spec_of(CHOICES)),
    "free deviations": (PLAIN, spec_of(REALS)),
    "deviations of the state": (replace(PLAIN, adaptive_stddev=True), spec_of(REALS)),
    "bins": (PLAIN, spec_of(BINNED)),
    "several parts": (PLAIN, spec_of(MIXED)),
    "several parts, deviations of the state": (replace(PLAIN, adaptive_stddev=True), spec_of(MIXED)),
    "matrix": (PLAIN, spec_of(CHOICES, ObservationSpec((2, 3), "float32"))),
    "several observations": (PLAIN, SEVERAL),
    "several observations, towers apart": (replace(PLAIN, actor_critic_share_weights=False), SEVERAL),
    "number": (PLAIN, spec_of(CHOICES, ObservationSpec((), "float32"))),
    "bytes": (PLAIN, spec_of(CHOICES, ObservationSpec((9,), "uint8"))),
    "constants": (replace(PLAIN, normalize_input=False, obs_subtract_mean=1.0, obs_scale=4.0), spec_of(CHOICES)),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_values_and_log_probs_are_those_of_torch(case: str) -> None:
    config, spec = CASES[case]
    flat = flat_of(config, spec)
    mlp = numpy_mlp(flat.module, ROWS)
    assert mlp is not None
    logits, value = np.empty((ROWS, spec.action.num_logits), np.float32), np.empty(ROWS, np.float32)
    action, log_prob = np.empty((ROWS, spec.action.num_values), spec.action.dtype), np.empty(ROWS, np.float32)
    sampler = ActionSampler(spec.action.parts, ROWS, np.random.default_rng(0))
    for seed in range(3):
        flat.flat.mul_(1.1)  # as when new weights arrive
        obs = {key: observations(shown, seed) for key, shown in spec.observations.items()}
        mlp.act(obs, logits, value)
        sampler.sample(logits, action, log_prob)
        with torch.no_grad():
            expected, values, _ = flat.module.act(
                {key: torch.from_numpy(x) for key, x in obs.items()},
                torch.zeros(ROWS, dtype=torch.bool),
                torch.zeros(ROWS, 0),
            )
            values = flat.module.denormalize_value(values)
            log_probs = ActionDistribution(spec.action.parts, expected).log_prob(torch.from_numpy(action))
        for mine, torchs in ((logits, expected), (value, values), (log_prob, log_probs)):
            np.testing.assert_allclose(mine, torchs.numpy(), rtol=TOLERANCE, atol=TOLERANCE)


def test_networks_of_other_kinds_are_left_to_torch() -> None:
    spec = spec_of(CHOICES)
    others = [
        (replace(PLAIN, use_rnn=True, hidden_size=8), spec),
        (replace(PLAIN, use_spectral_norm=True), spec),
        *((replace(PLAIN, encoder_subtype="mlp_residual", encoder_mlp_layers=(8,) * n), spec) for n in (1, 2)),
        (replace(PLAIN, encoder_mlp_layers=(1, MAX_WEIGHTS)), spec),
        (replace(PLAIN, hidden_size=8), spec_of(CHOICES, ObservationSpec((3, 36, 36), "uint8"))),
    ]
    assert [numpy_mlp(build_model(config, other), ROWS) for config, other in others] == [None] * len(others)
    assert not is_supported((ActionPart("bernoulli", 2),))


class Doubled(PolicyHead):
    """Its logits are twice as large."""

    def forward(self, features: Tensor) -> Tensor:
        """Return logits [*, L]."""
        return 2 * super().forward(features)


class DoubledLinear(nn.Linear):
    """Its outputs are twice as large."""

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs."""
        return 2 * super().forward(x)


class CenteredTower(Tower):
    """Its features are centered."""

    def step(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return features and state."""
        features, state = super().step(*inputs)  # type: ignore[arg-type]
        return features - features.mean(-1, keepdim=True), state


def _head(model: Any) -> None:
    model.policy_head.__class__ = Doubled


def _layer(model: Any) -> None:
    model.policy_head.linear.__class__ = DoubledLinear


def _value(model: Any) -> None:
    model.value_head.__class__ = DoubledLinear


def _hook(model: Any) -> None:
    model.value_head.register_forward_hook(lambda module, inputs, output: 2 * output)


def _tower(model: Any) -> None:
    model.actor.__class__ = CenteredTower


def _scaled(model: Any) -> None:
    model.scaling_of("obs").register_forward_pre_hook(lambda module, inputs: tuple(2 * x for x in inputs))


@pytest.mark.parametrize("change", [_head, _layer, _value, _hook, _tower, _scaled])
def test_a_model_with_a_part_of_another_class_is_left_to_torch(change: Callable[[Any], None]) -> None:
    model = build_model(PLAIN, spec_of(CHOICES))
    assert numpy_mlp(model, ROWS) is not None
    change(model)
    assert numpy_mlp(model, ROWS) is None
    assert not has_numpy_twin(model)


@pytest.mark.parametrize("name", ["q_head", "value_head", "tower"])
def test_a_network_of_values_with_a_part_of_another_class_is_left_to_torch(name: str) -> None:
    model = build_q_network(PLAIN, spec_of(CHOICES), dueling=True)
    assert numpy_q_network(model, ROWS) is not None
    getattr(model, name).__class__ = CenteredTower if name == "tower" else DoubledLinear
    assert numpy_q_network(model, ROWS) is None


def test_choices_are_drawn_as_often_as_they_are_likely() -> None:
    rows, rounds = 1000, 50
    p = np.array([0.5, 0.0, 0.3, 0.15, 0.05], np.float32)
    logits = np.tile(np.log(np.maximum(p, 1e-30)), (rows, 1)).astype(np.float32)
    action, log_prob = np.empty((rows, 1), np.int32), np.empty(rows, np.float32)
    sampler, counts = ActionSampler(CHOICES, rows, np.random.default_rng(1)), np.zeros(len(p))
    for _ in range(rounds):
        sampler.sample(logits, action, log_prob)
        counts += np.bincount(action[:, 0], minlength=len(p))
    np.testing.assert_allclose(counts / (rows * rounds), p, atol=4 * np.sqrt(0.25 / (rows * rounds)))
    assert counts[1] == 0


def test_reals_have_the_mean_and_the_deviation_of_the_logits_and_a_deviation_within_limits() -> None:
    rows = 40_000
    logits = np.tile(np.array([1.0, -2.0, 0.5, np.log(0.5), 9.0, -9.0], np.float32), (rows, 1))
    action, log_prob = np.empty((rows, 3), np.float32), np.empty(rows, np.float32)
    ActionSampler(REALS, rows, np.random.default_rng(2)).sample(logits, action, log_prob)
    deviation = np.array([0.5, np.exp(2.0), np.exp(-5.0)])
    assert (np.abs(action.mean(0) - [1.0, -2.0, 0.5]) < 5 * deviation / np.sqrt(rows)).all()
    np.testing.assert_allclose(action.std(0), deviation, rtol=0.03)


def test_what_is_not_finite_stays_in_its_row() -> None:
    spec = spec_of(CHOICES)
    mlp = numpy_mlp(flat_of(PLAIN, spec).module, ROWS)
    assert mlp is not None
    obs = observations(VECTOR)
    obs[3] = np.nan
    logits, value = np.empty((ROWS, 5), np.float32), np.empty(ROWS, np.float32)
    action, log_prob = np.empty((ROWS, 1), np.int32), np.empty(ROWS, np.float32)
    mlp.act({"obs": obs}, logits, value)
    ActionSampler(CHOICES, ROWS, np.random.default_rng(0)).sample(logits, action, log_prob)
    broken = np.arange(ROWS) == 3
    for found in (value, log_prob):
        np.testing.assert_array_equal(np.isfinite(found), ~broken)
    assert ((action >= 0) & (action < 5)).all()
