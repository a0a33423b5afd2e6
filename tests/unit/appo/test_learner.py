import json
import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from appo.algorithms.appo.config import METRICS
from appo.algorithms.appo.learner import APPOLearner
from appo.algorithms.ops.distributions import ActionDistribution
from appo.algorithms.ops.returns import gae, vtrace
from appo.algorithms.runtime.learning.batches import Batch
from appo.algorithms.runtime.memory.learner_state import LearnerState
from appo.envs.spec import EnvSpec
from tests.states import stacked
from tests.unit.appo.batches import (
    COLUMNS,
    ROLLOUT,
    SPEC,
    batch_of,
    clone,
    learn,
    learner_of,
    learning,
    parameters,
    same,
)
from tests.unit.models.cases import CATEGORICAL, CORES, GAUSSIAN, IMAGE, MIXED, context_of, env_spec_of

SAME_STEP = replace(SPEC, same_step=True)
FROZEN = {"learning_rate": 0.0, "max_grad_norm": 0.0}


def gradient_and_metrics(learner: APPOLearner, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    assert learn(learner, batch) == 1
    return learner.optimizer.gradient.clone(), learner.metrics()


# --- microbatches


@pytest.mark.parametrize("core", ["none", "gru"])
@pytest.mark.parametrize("spec", [SPEC, SAME_STEP, env_spec_of(*MIXED)])
@pytest.mark.parametrize("columns", [1, 2, 3, 4])
def test_microbatches_add_up_to_the_whole(core: str, spec: EnvSpec, columns: int) -> None:
    flags = {**FROZEN, "kl_loss_coeff": 0.1, "exploration_loss_coeff": 0.1}
    whole = learner_of(spec, model=CORES[core], **flags)
    parts = learner_of(spec, model=CORES[core], microbatch_size=columns * ROLLOUT, **flags)
    batch = batch_of(whole.model, spec)
    batch.valid[:, 1] = False  # a part can be without a valid step
    batch.valid[2:, 2] = False
    expected, expected_metrics = gradient_and_metrics(whole, batch)
    found, metrics = gradient_and_metrics(parts, batch)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)
    assert np.allclose(parts.statistics.to_array(), whole.statistics.to_array(), rtol=1e-5, atol=1e-6)
    assert expected.abs().max() > 1e-3


# --- epochs and minibatches


class Recording(APPOLearner):
    """Notes which columns every update was made of."""

    def update(self, batch: Batch) -> Tensor:
        self.seen = [*getattr(self, "seen", []), batch.reward[0].tolist()]
        return super().update(batch)


def recording_of(**flags: object) -> Recording:
    learner = learner_of()
    return Recording(learner.flat, context_of(learning(**flags), SPEC))


def columns_batch(learner: APPOLearner) -> Batch:
    batch = batch_of(learner.model)
    batch.reward[0] = torch.arange(COLUMNS)
    return batch


@pytest.mark.parametrize(("epochs", "columns"), [(1, 6), (3, 6), (1, 2), (4, 2), (2, 1), (2, 3)])
def test_every_column_is_used_once_per_epoch(epochs: int, columns: int) -> None:
    learner = recording_of(ppo_epochs=epochs, batch_size=columns * ROLLOUT)
    steps = learn(learner, columns_batch(learner))
    per_epoch = COLUMNS // columns
    assert steps == len(learner.seen) == epochs * per_epoch
    for epoch in range(epochs):
        used = [c for seen in learner.seen[epoch * per_epoch : (epoch + 1) * per_epoch] for c in seen]
        assert sorted(used) == list(range(COLUMNS))
    assert all(len(seen) == columns for seen in learner.seen)


def test_minibatches_are_drawn_anew_in_every_epoch() -> None:
    learner = recording_of(ppo_epochs=8, batch_size=3 * ROLLOUT)
    learn(learner, columns_batch(learner))
    splits = Counter(frozenset(seen) for seen in learner.seen)
    assert len(splits) > 6


def test_minibatches_stay_as_they_are_without_shuffling() -> None:
    learner = recording_of(ppo_epochs=2, batch_size=3 * ROLLOUT, shuffle_minibatches=False)
    learn(learner, columns_batch(learner))
    assert learner.seen == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] * 2


