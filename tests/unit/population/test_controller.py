import json
import logging
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from appo.algorithms.population.controller import Controller, objective_of
from appo.algorithms.population.exploit_explore import ExploitExplore
from appo.algorithms.population.lineage import Lineage, read_events
from appo.algorithms.run.config import parse_train
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.config import LoggingConfig
from appo.algorithms.runtime.disk import DiskThread
from appo.algorithms.runtime.messages import (
    CopyWeights,
    EpisodesDone,
    LearnerReport,
    Message,
    PolicyTraits,
    SetHyperparameters,
    ShapeRewards,
    TraitsSet,
    WorkerRestarted,
)
from appo.algorithms.runtime.monitor.monitor import Monitor
from appo.algorithms.runtime.monitor.policy_progress import PolicyProgress
from tests.patience import HANG_SECONDS

FLAGS = (
    "--env=CartPole-v1", "--with_pbt", "--pbt_start_mutation=1000", "--pbt_period_env_steps=500",
    "--pbt_min_episodes=2", "--pbt_mutation_rate=1", "--pbt_replace_fraction=0.3",
)  # fmt: skip
SHAPING = {"health": 1.0}


class AtOnce(DiskThread):
    """Done when `submit` returns."""

    def submit(self, action):  # type: ignore[no-untyped-def]
        future = super().submit(action)
        future.exception(HANG_SECONDS)
        return future


