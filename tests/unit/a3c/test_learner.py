"""A3C: gradients against a slow reference, applied as they were computed; what is reported, and what a state holds."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from appo.algorithms.a3c.config import COMPUTED, METRICS, A3CConfig
from appo.algorithms.a3c.learner import A3CLearner, TrajectoryGradient
from appo.algorithms.a3c.worker import GradientWorker
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.ppo.config import PPOConfig
from appo.algorithms.runtime.learning.batches import Batch
from appo.algorithms.runtime.learning.gradients import GRADIENT, GradientRing, GradientSource
from appo.algorithms.runtime.memory.learner_state import WEIGHTS, StateBlock, Vector
from appo.algorithms.runtime.memory.weights import WeightRing
from appo.algorithms.runtime.messages import Address, SlotReleased, TrajectoryReady, Wake
from appo.algorithms.runtime.roles import POLICY_WORKER
from appo.algorithms.runtime.sampling.weight_reader import WeightReader
from appo.envs.spec import MASK_KEY, EnvSpec, ObservationSpec
from appo.utils.errors import UsageError
from tests.unit.appo.batches import COLUMNS, ROLLOUT, SPEC, batch_of
from tests.unit.models.cases import CORES, GAUSSIAN, context_of, env_spec_of, model_of
from tests.unit.ppo import reference
from tests.unit.runtime.worlds import World, world_of

SAME_STEP = replace(SPEC, same_step=True)
ROLE = replace(POLICY_WORKER, name="gradient")


def config_of(**flags: object) -> A3CConfig:
    return A3CConfig(**{"rollout": ROLLOUT, "recurrence": 4, "grads_per_step": 1, **flags})  # type: ignore[arg-type]


def flat_of(spec: EnvSpec = SPEC, *, core: str = "none", normalize_input: bool = False, seed: int = 0) -> FlatModule:
    return FlatModule(model_of(spec, seed=seed, normalize_input=normalize_input, **CORES[core]))


def batch_for(flat: FlatModule, spec: EnvSpec = SPEC) -> Batch:
    """Steps that the model itself has acted, with garbage where they are invalid."""
    batch = batch_of(flat.module, spec, noise=0.0)  # type: ignore[arg-type]
    if not spec.same_step:
        assert (~batch.valid).sum() > 3
    invalid = ~batch.valid
    for name in ("reward", "recorded.log_prob", "recorded.value"):
        batch.named()[name][invalid] = math.nan
    batch.action[invalid] = math.nan if batch.action.is_floating_point() else 99
    batch.terminated[invalid] = True
    return batch


def slow_loss(weights: dict[str, Tensor], batch: Batch, config: A3CConfig, kind: str, length: int) -> Tensor:
    """The objective in float64, a step at a time: Mnih et al. 2016, algorithm S3."""
    same = PPOConfig(gamma=config.gamma, gae_lambda=config.gae_lambda)  # all that returns need
    advantage, target = reference.returns(weights, batch, same, length)
    loss, count = torch.zeros((), dtype=torch.float64), int(batch.valid.sum())
    for b in range(batch.valid.shape[1]):
        seen = [x for s in range(ROLLOUT // length) for x in reference.unroll(weights, batch, s, b, length, length)]
        for t, (logits, value) in enumerate(seen):
            if not batch.valid[t, b]:
                continue
            log_prob, entropy = reference.log_prob_and_entropy(kind, logits, batch.action[t, b])
            error = (value - target[t, b]) ** 2
            policy = -log_prob * advantage[t, b]
            loss = loss + policy + config.value_loss_coeff * error - config.exploration_loss_coeff * entropy
    return loss / count


@pytest.mark.parametrize(
    ("core", "spec", "flags"),
    [
        ("none", SPEC, {}),
        ("none", SPEC, {"gae_lambda": 0.7, "gamma": 0.9, "value_loss_coeff": 1.5}),
        ("none", SAME_STEP, {"exploration_loss_coeff": 0.1}),
        ("none", env_spec_of(*GAUSSIAN), {}),
        ("gru", SPEC, {}),
        ("gru", SAME_STEP, {"gae_lambda": 0.9}),
        ("gru", env_spec_of(*GAUSSIAN), {"exploration_loss_coeff": 0.1}),
    ],
)
def test_a_gradient_is_that_of_the_paper(core: str, spec: EnvSpec, flags: dict[str, object]) -> None:
    flat, config = flat_of(spec, core=core), config_of(**flags)
    batch = batch_for(flat, spec)
    differentiate = TrajectoryGradient(flat, spec, config)
    before = flat.flat.clone()
    figures = differentiate(batch)
    assert torch.equal(flat.flat, before)
    weights = {n: p.detach().double().requires_grad_() for n, p in flat.module.named_parameters()}
    kind, length = spec.action.parts[0].kind, 4 if core == "gru" else 1
    loss = slow_loss(weights, batch, config, kind, length)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(weights.values()))])
    assert differentiate.gradient.norm() > 0.05
    assert torch.allclose(differentiate.gradient.double(), expected, rtol=1e-4, atol=1e-5)
    computed = dict(zip(COMPUTED, figures, strict=False))
    assert computed["loss"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-5)
    assert computed["reproduction_error"] < 1e-5
    total = computed["policy_loss"] + config.value_loss_coeff * computed["value_loss"]
    assert total - config.exploration_loss_coeff * computed["entropy"] == pytest.approx(computed["loss"], abs=1e-5)


def test_actions_that_are_forbidden_do_not_count() -> None:
    """With one choice allowed there is nothing to decide: no entropy, and no gradient of the policy."""
    spec = replace(SPEC, observations={**SPEC.observations, MASK_KEY: ObservationSpec((4,), "uint8")}, action_mask=4)
    flat = flat_of(spec)
    batch = batch_for(flat_of(SPEC))
    batch.action[~batch.valid] = 0
    only = torch.zeros(ROLLOUT + 1, COLUMNS, 4, dtype=torch.uint8)
    only[:-1].scatter_(2, batch.action.long(), 1)
    batch.obs[MASK_KEY] = only
    batch.recorded["log_prob"] = torch.zeros_like(batch.recorded["log_prob"])
    differentiate = TrajectoryGradient(flat, spec, config_of())
    computed = dict(zip(COMPUTED, differentiate(batch), strict=False))
    assert computed["entropy"] == computed["policy_loss"] == 0
    weight = flat.module.get_parameter("policy_head.linear.weight").grad
    assert weight is not None
    assert not weight.any()
    assert computed["value_loss"] > 0


def test_the_largest_difference_from_acting_is_reported() -> None:
    flat = flat_of()
    batch = batch_for(flat)
    place = tuple(int(i) for i in batch.valid.nonzero()[5])
    value = float(batch.recorded["value"][place])
    batch.recorded["value"][place] += 0.5
    computed = dict(zip(COMPUTED, TrajectoryGradient(flat, SPEC, config_of())(batch), strict=False))
    assert computed["reproduction_error"] == pytest.approx(0.5 / (1 + abs(value + 0.5)), rel=1e-4)


class WithSize(TrajectoryGradient):
    """Reports metrics that `COMPUTED` does not have."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss, target, metrics = super().loss(batch)
        return loss, target, {**metrics, "size": loss.detach(), "age": loss.detach()}


