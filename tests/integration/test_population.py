"""Several policies in one run: each learns from its own steps alone, copies come whole, rewards follow their policy."""

import logging
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

from appo.algorithms.population.lineage import Event, numbers_of, read_events
from appo.algorithms.runtime.learning import learner_worker
from appo.algorithms.runtime.learning.batches import Batch
from appo.algorithms.runtime.messages import Stop, WorkerReport
from appo.algorithms.runtime.sampling import episodes
from tests.integration.runs import Recorded, SerialRun, record

POLICIES, EPOCHS = 3, 2
MIXED: dict[str, Any] = {
    "env": "toy/Counter-v0",
    "num_policies": POLICIES,
    "learning_rate": 0,
    "use_rnn": True,
    "hidden_size": 12,
    "encoder_mlp_layers": 12,
    "normalize_input": False,
    "obs_scale": 2.0**16,
    "normalize_returns": False,
    "rollout": 8,
    "batch_size": 64,
    "num_batches_per_iteration": 2,
    "ppo_epochs": EPOCHS,
    "train_for_env_steps": 600,
}


class Observers:
    """A learner of one of several policies: what its minibatches hold, recomputed by every policy of the run."""

    def __init__(self, run: SerialRun, policy: int) -> None:
        self.run, self.policy = run, policy
        worker = run.worker("learner", policy)
        self.learner = worker.learner
        with torch.no_grad():  # the small gain of the last layer would hide that policies differ
            self.learner.model.policy_head.linear.weight.mul_(100.0)
        self.learner.version += 1
        worker.publisher.publish(self.learner.version)
        self.learner.quick = None
        self._update, self.learner.update = self.learner.update, self.update
        self.trained: Counter[tuple[int, ...]] = Counter()
        self.gaps = np.zeros(POLICIES)  # largest difference of log-probabilities to those that each policy computes

    def update(self, batch: Batch) -> Tensor:
        valid = batch.valid
        # [env, episode, step, action]: the first three name a step of the run
        self.trained.update(tuple(row) for row in batch.obs["obs"][:-1][valid][:, :3].int().tolist())
        for policy in range(POLICIES):
            other = self.run.worker("learner", policy).learner
            with torch.no_grad():
                log_prob = other.unroll(batch)[0].log_prob(batch.action)
            gap = (log_prob - batch.recorded["log_prob"])[valid].abs().max()
            self.gaps[policy] = max(self.gaps[policy], float(gap))
        return self._update(batch)


def test_every_step_is_learned_from_by_the_policy_that_took_it(tmp_path: Path) -> None:
    run = SerialRun(tmp_path / "run", num_groups=2, rows=6, slots=8, **MIXED)
    observers = [Observers(run, policy) for policy in range(POLICIES)]
    learners = [run.worker("learner", policy) for policy in range(POLICIES)]
    for _ in run.turns():  # which do not end by themselves: whoever is done still plays with the others
        if all(learner.totals["samples"] >= 600 for learner in learners):
            break
    run.node.deliver(Stop())
    for policy, one in enumerate(observers):
        assert one.gaps[policy] < 1e-5
        assert np.delete(one.gaps, policy).min() > 1e-3  # no two policies say the same
        assert set(one.trained.values()) == {EPOCHS}
        assert len(one.trained) == learners[policy].totals["samples"] >= 600
    steps = [step for one in observers for step in one.trained]
    assert len(steps) == len(set(steps))  # none was learned from by two
    collected = sum(report.totals["collected"] for report in last_of_actors(run))
    assert sum(sum(one.totals[n] for n in ("samples", "discarded", "in_flight")) for one in learners) == collected


def last_of_actors(run: SerialRun) -> list[WorkerReport]:
    return list({report.worker: report for report in run.reports if isinstance(report, WorkerReport)}.values())


