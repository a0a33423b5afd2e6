"""BC and MARWIL: losses and gradients against slow ones written from the papers, and what is kept in a state."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from appo.algorithms.models.config import ModelConfig
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.offline.algorithm import MARWIL
from appo.algorithms.offline.config import CLONING_METRICS, MARWIL_METRICS, CloningConfig, MarwilConfig
from appo.algorithms.offline.learner import ADVANTAGE_SQUARE, CloningLearner, MarwilLearner
from appo.algorithms.ppo.config import PPOConfig
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.config import SamplingConfig
from appo.algorithms.runtime.devices import Device
from appo.algorithms.runtime.learning.batches import Batch
from appo.envs.spec import EnvSpec
from appo.utils.errors import UsageError
from tests.unit.appo.batches import ROLLOUT, SPEC, batch_of
from tests.unit.datasets.data import SPEC as DATA_SPEC
from tests.unit.datasets.data import episodes, written
from tests.unit.models.cases import CORES, GAUSSIAN, context_of, env_spec_of, model_of
from tests.unit.ppo import reference
from tests.unit.runtime.worlds import world_of

CASES = [("none", SPEC), ("gru", SPEC), ("none", env_spec_of(*GAUSSIAN))]
FLAGS: dict[str, object] = {"input": ("x",), "rollout": ROLLOUT, "recurrence": 4, "batch_size": 48}


def flat_of(spec: EnvSpec, core: str) -> FlatModule:
    return FlatModule(model_of(spec, normalize_input=False, **CORES[core]))


def batch_for(flat: FlatModule, spec: EnvSpec) -> Batch:
    """Steps as a dataset gives them: nothing is recorded of who acted, and there is nothing in invalid rows."""
    batch = batch_of(flat.module, spec)
    assert (~batch.valid).sum() > 3
    batch.action[~batch.valid] = 0
    return replace(batch, recorded={})


def seen(weights: dict[str, Tensor], batch: Batch, b: int, length: int) -> list[tuple[Tensor, Tensor]]:
    segments = range(ROLLOUT // length)
    return [x for s in segments for x in reference.unroll(weights, batch, s, b, length, length)]


def slow_loss(weights: dict[str, Tensor], batch: Batch, config: MarwilConfig, kind: str, length: int) -> Tensor:
    """Wang et al. 2018, algorithm 1, in float64, a step at a time; the first batch sets c."""
    same = PPOConfig(gamma=config.gamma, gae_lambda=config.gae_lambda)  # all that returns need
    advantage, target = reference.returns(weights, batch, same, length)
    norm = (advantage[batch.valid] ** 2).mean().sqrt()
    loss = torch.zeros((), dtype=torch.float64)
    for b in range(batch.valid.shape[1]):
        for t, (logits, value) in enumerate(seen(weights, batch, b, length)):
            if batch.valid[t, b]:
                log_prob, _ = reference.log_prob_and_entropy(kind, logits, batch.action[t, b])
                weight = (config.beta * advantage[t, b] / norm).exp().clamp(max=config.max_weight)
                loss = loss - weight * log_prob + config.value_loss_coeff * (value - target[t, b]) ** 2
    return loss / batch.valid.sum()


def gradient_of(learner: CloningLearner, batch: Batch) -> tuple[float, Tensor]:
    loss, _, _ = learner.loss(batch)
    learner.optimizer.gradient.zero_()
    loss.backward()
    return float(loss.detach()), learner.optimizer.gradient[: learner.flat.num_parameters].double()


def doubled(flat: FlatModule) -> dict[str, Tensor]:
    return {n: p.detach().double().requires_grad_() for n, p in flat.module.named_parameters()}


def check(found: tuple[float, Tensor], loss: Tensor, weights: dict[str, Tensor]) -> None:
    gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    pairs = zip(gradients, weights.values(), strict=True)
    expected = torch.cat([(torch.zeros_like(w) if g is None else g).flatten() for g, w in pairs])
    assert expected.norm() > 0.05
    assert found[0] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert torch.allclose(found[1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("core", "spec"), CASES)
def test_cloning_maximizes_the_likelihood_of_what_was_done(core: str, spec: EnvSpec) -> None:
    flat = flat_of(spec, core)
    batch, weights = batch_for(flat, spec), doubled(flat)
    kind, length = spec.action.parts[0].kind, 4 if core == "gru" else 1
    loss, agreed = torch.zeros((), dtype=torch.float64), 0
    for b in range(batch.valid.shape[1]):
        for t, (logits, _) in enumerate(seen(weights, batch, b, length)):
            if batch.valid[t, b]:
                loss = loss - reference.log_prob_and_entropy(kind, logits, batch.action[t, b])[0]
                agreed += kind == "categorical" and int(logits.argmax()) == int(batch.action[t, b])
    learner = CloningLearner(flat, context_of(CloningConfig(**FLAGS), spec))
    check(gradient_of(learner, batch), loss / batch.valid.sum(), weights)
    assert float(learner.loss(batch)[2]["agreement"].detach()) == pytest.approx(agreed / int(batch.valid.sum()))


@pytest.mark.parametrize(("core", "spec"), CASES)
@pytest.mark.parametrize("flags", [{}, {"beta": 3.0, "max_weight": 1.5, "gamma": 0.9, "gae_lambda": 0.7}])
def test_marwil_weighs_what_was_done_by_how_it_turned_out(core: str, spec: EnvSpec, flags: dict[str, object]) -> None:
    flat, config = flat_of(spec, core), MarwilConfig(**FLAGS, **flags)
    batch, weights = batch_for(flat, spec), doubled(flat)
    kind, length = spec.action.parts[0].kind, 4 if core == "gru" else 1
    check(
        gradient_of(MarwilLearner(flat, context_of(config, spec)), batch),
        slow_loss(weights, batch, config, kind, length),
        weights,
    )


def test_without_beta_marwil_clones() -> None:
    flat = flat_of(SPEC, "none")
    batch = batch_for(flat, SPEC)
    config = MarwilConfig(**FLAGS, beta=0.0, value_loss_coeff=0.0)
    loss, gradient = gradient_of(MarwilLearner(flat, context_of(config, SPEC)), batch)
    cloned = gradient_of(CloningLearner(flat_of(SPEC, "none"), context_of(CloningConfig(**FLAGS), SPEC)), batch)
    assert loss == pytest.approx(cloned[0])
    assert torch.allclose(gradient, cloned[1], atol=1e-7)


def test_a_learner_steps_once_per_batch_and_reports() -> None:
    for kind, config, metrics in (
        (CloningLearner, CloningConfig(**FLAGS), CLONING_METRICS),
        (MarwilLearner, MarwilConfig(**FLAGS), MARWIL_METRICS),
    ):
        flat = flat_of(SPEC, "none")
        learner, batch = kind(flat, context_of(config, SPEC)), batch_for(flat, SPEC)
        before = flat.flat.clone()
        first = float(learner.loss(batch)[0].detach())
        for _ in range(30):
            assert list(learner.learn(batch, 0.0)) == [None]
        assert (learner.updates, learner.version) == (30, 31)
        assert not torch.equal(before, flat.flat)
        reported = learner.metrics()
        assert reported.keys() == {*metrics, "skipped_in_a_row"}
        assert reported["skipped"] == 0
        assert float(learner.loss(batch)[0].detach()) < first


def test_the_scale_of_advantages_is_part_of_the_state() -> None:
    flat = flat_of(SPEC, "none")
    learner, batch = MarwilLearner(flat, context_of(MarwilConfig(**FLAGS), SPEC)), batch_for(flat, SPEC)
    norms = []
    for scale in (1.0, 10.0):
        learner.loss(replace(batch, reward=scale * batch.reward))
        norms.append(float(learner.further[ADVANTAGE_SQUARE]))
    advantages = []
    for scale in (1.0, 10.0):
        again = MarwilLearner(flat_of(SPEC, "none"), context_of(MarwilConfig(**FLAGS), SPEC))
        again.loss(replace(batch, reward=scale * batch.reward))
        advantages.append(float(again.further[ADVANTAGE_SQUARE]))
    assert norms[0] == advantages[0]
    assert norms[1] == pytest.approx(0.99 * advantages[0] + 0.01 * advantages[1])
    other = MarwilLearner(flat_of(SPEC, "none"), context_of(MarwilConfig(**FLAGS), SPEC))
    other.restore(learner.state())
    assert float(other.further[ADVANTAGE_SQUARE]) == norms[1]


def test_flags_that_name_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^--input is required: a dataset to learn from; appo record writes some$"):
        CloningConfig().check()


@pytest.mark.parametrize(("scale", "clip", "expected"), [(1.0, 0.0, None), (0.5, 0.0, None), (2.0, 9.0, 9.0)])
def test_rewards_are_scaled_and_clipped_as_those_that_are_played(
    tmp_path: Path, scale: float, clip: float, expected: float | None
) -> None:
    """Rewards of episode n are 10 n + t, see `data.episode`; all steps of the datasets are in one batch."""
    written(tmp_path / "set")
    flags = MarwilConfig(input=(str(tmp_path / "set"),), rollout=4, batch_size=4 * 6)
    world = world_of(DATA_SPEC)
    context = Context(DATA_SPEC, flags, ModelConfig(), "fp32", "cpu", reward_scale=scale, reward_clip=clip)
    source = MARWIL().make_source(context, world.trajectories, SamplingConfig(), Device())
    assert list(source.fill(1)) == []
    batch = source.take()
    assert batch is not None
    rewards = sorted(batch.reward[batch.valid].tolist())
    every = sorted(scale * float(reward) for one in episodes() for reward in one.reward)
    assert rewards == [min(reward, expected or reward) for reward in every]
