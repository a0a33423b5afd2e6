import errno
import os
import signal
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path

import pytest

from appo.utils import failpoints
from appo.utils.errors import UsageError
from appo.utils.failpoints import FailpointError, arm, failpoint
from tests.patience import HANG_SECONDS

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _disarm():
    yield
    arm("")


def outcomes(place: str, passages: int) -> list[bool]:
    fired = []
    for _ in range(passages):
        try:
            failpoint(place)
            fired.append(False)
        except FailpointError:
            fired.append(True)
    return fired


def test_nothing_happens_when_nothing_is_armed():
    arm("")
    assert outcomes("ckpt.rename", 3) == [False] * 3


def test_an_unarmed_passage_costs_next_to_nothing():
    arm("")

    def nothing(name: str) -> None: ...

    def seconds(call: Callable[[str], None]) -> float:
        return timeit.timeit(lambda: call("actor.step"), timer=time.process_time, number=20_000)

    pairs = [(seconds(failpoint), seconds(nothing)) for _ in range(15)]
    assert min(passage for passage, _ in pairs) < 3 * min(call for _, call in pairs)


def test_every_passage_the_nth_passage_and_other_places():
    arm("a.b:raise, c.d:raise@3")
    assert outcomes("a.b", 2) == [True, True]
    assert outcomes("c.d", 5) == [False, False, True, False, False]
    assert outcomes("a", 1) == outcomes("a.b.c", 1) == [False]


def test_several_triggers_at_one_place():
    arm("a:raise@2,a:raise@4")
    assert outcomes("a", 5) == [False, True, False, True, False]


def test_a_trigger_of_another_worker_neither_fires_nor_counts():
    arm("actor.step:raise@2%w1", worker=1)
    assert outcomes("actor.step", 3) == [False, True, False]
    for other in (0, None):
        arm("actor.step:raise@2%w1", worker=other)
        assert outcomes("actor.step", 3) == [False] * 3


def test_arming_again_counts_from_zero():
    arm("a:raise@2")
    assert outcomes("a", 1) == [False]
    arm("a:raise@2")
    assert outcomes("a", 2) == [False, True]


def test_a_full_disk_is_the_real_exception():
    arm("ckpt.write:enospc")
    with pytest.raises(OSError, match="No space left") as error:
        failpoint("ckpt.write")
    assert error.value.errno == errno.ENOSPC


def test_sleep_takes_the_seconds_it_says():
    arm("learner.publish:sleep=0.05")
    start = time.monotonic()
    failpoint("learner.publish")
    assert time.monotonic() - start >= 0.05


def test_the_variable_is_read_by_arm(monkeypatch):
    monkeypatch.setenv(failpoints.VARIABLE, "a:raise")
    arm()
    assert outcomes("a", 1) == [True]


@pytest.mark.parametrize(
    "text",
    ["a", "a:", ":raise", "a:explode", "a:exit", "a:sleep", "a:kill9=3", "a:exit=1.5", "a:sleep=1.2.3", "a:raise@0",
     "a:raise@x", "a:raise%1", "a:raise%w", "a b:raise", "a:raise;b:raise", "a:sleep=-1", "a:exit="],
)  # fmt: skip
def test_what_is_not_understood_is_refused_in_one_line(text):
    with pytest.raises(UsageError) as error:
        arm(text)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("action", "code"), [("kill9@2", -signal.SIGKILL), ("exit=7@2", 7), ("raise@2", 1)])
def test_a_child_armed_by_its_environment_alone(action, code):
    script = "from appo.utils.failpoints import failpoint\nfor n in '123': failpoint('x.y'); print(n, flush=True)"
    child = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, failpoints.VARIABLE: f"x.y:{action}"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert (child.returncode, child.stdout) == (code, "1\n"), child.stderr
