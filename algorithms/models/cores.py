"""The memory of a policy between steps: none, or the state of a GRU or LSTM."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from appo.algorithms.models.unrolling import Cell, unroll


def autocast_off(device_type: str) -> AbstractContextManager[object]:
    """Return a context without autocast on a kind of device; nearly free where autocast is off."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


Weights = dict[str, Tensor]


class Core(Protocol):
    """The module behind the encoder of a tower: a memory between steps.

    Attributes:
        output_size: D', features per step.
        state_size: H, numbers in the memory of a row.
    """

    output_size: int
    state_size: int

    def step(self, x: Tensor, first: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Step x [N,D] from state [N,H], which counts as zero where first [N]: return [N,D'] and the next state."""

    def unroll(self, x: Tensor, first: Tensor, state: Tensor) -> Tensor:
        """Compute what `step` gives for x [T+1,B,D] and first [T+1,B], differentiably: [T+1,B,D'].

        The T steps are segments of equal length, each of which starts from its own state [number of segments,B,H]; step
        T continues from the last one.
        """


class IdentityCore(nn.Module):
    """A core without memory: features pass unchanged and the state has no elements."""

    state_size = 0

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.output_size = input_size

    def step(self, x: Tensor, first: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return x [N,D] and the state [N,0]."""
        return x, state

    def unroll(self, x: Tensor, first: Tensor, state: Tensor) -> Tensor:
        """Return x [T+1,B,D]."""
        return x


class RecurrentCore(nn.Module):
    """A GRU or an LSTM whose state is one row of numbers.

    A state row [H] contains, layer by layer, the hidden vectors and then (LSTM) the cell vectors.

    Args:
        rnn_type: gru or lstm.
        input_size: D, features per step.
        hidden_size: width of a layer's state vector and of the output.
        num_layers: number of stacked layers.
    """

    def __init__(self, rnn_type: str, input_size: int, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.is_lstm = rnn_type == "lstm"
        self.rnn: nn.RNNBase = (nn.LSTM if self.is_lstm else nn.GRU)(input_size, hidden_size, num_layers)
        self.num_layers = num_layers
        self.output_size = hidden_size
        self.num_vectors = num_layers * (2 if self.is_lstm else 1)
        self.state_size = self.num_vectors * hidden_size

    def forward(self, x: Tensor, state: Tensor, weights: Weights | None = None) -> tuple[Tensor, Tensor]:
        """Advance through the steps of x without a reset; return y [t,B,hidden_size] and state [B,H], float32.

        Args:
            x: [t,B,D].
            state: [B,H] before the first of the t steps.
            weights: `_bf16_weights`, if the caller has them.
        """
        vectors = state.reshape(-1, self.num_vectors, self.output_size).transpose(0, 1).contiguous()
        weights = weights or self._bf16_weights(x)
        with autocast_off(x.device.type):
            if self.is_lstm:
                y, after = self.rnn(x.float(), (vectors[: self.num_layers], vectors[self.num_layers :]))
                vectors = torch.cat(after)
            elif weights:
                y, vectors = functional_call(self.rnn, weights, (x.bfloat16(), vectors.bfloat16()))
            else:
                y, vectors = self.rnn(x.float(), vectors)
        return y.float(), vectors.transpose(0, 1).flatten(1).float()

    def _bf16_weights(self, x: Tensor) -> Weights:
        """Return the weights of a GRU for autocast on the CPU, which does not support GRUs; otherwise nothing.

        An LSTM runs in float32: its bf16 kernel raises on processors without bf16. On a GPU both support autocast.
        """
        if self.is_lstm or x.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
            return {}
        return {name: parameter.bfloat16() for name, parameter in self.rnn.named_parameters()}

    def step(self, x: Tensor, first: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Take one step of N rows.

        Args:
            x: [N,D].
            first: [N] bool: the observation starts an episode, and the state counts as zero.
            state: [N,H] after the previous step.
        """
        # Filled, not multiplied: a state that is not finite must end with its episode. No copy to the host either.
        y, state = self(x.unsqueeze(0), state.masked_fill(first.unsqueeze(1), 0.0))
        return y.squeeze(0), state

    def unroll(self, x: Tensor, first: Tensor, state: Tensor) -> Tensor:
        """Repeat what acting did: `unroll_segments` of x [T+1,B,D]."""
        return unroll_segments(partial(self, weights=self._bf16_weights(x)), x, first, state)


def unroll_segments(cell: Cell, x: Tensor, first: Tensor, state: Tensor) -> Tensor:
    """Repeat acting in segments that each start from the stored state; return [T+1,B,D'].

    Backpropagation through time ends at the start of a segment and at every reset. Segments run side by side as columns
    of a batch: T segments of one step are one call instead of T.

    Args:
        cell: (x [t,B,D], state [B,H]) -> (y [t,B,D'], state [B,H]), t steps without a reset.
        x: [T+1,B,D].
        first: [T+1,B] bool.
        state: [T/recurrence,B,H] before each segment. Row T continues from the last segment.
    """
    num_segments, num_columns = state.shape[:2]
    rows, last_row = torch.split(x, [len(x) - 1, 1])
    steps, starts = _side_by_side(rows, num_segments), _side_by_side(first[:-1], num_segments)
    y, after = unroll(cell, steps, starts, state.detach().flatten(0, 1))
    y_last, _ = unroll(cell, last_row, first[-1:], after[-num_columns:])
    # Segments one after another again: [t, num_segments*B, *] -> [num_segments*t, B, *].
    return torch.cat((y.reshape(len(y), num_segments, num_columns, *y.shape[2:]).transpose(0, 1).flatten(0, 1), y_last))


def _side_by_side(x: Tensor, num_segments: int) -> Tensor:
    """Put segments of time side by side: [T,B,*] -> [T/num_segments, num_segments*B, *]."""
    return x.reshape(num_segments, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)
