"""What is refused because the machine has too little of it; the message has all figures."""

import pytest

from appo.algorithms.run import resources
from appo.algorithms.run.config import resolve
from appo.algorithms.run.placement import plan_workers
from appo.algorithms.run.resources import check_descriptors, check_machine, memory_plan, reserve
from appo.algorithms.runtime.memory.arena import Field
from appo.algorithms.runtime.topology import Topology
from appo.utils.errors import ResourceError, UsageError
from appo.utils.system import limits, machine

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


# What no machine like this can hold is refused before anything is started.


def check(**flags: object) -> None:
    config, _ = resolve({"env": "CartPole-v1", "inference": "local", "use_rnn": False, **flags})
    placement = config.sampling.inference
    check_machine(config, plan_workers(config, 2, placement))  # type: ignore[arg-type]


@pytest.fixture
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with 8 GiB free, 65,536 open files and no limit of processes."""
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 8192 * MIB)
    monkeypatch.setattr(machine, "free_pids", lambda: None)
    monkeypatch.setattr(limits, "raised_limit", lambda: 1 << 16)
    monkeypatch.setattr(limits, "num_open", lambda: 20)


TOO_MUCH: list[tuple[dict[str, object], str]] = [
    ({"num_workers": 1, "num_envs_per_worker": 10_000_000}, "2 processes and 10,000,000 envs need at least 14"),
    ({"num_workers": 3000, "num_envs_per_worker": 1}, "3,001 processes and 3,000 envs need at least 3601"),
    ({"num_workers": 1_000_000}, "1,000,001 processes and 1,000,000 envs need at least 1"),
    ({"inference": "central", "policy_workers_per_policy": 10**6}, "processes and "),
    ({"inference": "serial", "num_envs_per_worker": 10**8}, "0 processes and 100,000,000 envs need at least"),
    ({"encoder_mlp_layers": (200_000, 200_000)}, "a network of 40,000,200,000 weights needs"),
    ({"use_rnn": True, "hidden_size": 10**6}, "a network of 3,"),
    ({"use_rnn": True, "hidden_size": 20_000, "rnn_type": "lstm", "rnn_num_layers": 3}, "a network of 8,"),
]


@pytest.mark.usefixtures("_machine")
@pytest.mark.parametrize(("flags", "expected"), TOO_MUCH, ids=[next(reversed(flags)) for flags, _ in TOO_MUCH])
def test_what_cannot_fit_is_refused_at_once(flags: dict[str, object], expected: str) -> None:
    with pytest.raises(ResourceError) as refused:
        check(**flags)
    assert expected in str(refused.value)
    assert "free" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("_machine")
@pytest.mark.parametrize(
    "flags", [{"encoder_mlp_layers": (1,) * 101}, {"rnn_num_layers": 101}, {"env_framestack": 10**8}]
)
def test_more_layers_than_any_network_has_are_refused(flags: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="at most"):
        check(**flags)


@pytest.mark.usefixtures("_machine")
def test_what_may_fit_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check()
    check(num_workers=64, num_envs_per_worker=64, encoder_mlp_layers=(4096, 4096), use_rnn=True, hidden_size=4096)
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: resources.LEAST_START_BYTES)
    check(num_workers=1, num_envs_per_worker=1)
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: resources.LEAST_START_BYTES - 1)
    with pytest.raises(ResourceError, match=r"needs at least 128\.0 MiB of memory to start, free are 128\.0 MiB"):
        check(num_workers=1, num_envs_per_worker=1)
    check(inference="serial", num_envs_per_worker=1)  # starts nothing


@pytest.mark.usefixtures("_machine")
def test_few_processes_and_files_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 3 + resources.PIDS_OF_START  # two actors and a learner
    monkeypatch.setattr(machine, "free_pids", lambda: needed)
    check(num_workers=2)
    monkeypatch.setattr(machine, "free_pids", lambda: needed - 1)
    with pytest.raises(ResourceError, match=f"needs at least {needed} processes and threads, {needed - 1} more"):
        check(num_workers=2)
    check(inference="serial")
    monkeypatch.setattr(machine, "free_pids", lambda: None)
    monkeypatch.setattr(limits, "raised_limit", lambda: 60)
    with pytest.raises(ResourceError, match="a run of 3 processes needs 64 open files, `ulimit -n` allows 60"):
        check(num_workers=2)
