"""The gradient without torch is torch's gradient, with equal metrics, whatever the network and the flags."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.parts.learner import NOISE
from appo.algorithms.parts.twin_check import COMPARE_EVERY
from appo.algorithms.ppo.algorithm import PPO
from appo.algorithms.ppo.learner import PPOLearner
from appo.algorithms.ppo.numpy_learner import NumpyGradient, numpy_gradient
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.devices import Device
from appo.algorithms.runtime.learning.batches import Batch
from appo.envs.spec import ActionPart, EnvSpec, ObservationSpec
from tests.unit.appo.batches import SPEC, batch_of, clone
from tests.unit.models.cases import CORES, GAUSSIAN, MIXED, config_of, context_of, env_spec_of, model_of
from tests.unit.ppo.test_learner import STEPS, learn, learning, parameters

SAME_STEP = replace(SPEC, same_step=True)
SEVERAL = env_spec_of(a=ObservationSpec((4,), "float32"), b=ObservationSpec((2, 3), "uint8"))
PARTS = (ActionPart("gaussian", 2), ActionPart("categorical", 3), ActionPart("gaussian", 1))
PLAIN: dict[str, Any] = {"use_rnn": False, "encoder_mlp_layers": (16, 12)}
FLAGS: dict[str, Any] = {"learning_rate": 1e-2, "exploration_loss_coeff": 0.1, "normalize_returns": True}

MODELS: dict[str, tuple[EnvSpec, dict[str, Any]]] = {
    "choices": (SPEC, {}),
    "same step": (SAME_STEP, {}),
    "tanh, towers apart": (SPEC, {"nonlinearity": "tanh", "actor_critic_share_weights": False}),
    "free deviations": (env_spec_of(*GAUSSIAN), {"adaptive_stddev": False}),
    "squashed": (env_spec_of(ActionPart("tanh_gaussian", 2)), {}),
    "several observations": (SEVERAL, {"actor_critic_share_weights": False}),
    "several observations, one tower": (SEVERAL, {}),
    "several parts": (env_spec_of(*PARTS), {"adaptive_stddev": False}),
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "advantages by running moments": {"normalize_advantages": "running"},
    "advantages as they are": {"normalize_advantages": "off"},
    "tight clips": {"ppo_clip_value": 0.01, "ppo_clip_ratio": 0.02, "value_loss_coeff": 1.5},
    "returns as they are": {"normalize_returns": False},
    "no exploration": {"exploration_loss_coeff": 0.0},
}


def pair_of(
    spec: EnvSpec = SPEC, model: dict[str, Any] | None = None, kind: type[PPOLearner] = PPOLearner, **flags: Any
) -> tuple[PPOLearner, PPOLearner]:
    """Learners from equal weights: by torch, and with the twin if there is one."""
    made = []
    for _ in range(2):
        flat = FlatModule(model_of(spec, seed=0, **{**PLAIN, **(model or {})}))
        made.append(kind(flat, context_of(learning(**{**FLAGS, **flags}), spec)))
        made[-1].model.set_return_statistics(0.3, 1.7)
    exact, quick = made
    return exact, quick.accelerate(numpy_gradient)


def minibatch_of(learner: PPOLearner, spec: EnvSpec, seed: int = 0) -> Batch:
    """Half of the steps, from a policy that is far enough away for clips."""
    batch = learner.estimate(batch_of(learner.model, spec, noise=0.5, seed=seed))
    order = torch.randperm(STEPS, generator=torch.Generator().manual_seed(seed))
    return learner.minibatch(batch, order[: STEPS // 2])


def assert_same(exact: PPOLearner, quick: PPOLearner, minibatch: Batch) -> None:
    assert isinstance(quick.quick, NumpyGradient)
    expected = {name: float(x.detach()) for name, x in exact.differentiate(minibatch).items()}
    found = quick.quick.differentiate(minibatch)
    assert (*found,) == (*expected,)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    scale = float(exact.optimizer.gradient.abs().max())
    assert scale > 1e-4
    torch.testing.assert_close(
        quick.optimizer.gradient, exact.optimizer.gradient, rtol=1e-4, atol=2e-6 * max(1.0, scale)
    )


@pytest.mark.parametrize("case", MODELS)
def test_every_network_gets_the_gradient_of_torch(case: str) -> None:
    spec, model = MODELS[case]
    exact, quick = pair_of(spec, model)
    assert_same(exact, quick, minibatch_of(exact, spec))


@pytest.mark.parametrize("case", OBJECTIVES)
def test_every_objective_gets_the_gradient_of_torch(case: str) -> None:
    exact, quick = pair_of(**OBJECTIVES[case])
    minibatch = minibatch_of(exact, SPEC, seed=1)
    assert not minibatch.valid.all()
    assert_same(exact, quick, minibatch)


@pytest.mark.parametrize("case", ["free deviations", "several parts", "squashed"])
def test_noise_of_means_gets_the_gradient_of_torch(case: str) -> None:
    spec, model = MODELS[case]
    exact, quick = pair_of(spec, model, rpo_alpha=0.5)
    minibatch = minibatch_of(exact, spec)
    assert minibatch.recorded[NOISE].abs().max() > 0.4
    assert_same(exact, quick, minibatch)


@pytest.mark.parametrize("flags", [{}, {"target_kl": 1e-3}, {"lr_schedule": "kl_adaptive_epoch"}])
def test_whole_iterations_are_learned_alike(flags: dict[str, Any]) -> None:
    exact, quick = pair_of(ppo_epochs=4, **flags)
    for seed in range(2):
        batch = batch_of(exact.model, seed=seed)
        updates = learn(exact, clone(batch))
        assert learn(quick, batch) == updates
        assert (updates < 12) == ("target_kl" in flags)
    assert quick.quick is not None  # the comparison has found no difference
    torch.testing.assert_close(parameters(quick), parameters(exact), rtol=1e-3, atol=1e-3)
    assert quick.metrics() == pytest.approx(exact.metrics(), rel=1e-2, abs=1e-3)


def test_what_invalid_steps_hold_has_no_influence() -> None:
    learners = [pair_of()[1] for _ in range(2)]
    for learner, garbage in zip(learners, (0.0, float("nan")), strict=True):
        minibatch = minibatch_of(learner, SPEC)
        for field in minibatch.recorded.values():
            field[~minibatch.valid] = garbage
        assert isinstance(learner.quick, NumpyGradient)
        learner.quick.differentiate(minibatch)
    first, second = (learner.optimizer.gradient for learner in learners)
    assert first.abs().max() > 1e-4
    assert torch.equal(first, second)


@pytest.mark.parametrize("emptied", ["nothing is valid", "an advantage is not a number"])
def test_harmful_steps_are_skipped(emptied: str) -> None:
    _, quick = pair_of()
    minibatch = minibatch_of(quick, SPEC)
    if emptied == "nothing is valid":
        minibatch.valid[:] = False
    else:
        minibatch.recorded["advantage"][minibatch.valid] = float("nan")
    before = parameters(quick)
    assert isinstance(quick.quick, NumpyGradient)
    for _ in range(2):  # the first is compared
        quick.descend_by(minibatch.valid, quick.quick(minibatch))
    assert torch.equal(parameters(quick), before)
    assert quick.metrics()["skipped"] == (emptied == "an advantage is not a number")
    assert quick.quick is not None


class Halved(PPOLearner):
    """Its loss is half of PPO's."""

    def loss(self, minibatch: Batch, moments: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return half of the loss."""
        loss, metrics = super().loss(minibatch, moments)
        return 0.5 * loss, metrics


def test_a_subclass_learns_by_its_own_loss() -> None:
    exact, quick = pair_of(kind=Halved, max_grad_norm=0.0)
    assert quick.quick is None
    batch = batch_of(exact.model)
    assert learn(exact, clone(batch)) == learn(quick, batch)
    assert torch.equal(parameters(quick), parameters(exact))


def test_it_retires_where_the_loss_is_another_one(caplog: pytest.LogCaptureFixture) -> None:
    exact, quick = pair_of(kind=Halved, max_grad_norm=0.0)
    quick.quick = NumpyGradient(quick)
    batch = batch_of(exact.model)
    assert learn(exact, clone(batch)) == learn(quick, batch) == 6
    assert quick.quick is None
    assert torch.equal(parameters(quick), parameters(exact))  # both compared steps were those of the loss
    assert "updates run in torch: the loss is another one than ppo/numpy_learner.py computes" in caplog.text


def test_it_stays_where_the_loss_is_the_same() -> None:
    _, quick = pair_of()
    twin, minibatch = quick.quick, minibatch_of(quick, SPEC)
    assert isinstance(twin, NumpyGradient)
    for _ in range(COMPARE_EVERY + 2):
        twin(minibatch)
    assert quick.quick is twin


@pytest.mark.parametrize(
    ("spec", "model", "flags"),
    [
        (SPEC, {**CORES["gru"], "use_rnn": True}, {}),
        (env_spec_of(*MIXED), {}, {}),
        (SPEC, {}, {"microbatch_size": 4}),
        (SPEC, {"encoder_mlp_layers": (2000, 2000)}, {}),
    ],
)
def test_what_it_does_not_know_is_left_to_torch(spec: EnvSpec, model: dict[str, Any], flags: dict[str, Any]) -> None:
    assert pair_of(spec, model, **flags)[1].quick is None


@pytest.mark.parametrize(("spec", "stands"), [(SPEC, True), (replace(SPEC, action_mask=3), False)])
def test_a_run_has_it_unless_there_are_masks(spec: EnvSpec, stands: bool) -> None:
    context = Context(spec, learning(), config_of(use_rnn=False), "fp32", "cpu")
    learner = PPO().make_learner(context, PPO().make_model(context), Device())
    assert isinstance(learner, PPOLearner)
    assert (learner.quick is not None) == stands
    learner.configure(replace(learner.config, microbatch_size=4))
    assert learner.quick is None
