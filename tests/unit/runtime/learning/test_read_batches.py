"""Batches that are read ahead by a thread: the same as without it, whatever happens between two of them."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from appo.algorithms.runtime.learning.batches import Batch
from appo.algorithms.runtime.learning.read_batches import ReadBatches
from appo.algorithms.runtime.memory.ownership import LearnerLedger
from appo.utils.errors import UsageError

DATASET = 100
"""Steps, numbered by their reward; a batch has one of its columns invalid in every third place."""


class Ledger:
    """The counts of a learner, as it notes them."""

    samples = 0

    def noted(self) -> dict[str, int]:
        return {"samples": self.samples}


def batch_of(samples: int, columns: int) -> Batch:
    """The batch of so many columns of a step that follows so many steps."""
    steps = torch.arange(samples, samples + columns).unsqueeze(0)
    zeros = torch.zeros(1, columns, dtype=torch.bool)
    valid = ~zeros
    valid[0, -1] = samples % 3 != 0
    return Batch(
        obs={},
        first=torch.zeros(2, columns, dtype=torch.bool),
        valid=valid,
        reward=(steps % DATASET).float(),
        terminated=zeros,
        truncated=zeros,
        num_frames=torch.full((1, columns), 4, dtype=torch.int32),
        action=steps.unsqueeze(-1),
        recorded={},
        policy_version=torch.zeros(1, columns, dtype=torch.int64),
        rnn_state=torch.zeros(1, columns, 0),
    )


def source_of(read: Callable[[int, int], Batch] = batch_of, columns: int = 4) -> tuple[ReadBatches, Ledger]:
    ledger = Ledger()
    return ReadBatches(read, columns, cast(LearnerLedger, cast(Any, ledger))), ledger


def take(source: ReadBatches, ledger: Ledger) -> list[float]:
    """Take a batch as the worker does it; its rewards."""
    batch = source.take()
    entered = source.entered()
    assert entered.env_steps == 4 * entered.samples
    assert source.entered().samples == 0
    ledger.samples += entered.samples
    return cast(list[float], batch.reward[0].tolist())


def test_batches_follow_the_steps_that_were_valid() -> None:
    source, ledger = source_of()
    assert [take(source, ledger) for _ in range(3)] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert ledger.samples == 9


def test_a_batch_that_was_read_ahead_is_left_where_another_is_due() -> None:
    """After another number of columns, and after counts that a successor or an older state has changed."""
    places: list[tuple[int, int]] = []

    def read(samples: int, columns: int) -> Batch:
        places.append((samples, columns))
        return batch_of(samples, columns)

    source, ledger = source_of(read)
    assert take(source, ledger) == [0, 1, 2, 3]
    source.resize(2)
    assert take(source, ledger) == [3, 4]
    ledger.samples = 50
    assert take(source, ledger) == [50, 51]
    assert take(source, ledger) == [52, 53]  # and the one behind it may be being read
    assert places[:6] == [(0, 4), (3, 4), (3, 2), (4, 2), (50, 2), (52, 2)]


def test_what_cannot_be_read_ends_the_batch_that_needs_it() -> None:
    def read(samples: int, columns: int) -> Batch:
        if samples:
            raise UsageError("episode 7 is damaged")
        return batch_of(samples, columns)

    source, ledger = source_of(read)
    assert take(source, ledger) == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="episode 7 is damaged"):
        source.take()
    with pytest.raises(UsageError, match="episode 7 is damaged"):
        source.take()
