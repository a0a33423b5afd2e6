"""Figures that learners report: constants as they were given, rates as they were used."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.offline.config import CloningConfig, MarwilConfig
from appo.algorithms.offline.learner import CloningLearner, MarwilLearner
from appo.algorithms.parts.learner import ActorCriticLearner, FlatLearner
from appo.algorithms.runtime.learning.batches import Batch
from tests.unit.apex import test_learner as apex
from tests.unit.appo import batches as appo
from tests.unit.models.cases import model_of
from tests.unit.ppo import test_learner as ppo

SIZES: dict[str, Any] = {"rollout": appo.ROLLOUT, "recurrence": 4, "batch_size": appo.ROLLOUT * appo.COLUMNS}


def cloning(kind: type[CloningLearner], config: type[CloningConfig], **flags: Any) -> tuple[FlatLearner, Batch]:
    learner = kind(FlatModule(model_of(appo.SPEC)), appo.SPEC, config(input=("x",), **SIZES, **flags), 3)
    return learner, appo.batch_of(learner.model)


def of_appo(**flags: Any) -> tuple[FlatLearner, Batch]:
    learner = appo.learner_of(**flags)
    return learner, appo.batch_of(learner.model)


def of_ppo(**flags: Any) -> tuple[FlatLearner, Batch]:
    learner = ppo.learner_of(ppo_epochs=2, **flags)
    return learner, appo.batch_of(learner.model)


LEARNERS: dict[str, Callable[..., tuple[FlatLearner, Batch]]] = {
    "APPO": of_appo,
    "PPO": of_ppo,
    "APEX": lambda **flags: (apex.learner_of(**flags), apex.batch_of()),
    "BC": lambda **flags: cloning(CloningLearner, CloningConfig, **flags),
    "MARWIL": lambda **flags: cloning(MarwilLearner, MarwilConfig, **flags),
}


@pytest.mark.parametrize("rate", [1e-3, 7e-4, 1.2345678901234e-4, 0.0])
@pytest.mark.parametrize("algo", LEARNERS)
def test_a_constant_rate_is_reported_as_it_was_given(algo: str, rate: float) -> None:
    learner, batch = LEARNERS[algo](learning_rate=rate)
    for steps in (1, 3, 7):
        for _ in range(steps):
            list(learner.learn(batch.copy(), 0.0))
        assert learner.metrics()["learning_rate"] == rate


@pytest.mark.parametrize("algo", LEARNERS)
def test_the_rate_of_a_schedule_is_that_of_the_last_step(algo: str) -> None:
    learner, batch = LEARNERS[algo](learning_rate=1e-2, lr_schedule="linear")
    for progress in (0.0, 0.1, 0.25):
        list(learner.learn(batch.copy(), progress))
    assert learner.metrics()["learning_rate"] == 0.0075
    list(learner.learn(batch.copy(), 0.5))
    assert learner.metrics()["learning_rate"] == 0.005


def test_a_rate_that_adapts_is_reported_as_it_was_used() -> None:
    """Not as it is after the step, which the KL divergence has changed."""
    learner, batch = of_appo(learning_rate=1e-2, lr_schedule="kl_adaptive_minibatch", lr_schedule_kl_threshold=1e9)
    used = [1e-2, 1e-2]  # a tiny divergence raises it, to its limit at once
    for rate in used:
        list(learner.learn(batch.copy(), 0.0))
        assert learner.metrics()["learning_rate"] == rate
    learner, batch = of_appo(learning_rate=1e-3, lr_schedule="kl_adaptive_minibatch", lr_schedule_kl_threshold=1e9)
    for rate in (1e-3, 1.5e-3, 2.25e-3):
        list(learner.learn(batch.copy(), 0.0))
        assert learner.metrics()["learning_rate"] == pytest.approx(rate, rel=1e-6)


class Constants(ActorCriticLearner):
    """Reports two constants beside its loss."""

    def learn(self, batch: Batch, progress: float) -> Iterator[None]:
        """Make one step."""
        _, value = self.unroll(batch)
        self.descend(batch, value.square().mean(), {"temperature": torch.tensor(0.2), "clip": torch.tensor(0.1)})
        yield


@pytest.mark.parametrize("steps", [1, 3, 1000])
def test_means_of_constants_are_these_constants(steps: int) -> None:
    config = CloningConfig(input=("x",), **SIZES, learning_rate=3e-4)
    learner = Constants(FlatModule(model_of(appo.SPEC)), appo.SPEC, config, 3)
    for _ in range(steps):
        learner.step(torch.zeros(1, dtype=torch.bool), {"loss": 1.0, "temperature": 0.2, "clip": 0.1})
        learner._metric_count += 1
    found = learner.metrics()
    assert (found["temperature"], found["clip"], found["learning_rate"], found["skipped"]) == (0.2, 0.1, 3e-4, 1.0)