def test_each_step_raises_the_counters_before_its_weights_are_published() -> None:
    learner = learner_of(ppo_epochs=2, batch_size=3 * ROLLOUT)
    assert (learner.version, learner.updates) == (1, 0)
    seen = [
        (learner.version, learner.updates, parameters(learner)) for _ in learner.learn(batch_of(learner.model), 0.0)
    ]
    assert [(version, updates) for version, updates, _ in seen] == [(2, 1), (3, 2), (4, 3), (5, 4)]
    assert all(not torch.equal(a[2], b[2]) for a, b in pairwise(seen))


# --- batches are not changed


@pytest.mark.parametrize("image", [True, False])
def test_a_batch_is_the_same_after_several_epochs(image: bool) -> None:
    """Scaling observations in place would divide them by 255 again in every epoch."""
    spec = env_spec_of(obs=IMAGE) if image else SPEC
    learner = learner_of(spec, model={"obs_scale": 255.0, "obs_subtract_mean": 3.0}, ppo_epochs=2)
    batch = batch_of(learner.model, spec)
    before = clone(batch)
    learn(learner, batch)
    assert same(batch, before)


@pytest.mark.parametrize("normalize_input", [True, False])
def test_the_second_epoch_sees_what_the_first_saw(normalize_input: bool) -> None:
    model = {"obs_scale": 255.0, "normalize_input": normalize_input}
    together, apart = (learner_of(model=model, ppo_epochs=epochs, normalize_returns=False) for epochs in (2, 1))
    batch = batch_of(together.model)
    before = apart.flat.flat[apart.flat.num_parameters :].clone()
    learn(together, clone(batch))
    for _ in range(2):
        learn(apart, clone(batch))
        apart.flat.flat[apart.flat.num_parameters :] = before  # statistics change only after the last epoch
    assert torch.equal(parameters(together), parameters(apart))


# --- only valid steps


@pytest.mark.parametrize("parts", [CATEGORICAL, GAUSSIAN, MIXED])
@pytest.mark.parametrize(
    "flags", [{}, {"kl_loss_coeff": 0.5}, {"with_vtrace": False}, {"microbatch_size": 2 * ROLLOUT}]
)
def test_whatever_invalid_steps_hold_changes_no_bit(parts: tuple, flags: dict[str, object]) -> None:
    spec = env_spec_of(*parts)
    clean, dirty = (learner_of(spec, **FROZEN, **flags) for _ in range(2))
    batch = batch_of(clean.model, spec)
    assert (~batch.valid).sum() > 3
    garbage, invalid = clone(batch), ~batch.valid
    for name in ("reward", "recorded.log_prob", "recorded.value", "recorded.logits"):
        garbage.named()[name][invalid] = math.nan
    garbage.recorded["logits"][:, 0][invalid[:, 0]] = math.inf
    if garbage.action.is_floating_point():
        garbage.action[invalid] = math.nan
    garbage.terminated[invalid] = True
    garbage.policy_version[invalid] = -5
    expected, expected_metrics = gradient_and_metrics(clean, batch)
    found, metrics = gradient_and_metrics(dirty, garbage)
    assert torch.equal(found, expected)
    assert metrics == expected_metrics
    assert clean.statistics.to_array().tobytes() == dirty.statistics.to_array().tobytes()
    assert all(math.isfinite(value) for value in metrics.values())


def absent(batch: Batch, column: int, begin: int, end: int, *, terminated: bool = True) -> None:
    """An agent that takes no part in the steps from `begin` to `end`; what it did before ends with its last step."""
    batch.valid[begin:end, column] = batch.terminated[begin:end, column] = batch.truncated[begin:end, column] = False
    batch.first[begin + 1 : end + 1, column] = True
    if begin:
        batch.valid[begin - 1, column], batch.first[begin, column] = True, False
        batch.terminated[begin - 1, column], batch.truncated[begin - 1, column] = terminated, not terminated
    else:
        batch.first[0, column] = True


