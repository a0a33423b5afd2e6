"""Warnings about a first batch that does not fill, with numbers that can be checked by hand."""

import logging
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest

from appo.algorithms.run.config import Config
from appo.algorithms.run.first_batch import FirstBatch, budget_of, log_refill
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.monitor.policy_progress import PolicyProgress
from appo.algorithms.runtime.topology import Topology
from appo.utils.errors import NothingTrained, UsageError

CLOCK = "appo.algorithms.run.first_batch.time.monotonic"
FLAGS = {"env": "a", "experiment": "r", "rollout": 32, "batch_size": 1024}


def needs(**flags: Any) -> FirstBatch | None:
    config = Config.from_flat(FLAGS | flags)
    policies = config.sampling.num_policies
    return FirstBatch.of(config, Topology("local", 2, 1, 2, policies, 1, 8, 32))


def test_a_batch_with_a_part_of_datasets_takes_less_of_what_is_played() -> None:
    first = needs(input=["sampler:0.25", "data:0.75"])
    assert first is not None
    assert (first.columns, first.steps) == (8, 8 * 32)


class Watched:
    """A monitor, as far as it is asked here.

    Args:
        stepped: steps that were taken.
        whole: trajectories of groups that are whole.
        seconds: of the budget.
        totals: of the first policy.
    """

    def __init__(
        self, stepped: int = 0, whole: int = 0, seconds: float = 1e10, totals: Mapping[str, int] | None = None
    ) -> None:
        self.stepped, self.budget = stepped, Budget(10**9, seconds=seconds)
        self.workers = {"actor_0": {"trajectories": whole, "collected": 0}}
        self.policies = [PolicyProgress(100), PolicyProgress(100)]
        self.policies[0].totals |= totals or {}
        self.started = 0.0


def said(watched: Watched, caplog: pytest.LogCaptureFixture, **flags: Any) -> list[str]:
    first = needs(**flags)
    assert first is not None
    with caplog.at_level(logging.INFO), patch(CLOCK, return_value=watched.started + 8.001):
        first.tick(watched)  # type: ignore[arg-type]
    return caplog.messages


def test_a_batch_that_does_not_fill_is_said_with_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    """16 agents have taken 3 steps each in 8 s; each has to take 64 for 32 whole rollouts."""
    assert said(Watched(stepped=48), caplog) == [
        "nothing is trained after 8 s: 48 steps are collected, 0 rollouts of 32 steps are whole, and a batch takes 32"
        " of those (1,024 steps), 3 min from the start at this speed: lower --batch_size, --num_batches_per_iteration"
        " or --rollout, or play more environments (now 2 x 8 agents: --num_workers, --num_envs_per_worker)"
    ]


