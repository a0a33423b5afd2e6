"""Distributions over actions that may have several parts: choices, bits and real numbers.

Everything is computed in float32 whatever the dtype of the logits, because ratios of probabilities are the
difference of two logarithms and bf16 keeps three digits of each. The mask belongs to the distribution, so acting and
learning cannot disagree about it: log-probabilities of a policy that was sampled with a mask and trained without one
give biased ratios.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from operator import add
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn.functional import log_softmax, softplus

from appo.algorithms.ops.checks import require_shape

MASKED_LOGIT = -1e9
"""Far below any logit, yet finite: infinity times a probability of zero would be NaN."""
LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0
"""Standard deviations from 0.007 to 7.4 times the unit of an action."""
HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)

Parts = tuple[tuple[str, int], ...]
"""(kind, size) of each part of an action; kinds are categorical, bins, bernoulli, gaussian and tanh_gaussian."""

REAL = ("gaussian", "tanh_gaussian")
"""Kinds whose values are real numbers."""

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(16)
NORMAL_NODES, NORMAL_WEIGHTS = _NODES.tolist(), (_WEIGHTS / math.sqrt(2.0 * math.pi)).tolist()
"""Gauss-Hermite quadrature: E f(x) of a standard normal x is nearly the weighted sum of f at the nodes."""


@dataclass(frozen=True, eq=False)
class ActionDistribution:
    """Independent parts, one after the other in the logits and in the action.

    | kind        | logits                           | action values             |
    |-------------|----------------------------------|---------------------------|
    | categorical | size                             | 1, the index              |
    | bins        | size, not covered by a mask      | 1, the index              |
    | bernoulli   | size                             | size, each 0 or 1         |
    | gaussian    | size means, size log deviations  | size                      |
    | tanh_gaussian | as gaussian, before tanh       | size, before tanh         |

    The density of a tanh_gaussian is the density of tanh(value) in (-1, 1): Haarnoja et al. 2018, appendix C
    (arXiv:1801.01290). The mode is the tanh of the mean, the most probable value before tanh.

    Args:
        parts: (kind, size) of each part.
        logits: [..., L].
        action_mask: [..., M] bool over the logits of all categorical parts, in order; False is never sampled and gets
            gradient exactly 0. A part without an allowed choice counts as uniform (rows of dead agents).

    Raises:
        ValueError: an unknown kind, or the last dimension of a tensor does not fit the parts.
    """

    parts: Parts
    logits: Tensor
    action_mask: Tensor | None = None
    _distributions: "tuple[_Part, ...]" = field(init=False, repr=False)

    def __post_init__(self) -> None:
        layout = _layout(self.parts)
        require_shape("logits", self.logits, (*self.logits.shape[:-1], layout.widths.logits))
        mask = self.action_mask
        if mask is not None:
            require_shape("action_mask", mask, (*self.logits.shape[:-1], layout.widths.mask))
        # Built at once, not on first use: what `sample` would build without gradients must not serve `log_prob`.
        distributions = tuple(
            p.kind(self.logits[..., p.logits], None if mask is None else mask[..., p.mask]) for p in layout.parts
        )
        object.__setattr__(self, "_distributions", distributions)  # the dataclass is frozen

    @torch.no_grad()
    def sample(self, generator: Generator | None = None) -> Tensor:
        """Draw an action, [..., A]: float32 if a part is of real numbers, else int32."""
        return self._joined(part.sample(generator) for part in self._distributions)

    def rsample(self, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw an action [..., A] float32, and its log-probability [...], both differentiable in the logits.

        The action is mean + deviation * noise; a tanh_gaussian is before tanh, see `squashed`. The log-probability is
        computed from the noise, without the rounding of (action - mean) / deviation.

        Raises:
            ValueError: a part consists of choices or bits, whose samples have no gradient.

        Source: Haarnoja et al. 2018, arXiv:1801.01290, section 4.2 and appendix C.
        """
        drawn = [part.rsample(generator) for part in self._distributions]
        return torch.cat([value for value, _ in drawn], dim=-1), reduce(add, (log_prob for _, log_prob in drawn))

    @torch.no_grad()
    def mode(self) -> Tensor:
        """The most likely action, [..., A], of the dtype of `sample`."""
        return self._joined(part.mode() for part in self._distributions)

    def log_prob(self, action: Tensor) -> Tensor:
        """Logarithm of the probability (density of real numbers) of an action, [...] float32.

        Args:
            action: [..., A], indices within range also in rows that are masked out later; see `losses.zero_invalid`.

        Raises:
            ValueError: the shape does not fit the logits and parts.
        """
        layout = _layout(self.parts)
        require_shape("action", action, (*self.logits.shape[:-1], layout.widths.values))
        return reduce(
            add,
            (part.log_prob(action[..., p.values]) for part, p in zip(self._distributions, layout.parts, strict=True)),
        )

    def entropy(self) -> Tensor:
        """Entropy in nats, summed over the parts, [...] float32.

        That of a squashed Gaussian has no closed form. It is the Gaussian's plus E log(1 - tanh(x)^2), which quadrature
        with 16 nodes gives to within 1e-3 nats per number up to a deviation of 1.5; at 3 it errs by 0.03, and
        by 0.25 at 7.4, the largest.
        """
        return reduce(add, (part.entropy() for part in self._distributions))

    def kl(self, other: "ActionDistribution") -> Tensor:
        """KL(self || other) in nats, summed over the parts, [...] float32 (ValueError: the parts differ)."""
        if tuple(self.parts) != tuple(other.parts):
            raise ValueError(f"other: expected parts {self.parts}, got {other.parts}")
        return reduce(add, (p.kl(q) for p, q in zip(self._distributions, other._distributions, strict=True)))

    def symmetric_kl_to_uniform(self) -> Tensor:
        """½ [KL(p || u) + KL(u || p)] summed over the parts, [...] float32; u is uniform over what is allowed.

        Raises:
            ValueError: a part is of real numbers, for which there is no uniform distribution.
        """
        return reduce(add, (part.symmetric_kl_to_uniform() for part in self._distributions))

    def shifted(self, noise: Tensor) -> Self:
        """Return the distribution of logits + noise, [..., L] each."""
        return replace(self, logits=self.logits + noise)

    def _joined(self, values: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(values), dim=-1).to(_layout(self.parts).dtype)


