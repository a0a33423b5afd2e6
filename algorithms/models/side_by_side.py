"""Runs rows of a batch on several cores: each part forward and backward on a thread of its own.

Threads within an operation wait at the end of the operation, thousands of times per minibatch. Beside actors that take
a core now and then, two threads were slower than a single thread (Pong, 4 epochs, 2 cores: 145 samples/s instead of
195; side by side 260). Parts wait only for the slowest part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Result = TypeVar("Result")

Rows = Callable[[Tensor], Tensor]
"""Maps rows [N,*] to rows [N,*], each row separately."""


def side_by_side(function: Rows, parts: Sequence[Tensor], trained: Sequence[Tensor]) -> Tensor:
    """Apply a function to each part [n,*] on a thread of its own; return the joined results [N,*].

    Gradients flow to the trained tensors that require gradients, none to the parts. Gradients are added in the order of
    the parts, so the result does not depend on the speed of threads.
    """
    if not torch.is_grad_enabled():
        return torch.cat(_on_threads(function, parts))
    required = [tensor for tensor in trained if tensor.requires_grad]
    features: Tensor = _SideBySide.apply(function, parts, *required)  # type: ignore[no-untyped-call]
    return features


class _SideBySide(torch.autograd.Function):
    """Gives every part a graph of its own, so a thread can run the backward pass too."""

    @staticmethod
    def forward(ctx: Any, function: Rows, parts: Sequence[Tensor], *trained: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.features = _on_threads(function, parts)
        ctx.trained = trained
        return torch.cat([features.detach() for features in ctx.features])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        def differentiate(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
            features, of_features = pair
            gradients: tuple[Tensor, ...] = torch.autograd.grad(features, ctx.trained, of_features)
            return gradients

        pieces = torch.split(gradient, [len(features) for features in ctx.features])
        first, *others = _on_threads(differentiate, list(zip(ctx.features, pieces, strict=True)))
        del ctx.features
        for other in others:
            for total, term in zip(first, other, strict=True):
                total.add_(term)
        return (None, None, *first)


def _on_threads(function: Callable[[Any], Result], arguments: Sequence[Any]) -> list[Result]:
    """Return the results for all arguments, computed concurrently in the modes of this thread that affect a result."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def call(argument: Any) -> Result:
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
            # Its cache of weights is one for all threads: gradients would depend on who of them comes first.
            torch.autocast("cpu", dtype, enabled=autocast, cache_enabled=False),
        ):
            return function(argument)

    return list(_threads(len(arguments)).map(call, arguments))


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "side_by_side", initializer=torch.set_num_threads, initargs=(1,))
