"""Limits of files of datasets: sizes are compared with counts and spaces before memory is taken.

A file of some kB can name any size: of a list, a column, a compressed buffer, an array without values on the disk.
Spaces and the number of steps, both from the metadata, bound the content; see `require_stored`.
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
"""Largest accepted ratio of bytes in memory to bytes on the disk: compression reaches about as much."""
FREE_BYTES = 256 << 20
"""Unchecked bytes of an episode, and a quarter of those of a dataset, which may be zeros that take no disk."""
MOST_FIELDS = 10_000
"""Limit of the fields in a file of Arrow, over all levels."""
SLACK_BYTES = 64 << 10
"""Bytes that Arrow adds to the numbers of a column."""
JPEG_BYTES = 16 << 10
"""Limit of an encoded image beyond twice its decoded bytes: more than any encoder needs for noise."""


def decoded_images(shape: tuple[int, ...], encoded: Iterable[Any]) -> Array:
    """Return images [N, *shape] stored as JPEG; each size is compared with the shape before decoding.

    Args:
        shape: [H, W] for grey images, [H, W, 3] for colour.
        encoded: bytes of each image.

    Raises:
        UsageError: Pillow is missing.
        ValueError, OSError: an image is not JPEG or has another size.
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
    """Refuse content with much memory and nearly nothing on the disk (Unfit)."""
    if asked > free and asked > MOST_RATIO * stored:
        raise Unfit(f"{what} would take {asked >> 20} MiB of memory, and has {stored} bytes on the disk")


def row_bytes(space: Space) -> int:
    """Return the largest size of a value of a space in a file, in bytes."""
    parts = children(space)
    if parts is not None:
        return 32 + sum(row_bytes(one) for _, one in parts)
    return 32 + 8 * math.prod(space.shape or ()) + (JPEG_BYTES if is_image(space) else 0)


def is_image(space: Space) -> bool:
    """Return whether Minari may have stored values of a space as JPEG, each a run of bytes."""
    return isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)
