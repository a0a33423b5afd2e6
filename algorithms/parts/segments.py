"""Single steps, or segments of backpropagation through time, chosen from whole columns for minibatches."""

from collections.abc import Iterator, Sequence

import torch
from torch import Generator, Tensor

from appo.algorithms.runtime.learning.batches import Batch


def drawn_segments(count: int, size: int, epochs: int, generator: Generator | None) -> Iterator[Tensor]:
    """Yield the numbers of the segments of every minibatch.

    Args:
        count: number of segments.
        size: segments of a minibatch.
        epochs: passes over all segments.
        generator: generator on the host that draws an order per pass; None: the segments keep their order.
    """
    for _ in range(epochs):
        order = torch.arange(count) if generator is None else torch.randperm(count, generator=generator)
        yield from torch.split(order, size)


def rows_of(segments: Tensor, steps: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return rows of flattened fields [T * B]: of the steps [S, N], and of the observations.

    Single steps have their own observations, [1, N]; a longer segment has the next one too, for unrolling, [S+1, N].

    Args:
        segments: numbers [N] of segments, in the order of `Batch.rnn_state` [*, B].
        steps: S, steps of a segment.
        columns: B.
    """
    start = segments.div(columns, rounding_mode="floor") * steps * columns + segments % columns
    row = start + columns * torch.arange(steps, device=start.device).unsqueeze(1)
    return row, row if steps == 1 else torch.cat((row, row[-1:] + columns))


def select(field: Tensor, rows: Tensor) -> Tensor:
    """Return rows [S, N, *] of a field [T, B, *] or [T+1, B, *]."""
    return field.flatten(0, 1).index_select(0, rows.flatten()).view(*rows.shape, *field.shape[2:])


def gather(batch: Batch, segments: Tensor, steps: int, names: Sequence[str], *, remembers: bool) -> Batch:
    """Return a minibatch of segments, with observations and `first` as `rows_of` says, and rnn_state [1, N, H].

    Fields that no loss reads have no steps: [0, N].

    Args:
        batch: steps [T, B].
        segments: numbers [N] of segments, in the order of `Batch.rnn_state` [*, B].
        steps: S, steps of a segment.
        names: names of the gathered `Batch.recorded`.
        remembers: whether the network has a state; otherwise H is 0.
    """
    rows, seen = rows_of(segments, steps, batch.valid.shape[1])
    unread = batch.reward.new_empty(0, len(segments))
    state = select(batch.rnn_state, segments) if remembers else batch.rnn_state.new_empty(len(segments), 0)
    return Batch(
        obs={key: select(x, seen) for key, x in batch.obs.items()},
        first=select(batch.first, seen),
        valid=select(batch.valid, rows),
        reward=unread,
        terminated=unread,
        truncated=unread,
        num_frames=unread,
        action=select(batch.action, rows),
        recorded={name: select(batch.recorded[name], rows) for name in names},
        policy_version=unread,
        rnn_state=state.unsqueeze(0),
    )