class Paid(gymnasium.Env[Any, Any]):
    """Episodes of a single step, whose reward is a coefficient; the true reward is how near that is to 3."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.shaping: Mapping[str, Any] = self.get_default_reward_shaping()

    def get_default_reward_shaping(self) -> dict[str, float]:
        return {"pay": 1.0}

    def set_reward_shaping(self, shaping: Mapping[str, Any], agent: int) -> None:
        self.shaping = shaping

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        pay = self.shaping["pay"]
        return np.zeros(2, np.float32), pay, True, False, {"true_reward": -abs(pay - 3.0)}


POPULATION: dict[str, Any] = {
    "env": "tests.integration.test_population:Paid",
    "inference": "serial",
    "num_policies": 4,
    "with_pbt": True,
    "pbt_start_mutation": 100,
    "pbt_period_env_steps": 100,
    "pbt_min_episodes": 3,
    "pbt_mutation_rate": 0.7,
    "pbt_replace_reward_gap": 0.01,
    "pbt_optimize_batch_size": True,
    "stats_avg": 5,
    "rollout": 8,
    "batch_size": 32,
    "use_rnn": False,
    "encoder_mlp_layers": 8,
    "num_envs_per_worker": 8,
    "train_for_env_steps": 1500,
}


@pytest.fixture
def quick_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Main hears everything at once: in such a short run half a second is half of it."""
    monkeypatch.setattr(learner_worker, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(episodes, "FLUSH_SECONDS", 0.0)


def applied(run: Recorded, policy: int) -> list[Event]:
    return [e for e in read_events(run.directory) if e.policy == policy and e.state == "applied"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_reports")
def test_a_population_trains_in_one_process(tmp_path: Path) -> None:
    run = record(tmp_path / "run", **POPULATION)
    events = read_events(run.directory)
    assert {"copy", "mutation"} <= {event.kind for event in events}
    for policy in range(4):
        own, state = applied(run, policy), run.state(policy)
        assert [event.change for event in own] == list(range(len(own)))
        # What was saved with the weights is what the lineage says was done last.
        last = own[-1].after
        assert state["traits"]["hyperparameters"] | {"reward_shaping": state["traits"]["reward_shaping"]} == last
        assert state["traits"]["adoptions"] == sum(event.kind == "copy" for event in own)
        assert state["traits"]["decided_env_steps"] == own[-1].env_steps
        assert all(b.env_steps - a.env_steps > 100 for a, b in pairwise(own))
        check_values(own)
        check_rewards(run, policy, own)
        tags = run.metrics[-4 + policy]
        assert tags["pbt/copies"] == state["traits"]["adoptions"]
        assert tags["pbt/mutations"] == sum(event.kind == "mutation" for event in own)
        assert tags["pbt/batch_size"] == last["batch_size"]
        versions = [m.version for m in run.reports if getattr(m, "version", None) and m.policy == policy]
        assert versions == sorted(versions)
        assert state["version"] == 1 + state["updates"] + 101 * state["traits"]["adoptions"]
    sizes = {event.after["batch_size"] for event in events}
    assert len(sizes) > 1
    assert sizes <= {8, 16, 24, 32, 40, 48}
    collected = sum(t["collected"] for t in run.workers.values())
    assert sum(t["samples"] + t["discarded"] + t["in_flight"] for t in run.learners.values()) == collected


def check_values(own: list[Event]) -> None:
    """A decision begins with what the one before has left, and keeps within bounds."""
    for before, event in pairwise(own):
        assert event.before == before.after
        changed = event.before != event.after
        assert changed == (event.kind != "none") or event.kind == "copy"
        assert 0.01 <= numbers_of(event.after)["reward_shaping/pay"] <= 100
        if event.policy == 0:
            assert event.kind in ("none", "copy")  # the reference


def check_rewards(run: Recorded, policy: int, own: list[Event]) -> None:
    """Every episode was paid by a coefficient that its policy had, the last ones by the present one."""
    known = {np.float32(event.after["reward_shaping"]["pay"]) for event in own}
    returns = [r for done in run.episodes for r in done.episode_return[done.policy == policy].tolist()]
    assert {np.float32(r) for r in returns} <= known
    if own[-1].env_steps + 50 < run.learners[policy]["env_steps"]:
        assert np.float32(returns[-1]) == np.float32(own[-1].after["reward_shaping"]["pay"])


@pytest.mark.usefixtures("quick_reports")
def test_a_best_checkpoint_by_rewards_that_mutate_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for words in ({}, {"save_best_metric": "stats/true_reward/mean"}):
        caplog.clear()
        record(tmp_path / f"run{len(words)}", **POPULATION | {"num_policies": 2, "train_for_env_steps": 100} | words)
        assert ("returns of different rewards decide about the best checkpoint" in caplog.text) == (not words)


@pytest.mark.usefixtures("quick_reports")
def test_frozen_policies_play_and_never_learn(tmp_path: Path) -> None:
    flags = MIXED | {"inference": "serial", "learning_rate": 0.01, "num_policies": 3, "frozen_policies": 1}
    run = record(tmp_path / "run", **flags)
    assert run.reason.startswith("every policy has learned from")
    assert [run.learners[policy]["updates"] > 0 for policy in range(3)] == [True, False, True]
    assert run.learners[1]["env_steps"] == 0
    assert run.learners[1]["discarded"] > 100
    assert run.state(1)["version"] == 1
    assert any((done.policy == 1).any() for done in run.episodes)


def first_plays_more(agent: int, env: int, random: np.random.Generator) -> int:
    return 1 if env % 4 == 3 else 0


def test_policies_set_apart_are_compared_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flags = MIXED | {
        "inference": "serial", "num_policies": 2, "per_policy": '{"gamma": "0.9,0.99", "ppo_epochs": "1,2"}',
        "policy_mapping": "tests.integration.test_population:first_plays_more", "num_envs_per_worker": 8,
        "train_for_env_steps": 200,
    }  # fmt: skip
    with caplog.at_level(logging.INFO):
        run = record(tmp_path / "run", **flags)
    (line,) = (m for m in caplog.messages if m.startswith("policy 1 (gamma=0.99 ppo_epochs=2) against policy 0"))
    assert "95 % interval" in line
    for policy in range(2):
        totals = run.learners[policy]
        assert totals["updates"] == (1 + policy) * 2 * totals["batches"]
        assert run.series("pbt/gamma", policy)[-1] == (0.9, 0.99)[policy]
    played = [int((done.policy == policy).sum()) for policy in range(2) for done in run.episodes]
    assert sum(played) > 0
    steps = [run.learners[policy]["samples"] + run.learners[policy]["discarded"] for policy in range(2)]
    assert steps[0] > 2 * steps[1]
    assert [event.kind for event in read_events(run.directory)] == ["start", "start"]
