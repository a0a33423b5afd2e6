"""The choice of a device by its torch name."""

from appo.algorithms.runtime.cuda import CudaDevice
from appo.algorithms.runtime.devices import Device


def device_of(name: str, *, urgent: bool = False) -> Device:
    """Return the device of a torch name; work of workers made by an `urgent` device has priority."""
    return Device() if name == "cpu" else CudaDevice(urgent)
