"""All weights of a module in one vector: publishing, fetching, clipping and Adam are one call each."""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class FlatModule:
    """All parameters, then all float buffers, of a module as views of a float32 vector.

    Attributes:
        module: module whose tensors are views.
        flat: [P] vector.
        num_parameters: length of the trained prefix.
        table: (name, shape) of every view, in order.
    """

    def __init__(self, module: nn.Module) -> None:
        named = [*module.named_parameters(), *((n, b) for n, b in module.named_buffers() if b.is_floating_point())]
        self.module = module
        self.table = [(name, tuple(tensor.shape)) for name, tensor in named]
        self.num_parameters = sum(p.numel() for p in module.parameters())
        self.flat = torch.cat([t.detach().reshape(-1).float() for _, t in named])
        for (_, tensor), view in zip(named, split(self.flat, self.table), strict=True):
            tensor.data = view
        self._copies: list[Tensor] = []
        self._originals: list[Tensor] = []

    def compute_with_copies(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
        """Let the module compute with copies of parameters in another type; only `load` updates the copies.

        Kernels have the channels last in memory, the layout of convolutions. Versions of the parameters report changes.
        """
        for parameter in parameters:
            layout = torch.channels_last if parameter.dim() == 4 else torch.contiguous_format
            self._originals.append(parameter.data)
            parameter.data = parameter.data.to(dtype, memory_format=layout)
            self._copies.append(parameter)

    @torch.no_grad()
    def load(self, weights: NDArray[np.float32]) -> None:
        """Copy a vector of weights [P]."""
        self.flat.copy_(torch.from_numpy(weights))
        if self._copies:
            torch._foreach_copy_(self._copies, self._originals)  # into the parameters, which count their versions

    @property
    def parameter_table(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the table of the parameters."""
        return self.table[: len(list(self.module.parameters()))]


def split(flat: Tensor, table: list[tuple[str, tuple[int, ...]]]) -> list[Tensor]:
    """Return the views of a flat vector in a table."""
    views, start = [], 0
    for _, shape in table:
        size = int(np.prod(shape, dtype=np.int64))
        views.append(flat[start : start + size].view(shape))
        start += size
    return views
