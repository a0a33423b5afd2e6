"""The update of small Q-networks without torch: the same steps as torch's, where it stands for them, and where not."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from appo.algorithms.apex.algorithm import APEX
from appo.algorithms.apex.config import ApexConfig
from appo.algorithms.apex.learner import ApexLearner
from appo.algorithms.apex.numpy_learner import NumpyUpdate, numpy_update
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.models.q_network import build_q_network
from appo.algorithms.parts.learner import Metrics
from appo.algorithms.parts.twin_check import COMPARE_EVERY
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.devices import Device
from appo.algorithms.runtime.learning.batches import Batch
from appo.envs.spec import EnvSpec, ObservationSpec
from tests.unit.apex.test_learner import BRANCHES, MASKED, SIZE, SPEC, batch_of, learn
from tests.unit.models.cases import CATEGORICAL, config_of, context_of, env_spec_of

UPDATES = 12
SEVERAL = env_spec_of(*CATEGORICAL, a=ObservationSpec((4,), "float32"), b=ObservationSpec((2, 3), "float32"))


def pair_of(
    spec: EnvSpec = SPEC, kind: type[ApexLearner] = ApexLearner, **flags: Any
) -> tuple[ApexLearner, ApexLearner]:
    """Learners from the same weights: with the twin, if there is one, and without."""
    of_model = {name: flags.pop(name) for name in ("nonlinearity", "encoder_mlp_layers") if name in flags}
    normalize = bool(flags.pop("normalize_input", False))
    config = ApexConfig(rollout=4, batch_size=SIZE, learning_rate=1e-2, target_update_interval=3, **flags)
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        shape = config_of(use_rnn=False, normalize_input=normalize, **of_model)
        model = build_q_network(shape, spec, dueling=config.dueling)
        with torch.no_grad():
            model.q_head.weight.mul_(100.0)
        made.append(kind(FlatModule(model), context_of(config, spec)))
    quick, exact = made
    return quick.accelerate(numpy_update), exact


def with_invalid(batch: Batch) -> Batch:
    valid = batch.valid.clone()
    valid[0, ::5] = False
    return replace(batch, valid=valid)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"double_q": False, "dueling": False},
        {"dueling": False, "huber_loss": False, "max_grad_norm": 0.0},
        {"double_q": False, "nonlinearity": "relu", "encoder_mlp_layers": (7, 6)},
        {"nonlinearity": "tanh", "encoder_mlp_layers": ()},
        {"normalize_input": True},
        {"spec": SEVERAL},
    ],
)
def test_its_steps_are_those_of_torch(flags: dict[str, Any]) -> None:
    quick, exact = pair_of(**flags)
    assert isinstance(quick.quick, NumpyUpdate)
    quick.quick._check.is_due()  # or the first step would be torch's
    for seed in range(UPDATES):
        batch = with_invalid(batch_of(flags.get("spec", SPEC), seed=seed))
        torch.testing.assert_close(learn(quick, batch), learn(exact, batch), rtol=1e-4, atol=1e-5)
    assert quick.updates == exact.updates == UPDATES
    torch.testing.assert_close(quick.flat.flat, exact.flat.flat, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(quick.target.flat, exact.target.flat, rtol=1e-3, atol=1e-4)
    ours, theirs = quick.metrics(), exact.metrics()
    assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def with_reward(batch: Batch, place: int, reward: float) -> Batch:
    changed = batch.reward.clone()
    changed[0, place] = reward
    return replace(batch, reward=changed)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_rewards_without_measure_do_what_they_do_with_torch(reward: float) -> None:
    """A step that is not finite is skipped; one that is only huge is clipped."""
    quick, exact = pair_of()
    assert isinstance(quick.quick, NumpyUpdate)
    quick.quick._check.is_due()
    batch = with_reward(batch_of(), 3, reward)
    torch.testing.assert_close(learn(quick, batch), learn(exact, batch), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(quick.flat.flat, exact.flat.flat, rtol=1e-3, atol=1e-4)
    assert quick.metrics()["skipped"] == exact.metrics()["skipped"] == float(abs(reward) != 1e30)


def test_what_invalid_steps_hold_has_no_influence() -> None:
    quick, other = pair_of()[0], pair_of()[0]
    batch = with_invalid(batch_of())
    for learner, given in ((quick, batch), (other, with_reward(batch, 5, float("nan")))):
        assert isinstance(learner.quick, NumpyUpdate)
        learner.quick.differentiate(given, 0.5)
    assert torch.equal(quick.optimizer.gradient, other.optimizer.gradient)


@pytest.mark.parametrize(
    ("spec", "flags"),
    [
        (BRANCHES, {}),
        (SPEC, {"cql_alpha": 0.5}),
        (SPEC, {"value_rescaling": True}),
        (SPEC, {"batch_replay": True}),
        (SPEC, {"encoder_mlp_layers": (2000, 2000)}),
    ],
)
def test_what_it_does_not_know_is_torchs(spec: EnvSpec, flags: dict[str, Any]) -> None:
    quick, _ = pair_of(spec, **flags)
    assert quick.quick is None


@pytest.mark.parametrize(("spec", "stands"), [(SPEC, True), (MASKED, False)])
def test_a_run_has_it_unless_there_are_masks(spec: EnvSpec, stands: bool) -> None:
    context = Context(spec, ApexConfig(rollout=4, batch_size=SIZE), config_of(use_rnn=False), "fp32", "cpu")
    learner = APEX().make_learner(context, APEX().make_model(context), Device())
    assert isinstance(learner, ApexLearner)
    assert (learner.quick is not None) == stands


def test_flags_that_change_while_it_learns_decide_anew() -> None:
    learner, _ = pair_of()
    learner.configure(replace(learner.config, cql_alpha=1.0))
    assert learner.quick is None
    learner.configure(replace(learner.config, cql_alpha=0.0))
    assert learner.quick is not None


def test_it_retires_where_the_loss_is_another_one(caplog: pytest.LogCaptureFixture) -> None:
    """After the second comparison in a row; both steps were those of the loss."""
    quick, exact = pair_of(max_grad_norm=0.0)
    for learner in (quick, exact):
        usual = learner.loss

        def doubled(batch: Batch, beta: float, usual: Any = usual) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss, error, metrics = usual(batch, beta)
            return 2 * loss, error, metrics

        learner.loss = doubled  # type: ignore[method-assign]
    for seed in range(2):
        assert quick.quick is not None
        learn(quick, batch_of(seed=seed))
        learn(exact, batch_of(seed=seed))
    assert quick.quick is None
    assert torch.equal(quick.flat.flat, exact.flat.flat)
    assert "updates run in torch: the loss is another one than apex/numpy_learner.py computes" in caplog.text


def test_it_stays_where_the_loss_is_the_same() -> None:
    quick, _ = pair_of()
    for seed in range(COMPARE_EVERY + 2):
        learn(quick, batch_of(seed=seed))
    assert quick.quick is not None


class Halved(ApexLearner):
    """Its loss is half of the usual one, from its second step on, as an annealed term would be."""

    def loss(self, batch: Batch, beta: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the usual figures with another loss."""
        loss, error, metrics = super().loss(batch, beta)
        return (0.5 if self.updates else 1.0) * loss, error, metrics