@pytest.mark.parametrize("core", ["none", "gru", "lstm2"])
@pytest.mark.parametrize("with_vtrace", [True, False])
def test_whatever_absent_agents_hold_changes_no_bit(core: str, with_vtrace: bool) -> None:
    """Early deaths, late arrivals, who never comes, and who comes back: their rows are as if they were not."""
    model = CORES[core] | {"normalize_input": True}
    clean, dirty = (learner_of(model=model, **FROZEN, with_vtrace=with_vtrace) for _ in range(2))
    batch = batch_of(clean.model)
    absent(batch, 0, 3, ROLLOUT)
    absent(batch, 1, 0, 5)
    absent(batch, 2, 0, ROLLOUT)
    absent(batch, 3, 3, 6, terminated=False)
    garbage, read = clone(batch), torch.zeros_like(batch.first)
    read[:-1] = batch.valid
    read[1:] |= batch.valid & ~batch.terminated  # what a step leads to is bootstrapped from
    generator = torch.Generator().manual_seed(0)
    for array in garbage.obs.values():
        array[~read] = 1000 * torch.randn(array[~read].shape, generator=generator)
    garbage.rnn_state[~read[:ROLLOUT:4]] = 1000.0
    for name in ("reward", "recorded.log_prob", "recorded.value", "recorded.logits"):
        garbage.named()[name][~batch.valid] = math.nan
    expected, expected_metrics = gradient_and_metrics(clean, batch)
    found, metrics = gradient_and_metrics(dirty, garbage)
    assert expected.abs().max() > 0
    assert torch.equal(found, expected)
    assert metrics == expected_metrics
    assert clean.statistics.to_array().tobytes() == dirty.statistics.to_array().tobytes()


@pytest.mark.parametrize("core", ["none", "gru", "lstm2"])
def test_columns_without_a_valid_step_weigh_nothing(core: str) -> None:
    full, short = (learner_of(model=CORES[core], **FROZEN, normalize_returns=False) for _ in range(2))
    batch = batch_of(full.model)
    batch.valid[:, [1, 4]] = False
    expected, expected_metrics = gradient_and_metrics(short, batch.columns(torch.tensor([0, 2, 3, 5])))
    found, metrics = gradient_and_metrics(full, batch)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)


def test_without_a_valid_step_nothing_is_learned() -> None:
    learner = learner_of()
    batch = batch_of(learner.model)
    learn(learner, batch)  # Adam has momentum now
    learner.metrics()
    before, moments = parameters(learner), learner.optimizer.moments().clone()
    statistics = learner.statistics.to_array()
    nothing = clone(batch)
    nothing.valid[:] = False
    learn(learner, nothing)
    assert torch.equal(parameters(learner), before)
    assert torch.equal(learner.optimizer.moments(), moments)
    assert np.array_equal(learner.statistics.to_array(), statistics)
    metrics = learner.metrics()
    assert metrics["skipped"] == 0.0  # no number was lost
    assert all(math.isfinite(value) for value in metrics.values())


# --- steps that are not finite


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("obs.obs", math.nan),  # an infinite one is clipped
        *(("reward", value) for value in (math.nan, math.inf, -math.inf)),
        *(("recorded.value", value) for value in (math.nan, math.inf, -math.inf)),
        *(("recorded.logits", value) for value in (math.nan, math.inf)),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, of infinite rewards
def test_a_step_that_is_not_finite_is_skipped(where: str, value: float, max_grad_norm: float) -> None:
    # the unit of values, and the layer they come from, change with every batch that has a finite return
    learner = learner_of(max_grad_norm=max_grad_norm, ppo_epochs=2, batch_size=3 * ROLLOUT, normalize_returns=False)
    batch = batch_of(learner.model)
    learn(learner, batch)
    learner.metrics()
    before, state = parameters(learner), learner.state()
    bad = clone(batch)
    bad.valid[:] = True
    bad.named()[where][2] = value
    assert learn(learner, bad) == 4
    assert torch.equal(parameters(learner), before)
    after = learner.state()
    assert np.array_equal(stacked(after)[1:], stacked(state)[1:])
    assert after.meta["adam_steps"] == state.meta["adam_steps"] == 4.0
    metrics = learner.metrics()
    assert (metrics["skipped"], metrics["skipped_in_a_row"]) == (1.0, 4.0)
    assert after.meta["skipped_in_a_row"] == 4
    learner.restore(state)
    assert learner.state().meta["skipped_in_a_row"] == 0
    assert torch.isfinite(learner.flat.flat).all()  # the running statistics too
    assert np.isfinite(after.vectors["statistics"]).all()


def test_training_goes_on_after_a_skipped_step_as_if_it_had_not_been() -> None:
    disturbed, calm = (learner_of(model={"normalize_input": False}, normalize_returns=False) for _ in range(2))
    batch, later = batch_of(calm.model), batch_of(calm.model, seed=1)
    bad = clone(batch)
    bad.reward[3] = math.nan
    bad.valid[3] = True
    for step in (batch, later):
        learn(calm, step)
    for step in (batch, bad, later):
        learn(disturbed, step)
    assert torch.equal(disturbed.flat.flat, calm.flat.flat)
    assert torch.equal(disturbed.optimizer.moments(), calm.optimizer.moments())


