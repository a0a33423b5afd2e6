"""A network that a learner has beside the acting network, with an optimizer of its own."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from appo.algorithms.models.flat_module import FlatModule, split
from appo.algorithms.parts.config import OptimizerConfig
from appo.algorithms.parts.optimizer import MOMENTS, adam_of
from appo.algorithms.runtime.memory.learner_state import NETWORKS


def weights_of(name: str, flat: FlatModule) -> dict[str, Tensor]:
    """Return the weights of a network by their names in a state."""
    views = zip(flat.table, split(flat.flat, flat.table), strict=True)
    return {f"{NETWORKS}{name}.{key}": view for (key, _), view in views}


class OwnNetwork:
    """A network that never acts, and the network's Adam; `FlatLearner.add_network` describes the arguments."""

    def __init__(self, name: str, module: nn.Module, config: OptimizerConfig, rate: str) -> None:
        self.name, self.flat = name, FlatModule(module)
        self.optimizer = adam_of(self.flat, config, rate)
        self._no_kl = torch.zeros_like(self.optimizer.learning_rate)
        self._norms = self._no_kl.new_zeros(2)  # sum and number; a captured step counts on the device

    def descend(self, loss: Tensor, learnable: Tensor) -> None:
        """Make one step down a scalar loss with gradient; without a true value in `learnable` the step is skipped."""
        self.optimizer.gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        self.step(learnable.any(), loss.detach().isfinite())

    def step(self, learnable: Tensor, is_finite: Tensor) -> None:
        """Apply the gradient in `optimizer.gradient`; if one of the scalar bools is false, the step is skipped."""
        self.optimizer.note_rate()
        norm, _ = self.optimizer.step(learnable, is_finite, self._no_kl)
        self._norms += torch.stack((norm, torch.ones_like(norm)))

    def state(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield name and tensor of every part of the state, and whether `--init_from` copies the part."""
        yield from ((name, weight, True) for name, weight in weights_of(self.name, self.flat).items())
        table = self.flat.parameter_table
        for moment, flat in zip(MOMENTS, self.optimizer.moments(), strict=True):
            for (key, _), view in zip(table, split(flat, table), strict=True):
                yield f"{self.name}.{moment}.{key}", view, False
        yield f"{self.name}.adam_steps", self.optimizer.steps, False

    def metrics(self) -> dict[str, float]:
        """Return the mean norm of the gradient since the last call, and the rate in use; {} without a step."""
        total, count = self._norms.tolist()
        if not count:
            return {}
        self._norms.zero_()
        return {f"{self.name}_grad_norm": total / count, f"{self.name}_learning_rate": self.optimizer.rate_in_use()}
