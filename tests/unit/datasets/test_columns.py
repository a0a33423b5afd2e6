"""Columns of datasets: every step once per epoch, its place decided by the steps read before, whoever reads."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from appo.algorithms.datasets.columns import ShuffledReader, columns_of, stream_of
from appo.algorithms.datasets.reader import Dataset, open_dataset
from appo.algorithms.runtime.learning.batches import Batch
from tests.unit.datasets.data import SPEC, episodes, written

LENGTHS = (3, 1, 7, 2, 5, 11, 4)
STEPS = sum(LENGTHS)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    written(tmp_path / "d", episodes(LENGTHS))
    return open_dataset([str(tmp_path / "d")])


def reader_of(dataset: Dataset, rollout: int, window: int, segments: int = 1, state_size: int = 0) -> ShuffledReader:
    return ShuffledReader(dataset, window, rollout, columns_of(rollout, segments, state_size))


def seen(batch: Batch) -> list[tuple[int, int]]:
    """Episode and step of every valid step of a batch."""
    pairs = batch.obs["obs"][:-1][batch.valid]
    return [(int(number), int(t)) for number, t in pairs.tolist()]


def steps_of(lengths: tuple[int, ...] = LENGTHS) -> list[tuple[int, int]]:
    return [(number, t) for number, length in enumerate(lengths) for t in range(length)]


@pytest.mark.parametrize("rollout", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("window", [0, 1, 9, 20])
def test_every_step_is_read_once_per_epoch(dataset: Dataset, rollout: int, window: int) -> None:
    reader, samples = reader_of(dataset, rollout, window), 0
    counts: Counter[tuple[int, int]] = Counter()
    while samples < 3 * STEPS:
        batch = reader.read(samples, 1)
        samples += int(batch.valid.sum())
        counts.update(seen(batch))
        if samples % STEPS == 0:
            assert set(counts.values()) == {samples // STEPS}
    assert samples == 3 * STEPS  # epochs end where columns do
    assert sorted(counts) == steps_of()


@pytest.mark.parametrize("window", [0, 9])
def test_the_steps_read_so_far_decide_what_follows(dataset: Dataset, window: int) -> None:
    whole, found, samples = reader_of(dataset, 4, window), [], 0
    while samples < 2 * STEPS:
        found.append((samples, batch := whole.read(samples, 3)))
        samples += int(batch.valid.sum())
    for samples, batch in reversed(found):
        again = reader_of(dataset, 4, window).read(samples, 3)
        for name, tensor in batch.named().items():
            assert torch.equal(tensor, again.named()[name]), name


def test_epochs_have_orders_of_their_own(dataset: Dataset) -> None:
    reader = reader_of(dataset, 1, 0)
    first, second = (seen(reader.read(epoch * STEPS, STEPS)) for epoch in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second) == steps_of()


def test_a_batch_is_what_a_slot_would_have_held(dataset: Dataset) -> None:
    batch = reader_of(dataset, 4, 0, 2, 3).read(0, 5)
    assert batch.rnn_state.shape == (2, 5, 3)
    assert not batch.rnn_state.any()
    for column in range(5):
        for t in range(4):
            number, step = (int(x) for x in batch.obs["obs"][t, column].tolist())
            if not batch.valid[t, column]:
                assert bool(batch.first[t + 1, column])
                continue
            last, terminated = step == LENGTHS[number] - 1, number % 2 == 0
            assert batch.action[t, column].tolist() == [(number + step) % 3]
            assert float(batch.reward[t, column]) == 10 * number + step
            assert bool(batch.terminated[t, column]) == (last and terminated)
            assert bool(batch.truncated[t, column]) == (last and not terminated)
            assert int(batch.num_frames[t, column]) == SPEC.frames_per_step
            assert bool(batch.first[t, column]) == (step == 0)
            assert batch.obs["obs"][t + 1, column].tolist() == [number, step + 1]  # the true final one at the end


def test_a_stream_has_a_row_for_every_final_observation() -> None:
    stream = stream_of(episodes((2, 1)), SPEC, 4)
    assert stream["valid"].tolist() == [True, True, False, True, False, False, False, False, False]
    assert stream["first"].tolist() == [True, False, False, True, False, True, True, True, True]
    assert stream["obs.obs"][:5].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]]
    assert np.flatnonzero(stream["terminated"]).tolist() == [1]
    assert np.flatnonzero(stream["truncated"]).tolist() == [3]
