"""Adaptive rates follow the steps that were made."""

import math

import pytest
import torch

from appo.algorithms.appo.learner import APPOLearner
from appo.algorithms.appo.numpy_learner import numpy_update
from appo.algorithms.parts.captured_update import WARM_UPS, CapturedUpdate
from appo.algorithms.parts.config import OptimizerConfig
from appo.algorithms.parts.optimizer import FlatAdam
from tests.unit.appo.batches import batch_of, learn, learner_of
from tests.unit.models.cases import CORES
from tests.unit.runtime.devices import RecordingDevice

RATE = 1e-3


@pytest.mark.parametrize(
    ("schedule", "steps", "factor"),
    [
        ("kl_adaptive_epoch", [(0.3, 1.0, True), (0.0, 0.0, False)], 1 / 1.5),  # a mean of two would be near enough
        ("kl_adaptive_epoch", [(0.1, 1.0, True), (0.0, math.inf, True)], 1.0),
        ("kl_adaptive_epoch", [(0.3, math.nan, True), (math.nan, 1.0, False)], 1.0),
        ("kl_adaptive_epoch", [(0.01, 1.0, True), (0.01, 1.0, True)], 1.5),
        ("kl_adaptive_minibatch", [(0.0, 0.0, False)], 1.0),
        ("kl_adaptive_minibatch", [(0.0, math.inf, True)], 1.0),
        ("kl_adaptive_minibatch", [(0.3, 1.0, True)], 1 / 1.5),
    ],
)
def test_a_skipped_step_adapts_no_rate(schedule: str, steps: list[tuple[float, float, bool]], factor: float) -> None:
    config = OptimizerConfig(learning_rate=RATE, lr_schedule=schedule, lr_schedule_kl_threshold=0.1)
    optimizer = FlatAdam(torch.zeros(3), config)
    for _ in range(2):  # an epoch begins anew
        optimizer.learning_rate.fill_(RATE)
        for number, (kl, gradient, learnable) in enumerate(steps, start=1):
            optimizer.gradient.fill_(gradient)
            optimizer.step(torch.tensor(learnable), torch.tensor(True), torch.tensor(kl))
            optimizer.adapt(end_of_epoch=number == len(steps))
        assert float(optimizer.learning_rate) == pytest.approx(RATE * factor)


def test_a_step_without_valid_steps_leaves_weights_and_the_count_of_lost_steps_alone() -> None:
    optimizer, yes = FlatAdam(torch.zeros(3), OptimizerConfig(learning_rate=RATE)), torch.tensor(True)
    kl = torch.zeros(())
    optimizer.gradient.fill_(1.0)
    optimizer.step(yes, yes, kl)
    weights = optimizer.weights.clone()
    found = []
    for gradient, learnable, is_finite in (
        (0.0, False, True),  # momentum moves nothing
        (math.nan, True, True),
        (1.0, True, False),
        (0.0, False, True),
        (math.inf, False, True),
    ):
        optimizer.gradient.fill_(gradient)
        _, lost = optimizer.step(torch.tensor(learnable), torch.tensor(is_finite), kl)
        found.append((float(lost), float(optimizer.skipped_in_a_row)))
    assert found == [(0, 0), (1, 1), (1, 2), (0, 2), (1, 3)]
    assert torch.equal(optimizer.weights, weights)
    optimizer.gradient.fill_(1.0)
    optimizer.step(yes, yes, kl)
    assert float(optimizer.skipped_in_a_row) == 0


def in_numpy(learner: APPOLearner) -> APPOLearner:
    learner.quick = numpy_update(learner)
    assert learner.quick is not None
    return learner


def captured(learner: APPOLearner) -> APPOLearner:
    learner.quick = CapturedUpdate(learner.update, RecordingDevice())
    return learner


@pytest.mark.parametrize("path", [lambda learner: learner, in_numpy, captured], ids=["torch", "numpy", "captured"])
@pytest.mark.parametrize("schedule", ["kl_adaptive_epoch", "kl_adaptive_minibatch"])
def test_a_batch_without_a_valid_step_adapts_no_rate(path: object, schedule: str) -> None:
    learner = learner_of(model=CORES["none"], learning_rate=RATE, lr_schedule=schedule, ppo_epochs=2)
    assert callable(path)
    path(learner)
    batch = batch_of(learner.model, noise=0.0)
    batch.valid[:] = False
    for _ in range(WARM_UPS):
        learn(learner, batch)
    found = learner.metrics()
    assert (found["skipped"], found["skipped_in_a_row"]) == (0.0, 0.0)  # no number was lost, so nothing rolls back
    assert learner.state().meta["learning_rate"] == pytest.approx(RATE)
