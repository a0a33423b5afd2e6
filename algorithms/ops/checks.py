"""Shape checks whose errors name the tensor: a wrong call fails at the call, not three operations later."""

from collections.abc import Sequence

from torch import Tensor


def require_shape(name: str, tensor: Tensor, expected: Sequence[int | None]) -> None:
    """Check the shape of a tensor.

    Args:
        name: what the caller calls the tensor.
        tensor: any shape.
        expected: one size per dimension; None accepts any size there.

    Raises:
        ValueError: the shape differs; names the tensor, what was expected and what came.
    """
    got = tuple(tensor.shape)
    if got == tuple(expected):
        return
    if len(got) != len(expected) or any(e is not None and e != g for e, g in zip(expected, got, strict=True)):
        raise ValueError(f"{name}: expected shape {_written(expected)}, got {_written(got)}")


def require_same_shape(**tensors: Tensor) -> None:
    """Check that all tensors, given by name, have the shape of the first.

    Raises:
        ValueError: names the first tensor that differs, its shape, and the shape and name it was compared with.
    """
    (reference, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name}: expected shape {_written(first.shape)} as {reference} has, got {_written(tensor.shape)}"
            )


def _written(shape: Sequence[int | None]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
