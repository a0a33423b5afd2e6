import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from appo.algorithms.parts.statistics import (
    IMAGE_VARIANCE,
    NUMBER_VARIANCE,
    RETURN_MEMORY_SAMPLES,
    RunningStatistics,
    image_stride,
)
from appo.algorithms.runtime.learning.batches import Batch
from appo.envs.spec import ObservationSpec
from tests.unit.appo.batches import COLUMNS, ROLLOUT, batch_of, clone, learn, learner_of
from tests.unit.models.cases import IMAGE, VECTOR, env_spec_of, model_of

SPEC = env_spec_of(image=IMAGE, speed=VECTOR, height=ObservationSpec((), "float32"))


def statistics_of(**flags: object) -> RunningStatistics:
    return RunningStatistics(model_of(**flags), normalize_returns=True)


def targets_of(batch: Batch, *values: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.full(batch.valid.shape, value), batch.valid) for value in values]


def buffer(statistics: RunningStatistics, name: str) -> torch.Tensor:
    """`mean` or `inv_std` of the only observation."""
    return getattr(statistics.model.scalings[0], name)


def test_observations_are_counted_once_and_only_where_valid() -> None:
    statistics = statistics_of()
    batches = [batch_of(statistics.model, seed=seed) for seed in range(2)]
    for batch in batches:
        batch.obs["obs"][:-1][~batch.valid] = math.nan
        batch.obs["obs"][-1] = 1e6  # row T is row 0 of the next trajectory, and counted there
        statistics.update(batch, targets_of(batch, 0.0))
    seen = torch.cat([batch.obs["obs"][:-1][batch.valid] for batch in batches]).double()
    moments = statistics.observation["obs"]
    assert int(moments.count) == len(seen)
    assert torch.allclose(moments.mean, seen.mean(0))
    assert torch.allclose(moments.m2 / moments.count, seen.var(0, correction=0))
    assert torch.allclose(buffer(statistics, "mean"), seen.mean(0).float())
    expected = (seen.var(0, correction=0) + NUMBER_VARIANCE).rsqrt().float()
    assert torch.allclose(buffer(statistics, "inv_std"), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("mean", "size", "deviation"), [(0.0, 1e-4, 1.0), (0.0, 1e-9, 0.0), (1.0, 1e-3, 1.0), (1e6, 0.01, 0.0)]
)
def test_small_numbers_are_normalized_and_rounding_errors_are_not(mean: float, size: float, deviation: float) -> None:
    statistics = statistics_of()
    batch = batch_of(statistics.model)
    noise = torch.randn(batch.obs["obs"].shape, generator=torch.Generator().manual_seed(1))
    batch = replace(batch, obs={"obs": mean + size * noise})
    statistics.update(batch, targets_of(batch, 0.0))
    scaled = statistics.model.scalings[0](batch.obs["obs"][:-1][batch.valid])
    assert torch.allclose(scaled.std(0, correction=0), torch.tensor(deviation), atol=0.1)


def test_only_float_observations_are_normalized() -> None:
    statistics = RunningStatistics(model_of(SPEC), normalize_returns=True)
    assert {key: tuple(m.mean.shape) for key, m in statistics.observation.items()} == {"speed": (5,), "height": ()}
    batch = batch_of(statistics.model, SPEC)
    statistics.update(batch, targets_of(batch, 0.0))
    assert float(statistics.observation["height"].mean) == pytest.approx(
        float(batch.obs["height"][:-1][batch.valid].double().mean())
    )


def test_returns_have_a_mean_and_a_deviation() -> None:
    statistics = statistics_of()
    batch = batch_of(statistics.model)
    statistics.update(batch, targets_of(batch, 1.0, 5.0))
    assert int(statistics.returns.count) == 2 * int(batch.valid.sum())
    assert float(statistics.model.return_mean) == pytest.approx(3.0)
    assert float(statistics.model.return_std) == pytest.approx(2.0, abs=1e-5)


def test_a_mean_as_large_as_float32_allows_does_not_blow_up_the_layer_of_the_values() -> None:
    statistics = statistics_of()
    batch = batch_of(statistics.model)
    statistics.update(batch, targets_of(batch, 3e38))
    assert float(statistics.model.return_mean) == float(torch.tensor(3e38))
    assert float(statistics.model.return_std) == pytest.approx(3e38 * 2.0**-23)
    assert all(weights.isfinite().all() for weights in statistics.model.value_layer())


