"""Advantages and value targets of trajectories: V-trace and generalized advantage estimation.

Three functions decide the future that a step may see:

* `_next_value`: the value of the reached state, also where a time limit cut the episode;
* `_trace_ends`: whether a step knows nothing of the next row;
* `_accumulate`: the reverse recursion of both estimators.

Rows where `valid` is false may hold anything, NaN included. They are replaced before any arithmetic, because a mask
applied afterwards lets NaN through (0 * NaN is NaN). No argument is ever changed, and no result carries a gradient:
targets are constants of the loss. Functions of tensors raise ValueError if shapes disagree.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from appo.algorithms.ops.checks import require_same_shape, require_shape


class Returns(NamedTuple):
    """Estimates of the future that the losses need, float32; both are 0 where `valid` is false."""

    advantage: Tensor
    """[T, B], not normalized."""
    target: Tensor
    """[T, B], what the value of each step should have been."""


class _Steps(NamedTuple):
    """A trajectory with every invalid row zeroed; [T, B] but for `trace_ends`, [T-1, B]."""

    reward: Tensor
    value: Tensor
    next_value: Tensor
    trace_ends: Tensor


def vtrace(  # noqa: PLR0913 - a trajectory has this many signals, and every call names them
    *,
    ratio: Tensor,
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    first: Tensor,
    final_value: Tensor | None = None,
    gamma: float,
    vtrace_lambda: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
) -> Returns:
    """V-trace value targets, and advantages for a surrogate that multiplies by the ratio itself.

    With rho = min(rho_clip, ratio) and c = lambda * min(c_clip, ratio), both of step t:

        vs[t] - V[t] = rho * (r + gamma * V' - V) + gamma * c * (vs[t+1] - V[t+1])     the trace ends with the episode
        advantage[t] = r + gamma * vs[t+1] - V[t]

    The paper multiplies the advantage by rho because its policy gradient has no other importance weight. The PPO
    surrogate is ratio * advantage, so a factor rho here would weight every step twice.

    Args:
        ratio: [T, B], pi(a|s) / mu(a|s), already clamped (`losses.clamped_ratio`); read as a constant.
        reward: [T, B].
        value: [T+1, B], current values, one row more than there are steps.
        terminated: [T, B] bool, the episode ended in a state without a future.
        truncated: [T, B] bool, the episode was cut, by a time limit for example.
        valid: [T, B] bool, the step was really taken.
        first: [T+1, B] bool, the observation of that row starts an episode.
        final_value: [T, B], for environments that reset in the same step; read only where
            `valid[t] and first[t+1]`. Without it a truncated step of the kind is bootstrapped from its own value (the
            last known value of its episode).
        gamma: discount per step, in [0, 1].
        vtrace_lambda: shortens the traces, in [0, 1]; 1 is the paper's algorithm.
        rho_clip: limit of the weight of a step's own temporal difference; decides which policy is evaluated.
        c_clip: limit of the weight by which later differences reach back; decides the speed, not the fixed point.

    Returns:
        Advantage and target. With ratio = 1, both clips >= 1 and lambda = 1 the target is the on-policy return.

    Source: Espeholt et al. 2018, arXiv:1802.01561, eq. 1 and remarks 1 and 2.
    """
    require_same_shape(reward=reward, ratio=ratio)
    steps = _clean(reward, value, terminated, truncated, valid, first, final_value)
    ratio = _zero_unless(valid, _constant(ratio))
    difference = steps.reward.add_(steps.next_value, alpha=gamma).sub_(steps.value)
    decay = ratio[:-1].clamp(max=c_clip).mul_(gamma * vtrace_lambda).masked_fill_(steps.trace_ends, 0.0)
    correction = _accumulate(ratio.clamp_(max=rho_clip).mul_(difference), decay)  # vs - V
    # Where the trace goes on, r + gamma * vs[t+1] - V has gamma * (vs - V)[t+1] more than the difference.
    difference[:-1].add_(correction[1:].masked_fill(steps.trace_ends, 0.0), alpha=gamma)
    return Returns(advantage=difference, target=correction.add_(steps.value))


def gae(  # noqa: PLR0913 - a trajectory has this many signals, and every call names them
    *,
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    first: Tensor,
    final_value: Tensor | None = None,
    gamma: float,
    gae_lambda: float,
) -> Returns:
    """Generalized advantage estimates and their returns; arguments as in `vtrace`, and `gae_lambda` in [0, 1].

    A terminated step has no future; a truncated one is bootstrapped from the reached state, and nothing is carried over
    from the next episode. The target is advantage + value (the lambda-return), not the discounted sum of rewards.

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16.
    """
    steps = _clean(reward, value, terminated, truncated, valid, first, final_value)
    difference = steps.reward.add_(steps.next_value, alpha=gamma).sub_(steps.value)
    decay = torch.full_like(difference[:-1], gamma * gae_lambda).masked_fill_(steps.trace_ends, 0.0)
    advantage = _accumulate(difference, decay)
    return Returns(advantage, advantage + steps.value)


def _clean(
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    first: Tensor,
    final_value: Tensor | None,
) -> _Steps:
    """Check the shapes, and copy the trajectory with zeros for whatever invalid rows hold."""
    _require_shapes(
        value, first, reward=reward, terminated=terminated, truncated=truncated, valid=valid, final_value=final_value
    )
    value = _constant(value)
    return _Steps(
        reward=_zero_unless(valid, _constant(reward)),
        value=_zero_unless(valid, value[:-1]),
        next_value=_next_value(value, terminated, first, valid, final_value),
        trace_ends=_trace_ends(terminated, truncated, valid, first),
    )


def _next_value(value: Tensor, terminated: Tensor, first: Tensor, valid: Tensor, final_value: Tensor | None) -> Tensor:
    """Return the value of the state that each step reached, in the episode of the step: [T, B] float32.

    Invalid steps have 0. A terminated step has no future. A step followed by the first observation of the next episode
    (SAME_STEP reset) has its last observation's value in `final_value`, not in `value`. Everywhere else row t + 1 is
    the state that step t reached, also at a time limit (NEXT_STEP reset).

    Source: time limits as in Pardo et al. 2018, arXiv:1712.00378.
    """
    last_known = value[:-1] if final_value is None else _constant(final_value)
    reached = torch.where(valid & first[1:], last_known, value[1:])
    return _zero_unless(valid & ~terminated, reached)


def _trace_ends(terminated: Tensor, truncated: Tensor, valid: Tensor, first: Tensor) -> Tensor:
    """Whether a step knows nothing of the row after it, [T-1, B] bool; after the last step there is no row."""
    # An invalid row has the term 0 and no trace of its own: it passes nothing on to the row before it.
    return (terminated | truncated).logical_or_(first[1:]).logical_or_(~valid)[:-1]


def _accumulate(term: Tensor, decay: Tensor) -> Tensor:
    """Solve x[t] = term[t] + decay[t] * x[t+1] for t < T-1 from x[T-1] = term[T-1]; term [T, B], decay [T-1, B]."""
    return _accumulate_rows(term, decay) if term.device.type == "cpu" else _accumulate_on_device(term, decay)


@np.errstate(over="ignore", invalid="ignore")  # as torch does it on a device
def _accumulate_rows(term: Tensor, decay: Tensor) -> Tensor:
    """On the CPU numpy is several times faster: a row of a few hundred numbers is all overhead in torch."""
    total = term.clone()
    rows, decays = list(total.numpy()), list(decay.numpy())  # views: the rows of `total` itself
    for t in range(len(decays) - 1, -1, -1):
        rows[t] += decays[t] * rows[t + 1]
    return total


def _accumulate_on_device(term: Tensor, decay: Tensor) -> Tensor:
    """One fused operation per step, without a synchronization, so that it can be captured in a graph."""
    terms, decays = term.unbind(), decay.unbind()
    total = [terms[-1]]
    for t in range(len(decays) - 1, -1, -1):
        total.append(torch.addcmul(terms[t], decays[t], total[-1]))
    return torch.stack(total[::-1])


def _zero_unless(condition: Tensor, tensor: Tensor) -> Tensor:
    """Copy with zeros elsewhere; selected, because a product with 0 would keep NaN."""
    return torch.where(condition, tensor, 0.0)


def _constant(tensor: Tensor) -> Tensor:
    return tensor.detach().float()


def _require_shapes(value: Tensor, first: Tensor, **per_step: Tensor | None) -> None:
    """Check [T+1, B] of the first two, which T and B are read from, and [T, B] of the others."""
    require_shape("value", value, (None, None))
    require_same_shape(value=value, first=first)
    steps, columns = value.shape[0] - 1, value.shape[1]
    if steps < 1:
        raise ValueError(f"value: expected at least 2 rows (one step and the state it reached), got {steps + 1}")
    for name, tensor in per_step.items():
        if tensor is not None:
            require_shape(name, tensor, (steps, columns))
