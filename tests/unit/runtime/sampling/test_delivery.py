import logging

import numpy as np
import pytest
import torch
from torch import nn

from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.weights import WeightRing
from appo.algorithms.runtime.sampling.weight_reader import DAMAGED_VERSIONS, LOAD_ATTEMPTS, WeightReader
from appo.utils.errors import ResourceError

SIZE = 5


class LosingModule(FlatModule):
    """The first loads of it lose one bit of one weight."""

    losses = loads = 0

    def load(self, weights: np.ndarray) -> None:
        super().load(weights)
        self.loads += 1
        if self.loads <= self.losses:
            self.flat.view(torch.int32)[3] ^= 1


class Delivered:
    """A ring, and a delivery from it to a model of `SIZE` weights."""

    def __init__(self) -> None:
        self.arena = Arena.create(WeightRing.declare(0, SIZE))
        self.ring = WeightRing(self.arena, 0)
        self.flat = LosingModule(nn.Linear(4, 1))
        self.delivery = WeightReader(self.ring, self.flat)

    def publish(self, version: int, *, damaged: bool = False) -> None:
        self.ring.publish(np.full(SIZE, version, np.float32), version)
        if damaged:
            place = self.arena["weights.0.sequence"].argmax()
            self.arena["weights.0.buffer"].view(np.uint32)[place, 2] ^= 1

    @property
    def weights(self) -> list[float]:
        return self.flat.flat.tolist()


def test_the_newest_weights_are_loaded_once() -> None:
    delivered = Delivered()
    delivered.publish(1)
    delivered.publish(2)
    assert [delivered.delivery.refresh() for _ in range(3)] == [2, 2, 2]
    assert delivered.weights == [2.0] * SIZE
    assert delivered.flat.loads == 1


def test_weights_that_were_lost_on_the_way_are_loaded_again() -> None:
    delivered = Delivered()
    delivered.flat.losses = LOAD_ATTEMPTS - 1
    delivered.publish(1)
    assert delivered.delivery.refresh() == 1
    assert delivered.weights == [1.0] * SIZE
    assert delivered.flat.loads == LOAD_ATTEMPTS


def test_nobody_acts_with_weights_that_never_arrive() -> None:
    delivered = Delivered()
    delivered.flat.losses = 100
    delivered.publish(1)
    with pytest.raises(ResourceError, match="the weights of version 1 do not reach the model on cpu: in 3 attempts"):
        delivered.delivery.refresh()
    assert delivered.delivery.version == 0


def test_damaged_weights_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    delivered = Delivered()
    delivered.publish(1)
    assert delivered.delivery.refresh() == 1
    delivered.publish(2, damaged=True)
    with caplog.at_level(logging.WARNING):
        assert [delivered.delivery.refresh() for _ in range(3)] == [1, 1, 1]
    assert [r.getMessage() for r in caplog.records] == ["the weights of version 2 are damaged; version 1 acts on"]
    assert delivered.weights == [1.0] * SIZE
    delivered.publish(3)
    assert delivered.delivery.refresh() == 3
    assert delivered.weights == [3.0] * SIZE


def test_weights_that_are_damaged_again_and_again_are_no_chance() -> None:
    delivered = Delivered()
    delivered.publish(1)
    delivered.delivery.refresh()
    for version in range(2, 2 + DAMAGED_VERSIONS):
        delivered.publish(version, damaged=True)
        assert delivered.delivery.refresh() == 1
    delivered.publish(9, damaged=True)
    with pytest.raises(ResourceError, match="the weights of version 9 are damaged where all processes share them"):
        delivered.delivery.refresh()


def test_nobody_acts_without_weights() -> None:
    delivered = Delivered()
    assert delivered.delivery.refresh() == 0  # nothing is published yet
    delivered.publish(1, damaged=True)
    with pytest.raises(ResourceError, match="the weights of version 1 are damaged"):
        delivered.delivery.refresh()


def test_weights_that_are_being_written_are_no_damage(caplog: pytest.LogCaptureFixture) -> None:
    delivered = Delivered()
    delivered.publish(1)
    delivered.ring.begin(2)[2] = 7.0  # by a learner that died there
    assert delivered.delivery.refresh() == 1
    assert delivered.weights == [1.0] * SIZE
    delivered.publish(3)
    assert delivered.delivery.refresh() == 3
    assert not caplog.records


def test_far_from_the_host_one_load_in_many_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    delivered = Delivered()
    delivered.delivery._proved_loads = 4
    reads: list[int] = []
    proved = delivered.delivery._checksum_loaded
    monkeypatch.setattr(delivered.delivery, "_checksum_loaded", lambda: reads.append(delivered.flat.loads) or proved())
    for version in range(1, 10):
        delivered.publish(version)
        delivered.delivery.refresh()
    assert reads == [1, 5, 9]
