"""Images pass between this project and Minari in both directions, as they are and as JPEG."""

import io
import json
from pathlib import Path
from typing import Any

import h5py
import minari
import numpy as np
import pytest
from gymnasium import spaces
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_storage import MinariStorage
from PIL import Image

from appo.algorithms.datasets.episodes import Episode
from appo.algorithms.datasets.reader import open_dataset
from appo.envs.spec import ActionPart, ActionSpec, EnvSpec, ObservationSpec
from appo.utils.errors import UsageError
from tests.unit.datasets.data import assert_same, written

FORMATS = ("arrow", "hdf5")


def picture(*shape: int, high: int = 255) -> spaces.Box:
    return spaces.Box(0, high, shape, np.uint8)


SPEED = spaces.Box(-1, 1, (2,), np.float32)
SHOWN: dict[str, spaces.Space[Any]] = {
    "colour": picture(64, 64, 3),
    "atari": picture(210, 160, 3),
    "grey": picture(84, 84),
    "least": picture(32, 32),
    "stacked": picture(4, 84, 84),
    "small": picture(7, 7, 3),
    "binary": picture(64, 64, high=1),
    "dict": spaces.Dict({"camera": picture(64, 64, 3), "speed": SPEED}),
    "vizdoom": spaces.Dict({"obs": picture(72, 128, 3), "measurements": SPEED}),
    "nested": spaces.Dict({"eyes": spaces.Dict({"left": picture(40, 48), "right": picture(40, 48)}), "speed": SPEED}),
    "tuple": spaces.Tuple((picture(36, 36), SPEED)),
}
AS_JPEG = {"colour", "atari", "grey", "least", "dict", "vizdoom", "nested", "tuple"}
LENGTHS = (3, 1, 5)