def test_adaptive_rates_outlive_a_step_that_is_not_finite() -> None:
    learner = learner_of(learning_rate=1e-3, lr_schedule="kl_adaptive_minibatch")
    bad = batch_of(learner.model)
    bad.obs["obs"][2] = math.nan
    learn(learner, bad)
    assert learner.state().meta["learning_rate"] == pytest.approx(1e-3)
    learn(learner, batch_of(learner.model, noise=0.0))
    assert learner.state().meta["learning_rate"] == pytest.approx(1.5e-3)


# --- clipping and rates


def test_the_gradient_is_clipped_to_its_norm() -> None:
    free, clipped = learner_of(max_grad_norm=0.0), learner_of(max_grad_norm=0.05)
    batch = batch_of(free.model)
    raw, metrics = gradient_and_metrics(free, batch)
    found, clipped_metrics = gradient_and_metrics(clipped, batch)
    norm = float(raw.norm())
    assert norm > 0.05
    assert metrics["grad_norm"] == clipped_metrics["grad_norm"] == pytest.approx(norm)
    assert float(found.norm()) == pytest.approx(0.05, rel=1e-4)
    assert torch.allclose(found / found.norm(), raw / norm, atol=1e-6)


def test_a_short_gradient_is_left_alone() -> None:
    free, clipped = learner_of(max_grad_norm=0.0), learner_of(max_grad_norm=1e6)
    batch = batch_of(free.model)
    assert torch.equal(gradient_and_metrics(free, batch)[0], gradient_and_metrics(clipped, batch)[0])


def test_a_learning_rate_of_0_changes_no_weight() -> None:
    learner = learner_of(learning_rate=0.0, ppo_epochs=2, normalize_returns=False)
    before = parameters(learner)
    learn(learner, batch_of(learner.model))
    assert torch.equal(parameters(learner), before)
    assert learner.updates == 2
    assert learner.metrics()["grad_norm"] > 0


def rate_after(learner: APPOLearner, batch: Batch, progress: float = 0.0) -> list[float]:
    """The learning rate after every step."""
    return [learner.state().meta["learning_rate"] for _ in learner.learn(batch, progress)]


def test_linear_rates_fall_to_0_with_the_budget() -> None:
    learner = learner_of(lr_schedule="linear")
    batch = batch_of(learner.model)
    for progress, expected in ((0.0, 1e-2), (0.25, 0.75e-2), (1.0, 0.0), (1.3, 0.0), (0.5, 0.5e-2)):
        assert rate_after(learner, batch, progress) == [pytest.approx(expected)]


LINEAR = {"ppo_clip_schedule": "linear", "exploration_loss_schedule": "linear"}


def test_linear_clips_and_weights_of_exploration_fall_to_0_with_the_budget() -> None:
    """A step at some progress is the step with the coefficients of then."""
    flags = {"ppo_clip_ratio": 0.4, "exploration_loss_coeff": 0.2, "learning_rate": 0.0}
    batch = batch_of(learner_of().model, noise=1.0)
    for progress, left in ((0.25, 0.75), (0.5, 0.5), (1.3, 0.0), (0.0, 1.0)):
        learner = learner_of(**flags, **LINEAR)
        constant = learner_of(**{name: value * left for name, value in flags.items()})
        learn(constant, batch, progress)
        learn(learner, batch, progress)
        assert torch.equal(learner.optimizer.gradient, constant.optimizer.gradient)
        assert (float(learner.clip_ratio), float(learner.exploration_coeff)) == pytest.approx((0.4 * left, 0.2 * left))
        assert learner.metrics() == constant.metrics()


