"""Minibatches of PPO: single steps, or segments of backpropagation through time, gathered from whole columns."""

from dataclasses import dataclass, fields, replace

from torch import Tensor

from appo.algorithms.ops import losses
from appo.algorithms.parts.segments import rows_of, select
from appo.algorithms.runtime.learning.batches import Batch


@dataclass(frozen=True)
class Minibatch:
    """N segments of S steps, time-major. Without a recurrent core, S is 1."""

    obs: dict[str, Tensor]  # [S+1, N, *]; [1, N, *] if S is 1: a single step needs no unrolling
    first: Tensor  # as long as obs
    rnn_state: Tensor  # [N, H] before the segment
    valid: Tensor  # [S, N]
    action: Tensor  # [S, N, A]
    log_prob: Tensor  # of the action, by the policy that acted
    value: Tensor  # by the policy that acted, in units of return
    advantage: Tensor  # normalized, unless the loss normalizes
    target: Tensor  # of the value, in units of return
    noise: Tensor  # [S, N, L] of RPO for the logits; [S, N, 0] without

    def part(self, index: slice) -> "Minibatch":
        """Return a slice of the segments."""
        time_major = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("obs", "rnn_state")}
        return Minibatch(
            obs={key: x[:, index] for key, x in self.obs.items()},
            rnn_state=self.rnn_state[index],
            **{name: x[:, index] for name, x in time_major.items()},
        )


def gather(batch: Batch, segments: Tensor, noise: Tensor, *, remembers: bool) -> Minibatch:
    """Gather segments; segments of several steps include the next observation, for unrolling.

    Args:
        batch: steps [T, B], with recorded "advantage" and "target".
        segments: numbers [N] of segments, in the order of `Batch.rnn_state` [*, B].
        noise: noise [S, N, *] of RPO, with S steps of a segment.
        remembers: whether the network has a state.
    """
    row, seen = rows_of(segments, len(noise), batch.valid.shape[1])
    return Minibatch(
        obs={key: select(x, seen) for key, x in batch.obs.items()},
        first=select(batch.first, seen),
        rnn_state=select(batch.rnn_state, segments) if remembers else batch.rnn_state.new_empty(len(segments), 0),
        valid=select(batch.valid, row),
        action=select(batch.action, row),
        noise=noise,
        **{name: select(batch.recorded[name], row) for name in ("log_prob", "value", "advantage", "target")},
    )


def cleaned(batch: Batch) -> Batch:
    """Return the batch with zeros in actions and recorded numbers of invalid steps: 0 * NaN in a gradient is NaN."""
    recorded = {name: losses.zero_invalid(batch.recorded[name], batch.valid) for name in ("log_prob", "value")}
    return replace(batch, action=losses.zero_invalid(batch.action, batch.valid), recorded=batch.recorded | recorded)
