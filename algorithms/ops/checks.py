"""Shape checks whose errors name the tensor and fail at the wrong call, not three operations later."""

from collections.abc import Sequence

from torch import Tensor


def require_shape(name: str, tensor: Tensor, expected: Sequence[int | None]) -> None:
    """Check the shape of a tensor.

    Args:
        name: name of the tensor for the caller.
        tensor: tensor of any shape.
        expected: a size per dimension; None accepts any size.

    Raises:
        ValueError: names the tensor, the expected and the actual shape.
    """
    got = tuple(tensor.shape)
    if got == tuple(expected):
        return
    if len(got) != len(expected) or any(e is not None and e != g for e, g in zip(expected, got, strict=True)):
        raise ValueError(f"{name}: expected shape {_written(expected)}, got {_written(got)}")


def require_same_shape(**tensors: Tensor) -> None:
    """Check that all named tensors have the shape of the first.

    Raises:
        ValueError: names the first differing tensor, both shapes, and the reference.
    """
    (reference, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name}: expected shape {_written(first.shape)} as {reference} has, got {_written(tensor.shape)}"
            )


def _written(shape: Sequence[int | None]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
