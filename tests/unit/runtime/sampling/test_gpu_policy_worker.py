import logging
from functools import partial

import numpy as np
import pytest
import torch

from appo.algorithms.runtime.sampling import gpu_policy_worker as module
from appo.algorithms.runtime.sampling.gpu_policy_worker import GpuEngine, bucket_sizes
from tests.unit.runtime.devices import RecordingDevice
from tests.unit.runtime.sampling import test_policy_worker as acting
from tests.unit.runtime.worlds import arrays_of


@pytest.mark.parametrize(("rows", "sizes"), [(1, [32]), (32, [32]), (33, [32, 64]), (500, [32, 64, 128, 256, 512])])
def test_buckets_hold_every_number_of_rows(rows: int, sizes: list[int]) -> None:
    assert bucket_sizes(rows) == sizes


def buffered(monkeypatch: pytest.MonkeyPatch, device: RecordingDevice) -> acting.Acting:
    monkeypatch.setattr(module, "SMALLEST_BUCKET", 4)
    monkeypatch.setitem(acting.ENGINES, "gpu", partial(GpuEngine, device=device))
    monkeypatch.setattr(acting, "kind", "gpu")
    return acting.acting_of()


def answer_all(world: acting.Acting) -> None:
    """One, two, three and four groups of three rows at once: 3, 6, 9 and 12 rows in batches of 4, 8, 16 and 16."""
    for step in range(acting.ROLLOUT):
        requests = [acting.request(group, step) for group in range(1 + step)]
        list(world.worker.answer(requests))


def test_each_size_is_captured_once_and_replayed_on_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    device = RecordingDevice()
    world = buffered(monkeypatch, device)
    before = world.worker.live_state.clone()
    answer_all(world)
    answer_all(world)
    assert (len(device.captured), device.strict_runs, device.replays) == (3, 3, 8)
    monkeypatch.setattr(acting, "kind", "host")
    plain = acting.acting_of()
    assert torch.equal(plain.worker.live_state, before)
    answer_all(plain)
    answer_all(plain)
    for name in ("recorded.logits", "recorded.value", "rnn_state", "policy_version"):
        found, expected = (arrays_of(a.world.trajectories)[name] for a in (world, plain))
        assert np.allclose(found, expected, rtol=1e-5, atol=1e-5), name
    assert acting.close(world.worker.live_state, plain.worker.live_state)


def test_what_was_captured_before_a_capture_failed_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = RecordingDevice()
    world = buffered(monkeypatch, device)
    list(world.worker.answer([acting.request(0, 0)]))
    device.refuses = "capture"
    list(world.worker.answer([acting.request(group, 1) for group in range(2)]))
    assert (len(device.captured), device.replays) == (1, 1)
    list(world.worker.answer([acting.request(0, 2)]))
    assert device.replays == 1
    assert world.world.trajectories.policy_version[0, :3].min() == 1


@pytest.mark.parametrize("refuses", ["strict", "capture"])
def test_what_cannot_be_captured_runs_as_it_is_after_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refuses: str
) -> None:
    device = RecordingDevice(refuses)
    world = buffered(monkeypatch, device)
    with caplog.at_level(logging.WARNING):
        answer_all(world)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert device.strict_runs == 1
    t = world.world.trajectories
    assert (t.policy_version[np.arange(4), 3] == 1).all()
    assert t.recorded["logits"][:, 3].all()
