"""What is refused because the machine has too little of it; the message has all figures."""

import pytest

from algorithms.run import resources
from algorithms.run.resources import check_descriptors, memory_plan, reserve
from algorithms.runtime.memory.arena import Field
from algorithms.runtime.topology import Topology
from utils import limits, machine
from utils.errors import ResourceError

MIB = 1 << 20
FIELDS = [
    Field("reward", (MIB,), "float32"),
    Field("obs.obs", (MIB // 2,), "uint8"),
    Field("weights.0.buffer", (2, MIB), "uint8"),
    Field("weights.1.buffer", (2, MIB), "uint8"),
    Field("state.0.vectors", (MIB,), "uint8"),
]
PLAN = "9.5 MiB of shared memory (slots 4.5, weights 4.0, state 1.0)"
ADVICE = (
    "lower --num_workers, --num_envs_per_worker or --min_traj_buffers_per_worker, or else --batch_size or --rollout"
)


def test_the_plan_says_what_takes_how_much() -> None:
    assert memory_plan(FIELDS) == PLAN


def test_more_than_the_limit_is_refused() -> None:
    with pytest.raises(ResourceError) as caught:
        reserve(FIELDS, limit_mb=9)
    assert str(caught.value) == f"the run needs {PLAN}; --memory_limit_mb=9 allows 9.0 MiB: {ADVICE}"
    assert reserve(FIELDS, limit_mb=10).nbytes == 9.5 * MIB


def test_more_than_the_machine_has_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 10 * MIB)
    for limit_mb in (0, 10):  # a limit does not make more of it
        with pytest.raises(ResourceError) as caught:
            reserve(FIELDS, limit_mb)
        assert str(caught.value) == f"the run needs {PLAN}; free are 9.0 MiB: {ADVICE}"
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 11 * MIB)
    assert reserve(FIELDS, limit_mb=0).nbytes == 9.5 * MIB


def test_too_few_descriptors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology("central", 8, 2, 2, 2, 1, 8, 32)  # with two learners and two policy workers
    needed = 20 + resources.DESCRIPTORS_OF_MAIN + 12 * resources.DESCRIPTORS_OF_PROCESS
    monkeypatch.setattr(limits, "num_open", lambda: 20)
    for enough in (None, needed):
        monkeypatch.setattr(limits, "limit", lambda enough=enough: enough)
        check_descriptors(topology)
    monkeypatch.setattr(limits, "limit", lambda: needed - 1)
    with pytest.raises(ResourceError) as caught:
        check_descriptors(topology)
    wanted = f"a run of 12 processes needs {needed} open files, `ulimit -n` allows {needed - 1}: "
    assert str(caught.value) == wanted + "raise it or lower --num_workers to 7"
    monkeypatch.setattr(limits, "limit", lambda: 64)
    with pytest.raises(ResourceError, match=r"`ulimit -n` allows 64: raise it$"):
        check_descriptors(topology)