def test_it_is_said_when_the_budget_ends_before(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = said(Watched(stepped=48, seconds=60.0), caplog)
    assert "3 min from the start at this speed, and 60 s are given: lower" in line
    caplog.clear()
    (line,) = said(Watched(), caplog)  # of no step nothing follows
    assert (
        "0 steps are collected, 0 rollouts of 32 steps are whole, and a batch takes 32 of those (1,024 steps): l"
        in line
    )


@pytest.mark.parametrize(
    "watched",
    [
        Watched(stepped=1024, whole=4),  # 32 rollouts: the learner is at it
        Watched(stepped=500, totals={"samples": 1}),
        Watched(totals={"updates": 3}),  # of an earlier start
    ],
)
def test_where_a_batch_is_full_or_was_nothing_is_said(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    assert said(watched, caplog) == []


def test_updates_of_earlier_starts_do_not_count_where_a_replay_fills_again(caplog: pytest.LogCaptureFixture) -> None:
    config, topology = (
        Config.from_flat(FLAGS | {"algo": "APEX", "learning_starts": 100}),
        Topology("local", 2, 1, 2, 1, 1, 8, 32),
    )
    first = FirstBatch.of(config, topology, [{"updates": 3}])
    assert first is not None
    assert not first.is_trained(Watched(totals={"updates": 3}))  # type: ignore[arg-type]
    assert first.is_trained(Watched(totals={"updates": 4}))  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):  # no failure of its own: what was trained before is kept
        first.check(Watched(stepped=48, totals={"updates": 3}, seconds=20.0), "20 seconds are over")  # type: ignore[arg-type]
    (line,) = caplog.messages
    assert line.startswith("20 seconds are over, and nothing is trained: 48 steps are collected")


def test_policies_together_and_replays_need_what_they_need(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = said(Watched(stepped=1, whole=1), caplog, num_policies=2)
    assert "1 step is collected, 8 rollouts of 32 steps are whole, and a batch takes 64 of those (2,048 steps)" in line
    caplog.clear()
    (line,) = said(Watched(stepped=100, whole=9), caplog, algo="APEX", learning_starts=1000)
    assert "100 steps are collected, training begins at 1,000 (--learning_starts), 80 s from the start" in line
    assert "lower --learning_starts, or" in line
    caplog.clear()
    (again,) = said(Watched(stepped=100, totals={"samples": 100}), caplog, algo="APEX", learning_starts=1000)
    assert again == line


def test_a_budget_that_ends_before_the_first_update_from_a_replay_is_refused() -> None:
    def budget(env_steps: int, **flags: Any) -> float:
        config = Config.from_flat(FLAGS | {"train_for_env_steps": env_steps, "learning_starts": 100} | flags)
        return budget_of(config, frames_per_step=4).env_steps

    with pytest.raises(UsageError, match=r"=400 ends before the first update, which --learning_starts=100 delays"):
        budget(400, algo="APEX")
    assert budget(401, algo="APEX") == 401
    assert budget(400, algo="APEX", sampler_only=True) == 400
    own = {"num_policies": 2, "per_policy": {"learning_starts": [50, 100]}, "learning_starts": 10}
    with pytest.raises(UsageError, match=r"=400 ends before the first update, which --learning_starts=100 delays"):
        budget(400, algo="APEX", **own)
    assert budget(401, algo="APEX", **own) == 401
    parts = {"deterministic_resume": True, "save_every_env_steps": 400}
    with pytest.raises(
        UsageError, match=r"--save_every_env_steps=400 ends before the first update, .* or raise --save"
    ):
        budget(1000, algo="APEX", **parts)
    assert budget(1000, algo="APEX", **parts | {"save_every_env_steps": 401}) == 1000


def test_a_replay_that_fills_again_is_told_with_what_the_budget_leaves(caplog: pytest.LogCaptureFixture) -> None:
    config = Config.from_flat(FLAGS | {"algo": "APEX", "learning_starts": 100})
    with caplog.at_level(logging.INFO):
        for env_steps in (700, 701):
            log_refill("it fills again", config, env_steps, [{"env_steps": 300}], 4)
    assert [(one.levelno, one.getMessage()) for one in caplog.records] == [
        (logging.WARNING, "it fills again; nothing is trained, as the run ends before, at 700 env steps"),
        (logging.INFO, "it fills again"),
    ]


@pytest.mark.parametrize("flags", [{"sampler_only": True}, {"algo": "BC", "input": ["d"]}])
def test_a_run_that_trains_nothing_or_collects_nothing_needs_no_batch(flags: dict[str, Any]) -> None:
    assert needs(**flags) is None


def test_a_budget_that_is_over_with_nothing_trained_is_a_failure_of_its_own() -> None:
    first = needs()
    assert first is not None
    with pytest.raises(NothingTrained, match="20 seconds are over, and nothing is trained: 48 steps are c") as caught:
        first.check(Watched(stepped=48, seconds=20.0), "20 seconds are over")  # type: ignore[arg-type]
    assert caught.value.exit_code == 7
    with pytest.raises(NothingTrained, match="a batch is full, and training on it takes longer"):
        first.check(Watched(stepped=1024, whole=4, seconds=20.0), "20 seconds are over")  # type: ignore[arg-type]
    first.check(Watched(stepped=48, totals={"samples": 1}), "20 seconds are over")  # type: ignore[arg-type]
    first.check(Watched(seconds=0.0), "0 seconds are over")  # type: ignore[arg-type] # nobody wanted any training
    reached = Watched(stepped=48)
    reached.budget = Budget(10**9, episode_return=-1.0)
    for policy in reached.policies:
        policy.episode_return.append([5.0] * 100)
    first.check(reached, "the mean return has reached 5.00")  # type: ignore[arg-type] # a random policy is good enough


def test_steps_that_failing_learners_took_along_are_no_training() -> None:
    first = needs()
    assert first is not None
    lost = Watched(totals={"samples": 744, "env_steps": 744, "lost": 744})
    lost.budget = Budget(200)
    with pytest.raises(NothingTrained, match=r"^done, and nothing is trained: learners failed over all 744 s"):
        first.check(lost, "done")  # type: ignore[arg-type]
    lost.policies[0].totals["updates"] = 1
    first.check(lost, "done")  # type: ignore[arg-type]


def test_a_budget_that_a_replay_used_up_without_an_update_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Its steps count when they are stored; those of other learners count when they were trained on."""
    first, played = needs(algo="APEX", learning_starts=1000), {"env_steps": 4000, "samples": 1000}
    assert first is not None
    ended = Watched(stepped=1000, totals=played)
    ended.budget, ended.policies = Budget(4000), ended.policies[:1]
    first.topology = Topology("local", 2, 1, 2, 1, 1, 8, 32)
    first.check(ended, "the end")  # type: ignore[arg-type]
    assert caplog.messages == [
        "nothing is trained: no update was due so soon, or no stored step can be drawn (replay/unsampled)"
    ]
    ended.stepped = 999
    caplog.clear()
    with patch(CLOCK, return_value=ended.started + 10.0):
        first.check(ended, "the end")  # type: ignore[arg-type]
    assert "999 steps are collected, training begins at 1,000 (--learning_starts), 10 s from the start" in caplog.text
    ended.budget = Budget(4001, episode_return=-1.0)
    for policy in ended.policies:
        policy.episode_return.append([0.0] * 100)
    caplog.clear()
    first.check(ended, "the goal is reached by random actions")  # type: ignore[arg-type]
    assert not caplog.messages
