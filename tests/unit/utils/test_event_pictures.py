"""Histograms and images of the user's in TensorBoard's files."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from appo.utils.tensorboard.summaries import BUCKETS, histogram_of, image_of
from appo.utils.tensorboard.writer import EventWriter
from tests.unit.utils.test_metrics import events


def pixels_of(png: bytes) -> np.ndarray:
    """Decode a PNG whose lines are not filtered; checks every checksum."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, place = {}, 8
    while place < len(png):
        (length,), kind = struct.unpack(">I", png[place : place + 4]), png[place + 4 : place + 8]
        chunks[kind] = png[place + 8 : place + 8 + length]
        (checksum,) = struct.unpack(">I", png[place + 8 + length : place + 12 + length])
        assert checksum == zlib.crc32(kind + chunks[kind])
        place += length + 12
    width, height, bits, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    channels = {0: 1, 2: 3, 6: 4}[colour]
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + width * channels)
    assert (bits, lines[:, 0].any()) == (8, False)
    return lines[:, 1:].reshape(height, width, channels)


PIXELS = np.zeros((2, 5, 3), np.uint8)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_an_image_is_a_picture_of_its_pixels(channels: int) -> None:
    pixels = np.random.default_rng(1).integers(256, size=(5, 7, channels), dtype=np.uint8)
    fields = image_of(pixels)
    assert (fields["height"], fields["width"], fields["colorspace"]) == (5, 7, channels)
    encoded = fields["encoded_image_string"]
    assert isinstance(encoded, bytes)
    assert np.array_equal(pixels_of(encoded), pixels)
    assert np.array_equal(pixels_of(image_of(pixels[:, ::2])["encoded_image_string"]), pixels[:, ::2])  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 2)])
def test_what_is_no_image_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^an image is an array of uint8 \[H, W, 1, 3 or 4\], got uint8 "):
        image_of(np.zeros(shape, np.uint8))
    with pytest.raises(ValueError, match="got float64"):
        image_of(np.zeros((5, 7, 3)))


def test_a_histogram_counts_every_finite_value_once() -> None:
    values = np.random.default_rng(1).normal(size=500)
    fields = histogram_of([*values, np.nan, np.inf])
    assert fields is not None
    counts, edges = np.histogram(values, BUCKETS)
    assert fields["bucket"] == counts.tolist()
    np.testing.assert_allclose(fields["bucket_limit"], edges[1:])
    assert (fields["num"], fields["min"], fields["max"]) == (500, values.min(), values.max())
    assert fields["sum"] == pytest.approx(values.sum())
    assert fields["sum_squares"] == pytest.approx((values**2).sum())
    assert histogram_of([np.nan]) is None
    alike = histogram_of([2.0, 2.0])
    assert alike is not None
    assert alike["bucket"] == [2] + [0] * (BUCKETS - 1)


def test_both_come_to_the_files_at_their_step(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path)
    writer.add_histogram("mine/values", [1.0, 2.0, 4.0], 8)
    writer.add_histogram("mine/nothing", [], 9)
    writer.add_image("mine/image", np.zeros((2, 3, 1), np.uint8), 16)
    assert writer.close()
    _, first, second = events(tmp_path)
    assert (first.step, first.summary.value[0].tag, first.summary.value[0].histo.bucket[0]) == (
        8, "mine/values", 1.0
    )  # fmt: skip
    image = second.summary.value[0].image
    assert (second.step, image.height, image.width, image.colorspace) == (16, 2, 3, 1)


def test_the_names_of_arguments_are_those_of_torch(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(256, size=(3, 5, 7), dtype=np.uint8)
    writer = EventWriter(tmp_path)
    writer.add_scalar(tag="a", scalar_value=np.float32(0.5), global_step=np.int64(3))  # type: ignore[arg-type]
    writer.add_histogram(tag="b", values=[1.0], global_step=4)
    writer.add_image(tag="c", img_tensor=pixels, global_step=5, dataformats="CHW")
    writer.add_image("d", torch.from_numpy(pixels.transpose(1, 2, 0).copy()), 6)
    assert writer.close()
    _, scalar, histogram, *images = events(tmp_path)
    assert (scalar.step, scalar.summary.value[0].tag, scalar.summary.value[0].simple_value) == (3, "a", 0.5)
    assert (histogram.step, histogram.summary.value[0].tag, histogram.summary.value[0].histo.num) == (4, "b", 1)
    assert [(image.step, image.summary.value[0].tag) for image in images] == [(5, "c"), (6, "d")]
    for image in images:
        shown = pixels_of(image.summary.value[0].image.encoded_image_string)
        assert np.array_equal(shown, pixels.transpose(1, 2, 0))


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("add_scalar", (8, "a", 0.5), "add_scalar(tag, scalar_value, global_step): the tag comes first, got 8"),
        ("add_histogram", (8, "a", [1.0]), "add_histogram(tag, values, global_step): the tag comes first, got 8"),
        ("add_image", (8, "a", PIXELS), "add_image(tag, img_tensor, global_step): the tag comes first, got 8"),
        (
            "add_image",
            ("a", PIXELS.transpose(2, 0, 1), 8),
            "an image is an array of uint8 [H, W, 1, 3 or 4], got uint8 (3, 2, 5);"
            " dataformats='CHW' is for channels first",
        ),
    ],
)
def test_another_order_is_refused_with_the_right_one(
    tmp_path: Path, method: str, arguments: tuple[object, ...], message: str
) -> None:
    writer = EventWriter(tmp_path)
    with pytest.raises((TypeError, ValueError)) as caught:
        getattr(writer, method)(*arguments)
    assert str(caught.value) == message
    assert writer.close()
    assert writer.written == 0
