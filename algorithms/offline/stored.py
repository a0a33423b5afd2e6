"""Numbers as files of datasets hold them: images as JPEG, as Minari stores them from 0.5.3 on."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterable
from typing import Any

import numpy as np

from envs.spec import Array
from utils.errors import UsageError

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
