"""Forward and backward passes of MLPs in permanent memory, without a graph.

Products of single matrices into given memory are faster than numpy's and than batched ones: numpy multiplies stacks of
matrices on one thread, and its maximum with a number takes four times torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from appo.algorithms.models.actor_critic import PolicyHead
from appo.algorithms.models.critics import Critics
from appo.algorithms.models.numpy_mlp import encoder_of, is_usual
from appo.algorithms.models.policy_network import PolicyNetwork

Derivative = Callable[[Tensor, Tensor], object]
"""(gradient, output): multiply the gradient in place by the derivative at the output."""


def _relu_derivative(gradient: Tensor, out: Tensor) -> None:
    torch.ops.aten.threshold_backward.grad_input(gradient, out, 0, grad_input=gradient)


def _tanh_derivative(gradient: Tensor, out: Tensor) -> None:
    torch.ops.aten.tanh_backward.grad_input(gradient, out, grad_input=gradient)


def _elu_derivative(gradient: Tensor, out: Tensor) -> None:
    torch.ops.aten.elu_backward.grad_input(gradient, 1, 1, 1, True, out, grad_input=gradient)


_ACTIVATIONS: dict[type[nn.Module], tuple[Callable[[Tensor], Tensor], Derivative]] = {
    nn.ReLU: (torch.relu_, _relu_derivative),
    nn.Tanh: (torch.tanh_, _tanh_derivative),
    nn.ELU: (lambda x: nn.functional.elu(x, inplace=True), _elu_derivative),
}


class _Layer(NamedTuple):
    weight: Tensor  # [in, out]
    bias: Tensor  # [out]
    weight_gradient: Tensor | None
    bias_gradient: Tensor | None


class WrittenMlp:
    """An MLP for R rows; the last layer has no activation. Weights and gradients keep their place.

    Args:
        layers: layers in order.
        activation: class of the activation between two layers.
        rows: R.
    """

    def __init__(self, layers: Sequence[_Layer], activation: type[nn.Module], rows: int) -> None:
        self._layers, (self._activate, self._derive) = layers, _ACTIVATIONS[activation]
        self._outs = [layer.bias.new_empty(rows, len(layer.bias)) for layer in layers]
        self._gradients = [layer.bias.new_empty(rows, len(layer.weight)) for layer in layers]

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs [R, out] of inputs [R, in], valid until the next call; `backward` reads the inputs."""
        self._x, last = x, len(self._layers) - 1
        for i, (layer, out) in enumerate(zip(self._layers, self._outs, strict=True)):
            torch.addmm(layer.bias, x, layer.weight, out=out)
            x = out if i == last else self._activate(out)
        return x

    def backward(self, gradient: Tensor, trained: int) -> Tensor:
        """Set the gradients of all weights from the gradient of the first M outputs [M, out].

        Only the first `trained` rows count; the result is the gradient [M, units] behind the first product.
        """
        through = gradient
        for i, through in self._descend(gradient):
            layer, rows = self._layers[i], through[:trained]
            assert layer.weight_gradient is not None
            torch.mm((self._outs[i - 1] if i else self._x)[:trained].T, rows, out=layer.weight_gradient)
            torch.sum(rows, 0, out=layer.bias_gradient)
        return through

    def to_inputs(self, through: Tensor, first: int) -> Tensor:
        """Return the gradient [M, in - first] of the last inputs, from that behind the first product [M, units]."""
        return torch.mm(through, self._layers[0].weight[first:].T)

    def _descend(self, gradient: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the gradient [M, out] of every layer before its activation, from the last layer to the first."""
        for i in range(len(self._layers) - 1, 0, -1):
            yield i, gradient
            gradient = torch.mm(gradient, self._layers[i].weight.T, out=self._gradients[i][: len(gradient)])
            self._derive(gradient, self._outs[i - 1][: len(gradient)])
        yield 0, gradient


def written_policy(model: PolicyNetwork, rows: int) -> WrittenMlp | None:
    """Return the MLP from scaled observations [R, *] to logits [R, L]; None if the network has other parts."""
    head = model.policy_head
    if type(model) is not PolicyNetwork or len(model.keys) != 1 or head.linear.weight.device.type != "cpu":
        return None
    if type(head) is not PolicyHead or head.log_stddev is not None or not is_usual(model, [head.linear]):
        return None
    modules = list(encoder_of(model.tower))
    linears = [*(module for module in modules if isinstance(module, nn.Linear)), head.linear]
    activation = next((type(module) for module in modules if type(module) in _ACTIVATIONS), nn.ReLU)
    layers = []
    for one in linears:
        assert one.weight.grad is not None
        layers.append(_Layer(one.weight.detach().T, one.bias.detach(), one.weight.grad.T, one.bias.grad))
    return WrittenMlp(layers, activation, rows)


def written_critics(critics: Critics, rows: int) -> list[WrittenMlp] | None:
    """Return an MLP per critic, from observations beside actions [R, D + A] to values [R, 1]; None as above."""
    is_plain = type(critics) is Critics and critics.encoder is None and not critics.layer_norm
    kind = type(critics.activation)
    if not is_plain or kind not in _ACTIVATIONS or critics._forward_hooks or critics._forward_pre_hooks:
        return None
    found = []
    for n in range(len(critics.weights[0])):
        pairs = zip(critics.weights, critics.biases, strict=True)
        tensors = [(weight.detach()[n], bias.detach()[n, 0], weight.grad, bias.grad) for weight, bias in pairs]
        layers = [
            _Layer(weight, bias, None if dw is None else dw[n], None if db is None else db[n, 0])
            for weight, bias, dw, db in tensors
        ]
        found.append(WrittenMlp(layers, kind, rows))
    return found
