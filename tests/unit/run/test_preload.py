"""What the processes of a run share: nothing of ours is imported after the fork."""

import subprocess
import sys
from functools import cache

import pytest

from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.run.config import Config
from appo.algorithms.run.workers.blueprint import Blueprint
from appo.algorithms.runtime.processes.process import run_process

SCRIPT = """
import os, sys
from importlib import import_module
import numpy as np
from appo.algorithms.run.preload import FIRST, LAST, preloaded
for module in preloaded(with_torch=True):
    if module not in (FIRST, LAST):  # these two change the process, and import no more than what follows
        import_module(module)
if not (child := os.fork()):  # with the first one, but none of the imports below
    os.environ["APPO_MAIN_PID"] = str(os.getppid())
    import_module(FIRST)
    print(sorted(set(sys.argv[2:]) - set(sys.modules)))
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
from appo.algorithms.models.config import ModelConfig
from appo.algorithms.run.algorithms import find_algorithm
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.device_of import device_of
from appo.envs.spec import ActionPart, ActionSpec, EnvSpec, ObservationSpec
algorithm = find_algorithm(sys.argv[1])
action = ActionPart("tanh_gaussian" if sys.argv[1] == "SAC" else "categorical", 2)
spec = EnvSpec({"obs": ObservationSpec((4,), "float32")}, ActionSpec((action,)))
context = Context(spec, algorithm.flags(), ModelConfig(use_rnn=False), "fp32", "cpu", seeds=np.random.SeedSequence(1))
before = set(sys.modules)
algorithm.make_policy(context, algorithm.make_model(context))
algorithm.make_learner(context, algorithm.make_model(context), device_of("cpu"))
print(sorted(name for name in set(sys.modules) - before if name.split(".")[0] == "appo"))
"""
OTHERS = ("PPO", "A3C", "APEX", "SAC", "PQN")
UNPICKLED = {run_process.__module__, Blueprint.__module__, Config.__module__, APPO.__module__}


@cache
def missing(name: str) -> tuple[str, str]:
    """Modules that a child would load for its plan, and those for its network: two lines of a single process."""
    words = [sys.executable, "-c", SCRIPT, name, *UNPICKLED]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout.count("\n")) == (0, 2), found.stdout + found.stderr
    plan, network = found.stdout.splitlines()
    return plan, network


def test_the_plan_of_a_process_is_of_modules_that_are_there() -> None:
    """Every child would load, for itself, the modules of the classes that it unpickles."""
    assert missing("APPO")[0] == "[]"


@pytest.mark.parametrize("name", ["APPO", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_child_imports_nothing_of_ours_for_its_network(name: str) -> None:
    assert missing(name)[1] == "[]"
