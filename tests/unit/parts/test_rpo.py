"""RPO: the loss by hand with the noise that was drawn; what the noise must not change; and its random numbers."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch import distributions as reference

from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.appo.learner import APPOLearner
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.ops import losses
from appo.algorithms.ops.distributions import ActionDistribution, Parts, noise_of_means
from appo.algorithms.parts.captured_update import WARM_UPS, CapturedUpdate
from appo.algorithms.parts.learner import NOISE
from appo.algorithms.parts.verify import VerifyingLearner
from appo.algorithms.ppo.algorithm import PPO
from appo.algorithms.ppo.learner import PPOLearner
from appo.algorithms.ppo.streaming import StreamingLearner
from appo.algorithms.runtime.learning.batches import Batch
from appo.envs.spec import ActionPart, EnvSpec
from appo.utils.errors import UsageError
from tests.unit.appo import batches
from tests.unit.appo.batches import COLUMNS, ROLLOUT, batch_of
from tests.unit.appo.test_learner import assert_same_state, through_json
from tests.unit.models.cases import CATEGORICAL, CORES, GAUSSIAN, context_of, env_spec_of, model_of
from tests.unit.ppo import test_learner as ppo
from tests.unit.runtime.devices import RecordingDevice

ALPHA = 0.5
PARTS = (ActionPart("gaussian", 2), ActionPart("categorical", 3), ActionPart("tanh_gaussian", 1))
SPEC = env_spec_of(*PARTS)
FROZEN = {"learning_rate": 0.0, "max_grad_norm": 0.0}


class Noting(APPOLearner):
    """Notes the minibatch of every update."""

    def update(self, batch: Batch) -> Tensor:
        self.seen = [*getattr(self, "seen", []), batch]
        return super().update(batch)


def noting_of(spec: EnvSpec = SPEC, *, core: str = "none", **flags: object) -> Noting:
    flat = FlatModule(model_of(spec, normalize_input=False, **CORES[core]))
    return Noting(flat, context_of(batches.learning(normalize_returns=False, **flags), spec))


class NotingPPO(PPOLearner):
    """Notes the minibatch of every update."""

    def differentiate(self, minibatch: Batch) -> dict[str, Tensor]:
        self.seen = [*getattr(self, "seen", []), minibatch]
        return super().differentiate(minibatch)


def ppo_of(spec: EnvSpec = SPEC, **flags: object) -> NotingPPO:
    return NotingPPO(FlatModule(model_of(spec, use_rnn=False)), context_of(ppo.learning(**flags), spec))


def log_prob_by_hand(logits: Tensor, noise: Tensor, action: Tensor) -> Tensor:
    """Log-probability [N] in float64 of actions [N, 4] of `PARTS`, the means moved by noise [N, 2 and 1]."""
    logits, action, noise = logits.double(), action.double(), noise.double()
    plain = reference.Normal(logits[:, 0:2] + noise[:, 0:2], logits[:, 2:4].exp())
    before_tanh = reference.Normal(logits[:, 7:8] + noise[:, 2:3], logits[:, 8:9].exp())
    squashed = reference.TransformedDistribution(before_tanh, [reference.TanhTransform()])
    return (
        plain.log_prob(action[:, 0:2]).sum(1)
        + reference.Categorical(logits=logits[:, 4:7]).log_prob(action[:, 2])
        + squashed.log_prob(action[:, 3:4].tanh())[:, 0]
    )


def limited(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(math.log(losses.RATIO_MIN), math.log(losses.RATIO_MAX)).exp()


def normalized(advantage: Tensor) -> Tensor:
    advantage = advantage.double()
    return (advantage - advantage.mean()) / advantage.std(correction=0)


def assert_is_uniform_noise(noise: Tensor) -> Tensor:
    """Check that logits [*, 9] of `PARTS` are moved at the means alone; return the noise [N, 3] of the means."""
    noise = noise.flatten(0, 1)
    means = [0, 1, 7]
    assert not noise[:, [i for i in range(9) if i not in means]].any()
    assert 0.9 * ALPHA < noise[:, means].abs().max() <= ALPHA
    return noise[:, means]


def test_noise_is_uniform_and_independent() -> None:
    parts: Parts = (("categorical", 2), ("gaussian", 2), ("bernoulli", 1), ("bins", 2))
    noise = noise_of_means(parts, (100, 50), ALPHA, torch.Generator().manual_seed(0))
    assert noise.shape == (100, 50, 9)
    assert not noise[..., [0, 1, 4, 5, 6, 7, 8]].any()
    means = noise[..., 2:4].flatten(0, 1)
    assert means.mean(0).tolist() == pytest.approx([0.0, 0.0], abs=0.02)
    assert means.std(0).tolist() == pytest.approx([ALPHA / math.sqrt(3)] * 2, rel=0.03)
    assert abs(float(means.T.corrcoef()[0, 1])) < 0.05
    shares = [float(((means >= low) & (means < low + 0.25)).float().mean()) for low in (-0.5, -0.25, 0.0, 0.25)]
    assert shares == pytest.approx([0.25] * 4, abs=0.02)


# --- the loss by hand


def test_the_loss_of_appo_is_that_of_means_with_noise() -> None:
    learner = noting_of(rpo_alpha=ALPHA, exploration_loss_coeff=0.01, **FROZEN)
    batch = batch_of(learner.model, SPEC)
    assert batches.learn(learner, batch) == 1
    valid, metrics = batch.valid.flatten(), learner.metrics()
    noise = assert_is_uniform_noise(learner.seen[0].recorded[NOISE])
    plain = noting_of(**FROZEN)
    logits = plain.unroll(batch)[0].logits.detach()
    expected = log_prob_by_hand(logits.flatten(0, 1), noise, batch.action.flatten(0, 1))
    ratio = limited(expected - batch.recorded["log_prob"].flatten())[valid]
    assert metrics["ratio_mean"] == pytest.approx(float(ratio.mean()), rel=1e-4)
    assert metrics["ratio_max"] == pytest.approx(float(ratio.max()), rel=1e-4)

    _, target, exact_metrics = plain.loss(batch)  # noise moves neither targets nor the divergence
    without = {name: float(x.detach()) for name, x in exact_metrics.items()}
    assert torch.equal(learner.loss(learner.seen[0])[1], target)
    assert metrics["kl_divergence"] == pytest.approx(without["kl_divergence"], rel=1e-6)
    assert metrics["advantage_std"] == pytest.approx(without["advantage_std"], rel=1e-6)
    assert abs(metrics["ratio_mean"] - without["ratio_mean"]) > 0.01
    current = ActionDistribution(SPEC.action.parts, logits)
    moved = logits.clone()
    moved[..., [0, 1, 7]] += noise.view(ROLLOUT, COLUMNS, 3)
    entropy = ActionDistribution(SPEC.action.parts, moved).entropy()
    assert metrics["entropy"] == pytest.approx(float(entropy.flatten()[valid].mean()), rel=1e-5)
    assert not torch.allclose(entropy, current.entropy())  # of the squashed part

    exact = limited(current.log_prob(batch.action) - batch.recorded["log_prob"])
    value = plain.model.denormalize_value(plain.unroll(batch)[1].detach())
    advantage = normalized(plain.returns(batch, exact, value).advantage.flatten()[valid])
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 / 1.1, 1.1) * advantage)
    assert metrics["policy_loss"] == pytest.approx(-float(surrogate.mean()), rel=1e-3, abs=1e-5)


def test_the_loss_of_ppo_is_that_of_means_with_noise() -> None:
    learner = ppo_of(rpo_alpha=ALPHA, batch_size=48, num_batches_per_iteration=1, ppo_epochs=2, **FROZEN)
    batch = batch_of(learner.model, SPEC)
    assert ppo.learn(learner, batch) == 2
    first, second = learner.seen
    assert not torch.equal(first.recorded[NOISE], second.recorded[NOISE])
    learner.metrics()
    ratios = []
    for m in (first, second):
        noise, valid = assert_is_uniform_noise(m.recorded[NOISE]), m.valid[0]
        logits = learner.model.act({"obs": m.obs["obs"][0]}, m.first[0], m.rnn_state[0])[0].detach()
        ratio = limited(log_prob_by_hand(logits, noise, m.action[0]) - m.recorded["log_prob"][0])[valid]
        metrics = {name: x.detach() for name, x in learner.differentiate(m).items()}
        plain = learner.loss(replace(m, recorded={name: x for name, x in m.recorded.items() if name != NOISE}))[1]
        assert torch.equal(metrics["kl_divergence"], plain["kl_divergence"])
        advantage = normalized(m.recorded["advantage"][0][valid])
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        assert float(metrics["policy_loss"]) == pytest.approx(-float(surrogate.mean()), rel=1e-3, abs=1e-5)
        ratios.append(float(ratio.mean()))
        assert float(metrics["ratio_mean"]) == pytest.approx(ratios[-1], rel=1e-4)
    assert ratios[0] != ratios[1]


# --- all ways of an update


@pytest.mark.parametrize("core", ["none", "gru"])
def test_microbatches_of_appo_have_the_noise_of_the_whole(core: str) -> None:
    found = []
    for size in (0, 2 * ROLLOUT):
        learner = noting_of(core=core, rpo_alpha=ALPHA, microbatch_size=size, **FROZEN)
        assert batches.learn(learner, batch_of(learner.model, SPEC)) == 1
        found.append((learner.optimizer.gradient.clone(), learner.metrics()))
    (gradient, metrics), (of_parts, metrics_of_parts) = found
    assert torch.allclose(of_parts, gradient, rtol=1e-5, atol=1e-6)
    assert metrics_of_parts == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    assert gradient.abs().max() > 1e-3


def test_microbatches_of_ppo_have_the_noise_of_the_whole() -> None:
    whole, parts = (ppo_of(rpo_alpha=ALPHA, microbatch_size=size, **FROZEN) for size in (0, 4))
    minibatch = whole.minibatch(whole.estimate(batch_of(whole.model, SPEC)), torch.arange(16))
    metrics = [learner.differentiate(minibatch) for learner in (whole, parts)]
    torch.testing.assert_close(metrics[1], metrics[0], rtol=1e-5, atol=1e-6)
    assert torch.allclose(parts.optimizer.gradient, whole.optimizer.gradient, rtol=1e-5, atol=1e-6)


def test_captured_updates_get_new_noise_every_time() -> None:
    """What is captured reads the noise as a part of the minibatch."""
    flags = {"batch_size": 3 * ROLLOUT, "ppo_epochs": 3, "rpo_alpha": ALPHA}
    plain, captured, device = noting_of(**flags), noting_of(**flags), RecordingDevice()
    captured.quick = CapturedUpdate(captured.update, device)
    for learner in (plain, captured):
        assert batches.learn(learner, batch_of(learner.model, SPEC)) == 6
    assert device.replays == 6 - WARM_UPS
    assert torch.equal(captured.flat.flat, plain.flat.flat)


# --- random numbers


@pytest.mark.parametrize("kind", ["APPO", "PPO", "PPO that streams"])
def test_noise_follows_from_the_seed_and_goes_on_where_it_was(kind: str) -> None:
    def make(alpha: float = ALPHA) -> APPOLearner | StreamingLearner | PPOLearner:
        if kind == "APPO":
            return noting_of(rpo_alpha=alpha)
        if kind == "PPO":
            return ppo_of(rpo_alpha=alpha)
        streamed = {"batch_size": 96, "microbatch_size": 48, "num_batches_per_iteration": 1, "ppo_epochs": 1}
        return StreamingLearner(ppo_of(rpo_alpha=alpha, normalize_advantages="running", **streamed))

    first, again, without = make(), make(), make(0.0)
    found = [batch_of(model_of(SPEC, use_rnn=False), SPEC, seed=seed) for seed in range(4)]

    def train(learner: APPOLearner | StreamingLearner | PPOLearner, part: list[Batch]) -> None:
        for batch in part:
            for _ in learner.learn(batch, 0.0):
                pass

    for learner in (first, again, without):
        train(learner, found[:2])
    assert_same_state(again.state(), first.state())
    assert (without.state().weights != first.state().weights).any()
    restored = make()
    restored.restore(through_json(first.state()))
    for learner in (first, restored):
        train(learner, found[2:])
    assert_same_state(restored.state(), first.state())


def test_without_the_flag_no_random_number_is_drawn_and_nothing_added() -> None:
    learner, of_ppo = noting_of(batch_size=ROLLOUT, shuffle_minibatches=False), ppo_of(shuffle_minibatches=False)
    for one in (learner, of_ppo):
        before = one.generator.get_state()
        for _ in one.learn(batch_of(one.model, SPEC), 0.0):
            pass
        assert torch.equal(one.generator.get_state(), before)
    assert all(NOISE not in batch.recorded for batch in learner.seen)
    assert all(NOISE not in m.recorded for m in of_ppo.seen)


# --- what stays as it is


def test_what_was_acted_is_compared_without_noise() -> None:
    learner = noting_of(rpo_alpha=ALPHA)
    batch = batch_of(learner.model, SPEC, noise=0.0)
    verifying = VerifyingLearner(learner, SPEC, max_policy_lag=100)
    batch.recorded["value"] = learner.model.denormalize_value(learner.unroll(batch)[1][:-1].detach())
    for _ in verifying.learn(batch, 0.0):
        pass
    assert verifying.compared == int(batch.valid.sum())
    assert verifying.largest < 1e-5


@pytest.mark.parametrize("algorithm", [APPO(), PPO()])
@pytest.mark.parametrize("parts", [CATEGORICAL, (ActionPart("bins", 5),)])
def test_where_no_action_is_continuous_it_is_refused(algorithm: APPO | PPO, parts: tuple[ActionPart, ...]) -> None:
    flags = replace(algorithm.flags(), rpo_alpha=ALPHA)
    with pytest.raises(UsageError, match=r"--rpo_alpha=0.5: no action is continuous, or --continuous_as_bins makes"):
        algorithm.check(flags, env_spec_of(*parts))
    algorithm.check(replace(flags, rpo_alpha=0.0), env_spec_of(*parts))
    algorithm.check(flags, env_spec_of(*GAUSSIAN))
