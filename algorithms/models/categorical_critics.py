"""Critics that predict distributions of the return, with normalized activations and weights.

Source: Palenicek et al. 2025, arXiv:2509.25174 (XQC); rewards are scaled by their size instead of the returns' size.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.init import orthogonal_

from appo.algorithms.models.config import ModelConfig
from appo.algorithms.models.critics import joined, shared_encoder
from appo.algorithms.models.encoders import Observations, nonlinearity
from appo.envs.spec import ObservationSpec

ATOMS = 101
HEADROOM = 2.0
"""The outermost atom is so many times the return of rewards of root-mean-square size."""
LONGEST = 1000.0
"""Most rewards that a return is taken to consist of."""
VARIANCE_EPS = 1e-5
SLOWEST = 1e-3
"""Smallest weight of a batch in the running mean of squared rewards."""
SMALLEST = 1e-30
"""Square of the smallest size of rewards."""
ROUNDING = 1e-6
Moments = tuple[Tensor, Tensor]
"""Mean and variance of the inputs of an activation over a batch, each [N, 1, units]."""


class CategoricalCritics(nn.Module):
    """N networks of log-probabilities of atoms of Q(s, a) in layers of normalized weights and activations.

    The inputs and the inputs of every activation are normalized over the batch. A training batch contains (s, a) and
    (s', a'), which share the moments. Other passes use moments of such a batch, so that no running mean of moments is
    needed.

    Args:
        observations: observations of the environment by key, without masks.
        config: flags of the network; numbers enter as many layers as `--encoder_mlp_layers` has, an encoder one.
        num_actions: A, numbers of an action.
        num_critics: N.
        units: width of the layers.

    Raises:
        UsageError: see `shared_encoder`.
    """

    reward_square: Tensor
    batches: Tensor

    def __init__(
        self,
        observations: dict[str, ObservationSpec],
        config: ModelConfig,
        num_actions: int,
        num_critics: int,
        units: int,
    ) -> None:
        super().__init__()
        self.keys = tuple(observations)
        self.encoder, size = shared_encoder(observations, config)
        layers = len(config.encoder_mlp_layers) if self.encoder is None else 1
        sizes = (size + num_actions, *([units] * layers))

        def stack(a: int, b: int) -> Tensor:
            return torch.stack([orthogonal_(torch.empty(b, a)).T for _ in range(num_critics)])

        self.weights = nn.ParameterList([stack(a, b) for a, b in pairwise(sizes)])
        self.head = nn.Parameter(stack(sizes[-1], ATOMS))
        self.bias = nn.Parameter(torch.zeros(num_critics, 1, ATOMS))
        self.gains = nn.ParameterList([torch.ones(num_critics, 1, size) for size in sizes])
        self.shifts = nn.ParameterList([torch.zeros(num_critics, 1, size) for size in sizes])
        self.activation = nonlinearity(config.nonlinearity, inplace=True)
        self.register_buffer("reward_square", torch.zeros(1))  # running mean of squared rewards
        self.register_buffer("batches", torch.zeros(1))  # of this mean
        self.project()

    @torch.no_grad()
    def project(self) -> None:
        """Scale the weights of every unit to norm 1, gains and shifts of a layer to mean square 1; call after a step.

        The head stays as it is.
        """
        for weight in self.weights:
            _divide(weight.norm(dim=1, keepdim=True), weight)
        for gain, shift in zip(self.gains, self.shifts, strict=True):
            square = gain.square().sum(-1, keepdim=True) + shift.square().sum(-1, keepdim=True)
            _divide((square / gain.shape[-1]).sqrt(), gain, shift)

    def atoms(self, gamma: float) -> Tensor:
        """Return the atoms, [K] returns of rewards divided by `reward_size`, with the discount of one reward."""
        top = HEADROOM / max(1 - gamma, 1 / LONGEST)
        return torch.linspace(-top, top, ATOMS, device=self.head.device)

    @property
    def reward_size(self) -> Tensor:
        """Return the root of the running mean of squared rewards, [1]."""
        return self.reward_square.clamp_min(SMALLEST).sqrt()

    @torch.no_grad()
    def note_rewards(self, square: Tensor) -> None:
        """Take the mean square of a batch of rewards, scalar, into the running mean, unless it is not finite."""
        self.batches += square.isfinite()
        weight = (1 / self.batches.clamp_min(1)).clamp_min(SLOWEST)
        self.reward_square.lerp_(torch.where(square.isfinite(), square, self.reward_square), weight)

    def forward(
        self, obs: Observations, action: Tensor, moments: list[Moments] | None = None
    ) -> tuple[Tensor, list[Moments]]:
        """Return log-probabilities [N, B, K] of the atoms, and the moments of every layer.

        Args:
            obs: scaled observations {key} [B, *].
            action: [B, A] in [-1, 1].
            moments: moments to normalize by; gradients then flow to the action alone. None: those of this batch.
        """
        frozen, used = moments is not None, []
        gains, shifts, weights = list(self.gains), list(self.shifts), [*self.weights, self.head]
        if frozen:
            gains, shifts, weights = ([x.detach() for x in tensors] for tensors in (gains, shifts, weights))
        x = joined(obs, action, self.keys, self.encoder, frozen=frozen).expand(len(self.head), -1, -1)
        for layer, (gain, shift) in enumerate(zip(gains, shifts, strict=True)):
            if layer:
                x = torch.bmm(x, weights[layer - 1])
            mean, variance = _moments(x) if moments is None else moments[layer]
            used.append((mean.detach(), variance.detach()))
            factor = gain * torch.rsqrt(variance + VARIANCE_EPS)
            x = torch.addcmul(shift - mean * factor, x, factor)
            x = self.activation(x) if layer else x
        bias = self.bias.detach() if frozen else self.bias
        return torch.baddbmm(bias, x, weights[-1]).log_softmax(-1), used


def _moments(x: Tensor) -> Moments:
    """Return mean and variance of x [N, B, units] over B, by products of matrices, which are fast."""
    share = x.new_full((1, 1, x.shape[1]), 1 / x.shape[1]).expand(len(x), -1, -1)
    mean = torch.bmm(share, x)
    return mean, torch.bmm(share, (x - mean).square())


def _divide(norm: Tensor, *tensors: Tensor) -> None:
    """Divide by norms; a norm of 1 up to rounding changes nothing."""
    norm = norm.masked_fill((norm - 1).abs() < ROUNDING, 1.0).clamp_min(SMALLEST)
    for x in tensors:
        x.div_(norm)
