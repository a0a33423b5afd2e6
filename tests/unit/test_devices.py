from pathlib import Path

import pytest

from utils import devices as module
from utils.devices import choose_device
from utils.errors import UsageError


@pytest.mark.parametrize(
    ("wanted", "present", "visible", "expected"),
    [
        ("auto", True, None, "cuda"),
        ("auto", False, None, "cpu"),
        ("auto", True, "", "cpu"),
        ("auto", True, "-1", "cpu"),
        ("auto", True, "0,1", "cuda"),
        ("cpu", True, None, "cpu"),
        ("cuda", True, None, "cuda"),
    ],
)
def test_the_device_is_found_without_torch(
    monkeypatch: pytest.MonkeyPatch, wanted: str, present: bool, visible: str | None, expected: str
) -> None:
    monkeypatch.setattr(module, "Path", lambda path: Path("/dev/null" if present else "/nowhere"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert choose_device(wanted) == expected


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match="--device=cuda: no NVIDIA GPU is visible"):
        choose_device("cuda")
