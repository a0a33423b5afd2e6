"""Single steps, or segments of backpropagation through time, chosen from whole columns for minibatches."""

from collections.abc import Iterator

import torch
from torch import Generator, Tensor


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
