"""Killed at any point of an exchange between policies, a run goes on with policies that are each of one piece.

With a learning rate of 0 weights never change but by a copy, and `gamma`, which does not mutate, is a different one for
each policy: so both say from whom a policy descends, and must say the same.
"""

import json
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from appo.algorithms.population.lineage import Event, read_events
from appo.utils import checkpoint_files
from tests.chaos.runs import TrainingRun

POLICIES, PERIOD = 3, 300
GAMMAS = (0.9, 0.91, 0.92)
FLAGS = (
    "--inference=local",
    f"--num_policies={POLICIES}",
    "--with_pbt",
    "--learning_rate=0",
    "--per_policy=gamma=" + ",".join(map(str, GAMMAS)),
    f"--pbt_start_mutation={PERIOD}",
    f"--pbt_period_env_steps={PERIOD}",
    "--pbt_min_episodes=2",
    "--pbt_mutation_rate=0.5",
    "--pbt_replace_reward_gap=0",
    "--stats_avg=5",
    "--save_every_sec=1",
    "--train_for_env_steps=10000000",
)
IN_MAIN = ("pbt.decided", "pbt.recorded", "pbt.ordered", "pbt.told")
IN_LEARNERS = ("pbt.order", "pbt.done")


def states(directory: Path) -> list[tuple[dict[str, Any], bytes]]:
    """Plain state and weights of the newest checkpoint of every policy; weights without the running statistics."""
    found = []
    for policy in range(POLICIES):
        loaded = checkpoint_files.load(directory / f"checkpoint_p{policy}")
        assert loaded is not None
        weights = load(loaded.files["model.safetensors"])
        kept = [weights[name].tobytes() for name in sorted(weights) if name.endswith("weight") and "head" not in name]
        found.append((json.loads(loaded.files["state.json"]), b"".join(kept)))
    return found


def settled(directory: Path, policy: int) -> list[Event]:
    """What was done about a policy, as far as its checkpoint knows; and nothing that it does not know."""
    return [e for e in read_events(directory) if e.policy == policy and e.state != "taken back"]


def check(directory: Path, ancestors: dict[bytes, float]) -> list[int]:
    """Weights and hyperparameters of each policy are of one piece; env steps of all.

    Args:
        directory: of the run.
        ancestors: weights -> gamma, as far as it is known; extended.
    """
    for policy, (state, weights) in enumerate(states(directory)):
        traits = state["traits"]
        gamma = traits["hyperparameters"]["gamma"]
        assert ancestors.setdefault(weights, gamma) == gamma
        done = [event for event in settled(directory, policy) if event.change <= traits["changes"]]
        assert [event.change for event in done] == list(range(traits["changes"] + 1))
        assert sum(event.kind == "copy" for event in done) == traits["adoptions"]
        assert done[-1].after == traits["hyperparameters"]
        assert done[-1].env_steps == traits["decided_env_steps"] <= state["env_steps"]
        progress = state["progress"]
        assert progress["adoptions"] <= traits["adoptions"]
    assert len(set(ancestors.values())) == len(ancestors)
    return [state["env_steps"] for state, _ in states(directory)]


def decisions(directory: Path) -> int:
    return sum(event.kind != "start" and event.state == "applied" for event in read_events(directory))


def have_checkpoints(directory: Path) -> bool:
    return all(any((directory / f"checkpoint_p{policy}").glob("ckpt_*")) for policy in range(POLICIES))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", IN_MAIN)
def test_killed_in_main_and_started_again(tmp_path: Path, place: str) -> None:
    with TrainingRun(tmp_path, *FLAGS, failpoints=f"{place}:kill9@8") as run:
        ended = run.wait()
        run.seconds_until_gone(30)
    assert ended.exit_code == -signal.SIGKILL
    ancestors: dict[bytes, float] = {}
    before = check(run.directory, ancestors)
    with TrainingRun(tmp_path, *FLAGS) as run:
        run.wait_until(lambda: decisions(run.directory) >= 16, "new decisions")
        run.interrupt()
        assert run.wait().exit_code == 130
    after = check(run.directory, ancestors)
    assert set(ancestors.values()) <= set(GAMMAS)
    assert np.greater(after, before).all()
    check_clocks(run.directory)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", IN_LEARNERS)
def test_a_learner_that_is_killed_in_an_exchange_is_told_again(tmp_path: Path, place: str) -> None:
    with TrainingRun(tmp_path, *FLAGS, failpoints=f"{place}:kill9@2") as run:  # each that is started, in its second
        run.wait_until(lambda: decisions(run.directory) >= 8 and have_checkpoints(run.directory), "decisions")
        run.interrupt()
        assert run.wait().exit_code == 130
    assert "starting it again" in run.stdout + run.stderr
    ancestors: dict[bytes, float] = {}
    check(run.directory, ancestors)
    assert set(ancestors.values()) <= set(GAMMAS)


def check_clocks(directory: Path) -> None:
    """Between two decisions about a policy lies more than a period, whatever has died in between."""
    for policy in range(POLICIES):
        own = [event.env_steps for event in settled(directory, policy) if event.kind != "start"]
        assert all(later - earlier > PERIOD for earlier, later in pairwise(own))