def test_a_metric_without_a_place_in_a_gradient_is_refused() -> None:
    flat = flat_of()
    with pytest.raises(UsageError, match=r"^`loss` returns age, size, for which a gradient of A3C has no place: see"):
        WithSize(flat, SPEC, config_of())(batch_for(flat))


class Beside:
    """A gradient worker beside what has acted in a slot, and the learner behind the ring."""

    def __init__(self, **flags: object) -> None:
        self.flat, self.shared, self.config = flat_of(normalize_input=True), flat_of(normalize_input=True), config_of()
        self.config = replace(self.config, **flags)
        size = len(self.flat.flat)
        more = (
            *GradientRing.declare(0, 1, size, 50),
            *WeightRing.declare(0, size),
            *StateBlock.declare(0, {WEIGHTS: Vector(1)}),
        )
        counts = {"num_actors": 1, "groups_per_actor": 1, "slots_per_group": 1, "rows": COLUMNS, "rollout": ROLLOUT}
        self.world: World = world_of(SPEC, recurrence=4, more=more, **counts)
        self.ring, self.published = GradientRing(self.world.arena, 0), WeightRing(self.world.arena, 0)
        self.worker = self.make_worker(self.flat)
        self.learner = A3CLearner(self.shared, context_of(self.config))
        block = StateBlock(self.world.arena, 0)
        self.source = GradientSource(self.ring, 0, self.world.trajectories, block, ROLE, 100)
        self.published.publish(self.shared.flat.numpy(), 1)

    def make_worker(self, flat: FlatModule) -> GradientWorker:
        differentiate = TrajectoryGradient(flat, SPEC, self.config)
        reader = WeightReader(self.published, flat)
        return GradientWorker(Address("gradient", 0, 0), self.world.trajectories, reader, differentiate, self.ring)

    def fill(self, seed: int) -> TrajectoryReady:
        """What the newest weights have acted, handed over."""
        self.worker.weights.refresh()
        batch, t = batch_of(self.flat.module, SPEC, noise=0.0, seed=seed), self.world.trajectories  # type: ignore[arg-type]
        for name, array in Batch.of_slot(t, 0).named().items():
            if array.numel():
                array.copy_(batch.named()[name])
        t.sequence[0] += 1
        t.owner[0] = 1
        return TrajectoryReady(0, 0, int(t.sequence[0]), 0)

    def commit(self, seed: int) -> None:
        list(self.worker.handle(self.fill(seed)))
        assert self.worker.pending()
        list(self.worker.work())

    def apply(self) -> Batch:
        batch = self.source.take()
        assert batch is not None
        for _ in self.learner.learn(batch, 0.0):
            self.published.publish(self.shared.flat.numpy(), self.learner.version)
        return batch


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_a_gradient_is_applied_bit_for_bit_as_it_was_computed(optimizer: str) -> None:
    beside, twin = Beside(optimizer=optimizer), flat_of(normalize_input=True)
    alone = A3CLearner(twin, context_of(beside.config))
    for seed in range(3):
        beside.commit(seed)
        computed = beside.worker.differentiate.gradient.clone()
        again = TrajectoryGradient(twin, SPEC, beside.config)
        again(Batch.of_slot(beside.world.trajectories, 0))  # with the weights of that version, which the twin has
        assert torch.equal(again.gradient, computed)
        entry = beside.apply()
        size = beside.shared.num_parameters
        assert torch.equal(entry.recorded[GRADIENT][:size], computed)
        alone.optimizer.gradient.copy_(computed)
        alone.optimizer.step(torch.tensor(True), torch.tensor(True), torch.zeros(()))
        assert torch.equal(twin.flat[:size], beside.shared.flat[:size])
        twin.flat.copy_(beside.shared.flat)  # statistics of observations, too
        assert (beside.learner.version, beside.learner.updates) == (seed + 2, seed + 1)
    samples = int(beside.learner.statistics.observation["obs"].count)
    assert samples == beside.source.entered().samples > 60