def test_an_iteration_ends_after_an_epoch_that_has_moved_too_far() -> None:
    flags = {"learning_rate": 0.02, "ppo_epochs": 5, "batch_size": 3 * ROLLOUT, "normalize_returns": False}
    free = learner_of(**flags)
    batch = batch_of(free.model, noise=0.0)
    divergences, states = [], []
    for _ in free.learn(batch, 0.0):
        divergences.append(free.metrics()["kl_divergence"])
        states.append(parameters(free))
    epochs = [(a + b) / 2 for a, b in zip(divergences[::2], divergences[1::2], strict=True)]
    assert epochs[0] < epochs[1] < epochs[2]
    for schedule in ("constant", "kl_adaptive_epoch"):
        bounded = learner_of(
            **flags, target_kl=(epochs[1] + epochs[2]) / 2, lr_schedule=schedule, lr_adaptive_min=0.02,
            lr_adaptive_max=0.02,
        )  # fmt: skip
        assert learn(bounded, batch) == 6
        assert torch.equal(parameters(bounded), states[5])
        assert bounded.statistics.to_array()[0] == int(batch.valid.sum())  # every step once
        assert learn(bounded, batch) == 4  # the sum of an iteration does not go on into the next


def test_constant_rates_stay() -> None:
    learner = learner_of(ppo_epochs=3)
    assert rate_after(learner, batch_of(learner.model, noise=3.0), 0.9) == [pytest.approx(1e-2)] * 3


def test_the_rate_of_a_step_is_reported() -> None:
    learner = learner_of(lr_schedule="linear")
    learn(learner, batch_of(learner.model), 0.25)
    assert learner.metrics()["learning_rate"] == pytest.approx(0.75e-2)


@pytest.mark.parametrize(
    ("relative_kl", "factor"),
    [(0.4, 1.5), (0.6, 1.0), (1.0, 1.0), (1.9, 1.0), (2.1, 1 / 1.5), (1000.0, 1 / 1.5)],
)
def test_adaptive_rates_follow_the_divergence_of_a_minibatch(relative_kl: float, factor: float) -> None:
    probe = learner_of(learning_rate=0.0)
    batch = batch_of(probe.model)
    learn(probe, batch)
    threshold = probe.metrics()["kl_divergence"] / relative_kl
    learner = learner_of(
        learning_rate=1e-3, lr_schedule="kl_adaptive_minibatch", lr_schedule_kl_threshold=threshold, lr_adaptive_max=1.0
    )
    assert rate_after(learner, batch) == [pytest.approx(1e-3 * factor)]


def test_adaptive_rates_stay_within_their_limits() -> None:
    learner = learner_of(
        learning_rate=1e-3, lr_schedule="kl_adaptive_minibatch", lr_adaptive_min=0.9e-3, lr_adaptive_max=1.2e-3
    )
    near, far = batch_of(learner.model, noise=0.0), batch_of(learner.model, noise=5.0)
    assert rate_after(learner, near) == [pytest.approx(1.2e-3)]
    assert rate_after(learner, far) == [pytest.approx(0.9e-3)]  # and not 1.2e-3 / 1.5


def test_adaptive_rates_follow_the_mean_divergence_of_an_epoch() -> None:
    shared = {"learning_rate": 1e-5, "ppo_epochs": 2, "batch_size": 3 * ROLLOUT, "shuffle_minibatches": False}
    probe = learner_of(**shared)
    batch = batch_of(probe.model)
    divergences = []
    for _ in probe.learn(batch, 0.0):
        divergences.append(probe.metrics()["kl_divergence"])
    low, high = sorted((divergences[0], divergences[1]))
    assert high > 1.02 * low
    # Above twice this threshold lies the first epoch's mean, but not one of its two minibatches.
    threshold = (low + high) / 2 / 2 * 0.999
    assert low < 2 * threshold < (low + high) / 2
    learner = learner_of(**shared, lr_schedule="kl_adaptive_epoch", lr_schedule_kl_threshold=threshold)
    rates = rate_after(learner, batch)
    assert rates[0] == pytest.approx(1e-5)
    assert rates[1] == rates[2] == pytest.approx(1e-5 / 1.5)
    assert rates[3] == pytest.approx(1e-5 / 1.5**2)


# --- state


def through_json(state: LearnerState) -> LearnerState:
    return LearnerState({name: v.copy() for name, v in state.vectors.items()}, json.loads(json.dumps(state.meta)))


def assert_same_state(a: LearnerState, b: LearnerState) -> None:
    assert a.vectors.keys() == b.vectors.keys()
    assert all(vector.tobytes() == b.vectors[name].tobytes() for name, vector in a.vectors.items())
    assert a.meta == b.meta