def values_of(space: spaces.Space[Any], length: int, *, same: bool = False) -> Any:
    """Values [L+1, *]: smooth images, of which each differs from the others, or are all the same; numbers of bits."""
    if isinstance(space, spaces.Dict):
        return {key: values_of(one, length, same=same) for key, one in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(values_of(one, length, same=same) for one in space.spaces)
    if space.dtype != np.uint8:
        return np.random.default_rng(length).uniform(-1, 1, (length + 1, *space.shape)).astype(space.dtype)
    ramp = np.arange(np.prod(space.shape)).reshape(space.shape) * 200 // np.prod(space.shape)
    images = [ramp + (0 if same else 9 * t) for t in range(length + 1)]
    return np.minimum(np.stack(images), space.high).astype(np.uint8)


def stored_by_minari(
    folder: Path, space: spaces.Space[Any], stored: str, *, same: bool = False, **options: bool
) -> minari.MinariDataset:
    """A dataset that Minari has written, as it opens it itself."""
    (folder / "data").mkdir(parents=True)
    storage = MinariStorage.new(folder / "data", space, spaces.Discrete(3), data_format=stored, **options)
    storage.update_metadata({"dataset_id": "tests/images-v0", "minari_version": "0.5.3"})
    for number, length in enumerate(LENGTHS):
        ended = np.arange(length) == length - 1
        buffer = EpisodeBuffer(
            id=number,
            observations=values_of(space, length, same=same),
            actions=np.arange(length) % 3,
            rewards=np.arange(length, dtype=np.float64),
            terminations=ended & (number != 1),
            truncations=ended & (number == 1),
        )
        storage.update_episodes([buffer])
    return minari.MinariDataset(folder / "data")


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of observations under the keys that they have here."""
    if isinstance(values, dict | tuple):
        pairs = values.items() if isinstance(values, dict) else enumerate(values)
        return {k: v for key, one in pairs for k, v in flat(one, f"{prefix}.{key}" if prefix else str(key)).items()}
    return {prefix or "obs": values}


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("options", [{}, {"jpeg_encoding": False}], ids=["default", "raw"])
def test_what_minari_writes_is_read(tmp_path: Path, name: str, stored: str, options: dict[str, bool]) -> None:
    """With the numbers that Minari itself reads, which are those that were written where nothing is lost."""
    theirs = stored_by_minari(tmp_path / "d", SHOWN[name], stored, **options)
    ours = open_dataset([str(tmp_path / "d")])
    assert ours.lengths.tolist() == list(LENGTHS)
    for found, expected, length in zip(ours, theirs.iterate_episodes(), LENGTHS, strict=True):
        for key, values in flat(expected.observations).items():
            np.testing.assert_array_equal(found.obs[key], values)
        is_lossy = not options and name in AS_JPEG
        for key, values in flat(values_of(SHOWN[name], length)).items():
            away = np.abs(found.obs[key].astype(np.float64) - values)
            assert away.max() <= (12 if is_lossy and values.dtype == np.uint8 else 0)
        assert found.action[:, 0].tolist() == [t % 3 for t in range(length)]
        assert found.reward.tolist() == list(range(length))
        assert found.terminated == (length != 1)


def test_images_of_one_length_as_jpeg_are_read(tmp_path: Path) -> None:
    """HDF5 holds them as one table of bytes and not as rows of several lengths."""
    theirs = stored_by_minari(tmp_path / "d", SHOWN["colour"], "hdf5", same=True)
    with h5py.File(tmp_path / "d" / "data" / "main_data.hdf5") as file:
        assert file["episode_0/observations"].ndim == 2
    for found, expected in zip(open_dataset([str(tmp_path / "d")]), theirs.iterate_episodes(), strict=True):
        np.testing.assert_array_equal(found.obs["obs"], expected.observations)


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("encodes", [True, False])
def test_the_form_decides_where_metadata_says_nothing_of_jpeg(tmp_path: Path, stored: str, encodes: bool) -> None:
    """Minari has said so from 0.5.3 on; what this project wrote before holds no JPEG and said nothing."""
    theirs = stored_by_minari(tmp_path / "d", SHOWN["dict"], stored, jpeg_encoding=encodes)
    expected = [episode.observations["camera"] for episode in theirs.iterate_episodes()]
    path = tmp_path / "d" / "data" / "metadata.json"
    plain = json.loads(path.read_text())
    del plain["jpeg_encoding"]
    path.write_text(json.dumps(plain))
    for found, camera in zip(open_dataset([str(tmp_path / "d")]), expected, strict=True):
        np.testing.assert_array_equal(found.obs["camera"], camera)


def encoded(shape: tuple[int, ...], kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.zeros(shape, np.uint8)).save(buffer, format=kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (encoded((64, 65, 3)), r"an image of shape \(64, 65, 3\) as JPEG, where the space has \(64, 64, 3\)"),
        (encoded((64, 64)), r"an image of shape \(64, 64\) as JPEG, where the space has \(64, 64, 3\)"),
        (
            encoded((9000, 9000)),
            r"an image of shape \(9000, 9000\) as JPEG|an image of \d+ bytes as JPEG|observations would",
        ),
        (encoded((64, 64, 3), progressive=True), "as JPEG"),
        (encoded((64, 64, 3)) + bytes(50_000), r"an image of \d+ bytes as JPEG, where 12288 are decoded"),
        (encoded((64, 64, 3))[:300], ""),
        (encoded((64, 64, 3), "PNG"), "cannot identify image file"),
        (b"", "cannot identify image file"),
    ],
    ids=["size", "grey", "huge", "progressive", "long", "cut", "png", "empty"],
)
@pytest.mark.parametrize("stored", FORMATS)
def test_damaged_images_are_named_in_one_line(tmp_path: Path, content: bytes, error: str, stored: str) -> None:
    stored_by_minari(tmp_path / "d", SHOWN["colour"], stored)
    folder = tmp_path / "d" / "data"
    if stored == "hdf5":
        with h5py.File(folder / "main_data.hdf5", "a") as file:
            images = [*file["episode_0/observations"]]
            images[1] = np.frombuffer(content, np.uint8)
            del file["episode_0/observations"]
            table = file["episode_0"].create_dataset("observations", (len(images),), h5py.vlen_dtype(np.uint8))
            for t, image in enumerate(images):
                table[t] = image
    else:
        import pyarrow as pa

        path = folder / "0" / "part-0.arrow"
        (batch,) = pa.ipc.open_file(path.read_bytes()).read_all().to_batches()
        images = batch.column("observations").to_pylist()
        changed = batch.set_column(0, "observations", pa.array([images[0], content, *images[2:]], pa.binary()))
        with pa.ipc.new_file(path, changed.schema) as file:
            file.write_batch(changed)
    dataset = open_dataset([str(tmp_path / "d")])
    with pytest.raises(UsageError, match=rf"^--input: episode 0 of .*is damaged: .*{error}") as raised:
        dataset[0]
    assert "\n" not in str(raised.value)
    assert len(dataset[1]) == LENGTHS[1]


WRITTEN = {
    "colour": {"obs": ObservationSpec((64, 64, 3), "uint8")},
    "grey": {"obs": ObservationSpec((84, 84), "uint8")},
    "planes": {"obs": ObservationSpec((84, 84, 1), "uint8")},
    "stacked": {"obs": ObservationSpec((4, 84, 84), "uint8")},
    "stacked colour": {"obs": ObservationSpec((64, 64, 12), "uint8")},
    "dict": {"camera": ObservationSpec((48, 64, 3), "uint8"), "speed": ObservationSpec((2,), "float32")},
}


def test_an_observation_without_numbers_is_refused(tmp_path: Path) -> None:
    """Minari writes none that it reads, and Arrow divides by their size."""
    seen = {"speed": ObservationSpec((2,), "float32"), "none": ObservationSpec((0,), "float32")}
    spec = EnvSpec(seen, ActionSpec((ActionPart("categorical", 3),)))
    with pytest.raises(UsageError, match="--output: observation key none has no numbers, which Minari cannot read"):
        written(tmp_path / "d", [], spec)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("name", WRITTEN)
def test_minari_reads_the_images_that_are_written(tmp_path: Path, name: str) -> None:
    """Bit by bit."""
    spec = EnvSpec(WRITTEN[name], ActionSpec((ActionPart("categorical", 3),)))
    random, content = np.random.default_rng(1), []
    for length in LENGTHS:
        obs = {
            key: random.integers(256, size=(length + 1, *one.shape)).astype(one.dtype)
            for key, one in spec.observations.items()
        }
        action = random.integers(3, size=(length, 1)).astype(np.int32)
        content.append(Episode(obs, action, np.ones(length, np.float32), True))
    written(tmp_path / "d", content, spec)
    theirs = minari.MinariDataset(tmp_path / "d" / "part-00000" / "data")
    assert theirs.storage.jpeg_encoding is False
    for found, again, expected in zip(
        theirs.iterate_episodes(), open_dataset([str(tmp_path / "d")]), content, strict=True
    ):
        for key, values in flat(found.observations).items():
            np.testing.assert_array_equal(values, expected.obs[key])
        np.testing.assert_array_equal(found.actions, expected.action[:, 0])
        assert_same(again, expected)
