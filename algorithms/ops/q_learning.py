"""Maths of Q-learning: values of branches, targets of n steps, errors, value rescaling.

An action has K parts, each a branch with values of its own; they lie side by side in the last dimension, L in all.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

RESCALING_EPS = 1e-3
FORBIDDEN = -1e30
"""Value of a choice that a mask forbids: below all that a network says, and finite."""


def allowed_only(q: Tensor, allowed: Tensor | None) -> Tensor:
    """Return Q [..., L] with `FORBIDDEN` where `allowed` [..., L] is False; None allows everything."""
    return q if allowed is None else q.masked_fill(~allowed, FORBIDDEN)


def greedy_action(q: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the choice of the largest value in every branch, [..., K] int64, of Q [..., L]; the first of equals."""
    if len(sizes) == 1:
        return q.argmax(-1, keepdim=True)
    return torch.stack([branch.argmax(-1) for branch in torch.split(q, list(sizes), dim=-1)], dim=-1)


def taken(q: Tensor, action: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the values [..., K] of the choices [..., K] among Q [..., L]."""
    if len(sizes) == 1:
        return q.gather(-1, action.long())
    branches = torch.split(q, list(sizes), dim=-1)
    pairs = zip(branches, action.long().unbind(-1), strict=True)
    return torch.stack([branch.gather(-1, choice.unsqueeze(-1)).squeeze(-1) for branch, choice in pairs], dim=-1)


def dueling(value: Tensor, advantage: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return Q [..., L] = V [..., 1] + A [..., L] - the mean of A over its branch.

    Source: Wang et al. 2016, arXiv:1511.06581, eq. 9; by branch Tavakoli et al. 2018, arXiv:1711.08946, eq. 1.
    """
    branches = torch.split(advantage, list(sizes), dim=-1)
    return torch.cat([value + branch - branch.mean(-1, keepdim=True) for branch in branches], dim=-1)


def bootstrap_value(target_q: Tensor, online_q: Tensor | None, sizes: Sequence[int]) -> Tensor:
    """Return the value [...] of a state by the target network, the mean over branches.

    Args:
        target_q: [..., L] of the target network, with `FORBIDDEN` where a choice is.
        online_q: [..., L] of the network that is trained, which then chooses (double Q-learning); None: the target
            network chooses itself.
        sizes: of the branches.

    Source: Mnih et al. 2015; van Hasselt et al. 2016, arXiv:1509.06461, eq. 4; the mean over branches Tavakoli et al.
        2018, arXiv:1711.08946, eq. 6.
    """
    return taken(target_q, greedy_action(target_q if online_q is None else online_q, sizes), sizes).mean(-1)


def n_step_target(reward: Tensor, discount: Tensor, bootstrap: Tensor, *, rescaled: bool = False) -> Tensor:
    """Return R + discount * Q(s'), [...]; a bootstrap value does not count, whatever it is, where the discount is 0.

    Args:
        reward: [...] discounted sum of n rewards.
        discount: [...] gamma^n, 0 after a terminated step.
        bootstrap: [...] value of the state after them, in units of the network.
        rescaled: whether the network predicts h(return).

    Source: Horgan et al. 2018, arXiv:1803.00933, eq. 1; with h Pohlen et al. 2018, arXiv:1805.11593, eq. 1.
    """
    value = unscaled_value(bootstrap) if rescaled else bootstrap
    target = reward + torch.where(discount > 0, discount * value, torch.zeros_like(value))
    return rescaled_value(target) if rescaled else target


def td_loss(error: Tensor, *, huber: bool) -> Tensor:
    """Return the loss of every error: e^2 / 2, or with `huber` |e| - 1/2 beyond 1 (Mnih et al. 2015)."""
    return huber_loss(error, torch.zeros_like(error), reduction="none") if huber else 0.5 * error.square()


def conservative_gap(q: Tensor, value: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return log sum_a exp Q(s, a) - Q(s, a_t), [...], the mean over branches: how far above what was done others are.

    Source: Kumar et al. 2020, arXiv:2006.04779, eq. 4: CQL(H), of discrete actions.

    Args:
        q: [..., L], with `FORBIDDEN` where a choice is.
        value: [..., K] of what was done.
        sizes: of the branches.
    """
    soft = torch.stack([branch.logsumexp(-1) for branch in torch.split(q, list(sizes), dim=-1)], dim=-1)
    return (soft - value).mean(-1)


def rescaled_value(x: Tensor) -> Tensor:
    """Return h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x (Pohlen et al. 2018, arXiv:1805.11593, prop. A.2)."""
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + RESCALING_EPS * x


def unscaled_value(x: Tensor) -> Tensor:
    """Return the inverse of `rescaled_value`, in float64 inside: eps is far below its square in float32."""
    y, e = x.double(), RESCALING_EPS
    root = (((1 + 4 * e * (y.abs() + 1 + e)).sqrt() - 1) / (2 * e)).square() - 1
    return (y.sign() * root).to(x.dtype)


def epsilon_ladder(rows: int, epsilon: float, alpha: float) -> Tensor:
    """Return how often each of N rows acts at random, [N]: epsilon^(1 + i / (N - 1) * alpha); one row has the last.

    Source: Horgan et al. 2018, arXiv:1803.00933, section 4.1.
    """
    place = torch.linspace(0.0, 1.0, rows, dtype=torch.float64) if rows > 1 else torch.ones(1, dtype=torch.float64)
    return (epsilon ** (1 + place * alpha)).float()