def noise_of_means(parts: Parts, shape: tuple[int, ...], alpha: float, generator: Generator) -> Tensor:
    """Draw noise [*shape, L] for logits: Uniform(-alpha, alpha) for the mean of every real number, 0 elsewhere.

    Source: Rahman & Xue 2022, arXiv:2212.07536.
    """
    layout = _layout(parts)
    noise = torch.zeros(*shape, layout.widths.logits, device=generator.device)
    for (kind, size), part in zip(parts, layout.parts, strict=True):
        if kind in REAL:
            noise[..., part.logits][..., :size].uniform_(-alpha, alpha, generator=generator)
    return noise


def squashed(parts: Parts, action: Tensor) -> Tensor:
    """Return actions [..., A] as stored, with the values of every tanh_gaussian mapped into [-1, 1] by tanh."""
    placed = zip(parts, _layout(parts).parts, strict=True)
    pieces = [(kind, action[..., part.values]) for (kind, _), part in placed]
    return torch.cat([piece.tanh() if kind == "tanh_gaussian" else piece for kind, piece in pieces], dim=-1)


class _Widths(NamedTuple):
    logits: int
    values: int
    mask: int


class _Part(ABC):
    """Distribution over one part of an action, made of its own slices of the logits and the mask."""

    @abstractmethod
    def __init__(self, logits: Tensor, allowed: Tensor | None) -> None:
        """Take the part's logits, and which of its choices are allowed (categorical only)."""

    @staticmethod
    @abstractmethod
    def widths(size: int) -> _Widths:
        """Widths of a part of the given size."""

    @abstractmethod
    def sample(self, generator: Generator | None) -> Tensor:
        """Draw values, [..., number of values]."""

    def rsample(self, generator: Generator | None) -> tuple[Tensor, Tensor]:
        """Draw values, [..., number of values], and their log-probability, [...], with gradients."""
        raise ValueError("no gradient passes through a drawn choice or bit: rsample needs real numbers")

    @abstractmethod
    def mode(self) -> Tensor:
        """The most likely values, [..., number of values]."""

    @abstractmethod
    def log_prob(self, value: Tensor) -> Tensor:
        """[..., number of values] -> [...]."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """[...] in nats."""

    @abstractmethod
    def kl(self, other: Self) -> Tensor:
        """KL(self || other), [...] in nats."""

    @abstractmethod
    def symmetric_kl_to_uniform(self) -> Tensor:
        """[...] in nats."""


class _Categorical(_Part):
    def __init__(self, logits: Tensor, allowed: Tensor | None) -> None:
        logits = logits.float()
        self.allowed = allowed
        self.log_p = log_softmax(logits if allowed is None else logits.masked_fill(~allowed, MASKED_LOGIT), dim=-1)

    @staticmethod
    def widths(size: int) -> _Widths:
        return _Widths(logits=size, values=1, mask=size)

    def sample(self, generator: Generator | None) -> Tensor:
        # argmax(log p + Gumbel noise), with noise = -log(exponential) and exponential = -log(uniform), which is twice
        # as fast as `exponential_` on a CPU. A uniform number of exactly 0 or 1 would make the noise infinite and
        # could lift a masked choice above an allowed one, hence the limits.
        uniform = torch.empty_like(self.log_p).uniform_(generator=generator)
        exponential = uniform.log_().neg_().clamp_(1e-30, 1e3)
        return (self.log_p - exponential.log_()).argmax(dim=-1, keepdim=True)

    def mode(self) -> Tensor:
        return self.log_p.argmax(dim=-1, keepdim=True)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.log_p.gather(-1, value.long()).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self.log_p.exp() * self.log_p).sum(-1)

    def kl(self, other: Self) -> Tensor:
        return (self.log_p.exp() * (self.log_p - other.log_p)).sum(-1)

    def symmetric_kl_to_uniform(self) -> Tensor:
        # KL(p||u) = log n - H(p) and KL(u||p) = -log n - mean log p: the logarithms of n cancel.
        if self.allowed is None:
            return -0.5 * (self.entropy() + self.log_p.mean(-1))
        mean_log_p = self.log_p.masked_fill(~self.allowed, 0.0).sum(-1) / self.allowed.sum(-1).clamp(min=1)
        return -0.5 * (self.entropy() + mean_log_p)


class _Bins(_Categorical):
    """Choices that stand for numbers, all of them allowed."""

    @staticmethod
    def widths(size: int) -> _Widths:
        return _Widths(logits=size, values=1, mask=0)

    def __init__(self, logits: Tensor, allowed: Tensor | None) -> None:
        super().__init__(logits, None)


class _Bernoulli(_Part):
    def __init__(self, logits: Tensor, allowed: Tensor | None) -> None:
        self.logits = logits.float()

    @staticmethod
    def widths(size: int) -> _Widths:
        return _Widths(logits=size, values=size, mask=0)

    def sample(self, generator: Generator | None) -> Tensor:
        uniform = torch.empty_like(self.logits).uniform_(generator=generator)  # [0, 1): probability 0 is never drawn
        return uniform < self.logits.sigmoid()

    def mode(self) -> Tensor:
        return self.logits > 0

    def log_prob(self, value: Tensor) -> Tensor:
        return -softplus(torch.where(value != 0, -self.logits, self.logits)).sum(-1)

    def entropy(self) -> Tensor:
        p = self.logits.sigmoid()
        return (p * softplus(-self.logits) + (1.0 - p) * softplus(self.logits)).sum(-1)

    def kl(self, other: Self) -> Tensor:
        p = self.logits.sigmoid()
        on = softplus(-other.logits) - softplus(-self.logits)
        off = softplus(other.logits) - softplus(self.logits)
        return (p * on + (1.0 - p) * off).sum(-1)

    def symmetric_kl_to_uniform(self) -> Tensor:
        mean_log_p = -0.5 * (softplus(-self.logits) + softplus(self.logits)).sum(-1)
        return -0.5 * (self.entropy() + mean_log_p)


class _Gaussian(_Part):
    def __init__(self, logits: Tensor, allowed: Tensor | None) -> None:
        self.mean, log_std = logits.float().chunk(2, dim=-1)
        self.log_std = log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)

    @staticmethod
    def widths(size: int) -> _Widths:
        return _Widths(logits=2 * size, values=size, mask=0)

    def sample(self, generator: Generator | None) -> Tensor:
        return torch.empty_like(self.mean).normal_(generator=generator).mul_(self.log_std.exp()).add_(self.mean)

    def rsample(self, generator: Generator | None) -> tuple[Tensor, Tensor]:
        noise = torch.empty_like(self.mean).normal_(generator=generator)
        log_prob = (-0.5 * noise.square() - self.log_std - HALF_LOG_TWO_PI).sum(-1)
        return self.mean + self.log_std.exp() * noise, log_prob

    def mode(self) -> Tensor:
        return self.mean

    def log_prob(self, value: Tensor) -> Tensor:
        distance = (value.float() - self.mean) * (-self.log_std).exp()
        return (-0.5 * distance.square() - self.log_std - HALF_LOG_TWO_PI).sum(-1)

    def entropy(self) -> Tensor:
        return (self.log_std + (0.5 + HALF_LOG_TWO_PI)).sum(-1)

    def kl(self, other: Self) -> Tensor:
        widening = other.log_std - self.log_std
        distance = (self.mean - other.mean) * (-other.log_std).exp()
        return (widening + 0.5 * ((-2.0 * widening).exp() + distance.square() - 1.0)).sum(-1)

    def symmetric_kl_to_uniform(self) -> Tensor:
        raise ValueError("no uniform distribution over real numbers: use --exploration_loss=entropy")


class _TanhGaussian(_Gaussian):
    """A Gaussian before tanh: KL and samples are the Gaussian's, as tanh loses nothing."""

    def rsample(self, generator: Generator | None) -> tuple[Tensor, Tensor]:
        value, log_prob = super().rsample(generator)
        return value, log_prob - log_slope_of_tanh(value).sum(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value) - log_slope_of_tanh(value.float()).sum(-1)

    def entropy(self) -> Tensor:
        std = self.log_std.exp()
        nodes = zip(NORMAL_NODES, NORMAL_WEIGHTS, strict=True)
        slopes = (weight * log_slope_of_tanh(self.mean + node * std) for node, weight in nodes)
        entropy: Tensor = super().entropy() + reduce(add, slopes).sum(-1)
        return entropy