def test_buffers_stay_when_returns_are_not_normalized() -> None:
    statistics = RunningStatistics(model_of(), normalize_returns=False)
    batch = batch_of(statistics.model)
    statistics.update(batch, targets_of(batch, 5.0))
    assert float(statistics.returns.mean) == 5.0  # by which a warning tells that returns hardly differ
    assert (float(statistics.model.return_mean), float(statistics.model.return_std)) == (0.0, 1.0)


def test_returns_of_long_ago_fade() -> None:
    statistics = statistics_of()
    model = statistics.model
    batch = batch_of(model)
    batch.valid[:] = True
    many = (torch.full((RETURN_MEMORY_SAMPLES, 1), 0.0), torch.ones(RETURN_MEMORY_SAMPLES, 1, dtype=torch.bool))
    statistics.update(batch, [many])
    assert float(statistics.returns.count) == RETURN_MEMORY_SAMPLES
    for _ in range(3):
        statistics.update(batch, [(many[0] + 8.0, many[1])])
        assert float(statistics.returns.count) == RETURN_MEMORY_SAMPLES
    assert float(model.return_mean) == pytest.approx(8 * (1 - 1 / 8))  # half of the past is forgotten each time


def test_what_is_not_finite_is_left_out() -> None:
    clean, dirty = statistics_of(), statistics_of()
    batch = batch_of(clean.model)
    bad = clone(batch)
    t, b = torch.argwhere(batch.valid)[3].tolist()
    bad.obs["obs"][t, b, 2] = math.inf
    without = replace(batch, valid=batch.valid.clone())
    without.valid[t, b] = False
    target = torch.randn(ROLLOUT, COLUMNS)
    bad_target = target.clone()
    bad_target[t, b] = math.nan
    clean.update(without, [(target, without.valid)])
    dirty.update(bad, [(bad_target, bad.valid)])
    assert np.array_equal(clean.to_array(), dirty.to_array())


def test_a_batch_without_a_valid_step_changes_nothing() -> None:
    statistics = statistics_of()
    batch = batch_of(statistics.model)
    statistics.update(batch, targets_of(batch, 2.0))
    before, mean = statistics.to_array(), buffer(statistics, "mean").clone()
    batch.valid[:] = False
    statistics.update(batch, targets_of(batch, 7.0))
    assert np.array_equal(statistics.to_array(), before)
    assert torch.equal(buffer(statistics, "mean"), mean)


def test_arrays_round_trip_bit_for_bit() -> None:
    first, second = (RunningStatistics(model_of(SPEC), normalize_returns=True) for _ in range(2))
    batch = batch_of(first.model, SPEC)
    first.update(batch, targets_of(batch, 1.0, 1e38))
    array = first.to_array()
    assert array.dtype == np.float64
    assert len(array) == (1 + 2 * 5) + (1 + 2) + 3
    second.load_array(array)
    assert second.to_array().tobytes() == array.tobytes()
    array[:] = 0  # what was loaded is a copy
    assert second.to_array().tobytes() == first.to_array().tobytes()


def test_arrays_of_another_model_are_refused() -> None:
    statistics = statistics_of()
    with pytest.raises(ValueError, match="the state has 13 statistics, the model 14"):
        statistics.load_array(np.zeros(13))


@pytest.mark.parametrize(("epochs", "columns", "microbatch"), [(1, 6, 0), (3, 2, 0), (2, 3, 1), (2, 6, 4)])
def test_learning_counts_each_step_once(epochs: int, columns: int, microbatch: int) -> None:
    """Whatever the number of epochs, minibatches and microbatches."""
    learner = learner_of(ppo_epochs=epochs, batch_size=columns * ROLLOUT, microbatch_size=microbatch * ROLLOUT)
    count = 0
    for seed in range(3):
        batch = batch_of(learner.model, seed=seed)
        count += int(batch.valid.sum())
        learn(learner, batch)
    assert int(learner.statistics.returns.count) == count
    assert int(learner.statistics.observation["obs"].count) == count


def test_statistics_change_after_the_last_step_of_a_batch_and_before_it_is_published() -> None:
    learner = learner_of(ppo_epochs=2, batch_size=3 * ROLLOUT)
    buffers = slice(learner.flat.num_parameters, None)
    start = learner.flat.flat[buffers].clone()
    seen = [learner.flat.flat[buffers].clone() for _ in learner.learn(batch_of(learner.model), 0.0)]
    assert [torch.equal(buffers, start) for buffers in seen] == [True, True, True, False]


