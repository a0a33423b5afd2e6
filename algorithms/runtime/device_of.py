"""The choice of a device by the name in `--device`."""

from appo.algorithms.runtime.cuda import CudaDevice
from appo.algorithms.runtime.devices import Device, HostDevice


def device_of(name: str, *, urgent: bool = False) -> Device:
    """Return the device of a torch name; the work of workers that an `urgent` one makes goes before that of others."""
    if name == "cpu":
        return HostDevice()

    return CudaDevice(urgent)