def log_slope_of_tanh(value: Tensor) -> Tensor:
    """Return log(1 - tanh(x)^2), [*], exact where tanh(x) rounds to 1."""
    return 2.0 * (math.log(2.0) - value - softplus(-2.0 * value))


_KINDS: dict[str, type[_Part]] = {
    "categorical": _Categorical,
    "bins": _Bins,
    "bernoulli": _Bernoulli,
    "gaussian": _Gaussian,
    "tanh_gaussian": _TanhGaussian,
}


class _PlacedPart(NamedTuple):
    """Where a part lives: its class, and its slices of logits, action values and mask."""

    kind: type[_Part]
    logits: slice
    values: slice
    mask: slice


class _Layout(NamedTuple):
    parts: tuple[_PlacedPart, ...]
    widths: _Widths
    dtype: torch.dtype


@lru_cache(maxsize=64)
def _layout(parts: Parts) -> _Layout:
    """Slices of every part, and the sum of their widths; worked out once per action space."""
    if not parts:
        raise ValueError("parts: expected at least one, got none")
    placed, start = [], _Widths(0, 0, 0)
    for name, size in parts:
        if name not in _KINDS:
            raise ValueError(f"parts: expected a kind of {', '.join(_KINDS)}, got '{name}'")
        kind = _KINDS[name]
        end = _Widths(*(a + b for a, b in zip(start, kind.widths(size), strict=True)))
        placed.append(_PlacedPart(kind, *(slice(a, b) for a, b in zip(start, end, strict=True))))
        start = end
    dtype = torch.float32 if any(name in REAL for name, _ in parts) else torch.int32
    return _Layout(tuple(placed), start, dtype)
