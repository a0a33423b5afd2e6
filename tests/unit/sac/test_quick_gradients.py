"""The gradients of SAC without a graph: the same steps as torch's, where they stand for them, and where not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from appo.algorithms.models.config import ModelConfig
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.devices import Device
from appo.algorithms.sac.algorithm import SAC
from appo.algorithms.sac.config import SACConfig
from appo.algorithms.sac.learner import SACLearner
from appo.algorithms.sac.quick_gradients import QuickGradients, quick_gradients
from appo.envs.spec import ActionPart, EnvSpec
from tests.unit.models.cases import config_of, env_spec_of
from tests.unit.sac.test_learner import SPEC as TWO_PARTS
from tests.unit.sac.test_learner import batch_of, learn, learner_of

SPEC = env_spec_of(ActionPart("tanh_gaussian", 3))
UPDATES = 20
RATES = {"learning_rate": 1e-3, "critic_learning_rate": 1e-3}


def model_of(**flags: Any) -> ModelConfig:
    usual = {"use_rnn": False, "normalize_input": False, "encoder_mlp_layers": (8, 6), "nonlinearity": "relu"}
    return config_of(**(usual | {"adaptive_stddev": True} | flags))


def pair_of(model: ModelConfig | None = None, **flags: Any) -> tuple[SACLearner, SACLearner]:
    """Learners from the same weights: with the twin and without."""
    quick, exact = (learner_of(SPEC, model or model_of(), **(RATES | flags)) for _ in range(2))
    quick.gradients = quick_gradients(quick)
    assert isinstance(quick.gradients, QuickGradients)
    quick.gradients._check.is_due()  # or the first step would be torch's
    return quick, exact


def same(one: SACLearner, other: SACLearner) -> None:
    found, exact = one.state(), other.state()
    assert found.meta.keys() == exact.meta.keys()
    assert found.meta["generator"] == exact.meta["generator"]
    assert found.vectors.keys() == exact.vectors.keys()
    for name, vector in exact.vectors.items():
        np.testing.assert_allclose(found.vectors[name], vector, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("flags", "model"),
    [
        ({}, {}),
        ({"num_critics": 1, "learn_temperature": False, "temperature": 0.3}, {"nonlinearity": "tanh"}),
        ({"num_critics": 3, "prioritized_replay": True, "priority_beta": 0.7}, {"nonlinearity": "elu"}),
        ({"max_grad_norm": 0.1}, {"encoder_mlp_layers": ()}),
        ({}, {"normalize_input": True, "initial_stddev": 7.3}),  # some deviations beyond their limit
    ],
)
def test_its_steps_are_those_of_torch_also_after_a_change_of_both(flags: dict[str, Any], model: dict[str, Any]) -> None:
    quick, exact = pair_of(model_of(**model), **flags)
    for seed in range(UPDATES):
        batch = batch_of(SPEC, seed=seed)
        torch.testing.assert_close(learn(quick, batch), learn(exact, batch), rtol=1e-4, atol=1e-4)
        if seed == UPDATES // 2:
            state, other = quick.state(), exact.state()
            quick.restore(other)
            exact.restore(state)
    same(quick, exact)
    assert quick.gradients is not None
    assert quick.metrics() == pytest.approx(exact.metrics(), rel=1e-3, abs=1e-4)


def test_a_step_that_is_not_finite_changes_what_it_changes_with_torch() -> None:
    quick, exact = pair_of()
    batch = batch_of(SPEC)
    batch.reward[0, 1] = torch.nan
    assert torch.equal(learn(quick, batch).isnan(), learn(exact, batch).isnan())
    same(quick, exact)
    assert exact.critics.optimizer.skipped_in_a_row == quick.critics.optimizer.skipped_in_a_row == 1


def test_batches_of_other_sizes_have_passes_of_their_own() -> None:
    quick, exact = pair_of()
    for columns in (16, 5, 16):
        batch = batch_of(SPEC, seed=columns).columns(slice(0, columns))
        for learner in (quick, exact):
            learn(learner, batch)
    same(quick, exact)


def test_it_retires_where_a_loss_is_another_one(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """After the second comparison in a row; both steps were those of the loss."""
    quick, exact = pair_of()
    quick.gradients = quick_gradients(quick)
    for learner in (quick, exact):
        usual = learner.differentiate

        def doubled(*arguments: Any, learner: SACLearner = learner, usual: Any = usual) -> Any:
            found = usual(*arguments)
            learner.optimizer.gradient.mul_(2.0)
            return found

        monkeypatch.setattr(learner, "differentiate", doubled)
    for seed in range(2):
        assert quick.gradients is not None
        for learner in (quick, exact):
            learn(learner, batch_of(SPEC, seed=seed))
    assert quick.gradients is None
    assert torch.equal(quick.flat.flat, exact.flat.flat)
    assert "the loss is another one than sac/quick_gradients.py computes" in caplog.text


class Cautious(SACLearner):
    """Its targets are lower."""

    def target(self, *arguments: Any) -> Tensor:
        """Return the usual targets minus 1."""
        return super().target(*arguments) - 1.0


@pytest.mark.parametrize(
    ("spec", "flags"),
    [
        (TWO_PARTS, {}),
        (SPEC, {"layer_norm": True}),
        (SPEC, {"adaptive_stddev": False}),
        (SPEC, {"encoder_subtype": "mlp_residual", "encoder_mlp_layers": (8, 8)}),
        (env_spec_of(ActionPart("tanh_gaussian", 3), a=SPEC.observations["obs"], b=SPEC.observations["obs"]), {}),
    ],
)
def test_what_it_does_not_know_is_torchs(spec: EnvSpec, flags: dict[str, Any]) -> None:
    assert quick_gradients(learner_of(spec, model_of(**flags))) is None


def test_a_run_has_it_and_a_subclass_has_not() -> None:
    context = Context(SPEC, SACConfig(), model_of(), "fp32", "cpu")
    learner = SAC().make_learner(context, SAC().make_model(context), Device())
    assert isinstance(learner, SACLearner)
    assert isinstance(learner.gradients, QuickGradients)
    assert quick_gradients(Cautious(learner.flat, replace(context))) is None
