import pytest
import torch

from appo.algorithms.runtime.devices import Device
from appo.algorithms.runtime.learning.publisher import Publisher
from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.weights import WeightRing
from tests.unit.runtime.devices import LateDevice

SIZE = 5


def publisher_of(device: Device) -> tuple[Publisher, WeightRing]:
    ring = WeightRing(Arena.create(WeightRing.declare(0, SIZE)), 0)
    return Publisher(ring, torch.zeros(SIZE), device), ring


def fetched(ring: WeightRing) -> tuple[int, list[float] | None]:
    version, weights = ring.fetch(0)
    return version, None if weights is None else weights.tolist()


def test_on_the_host_it_is_done_at_once() -> None:
    publisher, ring = publisher_of(Device())
    for version in (1, 2, 7):
        publisher.flat.fill_(version)
        publisher.publish(version)
        assert not publisher.busy
        assert fetched(ring) == (version, [version] * SIZE)


def test_a_version_appears_when_its_copy_is_done_and_training_goes_on_meanwhile() -> None:
    device = LateDevice()
    publisher, ring = publisher_of(device)
    events = device.streams[0].events
    publisher.flat.fill_(1)
    publisher.publish(1)
    publisher.flat.fill_(-1)  # the next update is half done
    assert publisher.busy
    assert fetched(ring) == (0, None)
    events[0].reached = True
    publisher.flat.fill_(2)
    publisher.publish(2)
    assert fetched(ring) == (1, [1] * SIZE)
    for version in (3, 4):  # nobody sees version 3
        publisher.flat.fill_(version)
        publisher.publish(version)
    assert len(events) == 2
    events[1].reached = True
    publisher.poll()
    assert fetched(ring) == (2, [2] * SIZE)
    assert publisher.busy
    events[2].reached = True
    publisher.poll()
    assert fetched(ring) == (4, [4] * SIZE)
    assert not publisher.busy


@pytest.mark.parametrize("device", [Device(), LateDevice()])
def test_flushing_waits_for_the_newest(device: Device) -> None:
    publisher, ring = publisher_of(device)
    for version in (1, 2, 3):
        publisher.flat.fill_(version)
        publisher.publish(version)
    publisher.flush()
    assert not publisher.busy
    assert fetched(ring) == (3, [3] * SIZE)