class Shifted(ApexLearner):
    """Its targets are higher."""

    def _target(self, batch: Batch, value: Tensor) -> Tensor:
        return super()._target(batch, value) + 1.0


class Decayed(ApexLearner):
    """Its gradient has a term beside that of the loss."""

    def differentiate(self, batch: Batch, beta: float) -> tuple[Tensor, Metrics]:
        """Add the weights to the gradient."""
        found = super().differentiate(batch, beta)
        self.optimizer.gradient.add_(0.1 * self.flat.flat[: self.flat.num_parameters])
        return found


class Fixed(ApexLearner):
    """Exploits no importance weights."""

    def beta(self, progress: float) -> float:
        """Return 0."""
        return 0.0


@pytest.mark.parametrize("kind", [Halved, Shifted, Decayed, Fixed])
def test_a_subclass_learns_by_what_it_computes(kind: type[ApexLearner]) -> None:
    quick, exact = pair_of(kind=kind, max_grad_norm=0.0)
    for seed in range(3):
        learn(quick, batch_of(seed=seed))
        learn(exact, batch_of(seed=seed))
    assert quick.quick is None
    assert torch.equal(quick.flat.flat, exact.flat.flat)
    usual, _ = pair_of(max_grad_norm=0.0)
    for seed in range(3):
        learn(usual, batch_of(seed=seed))
    assert not torch.allclose(usual.flat.flat, exact.flat.flat, atol=1e-6)
    quick.configure(replace(quick.config, learning_rate=0.5))
    assert quick.quick is None