@pytest.mark.parametrize("schedule", ["constant", "linear", "kl_adaptive_minibatch", "kl_adaptive_epoch"])
@pytest.mark.parametrize("core", ["none", "lstm"])
def test_a_restored_learner_continues_bit_for_bit(schedule: str, core: str) -> None:
    flags = {"lr_schedule": schedule, "ppo_epochs": 2, "batch_size": 2 * ROLLOUT}
    first = learner_of(model=CORES[core], **flags)
    batches = [batch_of(first.model, seed=seed) for seed in range(4)]
    for batch in batches[:2]:
        learn(first, batch)
    second = learner_of(seed=9, model=CORES[core], **flags)
    second.restore(through_json(first.state()))
    assert_same_state(first.state(), second.state())
    assert (second.version, second.updates) == (13, 12)
    for batch in batches[2:]:
        learn(first, batch, 0.5)
        learn(second, batch, 0.5)
    assert_same_state(first.state(), second.state())
    first.metrics()
    assert first.state().meta["adam_steps"] == 24.0


def test_a_new_learner_has_a_state_too() -> None:
    first, second = learner_of(), learner_of(seed=9)
    learn(second, batch_of(second.model))
    second.restore(through_json(first.state()))  # also over one that has trained
    assert_same_state(first.state(), second.state())
    batch = batch_of(first.model)
    learn(first, batch)
    learn(second, batch)
    assert_same_state(first.state(), second.state())


def test_a_state_without_random_state_keeps_that_of_the_seed() -> None:
    first, second, other = learner_of(seed=1), learner_of(seed=2), learner_of(seed=2)
    first.generator.manual_seed(77)
    state = first.state()
    del state.meta["generator"]
    second.restore(state)
    assert torch.equal(second.flat.flat, first.flat.flat)
    assert second.state().meta["generator"] == other.state().meta["generator"] != first.state().meta["generator"]


def test_a_state_is_a_copy() -> None:
    learner = learner_of()
    learn(learner, batch_of(learner.model))
    state = learner.state()
    before = stacked(state)
    learn(learner, batch_of(learner.model))
    assert np.array_equal(stacked(state), before)
    other = learner_of()
    other.restore(state)
    learn(other, batch_of(other.model))
    assert np.array_equal(stacked(state), before)


def test_the_rate_of_the_flags_beats_that_of_the_state_unless_it_adapts() -> None:
    old, new = learner_of(learning_rate=1e-2), learner_of(learning_rate=1e-3)
    learn(old, batch_of(old.model))
    new.restore(old.state())
    assert new.state().meta["learning_rate"] == pytest.approx(1e-3)
    adaptive = learner_of(learning_rate=1e-3, lr_schedule="kl_adaptive_epoch")
    adaptive.restore(old.state())
    assert adaptive.state().meta["learning_rate"] == pytest.approx(1e-2)


def test_the_state_of_another_model_is_refused() -> None:
    learner = learner_of()
    other = learner_of(model={"hidden_size": 9}).state()
    with pytest.raises(ValueError, match=f"the state has {len(other.weights)} weights, the model "):
        learner.restore(other)
    state = learner.state()
    with pytest.raises(ValueError, match="the state has 3 statistics, the model 14"):
        learner.restore(LearnerState({**state.vectors, "statistics": state.vectors["statistics"][:3]}, state.meta))


# --- the objective


def on_policy(learner: APPOLearner, **flags: object) -> Batch:
    return replace(batch_of(learner.model, noise=0.0), **flags)


def test_at_the_acting_policy_the_gradient_is_that_of_policy_gradient() -> None:
    learner = learner_of(**FROZEN, value_loss_coeff=0.0, exploration_loss_coeff=0.0)
    batch = on_policy(learner)
    found, metrics = gradient_and_metrics(learner, batch)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    reference = learner_of()
    logits, value = reference.model.unroll(batch.obs, batch.first, batch.rnn_state, 4)
    signals = {name: getattr(batch, name) for name in ("reward", "terminated", "truncated", "valid", "first")}
    returns = gae(value=value.detach(), gamma=0.99, gae_lambda=1.0, **signals)
    advantage = returns.advantage[batch.valid]
    advantage = (advantage - advantage.mean()) / advantage.std(correction=0)
    log_prob = ActionDistribution(SPEC.action.parts, logits).log_prob(batch.action)[batch.valid]
    (-(advantage * log_prob).mean()).backward()
    assert torch.allclose(found, reference.optimizer.gradient, rtol=1e-4, atol=1e-6)
    assert found.abs().max() > 1e-3


