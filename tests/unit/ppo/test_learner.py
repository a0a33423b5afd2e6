"""The PPO learner: against a slow reference, what it counts and uses, modes, and its state."""

import math
from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.parts.statistics import RETURN_MEMORY_SAMPLES
from appo.algorithms.ppo.config import METRICS, PPOConfig
from appo.algorithms.ppo.learner import ADVANTAGES, PPOLearner
from appo.algorithms.ppo.numpy_learner import numpy_gradient
from appo.algorithms.runtime.learning.batches import Batch
from appo.envs.spec import MASK_KEY, ActionPart, EnvSpec, ObservationSpec
from appo.utils.errors import UsageError
from tests.unit.appo.batches import COLUMNS, ROLLOUT, SPEC, batch_of, same
from tests.unit.appo.test_learner import absent, assert_same_state, through_json
from tests.unit.models.cases import CATEGORICAL, CORES, GAUSSIAN, IMAGE, MIXED, SEED, context_of, env_spec_of, model_of
from tests.unit.ppo import reference

SAME_STEP = replace(SPEC, same_step=True)
STEPS = ROLLOUT * COLUMNS


def learning(**flags: object) -> PPOConfig:
    values = {"rollout": ROLLOUT, "recurrence": 4, "batch_size": STEPS // 3, "num_batches_per_iteration": 3, **flags}
    return PPOConfig(**{"ppo_epochs": 2, "learning_rate": 1e-3, **values})  # type: ignore[arg-type]


def learner_of(
    spec: EnvSpec = SPEC, *, core: str = "none", seed: int = 0, quick: bool = False, **flags: object
) -> PPOLearner:
    """Learners of one seed start from the same weights; a quick one has a twin, if there is one."""
    normalize = bool(flags.pop("normalize_input", False))
    flat = FlatModule(model_of(spec, seed=seed, normalize_input=normalize, **CORES[core]))
    learner = PPOLearner(flat, context_of(learning(**flags), spec))
    return learner.accelerate(numpy_gradient) if quick else learner


def learn(learner: PPOLearner, batch: Batch, progress: float = 0.0) -> int:
    """Train on a batch; how many updates there were."""
    before = learner.updates
    for _ in learner.learn(batch, progress):
        pass
    return learner.updates - before


def parameters(learner: PPOLearner) -> Tensor:
    return learner.flat.flat[: learner.flat.num_parameters].clone()


def spoil(batch: Batch) -> None:
    """Fill invalid steps with garbage."""
    invalid = ~batch.valid
    for name in ("reward", "recorded.log_prob", "recorded.value"):
        batch.named()[name][invalid] = math.nan
    batch.action[invalid] = math.nan if batch.action.is_floating_point() else 99
    batch.terminated[invalid] = True


# --- the slow reference


@pytest.mark.parametrize(
    ("core", "spec", "flags"),
    [
        ("none", SPEC, {}),
        ("none", SPEC, {"batch_size": 4, "num_batches_per_iteration": 12, "ppo_epochs": 1}),
        ("none", SPEC, {"recompute_advantages": True, "gae_lambda": 0.7, "gamma": 0.9}),
        ("none", SPEC, {"normalize_advantages": "running", "exploration_loss_coeff": 0.1}),
        ("none", SPEC, {"normalize_advantages": "off", "ppo_clip_value": 0.2, "value_loss_coeff": 1.5}),
        ("none", SPEC, {"shuffle_minibatches": False, "max_grad_norm": 0.05}),
        ("none", SAME_STEP, {}),
        ("none", env_spec_of(*GAUSSIAN), {"exploration_loss_coeff": 0.01}),
        ("gru", SPEC, {}),
        ("gru", SPEC, {"recurrence": 0, "recompute_advantages": True}),
        ("gru", SPEC, {"recurrence": 2, "batch_size": 4, "num_batches_per_iteration": 12, "ppo_epochs": 1}),
        ("gru", SAME_STEP, {"recurrence": 1}),
        ("gru", env_spec_of(*GAUSSIAN), {"normalize_advantages": "off"}),
    ],
)
def test_an_iteration_is_that_of_the_paper(core: str, spec: EnvSpec, flags: dict[str, object]) -> None:
    # With a small epsilon Adam's step would be the sign of gradients that float32 hardly tells from 0.
    learner = learner_of(spec, core=core, adam_eps=1e-3, **flags)
    config, length = learner.config, learner.config.segment_steps if core == "gru" else 1
    # Ratios stay within the limits of `clamped_ratio`, which the paper does not have.
    batch = batch_of(learner.model, spec, noise=0.3 if spec.action.parts == CATEGORICAL else 0.05)
    if core == "gru":  # stored every 4 steps; any state will do where another length is asked for
        states = torch.randn(ROLLOUT // length, COLUMNS, learner.model.rnn_state_size)
        batch = batch if length == 4 else replace(batch, rnn_state=states)
    if not spec.same_step:
        assert (~batch.valid).sum() > 3
    generator, count = torch.Generator().manual_seed(SEED), STEPS // length
    orders = [
        torch.randperm(count, generator=generator) if config.shuffle_minibatches else torch.arange(count)
        for _ in range(config.ppo_epochs)
    ]
    weights = dict(learner.model.named_parameters())
    before = parameters(learner)
    expected = reference.learned(weights, batch, config, spec.action.parts[0].kind, orders, length)
    spoil(batch)
    assert learn(learner, batch) == config.ppo_epochs * config.num_batches_per_iteration
    found = dict(learner.model.named_parameters())
    difference = max(float((found[name] - x).detach().abs().max()) for name, x in expected.items())
    assert difference < 1e-6
    assert (parameters(learner) - before).abs().max() > 1e-3


# --- counts and what is used


class Recording(PPOLearner):
    """Notes which steps every update was made of, by the number that is recorded as their value."""

    def differentiate(self, minibatch: Batch) -> dict[str, Tensor]:
        self.shapes = [*getattr(self, "shapes", []), tuple(minibatch.valid.shape)]
        self.seen = [*getattr(self, "seen", []), minibatch.recorded["value"][minibatch.valid].tolist()]
        return super().differentiate(minibatch)


def recording_of(core: str = "none", **flags: object) -> tuple[Recording, Batch]:
    flat = FlatModule(model_of(SPEC, **CORES[core]))
    learner = Recording(flat, context_of(learning(**flags), SPEC))
    batch = batch_of(learner.model)
    batch.recorded["value"] = torch.arange(1.0, STEPS + 1).view(ROLLOUT, COLUMNS)
    return learner, batch


@pytest.mark.parametrize(
    ("core", "size", "shape"),
    [("none", 4, (1, 4)), ("none", 16, (1, 16)), ("none", 48, (1, 48)), ("gru", 8, (4, 2)), ("gru", 24, (4, 6))],
)
@pytest.mark.parametrize("epochs", [1, 3])
def test_every_valid_step_is_used_once_per_epoch(core: str, size: int, shape: tuple[int, int], epochs: int) -> None:
    learner, batch = recording_of(core, batch_size=size, num_batches_per_iteration=STEPS // size, ppo_epochs=epochs)
    assert learn(learner, batch) == epochs * STEPS // size == len(learner.seen)
    assert set(learner.shapes) == {shape}
    valid = batch.recorded["value"][batch.valid].tolist()
    per_epoch = STEPS // size
    for epoch in range(epochs):
        used = [step for seen in learner.seen[epoch * per_epoch : (epoch + 1) * per_epoch] for step in seen]
        assert sorted(used) == sorted(valid)


def test_segments_are_consecutive_steps_of_a_column() -> None:
    learner, batch = recording_of("gru", batch_size=8, num_batches_per_iteration=6, ppo_epochs=1)
    batch = replace(batch, valid=torch.ones_like(batch.valid))
    learn(learner, batch)
    for seen in learner.seen:
        steps = torch.tensor(seen).view(4, 2) - 1
        assert torch.equal(steps.diff(dim=0), torch.full((3, 2), float(COLUMNS)))
        assert set((steps[0] // COLUMNS).tolist()) <= {0.0, 4.0}


def test_minibatches_are_drawn_anew_in_every_epoch_and_iteration() -> None:
    learner, batch = recording_of(ppo_epochs=4)
    learn(learner, batch)
    learn(learner, batch)
    assert len(Counter(frozenset(seen) for seen in learner.seen)) == 24
    same_order, batch = recording_of(ppo_epochs=2, shuffle_minibatches=False)
    learn(same_order, batch)
    assert same_order.seen[:3] == same_order.seen[3:]


def test_the_version_is_raised_once_per_iteration() -> None:
    learner = learner_of(ppo_epochs=2)
    batch = batch_of(learner.model)
    seen = [(learner.version, learner.updates) for _ in learner.learn(batch, 0.0)]
    assert seen == [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (2, 6)]


@pytest.mark.parametrize("spec", [SPEC, env_spec_of(obs=IMAGE)])
@pytest.mark.parametrize("core", ["none", "gru"])
def test_a_batch_is_the_same_after_training(spec: EnvSpec, core: str) -> None:
    learner = learner_of(spec, core=core, normalize_input=True)
    batch = batch_of(learner.model, spec)
    before = batch.copy()
    learn(learner, batch)
    assert same(batch, before)


@pytest.mark.parametrize("parts", [CATEGORICAL, GAUSSIAN, MIXED])
@pytest.mark.parametrize("core", ["none", "lstm2"])
def test_whatever_invalid_steps_hold_changes_no_bit(parts: tuple[ActionPart, ...], core: str) -> None:
    spec = env_spec_of(*parts)
    flags = {"normalize_input": True, "normalize_returns": True, "ppo_clip_value": 0.2}
    clean, dirty = (learner_of(spec, core=core, **flags) for _ in range(2))
    batch = batch_of(clean.model, spec)
    absent(batch, 0, 3, ROLLOUT)
    absent(batch, 2, 0, ROLLOUT)
    garbage = batch.copy()
    spoil(garbage)
    for learner, one in ((clean, batch), (dirty, garbage)):
        assert learn(learner, one) == 6
    assert_same_state(clean.state(), dirty.state())
    assert np.isfinite(clean.state().weights).all()
    assert all(math.isfinite(value) for value in dirty.metrics().values())


@pytest.mark.parametrize("core", ["none", "gru"])
def test_a_mask_is_that_of_the_step(core: str) -> None:
    """Of what is masked out nothing is learned: with one choice left there is no gradient of the policy."""
    spec = replace(SPEC, observations={**SPEC.observations, MASK_KEY: ObservationSpec((4,), "uint8")}, action_mask=4)
    learner = learner_of(spec, core=core, exploration_loss_coeff=1.0, value_loss_coeff=0.0)
    batch = batch_of(learner.model, spec)
    only = torch.zeros(ROLLOUT + 1, COLUMNS, 4, dtype=torch.uint8)
    chosen = torch.randint(0, 4, (ROLLOUT + 1, COLUMNS, 1))
    only.scatter_(2, chosen, 1)
    batch.obs[MASK_KEY] = only
    batch = replace(batch, action=chosen[:-1].to(batch.action.dtype))
    batch.recorded["log_prob"].zero_()
    before = parameters(learner)
    assert learn(learner, batch) == 6
    assert torch.allclose(parameters(learner), before, atol=1e-7)
    assert learner.metrics()["ratio_mean"] == pytest.approx(1.0)


def test_without_a_valid_step_nothing_is_learned() -> None:
    learner = learner_of()
    batch = batch_of(learner.model)
    learn(learner, batch)  # Adam has momentum now
    before, metrics = parameters(learner), learner.metrics()
    assert metrics["skipped"] == 0.0
    learn(learner, replace(batch, valid=torch.zeros_like(batch.valid)))
    assert torch.equal(parameters(learner), before)
    assert learner.metrics()["skipped"] == 0.0  # no number was lost


def test_a_step_that_is_not_finite_is_skipped() -> None:
    learner = learner_of(shuffle_minibatches=False, ppo_epochs=1, normalize_advantages="running")
    batch = batch_of(learner.model)
    batch.valid[:] = True
    batch.recorded["value"][0, 0] = math.nan
    learn(learner, batch)
    assert learner.metrics()["skipped"] == 0.0  # without a clip of values nothing reads them
    learner.configure(replace(learner.config, ppo_clip_value=1.0))
    learn(learner, batch)
    assert learner.metrics()["skipped"] == pytest.approx(1 / 3)
    batch.reward[-1, 0] = math.inf
    learn(learner, batch)
    assert np.isfinite(learner.state().vectors[ADVANTAGES]).all()
    assert np.isfinite(learner.state().weights).all()


# --- advantages


@pytest.mark.parametrize("units", [(0.0, 1.0), (3.0, 20.0)])
def test_advantages_of_a_minibatch_are_normalized_whatever_their_unit(units: tuple[float, float]) -> None:
    learner = learner_of(normalize_advantages="off")
    learner.model.set_return_statistics(*units)
    batch = batch_of(learner.model)
    raw = learner.estimate(batch).recorded["advantage"]
    plain = learner_of(normalize_advantages="off").estimate(batch).recorded["advantage"]
    torch.testing.assert_close(raw * units[1], plain, rtol=1e-4, atol=1e-4)


def test_running_moments_are_those_of_all_estimates() -> None:
    learner = learner_of(normalize_advantages="running", learning_rate=0.0)
    batches = [batch_of(learner.model, seed=seed) for seed in range(3)]
    plain = learner_of(normalize_advantages="off")
    raw = [plain.estimate(batch).recorded["advantage"][batch.valid].double() for batch in batches]
    for batch in batches:
        learn(learner, batch)
    seen = torch.cat(raw)
    count, mean, m2 = learner.state().vectors[ADVANTAGES]
    assert count == len(seen)
    assert mean == pytest.approx(float(seen.mean()), rel=1e-6, abs=1e-9)
    assert m2 / count == pytest.approx(float(seen.var(correction=0)), rel=1e-6)
    batch = learner.estimate(batches[0])
    twice = torch.cat((seen, raw[0]))
    expected = (raw[0] - twice.mean()) / (twice.var(correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(batch.recorded["advantage"][batch.valid].double(), expected, rtol=1e-5, atol=1e-5)


def test_running_moments_forget() -> None:
    learner = learner_of(normalize_advantages="running")
    learner.advantages = replace(learner.advantages, count=torch.tensor(1e9, dtype=torch.float64))
    learner.estimate(batch_of(learner.model))
    assert float(learner.advantages.count) == pytest.approx(RETURN_MEMORY_SAMPLES)


@pytest.mark.parametrize(("recompute", "times"), [(False, 1), (True, 3)])
def test_advantages_are_estimated_once_or_before_every_epoch(recompute: bool, times: int) -> None:
    learner = learner_of(recompute_advantages=recompute, ppo_epochs=3)
    estimated: list[Tensor] = []
    estimate = learner.estimate

    def noting(batch: Batch) -> Batch:
        estimated.append((found := estimate(batch)).recorded["target"])
        return found

    learner.estimate = noting  # type: ignore[method-assign]
    learn(learner, batch_of(learner.model))
    assert len(estimated) == times
    assert not any(torch.equal(a, b) for a, b in pairwise(estimated))


def test_statistics_change_with_the_version_and_not_before() -> None:
    learner = learner_of(normalize_input=True, normalize_returns=True)
    buffers = learner.flat.flat[learner.flat.num_parameters :]
    before = buffers.clone()
    batch = batch_of(learner.model)
    for _ in learner.learn(batch, 0.0):
        assert torch.equal(buffers, before) == (learner.version == 1)
    assert int(learner.statistics.returns.count) == int(batch.valid.sum())


# --- schedules and early ends


def test_linear_schedules_follow_the_budget() -> None:
    schedules = dict.fromkeys(("lr_schedule", "ppo_clip_schedule", "exploration_loss_schedule"), "linear")
    learner = learner_of(**schedules, learning_rate=1e-3, ppo_clip_ratio=0.2, exploration_loss_coeff=0.1)
    batch = batch_of(learner.model)
    for progress, share in ((0.0, 1.0), (0.25, 0.75), (1.3, 0.0)):
        learn(learner, batch, progress)
        assert float(learner.clip_ratio) == pytest.approx(0.2 * share)
        assert float(learner.exploration_coeff) == pytest.approx(0.1 * share)
        assert learner.metrics()["learning_rate"] == pytest.approx(1e-3 * share)
    falling, fixed = learner_of(**schedules, exploration_loss_coeff=0.4), learner_of(exploration_loss_coeff=0.1)
    falling.follow(0.75)
    fixed.clip_ratio.copy_(falling.clip_ratio)
    minibatches = [one.minibatch(one.estimate(batch), torch.arange(STEPS)) for one in (falling, fixed)]
    losses = [float(one.loss(part)[0].detach()) for one, part in zip((falling, fixed), minibatches, strict=True)]
    assert losses[0] == losses[1]
    constant = learner_of(ppo_clip_ratio=0.2)
    learn(constant, batch, 0.9)
    assert float(constant.clip_ratio) == pytest.approx(0.2)


def test_an_iteration_ends_where_the_policy_has_moved_too_far() -> None:
    free = learner_of(learning_rate=0.05, ppo_epochs=4)
    batch = batch_of(free.model, noise=0.0)
    divergences, weights = [], []
    for _ in free.learn(batch, 0.0):
        weights.append(parameters(free))
        divergences += [free.metrics().get("kl_divergence", 0.0)]
    target = 1e-3
    allowed = next(i for i, kl in enumerate(divergences) if kl > 1.5 * target)
    assert 0 < allowed < 12
    bounded = learner_of(learning_rate=0.05, ppo_epochs=4, target_kl=target)
    assert learn(bounded, batch) == allowed
    assert torch.equal(parameters(bounded), weights[allowed - 1])
    assert bounded.version == 2


@pytest.mark.parametrize(
    ("schedule", "relative_kl", "factor"),
    [
        ("kl_adaptive_epoch", 0.4, 1.5),
        ("kl_adaptive_epoch", 1.0, 1.0),
        ("kl_adaptive_epoch", 2.1, 1 / 1.5),
        ("kl_adaptive_minibatch", 0.2, 1.5 * 1.5),  # a step with a divergence of 0, then one with twice the mean
        ("kl_adaptive_minibatch", 2.1, 1.5 * 1 / 1.5),
        ("constant", 2.1, 1.0),
    ],
)
def test_the_rate_adapts_to_an_iteration_that_ends_within_an_epoch(
    schedule: str, relative_kl: float, factor: float
) -> None:
    probe = learner_of()
    batch = batch_of(probe.model, noise=0.0)
    divergences = [probe.metrics()["kl_divergence"] for _ in islice(probe.learn(batch, 0.0), 2)]
    assert 0 <= divergences[0] < 0.01 * divergences[1]
    target, threshold = 0.99 * divergences[1] / 1.5, sum(divergences) / 2 / relative_kl
    learner = learner_of(
        target_kl=target, lr_schedule=schedule, lr_schedule_kl_threshold=threshold, lr_adaptive_min=0.0,
        lr_adaptive_max=1.0,
    )  # fmt: skip
    assert learn(learner, batch) == 1
    assert float(learner.optimizer.learning_rate) == pytest.approx(1e-3 * factor)


def test_metrics_are_means_since_the_last_call() -> None:
    learner = learner_of(learning_rate=0.0)
    assert learner.metrics() == {}
    batch = batch_of(learner.model)
    learn(learner, batch)
    metrics = learner.metrics()
    assert metrics.keys() == {*METRICS, "skipped_in_a_row"}
    policy = learner.model.act(
        {"obs": batch.obs["obs"][:-1].flatten(0, 1)}, batch.first[:-1].flatten(), torch.zeros(48, 0)
    )
    log_p = policy[0].detach().log_softmax(-1).gather(-1, batch.action.flatten(0, 1).long())[:, 0].view(ROLLOUT, -1)
    ratio = (log_p - batch.recorded["log_prob"]).exp()[batch.valid]
    assert metrics["ratio_max"] <= float(ratio.max()) + 1e-5
    whole = learner_of(learning_rate=0.0, batch_size=STEPS, num_batches_per_iteration=1, ppo_epochs=1)
    learn(whole, batch)
    metrics = whole.metrics()
    assert metrics["ratio_mean"] == pytest.approx(float(ratio.mean()), rel=1e-4)
    assert metrics["ratio_max"] == pytest.approx(float(ratio.max()), rel=1e-4)
    assert metrics["kl_divergence"] == pytest.approx(float((ratio - 1 - ratio.log()).mean()), rel=1e-3)
    assert metrics["fraction_clipped"] == pytest.approx(float(((ratio - 1).abs() > 0.2).float().mean()), abs=1e-6)
    target = learner_of().returns(batch).target[batch.valid].double()
    error = target - batch.recorded["value"][batch.valid].double()
    explained = 1 - np.var(error.numpy()) / np.var(target.numpy())
    assert -1 < explained < 1
    assert metrics["explained_variance"] == pytest.approx(explained, rel=1e-4)


# --- state


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize(
    "flags",
    [{}, {"normalize_advantages": "running", "recompute_advantages": True}, {"lr_schedule": "kl_adaptive_epoch"}],
)
def test_a_restored_learner_continues_bit_for_bit(core: str, flags: dict[str, object]) -> None:
    first = learner_of(core=core, normalize_input=True, normalize_returns=True, **flags)
    batches = [batch_of(first.model, seed=seed) for seed in range(4)]
    for batch in batches[:2]:
        learn(first, batch)
    second = learner_of(core=core, seed=9, normalize_input=True, normalize_returns=True, **flags)
    second.restore(through_json(first.state()))
    assert_same_state(first.state(), second.state())
    assert (second.version, second.updates) == (3, 12)
    for batch in batches[2:]:
        learn(first, batch, 0.5)
        learn(second, batch, 0.5)
    assert_same_state(first.state(), second.state())


def test_a_restored_learner_forgets_the_divergence_of_an_epoch_that_it_had_begun() -> None:
    flags = {"lr_schedule": "kl_adaptive_epoch", "lr_schedule_kl_threshold": 0.1, "ppo_epochs": 1}
    learner = learner_of(**flags)
    state = through_json(learner.state())
    next(learner.learn(batch_of(learner.model, noise=3.0), 0.0))
    assert learner.metrics()["kl_divergence"] > 0.6  # more than twice the threshold, over three minibatches
    learner.restore(state)
    learn(learner, batch_of(learner.model, noise=0.0))
    assert float(learner.optimizer.learning_rate) == pytest.approx(1.5e-3)


def test_the_layout_is_that_of_the_state() -> None:
    learner = learner_of(normalize_input=True)
    layout = learner.layout
    assert {name: (v.shape, v.dtype) for name, v in layout.vectors.items()} == {
        name: (array.shape, str(array.dtype)) for name, array in learner.state().vectors.items()
    }


def test_the_state_of_another_model_is_refused() -> None:
    learner = learner_of()
    with pytest.raises(ValueError, match="weights, the model"):
        learner.restore(learner_of(core="gru").state())


# --- flags


@pytest.mark.parametrize(
    ("flags", "core", "message"),
    [
        (
            {"batch_size": 6, "num_batches_per_iteration": 3},
            "none",
            "--batch_size=6 times --num_batches_per_iteration=3 is no multiple of --rollout=8",
        ),
        ({"recurrence": 3}, "none", "--rollout=8 is not a multiple of --recurrence=3"),
        (
            {"batch_size": 4, "recurrence": 0, "num_batches_per_iteration": 4},
            "gru",
            "--batch_size=4 is no multiple of --recurrence=8, the steps of a segment",
        ),
        ({"lr_adaptive_min": 0.5, "lr_adaptive_max": 0.1}, "none", "--lr_adaptive_min=0.5 is above"),
        (
            {"lr_schedule": "kl_adaptive_epoch", "ppo_epochs": 1, "num_batches_per_iteration": 1},
            "none",
            "--lr_schedule=kl_adaptive_epoch: the only optimizer step of an iteration starts from the weights that",
        ),
        ({"target_kl": 0.01, "ppo_epochs": 1, "num_batches_per_iteration": 1}, "none", "--target_kl=0.01: the only"),
        ({"lr_schedule": "kl_adaptive_epoch", "learning_rate": 0.1}, "none", "--learning_rate=0.1 is not between --lr"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags: dict[str, object], core: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        learner_of(core=core, **flags)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 24, 48])
def test_minibatches_may_be_any_divisor(size: int) -> None:
    learner = learner_of(batch_size=size, num_batches_per_iteration=STEPS // size, ppo_epochs=1)
    assert learner.config.macro_batch_columns == COLUMNS
    assert learn(learner, batch_of(learner.model)) == STEPS // size


def test_defaults_are_those_of_stable_baselines() -> None:
    c = PPOConfig()
    c.check(recurrent=False)
    assert c.macro_batch_columns * c.rollout == 2048
    found = (c.batch_size, c.ppo_epochs, c.learning_rate, c.gamma, c.gae_lambda, c.ppo_clip_ratio, c.ppo_clip_value)
    assert found == (64, 10, 3e-4, 0.99, 0.95, 0.2, 0.0)
    assert (c.exploration_loss_coeff, c.value_loss_coeff, c.max_grad_norm, c.adam_eps) == (0.0, 0.5, 0.5, 1e-5)


def test_one_update_for_measuring_is_a_pass_over_so_many_samples() -> None:
    for size, batch_size, count in ((128, 64, 2), (96, 96, 1), (640, 64, 10)):
        flags = PPOConfig(batch_size=64).one_update(size)
        assert (flags.batch_size, flags.num_batches_per_iteration, flags.ppo_epochs) == (batch_size, count, 1)
