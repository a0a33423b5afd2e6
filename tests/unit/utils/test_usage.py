"""How busy the machine is: CPU time, memory and GPUs."""

from typing import Any

import pytest

from appo.utils.system import usage as module
from appo.utils.system.usage import Nvml, Usage


class Library:
    """Two GPUs, as NVIDIA's library tells of them; `failing` is a function of it that fails."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == self.failing:
                return 1
            return int(getattr(self, f"_{name}")(*arguments) or 0)

        return call

    def _nvmlInit_v2(self) -> None:
        pass

    def _nvmlDeviceGetCount_v2(self, count: Any) -> None:
        count._obj.value = 2

    def _nvmlDeviceGetHandleByIndex_v2(self, index: int, gpu: Any) -> None:
        gpu._obj.value = 100 + index

    def _nvmlDeviceGetUtilizationRates(self, gpu: Any, rates: Any) -> None:
        rates._obj[0] = gpu.value - 90  # 10 and 11

    def _nvmlDeviceGetMemoryInfo(self, gpu: Any, sizes: Any) -> None:
        sizes._obj[0], sizes._obj[2] = 80, 20 * (gpu.value - 99)


def test_gpus_are_told_apart() -> None:
    usage = Usage(Nvml(Library()))  # type: ignore[arg-type]
    usage.read()
    figures = usage.read()
    assert {name: value for name, value in figures.items() if name.startswith("gpu")} == {
        "gpu0_percent": 10.0,
        "gpu0_memory_percent": 25.0,
        "gpu1_percent": 11.0,
        "gpu1_memory_percent": 50.0,
    }
    assert 0.0 <= figures["machine_cpu_percent"] <= 100.0
    assert 0.0 < figures["machine_memory_percent"] < 100.0


def test_cpu_time_is_known_from_the_second_look_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    usage = Usage()
    assert usage.read().keys() == {"machine_memory_percent"}
    assert usage.read().keys() == {"machine_memory_percent", "machine_cpu_percent"}


@pytest.mark.parametrize(
    "failing",
    [
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetMemoryInfo",
    ],
)
def test_a_library_that_fails_says_nothing(failing: str) -> None:
    assert Nvml(Library(failing)).read() == []  # type: ignore[arg-type]


def test_without_the_library_there_is_nobody_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_gpu", lambda: True)
    monkeypatch.setattr(Nvml, "NAMES", ("libno-such-library.so",))
    assert Nvml.find() is None
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: Library("nvmlInit_v2"))
    assert Nvml.find() is None
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: Library())
    assert isinstance(Nvml.find(), Nvml)