def test_values_are_learned_in_units_of_the_returns() -> None:
    learner = learner_of(**FROZEN, gamma=0.0, ppo_clip_value=0.0, exploration_loss_coeff=0.0)
    learner.model.set_return_statistics(3.0, 2.0)
    batch = on_policy(learner)
    value = learner.model.unroll(batch.obs, batch.first, batch.rnn_state, 4)[1].detach()
    _, target, _ = learner.loss(batch)
    assert torch.allclose(target, batch.reward, atol=1e-5)
    _, metrics = gradient_and_metrics(learner, batch)
    error = (value[:-1] - (batch.reward - 3.0) / 2.0).square()[batch.valid]
    assert metrics["value_loss"] == pytest.approx(float(error.mean()), rel=1e-4)
    assert metrics["value_mean"] == pytest.approx(float((value[:-1] * 2 + 3)[batch.valid].mean()), rel=1e-4)


def test_the_value_clip_compares_in_units_of_now() -> None:
    """The behaviour value is stored in units of return: other statistics by now must not look like a move."""
    learner = learner_of(**FROZEN, ppo_clip_value=0.1)
    batch = on_policy(learner)
    learner.model.set_return_statistics(3.0, 2.0)  # the values of now are the same in units of return
    free = learner_of(**FROZEN, ppo_clip_value=0.0)
    free.model.set_return_statistics(3.0, 2.0)
    assert torch.equal(gradient_and_metrics(learner, batch)[0], gradient_and_metrics(free, batch)[0])


def test_values_of_read_steps_are_not_held_near_those_that_were_recorded() -> None:
    """As if the limit were none; for steps that were played it is what it was."""
    wild = [learner_of(**FROZEN, ppo_clip_value=limit) for limit in (0.1, 0.1, 0.0, 0.1)]
    batch = on_policy(wild[0])
    batch.recorded["value"] += 5.0
    read = replace(batch, recorded=batch.recorded | {"is_read": torch.ones_like(batch.valid)})
    played = replace(batch, recorded=batch.recorded | {"is_read": torch.zeros_like(batch.valid)})
    held, free = gradient_and_metrics(wild[0], batch), gradient_and_metrics(wild[2], batch)
    assert held[1]["value_loss"] > 2 * free[1]["value_loss"]
    found = gradient_and_metrics(wild[1], read)
    assert found[1]["value_loss"] == pytest.approx(free[1]["value_loss"], rel=1e-6)
    assert torch.allclose(found[0], free[0], rtol=1e-5, atol=1e-7)
    assert torch.equal(gradient_and_metrics(wild[3], played)[0], held[0])


