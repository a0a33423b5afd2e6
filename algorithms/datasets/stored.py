"""Files of datasets: their sizes are compared with counts and spaces before memory is taken.

A file of some kB can name any size: of a list, a column, a compressed buffer, an array without values on the disk.
Spaces and the number of steps, both from the metadata, say how much is read; see `require_stored`.
"""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium.spaces import Box

from appo.algorithms.datasets.episodes import Unfit
from appo.envs.spaces import Space, children
from appo.envs.spec import Array
from appo.utils.errors import UsageError

MOST_RATIO = 1000
"""Of the bytes in memory to those on a disk, beyond which a file is not believed: compression has about as much."""
FREE_BYTES = 256 << 20
"""Of an episode, and four times as much of a dataset, which may be zeros alone that take no room on a disk."""
MOST_FIELDS = 10_000
"""Of a file of Arrow, in all levels."""
SLACK_BYTES = 64 << 10
"""Of a column, for what Arrow adds to its numbers."""
JPEG_BYTES = 16 << 10
"""Of an image, beside twice the bytes that it has decoded: more than any encoder makes of noise."""


def decoded_images(shape: tuple[int, ...], encoded: Iterable[Any]) -> Array:
    """Return images [N, *shape] that are stored as JPEG; sizes are compared with the shape before one is decoded.

    Args:
        shape: [H, W] of grey images, [H, W, 3] of those in colour.
        encoded: the bytes of each.

    Raises:
        UsageError: Pillow is missing.
        ValueError, OSError: one is no JPEG, or is of another size.
    """
    try:
        image_of = importlib.import_module("PIL.Image").open
    except ImportError:
        raise UsageError('images as JPEG need the package pillow: pip install "appo[offline]"') from None
    size = int(np.prod(shape, dtype=np.int64))
    images = []
    for content in encoded:
        with memoryview(content) as view:
            if view.nbytes > 2 * size + JPEG_BYTES:
                raise ValueError(f"an image of {view.nbytes} bytes as JPEG, where {size} are decoded")
            image = image_of(io.BytesIO(view), formats=("JPEG",))
        found = (*image.size[::-1], *((len(image.getbands()),) if len(image.getbands()) > 1 else ()))
        # A progressive one is decoded as often as it has scans, of which thousands fit into some kB.
        if found != shape or "progressive" in image.info:
            raise ValueError(f"an image of shape {found} as JPEG, where the space has {shape}")
        images.append(np.asarray(image))
    return np.stack(images) if images else np.zeros((0, *shape), np.uint8)


def require_stored(what: str, asked: int, stored: int, free: int = FREE_BYTES) -> None:
    """Refuse content that takes much memory and next to nothing on the disk (Unfit)."""
    if asked > free and asked > MOST_RATIO * stored:
        raise Unfit(f"{what} would take {asked >> 20} MiB of memory, and has {stored} bytes on the disk")


def row_bytes(space: Space) -> int:
    """Return how many bytes a value of a space takes at most in a file."""
    parts = children(space)
    if parts is not None:
        return 32 + sum(row_bytes(one) for _, one in parts)
    return 32 + 8 * math.prod(space.shape or ()) + (JPEG_BYTES if is_image(space) else 0)


def is_image(space: Space) -> bool:
    """Whether Minari may have stored values of a space as JPEG, which their form then tells: each is a run of bytes."""
    return isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)
