"""Maths of values as distributions over evenly spaced numbers, the atoms."""

import torch
from torch import Tensor


def mean_of(log_probability: Tensor, atoms: Tensor) -> Tensor:
    """Return the means [*] of distributions [*, K] over atoms [K]."""
    return (log_probability.exp() * atoms).sum(-1)


def projected(probability: Tensor, value: Tensor, atoms: Tensor) -> Tensor:
    """Return distributions [B, K] over the atoms that stand for probabilities [B, K] of values [B, K].

    A value between two atoms gives each a share by its distance; a value beyond the atoms counts as the outermost.
    The mean of values within the atoms is kept. A value that is not finite makes its distribution NaN.

    Source: Bellemare et al. 2017, arXiv:1707.06887, equation 7.
    """
    low, high = atoms[0], atoms[-1]
    inside = value.clamp(low, high) + 0.0 * value  # 0 * inf is NaN
    place = (inside - low) * ((len(atoms) - 1) / (high - low))
    index = place.long().clamp(0, len(atoms) - 2)
    share = place - index
    found = torch.zeros_like(probability)
    return found.scatter_add_(1, index, probability * (1 - share)).scatter_add_(1, index + 1, probability * share)


def least(log_probability: Tensor, atoms: Tensor) -> Tensor:
    """Return the distribution with the smallest mean, [B, K] logarithms, of N distributions [N, B, K]."""
    chosen = mean_of(log_probability, atoms).argmin(0)
    return log_probability[chosen, torch.arange(len(chosen), device=chosen.device)]
