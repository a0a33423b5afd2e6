"""Figures that learners report: constants as they were given, rates as they were used."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load

from appo.algorithms.models.build import build_tower
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.offline.config import CloningConfig, MarwilConfig
from appo.algorithms.offline.learner import CloningLearner, MarwilLearner
from appo.algorithms.ops.normalization import Moments
from appo.algorithms.parts.config import network_metrics
from appo.algorithms.parts.learner import ActorCriticLearner, FlatLearner
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.learning.batches import Batch
from appo.algorithms.runtime.memory.learner_state import all_weights, replace_weights, vector_of
from appo.algorithms.runtime.memory.state_files import decode, encode
from tests.unit.apex import test_learner as apex
from tests.unit.appo import batches as appo
from tests.unit.models.cases import config_of, context_of, model_of
from tests.unit.ppo import test_learner as ppo

SIZES: dict[str, Any] = {"rollout": appo.ROLLOUT, "recurrence": 4, "batch_size": appo.ROLLOUT * appo.COLUMNS}


def cloning(kind: type[CloningLearner], config: type[CloningConfig], **flags: Any) -> tuple[FlatLearner, Batch]:
    learner = kind(FlatModule(model_of(appo.SPEC)), context_of(config(input=("x",), **SIZES, **flags), appo.SPEC))
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
    learner = Constants(FlatModule(model_of(appo.SPEC)), context_of(config, appo.SPEC))
    for _ in range(steps):
        learner.step(torch.zeros(1, dtype=torch.bool), {"loss": 1.0, "temperature": 0.2, "clip": 0.1})
        learner._metric_count += 1
    found = learner.metrics()
    assert (found["temperature"], found["clip"], found["learning_rate"], found["skipped"]) == (0.2, 0.1, 3e-4, 0.0)


def test_the_largest_of_all_steps_is_no_mean() -> None:
    learner = Constants(FlatModule(model_of(appo.SPEC)), context_of(CloningConfig(input=("x",), **SIZES), appo.SPEC))
    for _ in range(2):
        for value in (1.0, 8.0, 3.0):
            metrics = {"loss": 1.0, "ratio": value, "ratio_max": value, "reproduction_error": -value}
            learner.step(torch.zeros(1, dtype=torch.bool), metrics)
            learner.count_update()
        found = learner.metrics()
        assert [found[name] for name in ("ratio", "ratio_max", "reproduction_error")] == [4.0, 8.0, -1.0]


@dataclass(frozen=True)
class TwoRates(CloningConfig):
    critic_learning_rate: float = 1e-2


class Twins(ActorCriticLearner):
    """Trains a network of its own, made by the flags of the network, and moves a target network half way after it."""

    def __init__(self, flat: FlatModule, context: Context) -> None:
        super().__init__(flat, context)
        self.critic = build_tower(context.model, context.spec.observations)
        self.trained = self.add_network("critic", self.critic, rate="critic_learning_rate")
        self.target = self.keep_network("target", copy.deepcopy(self.critic))

    def learn(self, batch: Batch, progress: float) -> Iterator[None]:
        """Make one step of both networks."""
        self.follow(progress)
        _, value = self.unroll(batch)
        noise = torch.randn(value.shape, generator=self.device_generator)
        seen = self.model.scaled({key: x.flatten(0, 1) for key, x in batch.obs.items()})
        features, _ = self.critic.step(seen, batch.first.flatten(), torch.zeros(batch.first.numel(), 0))
        self.trained.descend((features.mean(-1) - noise.flatten()).square().mean(), batch.valid)
        self.target.flat.lerp_(self.trained.flat.flat, 0.5)
        self.descend(batch, value.square().mean(), {})
        yield


def twins_of(**flags: Any) -> Twins:
    config = TwoRates(input=("x",), **SIZES, **flags)
    flat = FlatModule(model_of(appo.SPEC))
    return Twins(flat, context_of(config, appo.SPEC, config_of(use_rnn=False)))


def test_a_network_of_a_learner_follows_its_own_rate_and_reports() -> None:
    learner = twins_of(lr_schedule="linear", learning_rate=1e-3)
    batch = appo.batch_of(learner.model)
    for progress in (0.0, 0.25):
        list(learner.learn(batch, progress))
    found = learner.metrics()
    assert (found["learning_rate"], found["critic_learning_rate"]) == (7.5e-4, 7.5e-3)
    assert found["critic_grad_norm"] > 0
    assert network_metrics("critic").keys() < found.keys()
    learner.configure(replace(learner.config, lr_schedule="constant", critic_learning_rate=0.5))
    list(learner.learn(batch, 0.5))
    assert learner.metrics()["critic_learning_rate"] == 0.5
    list(learner.learn(replace(batch, valid=torch.zeros_like(batch.valid)), 0.5))
    assert learner.metrics()["skipped_in_a_row"] == 0


def test_networks_of_a_learner_go_on_from_a_checkpoint_bit_by_bit() -> None:
    learner, again = twins_of(), twins_of()
    batch = appo.batch_of(learner.model)
    for _ in range(3):
        list(learner.learn(batch, 0.0))
    state, layout = learner.state(), learner.layout
    assert {name: (x.shape, str(x.dtype)) for name, x in state.vectors.items()} == {
        name: (one.shape, one.dtype) for name, one in layout.vectors.items()
    }
    state.meta.update(env_steps=1, samples=1, discarded=0)  # of the learner worker
    files = encode(state, learner.flat.table)
    saved = load(files["optimizer.safetensors"])
    assert saved["networks.critic.encoder.encoders.0.0.weight"].shape == (16, 5)
    assert saved["critic.exp_avg.encoder.encoders.0.0.weight"].any()
    assert layout.vectors["networks.target.encoder.encoders.0.0.weight"].inherited
    assert not layout.vectors["critic.adam_steps"].inherited
    again.restore(decode(files, learner.flat.table, layout)[0])
    for one in (learner, again):
        list(one.learn(batch, 0.0))
    first, second = learner.state(), again.state()
    assert first.meta == second.meta
    assert all(np.array_equal(first.vectors[name], second.vectors[name]) for name in first.vectors)
    assert not np.array_equal(
        first.vectors["networks.critic.encoder.encoders.0.0.weight"],
        saved["networks.critic.encoder.encoders.0.0.weight"],
    )


def test_weights_of_all_networks_can_be_replaced() -> None:
    learner = twins_of()
    state = learner.state()
    weights = {
        name: np.full(x.shape, i, np.float32)
        for i, (name, x) in enumerate(all_weights(state, learner.flat.table).items())
    }
    assert {"networks.critic.encoder.encoders.0.0.bias", *dict(learner.flat.table)} < weights.keys()
    table = [(name, x.shape) for name, x in weights.items()]
    kept = state.vectors["networks.target.encoder.encoders.0.0.bias"].copy()
    replace_weights(state, vector_of({name: weights[name] for name, _ in learner.flat.table}, learner.flat.table))
    assert np.array_equal(state.vectors["networks.target.encoder.encoders.0.0.bias"], kept)
    replace_weights(state, vector_of(weights, table))
    assert all(np.array_equal(x, weights[name]) for name, x in all_weights(state, learner.flat.table).items())


@pytest.mark.parametrize(
    ("scale", "algo", "normalizes", "warns"),
    [
        (1e-6, of_appo, True, True),
        (1e-6, of_appo, False, True),
        (1e-6, of_ppo, True, False),
        (1e-6, of_ppo, False, True),
        (1.0, of_appo, True, False),
    ],
)
def test_returns_that_hardly_differ_are_named_once(
    scale: float,
    algo: Callable[..., tuple[FlatLearner, Batch]],
    normalizes: bool,
    warns: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    learner, batch = algo(normalize_returns=normalizes)
    learner.context = replace(learner.context, reward_scale=0.01)  # which the named scale replaces
    learner.statistics.returns = Moments(torch.tensor(100.0), torch.tensor(0.0), torch.tensor(100.0 * scale**2))
    learner.statistics.gather = lambda *_: None  # type: ignore[method-assign]
    learner.statistics.apply = lambda: None  # type: ignore[method-assign]
    for _ in range(2):
        list(learner.learn(batch, 0.0))
        assert learner.metrics()
    line = "returns differ by 1.0e-06 only, so little or nothing is learned: give --reward_scale=10000"
    assert caplog.messages == [line] * warns