class Population:
    """A controller, and learners that do at once what they are told, if they live."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, *words: str, policies: int = 3) -> None:
        monkeypatch.setattr("appo.algorithms.population.lineage.DiskThread", AtOnce)
        config = parse_train([*FLAGS, f"--num_policies={policies}", *words])
        self.directory, self.exploit_explore = directory, ExploitExplore.of(config, SHAPING, seed=1)
        logging_config = LoggingConfig(tensorboard=False, stats_avg=4)
        self.monitor = Monitor(directory, logging_config, [{}] * policies, Budget(10**9))
        self.traits = [self.exploit_explore.first(policy, {}) for policy in range(policies)]
        self.learning = [p for p in range(policies) if p not in config.frozen]
        self.controller = self.begin(self.traits)

    def begin(self, traits: Iterable[PolicyTraits]) -> Controller:
        """A start that goes on with these traits."""
        traits = list(traits)
        lineage = Lineage(self.directory, traits)
        self.controller = Controller(self.exploit_explore, self.monitor, lineage, traits, self.learning, actors=2)
        return self.controller

    def learned(self, *env_steps: int) -> None:
        for policy, count in enumerate(env_steps):
            totals = {"env_steps": count, "samples": count, "discarded": 0, "updates": 1}
            self.hear(LearnerReport(policy, 1, totals, {}))

    def played(self, *returns: float, times: int = 2) -> None:
        for policy, one in enumerate(returns):
            episodes = np.full(times, policy, np.int32), np.full(times, one), np.full(times, 9)
            self.hear(EpisodesDone(*episodes, ()))

    def hear(self, message: Message) -> None:
        self.monitor.handle(message)
        self.controller.handle(message)

    def said(self) -> list[Message]:
        return list(self.controller.tick())

    def obey(self, order: Message, taken_env_steps: int | None = None) -> list[Message]:
        """The learner does it; what is said then."""
        assert isinstance(order, CopyWeights | SetHyperparameters)
        self.hear(TraitsSet(order.policy, order.traits, 7, taken_env_steps))
        return self.said()

    def kinds(self) -> list[tuple[str, int, int, str]]:
        return [(e.kind, e.policy, e.source, e.state) for e in read_events(self.directory)]


@pytest.fixture
def population(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Population:
    return Population(tmp_path, monkeypatch)


def order_in(messages: list[Message]) -> CopyWeights | SetHyperparameters:
    (order,) = (m for m in messages if isinstance(m, CopyWeights | SetHyperparameters))
    return order


def test_nothing_happens_before_the_start_or_without_episodes(population: Population) -> None:
    population.learned(2000, 2000, 2000)
    assert population.said() == []
    population.played(1.0, 2.0, 3.0)
    population.learned(999, 999, 999)
    assert population.said() == []
    assert [kind for kind, *_ in population.kinds()] == ["start"] * 3


def test_each_policy_has_a_clock_of_its_own(population: Population) -> None:
    population.played(1.0, 2.0, 3.0)
    population.learned(1000, 900, 2000)
    order = order_in(population.said())
    assert order.policy == 2  # most overdue
    assert order.traits.decided_env_steps == 2000
    assert population.said() == []  # one at a time
    order = order_in(population.obey(order))
    assert order.policy == 0
    assert population.obey(order) == [ShapeRewards(actor, 0, order.traits.reward_shaping) for actor in (0, 1)]
    population.played(1.0)
    population.learned(1000, 900, 2500)
    assert population.said() == []  # more than the period has to be over
    population.learned(1000, 900, 2501)
    assert order_in(population.said()).policy == 2


def test_the_worst_copies_the_best_and_its_statistics_start_afresh(population: Population) -> None:
    population.played(1.0, 2.0, 30.0)
    population.learned(1600, 1000, 1000)
    order = population.said()
    assert order == [CopyWeights(0, order_in(order).traits, 2)]
    assert order_in(order).traits.adoptions == 1
    assert order_in(order).traits.hyperparameters == population.traits[2].hyperparameters  # the reference: unmutated
    assert population.monitor.policies[0].episode_return.count == 2
    population.obey(order_in(order), taken_env_steps=990)
    assert [p.episode_return.count for p in population.monitor.policies] == [0, 2, 2]
    assert population.monitor.policies[0].version == 7
    assert population.kinds()[-1] == ("copy", 0, 2, "applied")
    event = read_events(population.directory)[-1]
    assert event.scores == {"0": 1.0, "1": 2.0, "2": 30.0}
    assert (event.env_steps, event.source_env_steps, event.change) == (1600, 990, 1)
    assert event.before["learning_rate"] == population.traits[0].hyperparameters["learning_rate"]
    assert event.after["reward_shaping"] == population.traits[2].reward_shaping
    population.learned(2200, 2200, 2200)
    assert population.said() == []  # nobody can be compared with a policy that has not played yet
    population.played(5.0)
    assert order_in(population.said()).policy == 2


def test_nan_ranks_worst_and_its_score_is_null(population: Population) -> None:
    population.played(5.0, math.nan, 4.0)
    population.learned(1000, 1600, 1000)
    order = order_in(population.said())
    assert order[0::2] == (1, 0)
    assert json.loads((population.directory / "lineage.json").read_text())["events"][-1]["scores"]["1"] is None


def test_what_policies_learn_with_is_reported(population: Population) -> None:
    shown = population.monitor.policies[1].metrics
    assert shown["pbt/learning_rate"] == population.traits[1].hyperparameters["learning_rate"]
    assert shown["pbt/reward_shaping/health"] == population.traits[1].reward_shaping["health"]
    assert (shown["pbt/copies"], shown["pbt/mutations"]) == (0, 0)
    population.played(1.0, 2.0, 30.0)
    population.learned(1600, 1000, 1000)
    population.obey(order_in(population.said()))
    shown = population.monitor.policies[0].tags()
    assert (shown["pbt/copies"], shown["pbt/copied_from"], shown["pbt/mutations"]) == (1, 2, 0)
    assert (shown["pbt/objective"], shown["pbt/rank"]) == (1.0, 3)
    assert shown["pbt/learning_rate"] == population.traits[2].hyperparameters["learning_rate"]


def test_frozen_policies_take_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    population = Population(tmp_path, monkeypatch, "--frozen_policies=1")
    population.played(1.0, 99.0, 3.0)
    population.learned(1600, 0, 1600)
    assert order_in(population.said()).policy in (0, 2)
    assert {event.policy for event in read_events(tmp_path)} == {0, 2}
    assert read_events(tmp_path)[-1].scores.keys() == {"0", "2"}


@pytest.mark.parametrize("done_before", [False, True])
def test_an_order_is_repeated_to_a_learner_that_was_started_again(population: Population, done_before: bool) -> None:
    population.played(1.0, 2.0, 30.0)
    population.learned(1600, 1000, 1000)
    order = order_in(population.said())
    if done_before:  # and it has said so; what it has saved since may still be older
        population.obey(order)
    population.hear(WorkerRestarted("learner_1", "killed"))
    assert population.said() == []
    population.hear(WorkerRestarted("learner_0", "killed"))
    assert population.said() == [SetHyperparameters(0, order.traits) if done_before else order]
    population.obey(order)
    assert [kind for kind, *_ in population.kinds()].count("copy") == 1


def test_an_actor_that_was_started_again_is_told_how_to_reward(population: Population) -> None:
    population.hear(WorkerRestarted("actor_1", "killed"))
    assert population.said() == [
        ShapeRewards(1, policy, population.traits[policy].reward_shaping) for policy in range(3)
    ]


def test_clocks_go_on_after_a_start_and_what_was_taken_back_is_marked(population: Population) -> None:
    population.played(1.0, 2.0, 30.0)
    population.learned(1600, 1600, 1600)
    order = order_in(population.said())
    decided = [*population.traits]
    first = order.policy
    decided[first] = order.traits
    population.controller.close()
    population.begin(decided)  # saved, but nobody had heard of it
    last = population.controller.lineage.events[-1]
    assert (last.policy, last.state) == (first, "applied")
    assert order_in(population.said()).policy != first
    before = population.kinds()
    population.begin(decided)  # killed before the second one was saved
    assert population.kinds() == before
    population.controller.lineage.close()
    states = [event.state for event in population.controller.lineage.events]
    assert states == ["applied"] * 4 + ["taken back"]


def test_an_objective_that_is_never_reported_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    population = Population(tmp_path, monkeypatch, "--pbt_target_objective=kills")
    population.played(1.0, 2.0, 3.0)
    population.learned(1600, 1600, 1600)
    with caplog.at_level(logging.WARNING):
        assert population.said() == population.said() == []
    assert caplog.messages == ["no episode has reported kills (--pbt_target_objective) so far, only reward, len"]


@pytest.mark.parametrize("flags", [[], ["--pbt_target_objective=true_objective"]])
def test_a_true_reward_that_is_never_reported_is_said_once(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    population = Population(tmp_path, monkeypatch, *flags)
    population.played(1.0, 2.0, 3.0)
    population.learned(1600, 1600, 1600)
    with caplog.at_level(logging.WARNING):
        population.said()
        population.said()
    name = "true_objective" if flags else "true_reward"
    said = f"no episode has reported {name} (--pbt_target_objective) so far, only reward, len"
    assert caplog.messages == [f"{said}: policies are ranked by reward"]


def test_a_policy_that_has_not_reported_the_true_reward_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    population = Population(tmp_path, monkeypatch)
    stats = tuple((policy, {"true_reward": float(policy)}) for policy in (0, 0, 1, 1))
    done = np.array([0, 0, 1, 1, 2, 2], np.int32)
    population.hear(EpisodesDone(done, np.full(6, 9.0), np.full(6, 9.0), stats))
    with caplog.at_level(logging.WARNING):
        assert population.controller.objectives() is population.controller.objectives() is None
    assert caplog.messages == ["true_reward (--pbt_target_objective) is in no episode of policy 2: all wait for it"]
    late = tuple((2, {"true_reward": 5.0}) for _ in range(2))
    population.hear(EpisodesDone(done[4:], np.full(2, 9.0), np.full(2, 9.0), late))
    assert population.controller.objectives() == {0: 0.0, 1: 1.0, 2: 5.0}


def test_objectives() -> None:
    progress = PolicyProgress(10)
    progress.episode_return.append([1.0])
    assert objective_of(progress, "true_reward") is None
    assert objective_of(progress, "reward") is progress.episode_return
    assert objective_of(progress, "len") is progress.length
    stats = ((0, {"true_reward": 5.0, "kills": 2.0}),)
    progress.add_episodes(EpisodesDone(np.zeros(1, np.int32), np.zeros(1), np.zeros(1), stats), 0)
    assert objective_of(progress, "true_reward") is progress.stats["true_reward"]
    assert objective_of(progress, "true_objective") is progress.stats["true_reward"]
    assert objective_of(progress, "kills") is objective_of(progress, "stats/kills") is progress.stats["kills"]
