"""The update without torch is the update: same gradient, targets and metrics, whatever the network and the flags."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from appo.algorithms.appo.learner import APPOLearner, Whole
from appo.algorithms.appo.numpy_learner import NumpyUpdate, numpy_update
from appo.algorithms.ops.returns import Returns
from appo.algorithms.parts.learner import NOISE
from appo.algorithms.runtime.learning.batches import Batch
from appo.envs.spec import ActionPart, EnvSpec, ObservationSpec
from appo.utils.logging import SHOWN
from tests.unit.appo.batches import SPEC, batch_of, clone, learn, learner_of, parameters
from tests.unit.models.cases import CORES, GAUSSIAN, MIXED, env_spec_of

SAME_STEP = replace(SPEC, same_step=True)
SEVERAL = env_spec_of(a=ObservationSpec((4,), "float32"), b=ObservationSpec((2, 3), "uint8"))
PARTS = (ActionPart("gaussian", 2), ActionPart("categorical", 3), ActionPart("gaussian", 1))
PLAIN = {"use_rnn": False, "encoder_mlp_layers": (16, 12)}
FLAGS: dict[str, object] = {"learning_rate": 1e-2, "exploration_loss_coeff": 0.1, "max_grad_norm": 0.0}
FREE = {"adaptive_stddev": False}

MODELS: dict[str, tuple[EnvSpec, dict[str, object]]] = {
    "choices": (SPEC, {}),
    "same step": (SAME_STEP, {}),
    "tanh": (SPEC, {"nonlinearity": "tanh"}),
    "relu": (SPEC, {"nonlinearity": "relu"}),
    "towers apart": (SPEC, {"actor_critic_share_weights": False}),
    "one layer": (SPEC, {"encoder_mlp_layers": (16,)}),
    "gaussian": (env_spec_of(*GAUSSIAN), {}),
    "free deviations": (env_spec_of(*GAUSSIAN), FREE),
    "squashed": (env_spec_of(ActionPart("tanh_gaussian", 2)), {}),
    "several observations": (SEVERAL, {"actor_critic_share_weights": False}),
    "several observations, one tower": (SEVERAL, {}),
    "several parts": (env_spec_of(*PARTS), {}),
    "several parts, free deviations": (env_spec_of(*PARTS), FREE),
}
OBJECTIVES: dict[str, dict[str, object]] = {
    "as it is": {},
    "gae": {"with_vtrace": False},
    "short traces": {"vtrace_lambda": 0.8, "vtrace_rho": 0.9, "vtrace_c": 0.7, "gamma": 0.9},
    "no value clip": {"ppo_clip_value": 0.0},
    "tight clips": {"ppo_clip_value": 0.01, "ppo_clip_ratio": 0.02},
    "returns as they are": {"normalize_returns": False},
    "no exploration": {"exploration_loss_coeff": 0.0},
    "gradient clipped": {"max_grad_norm": 0.1},
}


def pair_of(spec: EnvSpec, model: dict[str, object], flags: dict[str, object]) -> tuple[APPOLearner, APPOLearner]:
    """A learner as it is, and one with the update without torch."""
    expected, found = (learner_of(spec, model={**PLAIN, **model}, **{**FLAGS, **flags}) for _ in range(2))
    for learner in (expected, found):
        learner.model.set_return_statistics(0.3, 1.7)
    found.quick = numpy_update(found)
    assert found.quick is not None
    return expected, found


def assert_same_step(expected: APPOLearner, found: APPOLearner, batch: Batch) -> None:
    assert isinstance(found.quick, NumpyUpdate)
    target, metrics = expected.differentiate(clone(batch))
    found_target, found_metrics = found.quick.differentiate(batch)
    assert torch.allclose(found_target, target, rtol=1e-5, atol=1e-5)
    scale = float(expected.optimizer.gradient.abs().max())
    assert scale > 1e-4
    assert torch.allclose(found.optimizer.gradient, expected.optimizer.gradient, rtol=1e-4, atol=2e-6 * max(1.0, scale))
    assert found_metrics == pytest.approx({name: float(x.detach()) for name, x in metrics.items()}, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("noise", [0.0, 0.3, 4.0])
@pytest.mark.parametrize("case", MODELS)
def test_every_network_gets_the_gradient_of_torch(case: str, noise: float) -> None:
    spec, model = MODELS[case]
    expected, found = pair_of(spec, model, {})
    assert_same_step(expected, found, batch_of(expected.model, spec, noise=noise))


@pytest.mark.parametrize("spec", [SPEC, SAME_STEP], ids=["next step", "same step"])
@pytest.mark.parametrize("case", OBJECTIVES)
def test_every_objective_gets_the_gradient_of_torch(case: str, spec: EnvSpec) -> None:
    expected, found = pair_of(spec, {}, OBJECTIVES[case])
    assert_same_step(expected, found, batch_of(expected.model, spec, noise=0.5, seed=1))


@pytest.mark.parametrize("case", ["as it is", "tight clips"])
def test_steps_of_datasets_get_the_gradient_of_torch(case: str) -> None:
    expected, found = pair_of(SPEC, {}, OBJECTIVES[case])
    batch = batch_of(expected.model, noise=0.5, seed=1)
    read = torch.zeros_like(batch.valid)
    read[:, 3:] = True
    batch.recorded["value"][read] = 1e3
    assert_same_step(expected, found, replace(batch, recorded=batch.recorded | {"is_read": read}))


@pytest.mark.parametrize("case", ["gaussian", "several parts, free deviations", "squashed"])
def test_noise_of_means_gets_the_gradient_of_torch(case: str) -> None:
    spec, model = MODELS[case]
    expected, found = pair_of(spec, model, {"rpo_alpha": 0.5})
    batch = batch_of(expected.model, spec, noise=0.5)
    noise = expected.draw_noise(*batch.valid.shape)
    assert noise.abs().max() > 0.4
    assert_same_step(expected, found, replace(batch, recorded=batch.recorded | {NOISE: noise}))


def test_scheduled_coefficients_are_those_of_torch() -> None:
    schedules = {"ppo_clip_schedule": "linear", "exploration_loss_schedule": "linear", "ppo_clip_ratio": 0.1}
    expected, found = pair_of(SPEC, {}, schedules)
    constant = pair_of(SPEC, {}, {"ppo_clip_ratio": 0.025, "exploration_loss_coeff": 0.025})[0]
    batch = batch_of(expected.model, noise=0.5, seed=1)
    for learner in (expected, found):
        learner.follow(0.75)
    assert_same_step(expected, found, batch)
    assert_same_step(constant, found, batch)


def test_whole_batches_are_learned_alike() -> None:
    flags = {"batch_size": 16, "ppo_epochs": 2, "num_batches_per_iteration": 3}
    expected, found = pair_of(SPEC, {}, flags)
    batch = batch_of(expected.model)
    assert learn(expected, clone(batch)) == learn(found, batch) == 6
    assert isinstance(found.quick, NumpyUpdate)  # it has compared itself and found no difference
    assert torch.allclose(parameters(found), parameters(expected), atol=1e-3)
    assert expected.metrics() == pytest.approx(found.metrics(), rel=1e-3, abs=1e-4)


def test_what_invalid_steps_hold_has_no_influence() -> None:
    expected, found = pair_of(SPEC, {}, {})
    batch = batch_of(expected.model)
    poisoned = clone(batch)
    invalid = ~batch.valid
    assert invalid.any()
    for name in ("reward", "recorded.log_prob", "recorded.value"):
        poisoned.named()[name][invalid] = float("nan")
    assert_same_step(expected, found, batch)
    other = pair_of(SPEC, {}, {})[1]
    assert isinstance(other.quick, NumpyUpdate)
    other.quick.differentiate(poisoned)
    assert torch.equal(other.optimizer.gradient, found.optimizer.gradient)


@pytest.mark.parametrize("emptied", ["nothing is valid", "a reward is not a number"])
def test_harmful_steps_are_skipped(emptied: str) -> None:
    found = pair_of(SPEC, {}, {})[1]
    batch = batch_of(found.model)
    if emptied == "nothing is valid":
        batch.valid[:] = False
    else:
        batch.reward[batch.valid] = float("nan")
    before = parameters(found)
    assert isinstance(found.quick, NumpyUpdate)
    for _ in range(2):  # the first is compared
        found.quick(batch)
    assert torch.equal(parameters(found), before)
    found._metric_count = 2
    assert found.metrics()["skipped"] == (emptied == "a reward is not a number")
    assert found.quick is not None


class WithWeightPenalty(APPOLearner):
    """A loss that somebody has changed."""

    def loss(
        self, batch: Batch, whole: Whole | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        loss, target, metrics = super().loss(batch, whole)
        return loss + 0.1 * sum(p.square().sum() for p in self.model.parameters()), target, metrics


class WithMetric(APPOLearner):
    """A metric that the twin does not compute."""

    def loss(
        self, batch: Batch, whole: Whole | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        loss, target, metrics = super().loss(batch, whole)
        return loss, target, {**metrics, "size": torch.tensor(7.0)}


def test_a_twin_that_lacks_a_metric_retires_at_once(caplog: pytest.LogCaptureFixture) -> None:
    plain = pair_of(SPEC, PLAIN, {})[1]
    found = WithMetric(plain.flat, plain.context)
    found.quick = NumpyUpdate(found)
    learn(found, batch_of(found.model))
    assert found.quick is None
    assert found.metrics()["size"] == 7.0
    (record,) = caplog.records
    assert record.getMessage() == "updates run in torch: appo/numpy_learner.py does not compute size"
    assert vars(record).items() >= SHOWN.items()


def test_one_difference_alone_can_be_chance(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    found = pair_of(SPEC, {}, {})[1]
    batch, twin, by_torch = batch_of(found.model), found.quick, found.differentiate
    assert isinstance(twin, NumpyUpdate)
    compared: list[int] = []

    def differentiate(batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        compared.append(found.updates)
        result = by_torch(batch)
        found.optimizer.gradient.mul_(1.01 if found.updates == 0 else 1.0)
        return result

    monkeypatch.setattr(found, "differentiate", differentiate)
    for found.updates in range(4):
        twin(clone(batch))
    assert compared == [0, 1]
    assert found.quick is twin
    assert not caplog.records


def test_a_changed_loss_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    expected, found = pair_of(SPEC, PLAIN, {})
    expected, found = (WithWeightPenalty(x.flat, x.context) for x in (expected, found))
    found.quick = NumpyUpdate(found)
    batch = batch_of(expected.model)
    for learner in (expected, found) * 2:
        learn(learner, clone(batch))
    assert found.quick is None
    assert torch.equal(parameters(found), parameters(expected))
    assert "updates run in torch: the loss is another one than appo/numpy_learner.py computes" in caplog.text


@pytest.mark.parametrize(
    ("spec", "model", "flags"),
    [
        (SPEC, CORES["gru"], {}),
        (env_spec_of(*MIXED), PLAIN, {}),
        (SPEC, PLAIN, {"kl_loss_coeff": 0.1}),
        (SPEC, PLAIN, {"microbatch_size": 8}),
        (SPEC, PLAIN, {"exploration_loss": "symmetric_kl", "exploration_loss_coeff": 0.1}),
    ],
)
def test_what_it_does_not_know_is_left_to_torch(
    spec: EnvSpec, model: dict[str, object], flags: dict[str, object]
) -> None:
    assert numpy_update(learner_of(spec, model=model, **flags)) is None


class OtherSurrogate(APPOLearner):
    """Its surrogate is twice as large."""

    def policy_loss(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Return the surrogate of every step."""
        return 2 * super().policy_loss(ratio, advantage)


class OtherReturns(APPOLearner):
    """Its targets are higher."""

    def returns(self, batch: Batch, ratio: Tensor, value: Tensor) -> Returns:
        """Return advantages and targets."""
        found = super().returns(batch, ratio, value)
        return found._replace(target=found.target + 1.0)


@pytest.mark.parametrize("kind", [OtherSurrogate, OtherReturns])
def test_a_subclass_has_none_whoever_makes_it(kind: type[APPOLearner]) -> None:
    usual = learner_of(SPEC, model=PLAIN, **FLAGS)
    assert numpy_update(usual) is not None
    own = kind(usual.flat, usual.context).accelerate(numpy_update)
    assert own.quick is None
    own.configure(replace(own.config, learning_rate=1e-3))
    assert own.quick is None