def test_images_are_normalized_pixel_by_pixel_when_asked() -> None:
    statistics = RunningStatistics(model_of(SPEC, normalize_images=True), normalize_returns=True)
    model = statistics.model
    batch = batch_of(model, SPEC)
    statistics.update(batch, targets_of(batch, 0.0))
    images = batch.obs["image"][:-1].flatten(0, 1)
    stride = image_stride(ROLLOUT, COLUMNS)
    seen = images[::stride][batch.valid.flatten()[::stride]].double()
    scaling = model.scaling_of("image")
    assert torch.allclose(scaling.mean, seen.mean(0).float())
    expected = (seen.var(0, correction=0) + IMAGE_VARIANCE * 255**2).rsqrt().float()
    assert torch.allclose(scaling.inv_std, expected, rtol=1e-5)
    x = images[:3]
    assert torch.allclose(scaling(x), (x - scaling.mean) * scaling.inv_std, atol=1e-6)


@pytest.mark.parametrize("size", [1e-3, 0.05, 0.3])
def test_numbers_in_three_dimensions_need_not_be_pixels(size: float) -> None:
    spec = env_spec_of(prices=ObservationSpec((4, 5, 1), "float32"))
    statistics = RunningStatistics(model_of(spec), normalize_returns=True)
    batch = batch_of(statistics.model, spec)
    noise = torch.randn(batch.obs["prices"].shape, generator=torch.Generator().manual_seed(1))
    batch = replace(batch, obs={"prices": size * noise})
    statistics.update(batch, targets_of(batch, 0.0))
    scaled = statistics.model.scaling_of("prices")(batch.obs["prices"][:-1].flatten(0, 1))
    assert float(scaled.std()) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize(("steps", "columns"), [(128, 8), (32, 32), (32, 6), (20, 1), (1, 9)])
def test_images_of_every_column_are_seen(steps: int, columns: int) -> None:
    statistics = RunningStatistics(model_of(SPEC, normalize_images=True), normalize_returns=False)
    images = torch.zeros(steps + 1, columns, *IMAGE.shape, dtype=torch.uint8)
    lit = images.flatten(2)
    for column in range(columns):
        lit[:, column, column] = 255  # a pixel of its own
    obs = {"image": images, "speed": torch.zeros(steps + 1, columns, 5), "height": torch.zeros(steps + 1, columns)}
    valid = torch.ones(steps, columns, dtype=torch.bool)
    statistics.update(replace(batch_of(statistics.model, SPEC), obs=obs, valid=valid), [])
    moments = statistics.observation["image"]
    assert 0 < int(moments.count) <= 64
    assert moments.mean.flatten().nonzero().flatten().tolist() == [*range(columns)]


@pytest.mark.parametrize("shared", [True, False])
def test_values_stay_what_they_are_in_units_of_return(shared: bool) -> None:
    """Or else they would bootstrap returns that are as wrong as the unit was, and set the next unit by them."""
    statistics = statistics_of(actor_critic_share_weights=shared)
    model = statistics.model
    batch = batch_of(model)
    statistics.update(batch, targets_of(batch, 1.0, 5.0))
    obs = {key: x.clone() for key, x in batch.obs.items()}

    def values() -> torch.Tensor:
        recurrence = ROLLOUT // len(batch.rnn_state)
        return model.denormalize_value(model.unroll(obs, batch.first, batch.rnn_state, recurrence)[1])

    model.normalized_keys = ()
    statistics.observation = {}  # what is observed must not change
    before, units = values(), float(model.return_std)
    statistics.update(batch, targets_of(batch, -300.0, 700.0))
    assert float(model.return_std) > 100 * units
    assert torch.allclose(values(), before, atol=1e-4)


def test_what_others_have_gathered_is_merged() -> None:
    whole, merged = statistics_of(), statistics_of()
    for seed in range(3):
        batch = batch_of(whole.model, seed=seed)
        batch.obs["obs"][:-1][~batch.valid] = math.nan
        targets = [(batch.reward.clone(), batch.valid)]
        whole.update(batch, targets)
        other = RunningStatistics(merged.model, normalize_returns=True)
        before = buffer(merged, "mean").clone()
        other.gather(batch, targets)
        other.settle()
        assert torch.equal(buffer(merged, "mean"), before)
        merged.merge(other.to_array())
    assert merged.to_array().tolist() == whole.to_array().tolist()
    for name in ("mean", "inv_std"):
        assert torch.equal(buffer(merged, name), buffer(whole, name))
    assert torch.equal(merged.model.return_std, whole.model.return_std)
    with pytest.raises(ValueError, match=r"^the state has 3 statistics, the model 14$"):
        merged.merge(np.zeros(3))
