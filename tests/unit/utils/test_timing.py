import pytest

from appo.utils.timing import (
    COPYING,
    ENV,
    FRAMEWORK,
    INFERENCE,
    PHASES,
    SAMPLE_INTERVAL_NS,
    TRAINING,
    WAITING,
    WAITING_FOR_SLOTS,
    PhaseClock,
)


class Clocks:
    """Wall and CPU time that pass as the test says."""

    def __init__(self) -> None:
        self.wall, self.cpu = 7_000_000_000, 3_000_000_000
        self.clock = PhaseClock(lambda: self.wall, lambda: self.cpu)

    def spend(self, phase: int, wall_ns: int, cpu_ns: int) -> None:
        self.clock.enter(phase)
        self.wall += wall_ns
        self.cpu += cpu_ns


def test_every_phase_is_numbered_as_it_is_named() -> None:
    assert [PHASES[phase] for phase in (FRAMEWORK, ENV, INFERENCE, TRAINING, COPYING, WAITING, WAITING_FOR_SLOTS)] == [
        "framework", "env", "inference", "training", "copying", "waiting", "waiting_for_slots"
    ]  # fmt: skip


def test_phases_add_up_to_the_time_of_the_process() -> None:
    clocks = Clocks()
    clocks.wall += 1_000_000_000  # before the first boundary it is the framework's
    clocks.cpu += 1_000_000_000
    for _ in range(4):
        clocks.spend(ENV, 2_000_000_000, 500_000_000)  # waits for its game most of the time
        clocks.spend(INFERENCE, 250_000_000, 250_000_000)
        clocks.spend(WAITING, 500_000_000, 0)
    seconds, cpu_seconds = clocks.clock.spent()
    assert seconds == {"framework": 1.0, "env": 8.0, "inference": 1.0, "waiting": 2.0}
    assert cpu_seconds == {"framework": 1.0, "env": 2.0, "inference": 1.0, "waiting": 0.0}
    clocks.spend(TRAINING, 3_000_000_000, 6_000_000_000)  # in two threads
    seconds, cpu_seconds = clocks.clock.spent()
    assert (seconds["training"], cpu_seconds["training"]) == (3.0, 6.0)
    assert sum(seconds.values()) == 15.0
    assert sum(cpu_seconds.values()) == 10.0


def test_the_share_of_cpu_time_is_that_of_the_samples() -> None:
    """Of short phases only some are looked at; those between have a part of what the process used."""
    clocks = Clocks()
    short = SAMPLE_INTERVAL_NS // 100
    for step in range(1000):
        clocks.spend(ENV, 3 * short, short if step < 500 else 2 * short)
        clocks.spend(INFERENCE, 2 * short, 2 * short)
    seconds, cpu_seconds = clocks.clock.spent()
    assert seconds == {"env": 3000 * short / 1e9, "inference": 2000 * short / 1e9}
    assert cpu_seconds["env"] == pytest.approx(1500 * short / 1e9, rel=0.02)
    assert cpu_seconds["inference"] == pytest.approx(2000 * short / 1e9, rel=0.02)
    assert sum(cpu_seconds.values()) == pytest.approx((clocks.cpu - 3_000_000_000) / 1e9, rel=1e-12)


def test_cpu_time_that_no_sample_explains_is_the_present_phases() -> None:
    clocks = Clocks()
    clocks.spend(WAITING, 1_000_000_000, 0)
    assert clocks.clock.spent().cpu_seconds == {"waiting": 0.0}
    clocks.cpu += 500_000_000  # another thread works while this one waits
    clocks.wall += 1_000_000_000
    assert clocks.clock.spent().cpu_seconds == {"waiting": 0.5}


def test_a_phase_may_lie_inside_another() -> None:
    clocks = Clocks()
    clocks.spend(ENV, 1_000_000_000, 0)
    before = clocks.clock.enter(COPYING)
    clocks.wall += 1_000_000_000
    clocks.clock.enter(before)
    clocks.wall += 2_000_000_000
    assert before == ENV
    assert clocks.clock.spent().seconds == {"env": 3.0, "copying": 1.0}


def test_waiting_is_for_slots_while_a_group_is_parked() -> None:
    clocks = Clocks()
    for parked in (0, 2, 1, 0):
        clocks.clock.parked = parked
        clocks.clock.wait()
        clocks.wall += 1_000_000_000
        clocks.clock.enter(FRAMEWORK)
    assert clocks.clock.spent().seconds == {"waiting": 2.0, "waiting_for_slots": 2.0}


def test_a_restart_forgets_everything() -> None:
    clocks = Clocks()
    clocks.spend(ENV, 1_000_000_000, 1_000_000_000)
    clocks.clock.collected, clocks.clock.trained, clocks.clock.parked = 3, 2, 1
    clocks.clock.restart()
    clocks.wall += 500_000_000
    assert clocks.clock.spent() == ({"framework": 0.5}, {"framework": 0.0})
    assert (clocks.clock.collected, clocks.clock.trained, clocks.clock.parked) == (0, 0, 0)
    assert clocks.clock.started_ns == 8_000_000_000