def test_a_slot_goes_back_when_its_gradient_is_committed() -> None:
    beside = Beside()
    message = beside.fill(0)
    list(beside.worker.handle(message))
    list(beside.worker.handle(message))  # said twice, taken once
    released = SlotReleased(0, 0, message.sequence)
    assert list(beside.worker.work()) == [released, Wake(Address("learner", 0))]
    assert not beside.worker.pending()
    assert beside.world.trajectories.released[0, 0] == message.sequence
    assert beside.source.waiting == 1


def test_a_worker_waits_while_the_ring_is_full() -> None:
    beside, seed = Beside(), 0
    while beside.ring.has_room(0):
        beside.commit(seed := seed + 1)
    list(beside.worker.handle(beside.fill(9)))
    assert not beside.worker.pending()
    beside.apply()
    assert beside.worker.pending()


@pytest.mark.parametrize("committed", [False, True])
def test_a_successor_repeats_what_is_not_committed(committed: bool) -> None:
    beside = Beside()
    message = beside.fill(0)
    if committed:  # and killed before the release
        beside.worker._commit(message)
    successor = beside.make_worker(flat_of(normalize_input=True))
    list(successor.handle(message))
    assert next(iter(successor.work())) == SlotReleased(0, 0, message.sequence)
    assert beside.source.waiting == 1
    by = beside.worker if committed else successor
    gradient = beside.ring.apply(0).recorded[GRADIENT][: beside.flat.num_parameters]
    assert torch.equal(gradient, by.differentiate.gradient)


