from pathlib import Path
from types import SimpleNamespace

import pytest

from appo.utils.errors import UsageError
from appo.utils.system import devices as module
from appo.utils.system.devices import choose_device


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
    monkeypatch.setattr(module, "_torch_has_cuda", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert choose_device(wanted) == expected


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match="--device=cuda: no NVIDIA GPU is visible"):
        choose_device("cuda")


def test_a_gpu_that_torch_is_not_built_for_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    version = tmp_path / "torch" / "version.py"
    monkeypatch.setattr(module, "Path", lambda path: Path("/dev/null") if path.startswith("/dev") else Path(path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    spec = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: spec)
    for cuda, expected in (("None", "cpu"), ("'13.0'", "cuda")):
        version.write_text(f"cuda = {cuda}\n")
        module._torch_has_cuda.cache_clear()
        assert choose_device("auto") == expected
        if expected == "cpu":
            with pytest.raises(UsageError, match="--device=cuda: torch is a build for the CPU"):
                choose_device("cuda")
    module._torch_has_cuda.cache_clear()