def test_the_divergence_is_that_of_played_steps() -> None:
    """The policy of a dataset may be at any distance, however small a step is."""
    learner, other = learner_of(**FROZEN), learner_of(**FROZEN)
    batch = on_policy(learner)
    read = torch.zeros_like(batch.valid)
    read[:, ::2] = True
    batch.recorded["logits"][read] += 5 * torch.randn(batch.recorded["logits"][read].shape)
    mixed = replace(batch, recorded=batch.recorded | {"is_read": read})
    assert gradient_and_metrics(other, batch)[1]["kl_divergence"] > 0.1  # counted, as if played
    assert gradient_and_metrics(learner, mixed)[1]["kl_divergence"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("spec", [SPEC, SAME_STEP])
def test_returns_are_those_of_the_chosen_estimator(spec: EnvSpec) -> None:
    flags = {"gamma": 0.9, "gae_lambda": 0.7, "vtrace_lambda": 0.8, "vtrace_rho": 1.2, "vtrace_c": 0.9}
    learner, other = learner_of(spec, **flags), learner_of(spec, **flags, with_vtrace=False)
    batch = batch_of(learner.model, spec)
    ratio, value = torch.rand(ROLLOUT, COLUMNS) * 2, torch.randn(ROLLOUT + 1, COLUMNS)
    signals = {name: getattr(batch, name) for name in ("reward", "terminated", "truncated", "valid", "first")}
    final = batch.recorded["final_value"] if spec.same_step else None
    expected = vtrace(
        ratio=ratio, value=value, final_value=final, gamma=0.9, vtrace_lambda=0.8, rho_clip=1.2, c_clip=0.9, **signals
    )
    assert all(map(torch.equal, learner.returns(batch, ratio, value), expected))
    expected = gae(value=value, final_value=final, gamma=0.9, gae_lambda=0.7, **signals)
    assert all(map(torch.equal, other.returns(batch, ratio, value), expected))


@pytest.mark.parametrize("loss", ["entropy", "symmetric_kl"])
def test_exploration_flattens_the_policy(loss: str) -> None:
    learner = learner_of(exploration_loss=loss, exploration_loss_coeff=10.0)
    with torch.no_grad():
        learner.model.policy_head.linear.bias.copy_(torch.tensor([2.0, 0.0, 0.0, -2.0]))
    batch = on_policy(learner)
    entropies = []
    for _ in range(100):
        learn(learner, batch)
        entropies.append(learner.metrics()["entropy"])
    assert entropies[0] < 1.0
    assert entropies[-1] > 0.95 * math.log(4)


def test_rewarded_actions_become_likelier() -> None:
    learner = learner_of(gamma=0.0, exploration_loss_coeff=0.0)

    def probability() -> float:
        logits = learner.model.unroll(batch.obs, batch.first, batch.rnn_state, 4)[0].detach()
        return float(logits.softmax(-1)[..., 2].mean())

    batch = on_policy(learner)
    before = probability()
    for seed in range(30):
        batch = batch_of(learner.model, noise=0.0, seed=seed)
        learn(learner, replace(batch, reward=(batch.action[..., 0] == 2).float()))
    assert probability() > before + 0.3


def test_metrics_are_means_since_the_last_call() -> None:
    learner = learner_of(model={"normalize_input": False}, learning_rate=0.0, normalize_returns=False)
    assert learner.metrics() == {}
    batches = [batch_of(learner.model, seed=seed) for seed in range(2)]
    singles = []
    for batch in batches:
        learn(learner, batch)
        singles.append(learner.metrics())
    assert singles[0].keys() == {*METRICS, "skipped_in_a_row"}
    for batch in batches:
        learn(learner, batch)
    both = learner.metrics()
    assert singles[0]["loss"] != singles[1]["loss"]
    means = {name: (singles[0][name] + singles[1][name]) / 2 for name in singles[0]}
    assert both == pytest.approx(means | {"ratio_max": max(one["ratio_max"] for one in singles)}, 1e-5)
    assert learner.metrics() == {}


def test_metrics_of_a_known_batch() -> None:
    learner = learner_of(**FROZEN, ppo_clip_ratio=0.2)
    batch = batch_of(learner.model, noise=0.5)
    logits = learner.model.unroll(batch.obs, batch.first, batch.rnn_state, 4)[0].detach()
    policy = ActionDistribution(SPEC.action.parts, logits)
    ratio = (policy.log_prob(batch.action) - batch.recorded["log_prob"]).exp()[batch.valid]
    _, metrics = gradient_and_metrics(learner, batch)
    assert metrics["ratio_mean"] == pytest.approx(float(ratio.mean()), rel=1e-4)
    assert metrics["ratio_max"] == pytest.approx(float(ratio.max()), rel=1e-4)
    clipped = ((ratio > 1.2) | (ratio < 1 / 1.2)).float().mean()
    assert metrics["fraction_clipped"] == pytest.approx(float(clipped), rel=1e-4)
    assert metrics["entropy"] == pytest.approx(float(policy.entropy()[batch.valid].mean()), rel=1e-4)
    kl = ActionDistribution(SPEC.action.parts, batch.recorded["logits"]).kl(policy)[batch.valid].mean()
    assert metrics["kl_divergence"] == pytest.approx(float(kl), rel=1e-4)
    assert metrics["skipped"] == 0.0


@pytest.mark.parametrize("normalize_returns", [False, True])
def test_the_explained_variance_is_that_of_the_values_of_the_acting_policy(normalize_returns: bool) -> None:
    learner = learner_of(learning_rate=0.0, normalize_returns=normalize_returns)
    learner.model.set_return_statistics(0.3, 1.7)
    batch = batch_of(learner.model, noise=0.5)
    assert not batch.valid.all()
    target, metrics = learner.differentiate(batch)
    seen = target[batch.valid].double().numpy()
    error = seen - batch.recorded["value"][batch.valid].double().numpy()
    expected = 1 - np.var(error) / np.var(seen)
    assert -1 < expected < 1
    assert float(metrics["explained_variance"]) == pytest.approx(expected, rel=1e-4)