def test_nothing_is_learned_from_resets_alone() -> None:
    beside = Beside()
    message = beside.fill(0)
    beside.world.trajectories.valid[0] = False
    list(beside.worker.handle(message))
    assert SlotReleased(0, 0, message.sequence) in list(beside.worker.work())
    assert beside.source.waiting == 0
    assert beside.source.counts().released == 1


def test_metrics_are_means_over_enough_gradients() -> None:
    beside = Beside(grads_per_step=3, learning_rate=0.0)
    losses = []
    for seed in range(3):
        assert beside.learner.metrics() == {}
        beside.commit(seed)
        losses.append(float(beside.apply().recorded["figures"][0]))
    found = beside.learner.metrics()
    assert found.keys() == {*METRICS, "skipped_in_a_row"}
    assert found["loss"] == pytest.approx(np.mean(losses))
    assert (found["skipped"], found["skipped_in_a_row"], found["learning_rate"]) == (0, 0, 0)
    assert found["apply_ms"] > 0
    assert found["dispatch_ms"] > 0
    assert found["wait_ms"] > 0
    assert beside.learner.metrics() == {}


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    beside = Beside()
    message = beside.fill(0)
    beside.world.trajectories.reward[0] = math.nan
    list(beside.worker.handle(message))
    list(beside.worker.work())
    before = beside.shared.flat[: beside.shared.num_parameters].clone()
    beside.apply()
    assert torch.equal(beside.shared.flat[: beside.shared.num_parameters], before)
    assert (beside.learner.metrics()["skipped"], beside.learner.updates) == (1, 1)
    beside.commit(1)
    beside.apply()
    assert beside.learner.metrics()["skipped_in_a_row"] == 0
    assert not torch.equal(beside.shared.flat[: beside.shared.num_parameters], before)


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_a_state_goes_on_bit_for_bit(optimizer: str) -> None:
    beside = Beside(optimizer=optimizer)
    for seed in range(2):
        beside.commit(seed)
        beside.apply()
    state = beside.learner.state()
    assert state.vectors.keys() == A3CLearner(beside.shared, context_of(beside.config)).layout.vectors.keys()
    expected = {"rmsprop": {"square_avg"}, "adam": {"exp_avg", "exp_avg_sq"}}[optimizer]
    assert state.vectors.keys() - {"weights", "statistics"} == expected
    assert all(state.vectors[name].any() for name in expected)
    other = A3CLearner(flat_of(normalize_input=True, seed=5), context_of(beside.config))
    other.restore(state)
    assert (other.version, other.updates) == (3, 2)
    beside.commit(7)
    entry = beside.source.take()
    assert entry is not None
    for learner in (beside.learner, other):
        for _ in learner.learn(entry, 0.0):
            pass
    assert torch.equal(other.flat.flat, beside.shared.flat)
    with pytest.raises(ValueError, match=r"^the state has \d+ weights, the model \d+$"):
        A3CLearner(flat_of(core="gru"), context_of(beside.config)).restore(state)


def test_a_linear_rate_falls_with_the_budget() -> None:
    beside = Beside(lr_schedule="linear", learning_rate=1e-2)
    beside.commit(0)
    entry = beside.source.take()
    assert entry is not None
    list(beside.learner.learn(entry, 0.75))
    assert beside.learner.metrics()["learning_rate"] == 2.5e-3
    beside.learner.configure(replace(beside.config, lr_schedule="constant", learning_rate=3e-3))
    assert float(beside.learner.optimizer.learning_rate) == pytest.approx(3e-3)


def test_segments_divide_a_trajectory() -> None:
    with pytest.raises(UsageError, match=r"^--rollout=20 is not a multiple of --recurrence=3$"):
        A3CConfig(recurrence=3).check()
