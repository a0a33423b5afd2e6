"""Microbatches: their gradients add up, and batches that stream keep one step, one version and one round of slots."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.parts.columns import StreamedBatches
from appo.algorithms.ppo.config import STREAMING_METRICS
from appo.algorithms.ppo.learner import PPOLearner
from appo.algorithms.ppo.streaming import StreamingLearner
from appo.algorithms.run.config import Config
from appo.algorithms.run.placement import Sampling, topology_of
from appo.algorithms.runtime.devices import Device
from appo.algorithms.runtime.learning.batches import Batch, Entered
from appo.algorithms.runtime.learning.column_batches import ColumnBatches
from appo.algorithms.runtime.learning.gpu_batches import BUFFERS, DeviceStaging
from appo.algorithms.runtime.learning.staging import Staging
from appo.algorithms.runtime.memory.slots import Trajectories, sizes_of
from appo.algorithms.runtime.messages import SlotReleased
from appo.envs.spec import ObservationSpec
from appo.utils.errors import UsageError
from tests.unit.appo.batches import ROLLOUT, SPEC, batch_of
from tests.unit.appo.test_learner import assert_same_state, through_json
from tests.unit.models.cases import CORES, context_of, model_of
from tests.unit.ppo.test_learner import learn, learning, parameters
from tests.unit.runtime.worlds import SPEC as ARENA_SPEC
from tests.unit.runtime.worlds import World, hand_over, number_all, world_of

COLUMNS = 32
STEPS = COLUMNS * ROLLOUT


def whole_of(core: str = "none", **flags: object) -> PPOLearner:
    given = {"batch_size": STEPS, "num_batches_per_iteration": 1, "ppo_epochs": 1, "normalize_advantages": "off"}
    flat = FlatModule(model_of(SPEC, normalize_input=True, **CORES[core]))
    return PPOLearner(flat, context_of(learning(**{**given, "normalize_returns": True, **flags}), SPEC))


def streaming_of(parts: int, core: str = "none", **flags: object) -> StreamingLearner:
    return StreamingLearner(whole_of(core, microbatch_size=STEPS // parts, **flags))


def parts_of(batch: Batch, count: int) -> Iterator[Batch]:
    size = COLUMNS // count
    return (batch.columns(slice(i, i + size)) for i in range(0, COLUMNS, size))


def stream(learner: StreamingLearner, batch: Batch, count: int) -> list[tuple[int, int]]:
    """Learn from a batch in so many parts; version and updates at every yield."""
    return [(learner.version, learner.updates) for one in parts_of(batch, count) for _ in learner.learn(one, 0.0)]


def batch_for(learner: PPOLearner, seed: int = 0) -> Batch:
    batch = batch_of(learner.model, columns=COLUMNS, seed=seed)
    batch.valid[:, 1] = False  # a part can be without a valid step
    return batch


# --- gradients


@pytest.mark.parametrize("core", ["none", "gru"])
@pytest.mark.parametrize("normalize", ["batch", "off"])
def test_gradients_of_parts_are_those_of_the_whole(core: str, normalize: str) -> None:
    found = {}
    for parts in (1, 2, 8, 32):
        size = STEPS // parts if parts > 1 else 0
        learner = whole_of(core, microbatch_size=size, ppo_epochs=2, normalize_advantages=normalize)
        batch = learner.estimate(batch_for(learner))
        segments = torch.arange(STEPS // learner.segment_steps)
        metrics = learner.differentiate(learner.minibatch(batch, segments))
        found[parts] = (learner.optimizer.gradient.double(), metrics)
    gradient, metrics = found[1]
    for parts in (2, 8, 32):
        difference = found[parts][0] - gradient
        assert difference.norm() < 1e-6 * gradient.norm()
        assert difference.abs().max() < 1e-6 * gradient.abs().max()
        torch.testing.assert_close(found[parts][1], metrics, rtol=1e-5, atol=1e-6)
    assert gradient.norm() > 1e-2


@pytest.mark.parametrize("core", ["none", "gru"])
@pytest.mark.parametrize("parts", [2, 8, 32])
def test_a_streamed_update_is_the_one_of_the_whole_batch(core: str, parts: int) -> None:
    # With a small epsilon Adam's step would be the sign of gradients that float32 hardly tells from 0.
    whole, streamed = whole_of(core, adam_eps=1e-3), streaming_of(parts, core, adam_eps=1e-3)
    before = parameters(whole)
    for seed in range(2):
        batch = batch_for(whole, seed)
        assert learn(whole, batch) == 1
        assert stream(streamed, batch, parts) == [(1 + seed, 1 + seed), (2 + seed, 1 + seed)]
    mine, theirs = streamed.state(), whole.state()
    assert np.abs(mine.weights - theirs.weights).max() < 1e-6
    for name in ("statistics", "advantages"):
        np.testing.assert_allclose(mine.vectors[name], theirs.vectors[name], rtol=1e-6, atol=1e-6)
    expected = whole.metrics()
    found = streamed.metrics()
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert found.keys() - expected.keys() == STREAMING_METRICS.keys()
    assert all(found[name] >= 0 for name in STREAMING_METRICS)
    assert (parameters(whole) - before).abs().max() > 1e-4


def test_running_moments_do_not_depend_on_the_parts() -> None:
    states = []
    for parts in (2, 32):
        learner = streaming_of(parts, normalize_advantages="running", adam_eps=1e-3)
        for seed in range(3):
            stream(learner, batch_for(learner.learner, seed), parts)
        states.append(learner.state())
    assert np.abs(states[0].weights - states[1].weights).max() < 1e-6
    np.testing.assert_allclose(states[0].vectors["advantages"], states[1].vectors["advantages"], rtol=1e-4)


def test_schedules_stand_still_within_a_batch() -> None:
    linear = {"ppo_clip_schedule": "linear", "exploration_loss_schedule": "linear", "exploration_loss_coeff": 0.1}
    whole, streamed = whole_of(adam_eps=1e-3, **linear), streaming_of(4, adam_eps=1e-3, **linear)
    batch = batch_for(whole)
    learn(whole, batch, 0.5)
    for i, one in enumerate(parts_of(batch, 4)):
        list(streamed.learn(one, 0.5 + i / 10))
        assert float(streamed.learner.clip_ratio) == pytest.approx(0.2 * 0.5)
        assert float(streamed.learner.exploration_coeff) == pytest.approx(0.1 * 0.5)
    assert np.abs(streamed.state().weights - whole.state().weights).max() < 1e-6


# --- what moves when


def test_nothing_moves_before_the_step() -> None:
    learner = streaming_of(4, normalize_advantages="running")
    batch = batch_for(learner.learner)
    before = learner.state()
    first, *_, last = parts_of(batch, 4)
    for one in (first, first, first):
        assert list(learner.learn(one, 0.0)) == []
        assert_same_state(learner.state(), before)
    assert len(list(learner.learn(last, 0.0))) == 2
    assert learner.state().vectors["advantages"][0] > 0
    assert not np.array_equal(learner.state().weights, before.weights)


def test_a_restored_state_drops_the_partial_gradient() -> None:
    clean, disturbed = streaming_of(4), streaming_of(4)
    batch, other = batch_for(clean.learner), batch_for(clean.learner, seed=5)
    state = through_json(disturbed.state())
    for one in list(parts_of(other, 4))[:3]:
        assert list(disturbed.learn(one, 0.0)) == []
    disturbed.restore(state)
    for learner in (clean, disturbed):
        stream(learner, batch, 4)
    assert_same_state(clean.state(), disturbed.state())


def test_a_part_that_is_not_finite_costs_its_batch_and_no_other() -> None:
    spoiled = streaming_of(4, normalize_returns=False)
    batch, bad = batch_for(spoiled.learner), batch_for(spoiled.learner, seed=5)
    bad.valid[:] = True
    bad.reward[0, 9] = float("inf")
    before = parameters(spoiled.learner)
    stream(spoiled, bad, 4)
    assert torch.equal(parameters(spoiled.learner), before)
    assert spoiled.metrics()["skipped"] == 1.0
    stream(spoiled, batch, 4)
    assert np.isfinite(spoiled.state().weights).all()
    assert spoiled.metrics()["skipped"] == 0.0


def test_other_flags_begin_with_the_next_batch() -> None:
    learner = streaming_of(2)
    first, second = parts_of(batch_for(learner.learner), 2)
    list(learner.learn(first, 0.0))
    later = replace(learner.learner.config, gamma=0.5)
    learner.configure(later)
    assert learner.learner.config.gamma == 0.99
    list(learner.learn(second, 0.0))
    assert learner.learner.config is later


# --- flags


@pytest.mark.parametrize(
    ("flags", "core", "message"),
    [
        ({"microbatch_size": STEPS}, "none", f"--microbatch_size={STEPS} must be smaller than --batch_size={STEPS}"),
        ({"microbatch_size": 2 * STEPS}, "none", "must be smaller than --batch_size"),
        ({"microbatch_size": 24}, "none", f"smaller than --batch_size={STEPS} and divide it"),
        ({"microbatch_size": 4}, "none", "--microbatch_size=4 is no multiple of --rollout=8, and with --ppo_epochs=1"),
        ({"microbatch_size": 2, "ppo_epochs": 2}, "gru", "--microbatch_size=2 is no multiple of --recurrence=4"),
        ({"microbatch_size": 8, "normalize_advantages": "batch"}, "none", "normalize_advantages=running or off"),
    ],
)
def test_a_microbatch_that_is_no_part_is_refused(flags: dict[str, object], core: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        whole_of(core, **flags)


# --- slots


def source_of(world: World, parts: int, columns: int, *, lockstep: bool = False) -> StreamedBatches:
    t = world.trajectories
    source = ColumnBatches(Staging(t), 0, columns, 100, False, 1, rounds=lockstep)
    return StreamedBatches(source, parts, on_policy=True)


def one_slot_each(groups: int = 2) -> World:
    world = world_of(ARENA_SPEC, groups_per_actor=groups, slots_per_group=1)  # 3 rows of 4 steps in a slot
    number_all(world)
    return world


@pytest.mark.parametrize(
    ("order", "expected"),
    [((0, 1, 0, 1), [[0], [1], [], [0, 1]]), ((0, 0, 1, 0), [[0], [0], [], [1, 0]])],  # in turn, or one is fast
)
def test_slots_of_the_last_round_are_held_until_the_step(order: tuple[int, ...], expected: list[list[int]]) -> None:
    world = one_slot_each()
    source = source_of(world, parts=4, columns=3)  # 12 columns: two rounds of two slots
    whole = []
    released: list[list[int]] = []
    for slot in order:
        source.add(hand_over(world, slot))
        said = [message.slot for message in source.fill(1)]
        assert source.take() is not None
        whole.append(source.entered())
        released.append([*said, *(message.slot for message in source.trained())])
    assert released == expected
    assert [one.whole for one in whole] == [False, False, False, True]
    assert whole[-1] == Entered(48, 192, earlier=36)


def test_a_fast_group_takes_no_more_than_the_batch_lacks() -> None:
    world = one_slot_each()
    source = source_of(world, parts=3, columns=3)  # the slow group acts one of three slots
    for expected in ([0], []):
        source.add(hand_over(world, 0))
        assert [m.slot for m in source.fill(1)] == expected
        assert source.take() is not None
        assert list(source.trained()) == []
    source.add(hand_over(world, 1))
    assert list(source.fill(1)) == []
    assert source.counts().held == 2
    assert source.take() is not None
    assert [m.slot for m in source.trained()] == [0, 1]
    assert source.counts().held == 0


def test_steps_in_the_gradient_are_staged_and_discarded_with_it() -> None:
    world = one_slot_each()
    source = source_of(world, parts=4, columns=3)
    source.add(hand_over(world, 0))
    assert list(source.fill(1)) == [SlotReleased(0, 0, 1)]
    assert source.take() is not None
    assert source.entered() == Entered(whole=False)
    assert source.staged_samples == source.counts().in_flight == 12
    source.weights_replaced()
    assert source.staged_samples == source.counts().in_flight == 0
    assert source.counts().discarded == 12


def test_slots_are_wanted_again_when_a_begun_batch_is_dropped() -> None:
    world = one_slot_each(groups=1)
    source = source_of(world, parts=2, columns=3)
    for expected in ([0], []):
        source.add(hand_over(world, 0))
        assert [m.slot for m in source.fill(1)] == expected
        if expected:
            assert source.take() is not None
    assert source.waiting == 0
    source.weights_replaced()
    assert source.waiting == 1
    assert [m.slot for m in source.fill(1)] == [0]


def test_lockstep_keeps_its_rounds() -> None:
    world = one_slot_each()
    source = source_of(world, parts=4, columns=3, lockstep=True)
    released = []
    for _ in range(2):
        for slot in (1, 0):
            source.add(hand_over(world, slot))
        assert source.waiting == 2
        for _ in range(2):
            said = [m.slot for m in source.fill(1)]
            assert source.take() is not None
            released.append([*said, *(m.slot for m in source.trained())])
    assert released == [[], [0, 1], [], [0, 1]]


# --- memory


def test_memory_does_not_grow_with_the_batch() -> None:
    """Slots, staging and buffers of a device, of frames as Atari has them."""
    spec = replace(ARENA_SPEC, observations={"obs": ObservationSpec((4, 84, 84), "uint8")})
    needed = {}
    for batch_size in (4096, 65_536):
        flags = {"rollout": 32, "batch_size": batch_size, "microbatch_size": 512, "num_batches_per_iteration": 1}
        flags |= {"algo": "PPO", "ppo_epochs": 1, "normalize_advantages": "running"}
        config = Config.from_flat(flags)
        topology = topology_of(config, Sampling("local", 2, 8, 1), num_agents=1)
        sizes = sizes_of(topology, spec, 0, 32)
        recorded = config.algorithm.recorded(spec)
        slots = sum(field.nbytes for field in Trajectories.declare(sizes, spec, recorded))
        one = {**sizes, "S": 1, "R": config.learning.macro_batch_columns}
        part = sum(field.nbytes for field in Trajectories.declare(one, spec, recorded))
        needed[batch_size] = slots + (1 + BUFFERS) * part
    assert needed[65_536] < 1.1 * needed[4096]
    assert needed[4096] > 16 * 33 * 4 * 84 * 84


def test_staging_and_device_hold_two_microbatches() -> None:
    world = one_slot_each()
    t = world.trajectories
    staging = DeviceStaging(t, Device())
    device = ColumnBatches(staging, 0, 3, 100, False, 1)
    streamed = StreamedBatches(device, 1000, on_policy=True)
    assert streamed.source is device
    assert len(staging.buffers) == 2
    assert {tensor.shape[1] for buffer in staging.buffers for tensor in buffer.values()} == {3}
