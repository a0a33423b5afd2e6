"""Every step, slot, update and episode of a parallel run is counted, and counted once."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from appo.algorithms.run.plan import SEED_BRANCHES
from appo.envs.toys.toy import counter_length
from tests.integration.runs import Recorded, record, run_command

ROLLOUT = 8
ENVS = 4
COLUMNS = 16  # of a macro batch
EPOCHS, MINIBATCHES = 2, 2
SMALL: dict[str, object] = {
    "env": "toy/Counter-v0",
    "rollout": ROLLOUT,
    "batch_size": COLUMNS // MINIBATCHES * ROLLOUT,
    "num_batches_per_iteration": MINIBATCHES,
    "ppo_epochs": EPOCHS,
    "encoder_mlp_layers": 16,
    "use_rnn": False,
    "num_workers": 2,
    "num_envs_per_worker": ENVS,
    "worker_num_splits": 1,
    "train_for_env_steps": 1200,
}
DIGIT = 16  # an episode's return tells its env and its number modulo this


def env_ids(seed: int, group: int, rows: int = ENVS) -> list[int]:
    """The numbers by which the envs of a group go: a native vector is seeded by its first env's seed."""
    seeds = np.random.SeedSequence(seed, spawn_key=(SEED_BRANCHES["group"], group, 0)).spawn(2)[0]
    return [((int(seeds.generate_state(rows)[0]) >> 1) + row) % 2**16 for row in range(rows)]


def seed_of_distinct_envs(groups: int) -> int:
    """A seed under which the returns of all envs of the run can be told apart."""
    for seed in count():
        digits = [env % DIGIT for group in range(groups) for env in env_ids(seed, group)]
        if len(set(digits)) == len(digits):
            return seed
    raise AssertionError


class Episode(NamedTuple):
    """What a report says of an episode, and what the report's return says about who played it."""

    env_digit: int
    number_digit: int
    length: int


def identify(episode_return: float, length: int) -> Episode:
    """The inverse of what `counter_step` adds up over an episode; up to 3/1024 of a step's reward is its action's."""
    per_step = episode_return / length - (length + 1) / 512
    sixteenths = int(np.floor(per_step * DIGIT + 1e-6))
    assert 0 <= per_step * DIGIT - sixteenths + 1e-6 <= 3 / 1024 * DIGIT + 2e-6
    return Episode(sixteenths // DIGIT, sixteenths % DIGIT, length)


def episodes_by_env(run: Recorded) -> dict[int, list[Episode]]:
    """Env digit -> its episodes, in the order of the reports."""
    played: dict[int, list[Episode]] = defaultdict(list)
    for done in run.episodes:
        for one_return, length in zip(done.episode_return, done.length, strict=True):
            episode = identify(float(one_return), int(length))
            played[episode.env_digit].append(episode)
    return played


def ends(env: int, same_step: bool) -> Iterator[int]:
    """The steps of a group, counted with the resets, after which the first, second, ... episode of an env is over."""
    steps = 0
    for episode in count():
        steps += counter_length(env, episode)
        yield steps
        steps += not same_step


def steps_of(env: int, episodes: list[Episode], same_step: bool) -> range:
    """All numbers of steps after which exactly these episodes are over; asserts that they are the env's first ones."""
    last = 0
    for number, (episode, end) in enumerate(zip([*episodes, None], ends(env, same_step), strict=False)):
        if episode is None:
            return range(last, end)
        assert episode == Episode(env % DIGIT, number % DIGIT, counter_length(env, number))
        last = end
    raise AssertionError


def check_steps(run: Recorded, policies: int) -> None:
    """Every step handed over was trained on, discarded, or still waits."""
    actors, learners = run.workers.values(), run.learners.values()
    assert len(actors) == 2
    assert len(learners) == policies
    collected = sum(t["collected"] for t in actors)
    for totals in actors:
        assert totals["collected"] + totals["reset_rows"] == ENVS * ROLLOUT * totals["trajectories"]
    assert sum(t["samples"] + t["discarded"] + t["in_flight"] for t in learners) == collected
    assert all(t["env_steps"] == t["samples"] >= SMALL["train_for_env_steps"] for t in learners)


def check_slots(run: Recorded, policies: int) -> None:
    """Every slot handed over was given back once, or is still held."""
    actors, learners = run.workers.values(), run.learners.values()
    sent = sum(t["sent"] for t in actors)
    trajectories = sum(t["trajectories"] for t in actors)
    assert sent == trajectories if policies == 1 else trajectories <= sent <= policies * trajectories
    assert sum(t["trajectories"] for t in learners) == sent
    assert all(t["released"] + t["held"] == t["trajectories"] for t in learners)
    assert sum(t["released"] for t in actors) <= sum(t["released"] for t in learners)


def check_updates(run: Recorded, epochs: int = EPOCHS) -> None:
    """An update is an optimizer step, and each has its version."""
    for policy, totals in run.learners.items():
        state = run.state(policy)
        assert totals["updates"] == epochs * MINIBATCHES * totals["batches"] > 0
        assert state["updates"] == state["adam_steps"] == totals["updates"]
        assert state["version"] == 1 + totals["updates"]
        statistics = run.statistics(policy)  # count first, of observations and then of returns: each step once
        assert statistics[0] == statistics[-3] == totals["samples"]


def check_episodes(run: Recorded, seed: int, same_step: bool) -> None:
    """Every episode of every env is reported exactly once, in order, with its own length and return."""
    played = episodes_by_env(run)
    reported = sum(len(episodes) for episodes in played.values())
    assert reported == sum(t["episodes"] for t in run.workers.values())
    assert sum(run.series("perf/episodes", policy)[-1] for policy in run.learners) == reported
    for group, totals in enumerate(run.workers[f"actor_{i}"] for i in range(2)):
        rows = [steps_of(env, played.pop(env % DIGIT, []), same_step) for env in env_ids(seed, group)]
        # The envs of a group step together, so there is a number of steps that explains all of them ...
        fewest, most = max(r.start for r in rows), min(r.stop for r in rows) - 1
        assert fewest <= most
        # ... and it is that of the slots filled and of the one begun.
        filled = totals["trajectories"] * ROLLOUT - group * ROLLOUT // 2
        assert fewest <= filled + ROLLOUT
        assert most >= filled
    assert not played
    stats = [one for done in run.episodes for _, one in done.stats]
    true_rewards = sorted(one["true_reward"] for one in stats)
    np.testing.assert_allclose(true_rewards, sorted(r for done in run.episodes for r in done.episode_return))
    assert sum(one["length"] for one in stats) == sum(int(done.length.sum()) for done in run.episodes)


@pytest.mark.parametrize(
    ("inference", "policies", "mode"),
    [
        ("local", 1, "NextStep"),
        pytest.param("local", 2, "SameStep", marks=pytest.mark.slow),
        pytest.param("central", 1, "SameStep", marks=pytest.mark.slow),
        ("central", 2, "NextStep"),
        pytest.param("local", 1, "SameStep", marks=pytest.mark.slow),
        pytest.param("local", 2, "NextStep", marks=pytest.mark.slow),
        pytest.param("central", 1, "NextStep", marks=pytest.mark.slow),
        pytest.param("central", 2, "SameStep", marks=pytest.mark.slow),
    ],
)
def test_everything_is_counted_once(tmp_path: Path, inference: str, policies: int, mode: str) -> None:
    seed = seed_of_distinct_envs(groups=2)
    kwargs = f'{{"autoreset_mode": "{mode}"}}'
    run = record(tmp_path / "run", **SMALL, inference=inference, num_policies=policies, env_kwargs=kwargs, seed=seed)
    check_steps(run, policies)
    check_slots(run, policies)
    check_updates(run)
    check_episodes(run, seed, same_step=mode == "SameStep")
    if policies == 1:  # of several, those that are done discard what they play with the others
        assert not any(t["discarded"] for t in run.learners.values())


@pytest.mark.parametrize("inference", ["local", "central"])
def test_old_trajectories_are_discarded_and_counted(tmp_path: Path, inference: str) -> None:
    """Only what the newest weights alone have acted may be trained on."""
    flags: dict[str, Any] = SMALL | {"max_policy_lag": 1, "ppo_epochs": 4, "inference": inference}
    run = record(tmp_path / "run", **flags)
    check_steps(run, policies=1)
    check_slots(run, policies=1)
    check_updates(run, epochs=4)
    assert run.totals["discarded"] > 0
    assert max(run.reported("train/policy_lag_max")) == 0


def test_no_step_is_older_than_allowed(tmp_path: Path) -> None:
    flags: dict[str, Any] = SMALL | {"max_policy_lag": 4, "ppo_epochs": 4, "inference": "local"}
    run = record(tmp_path / "run", **flags)
    check_steps(run, policies=1)
    assert max(run.reported("train/policy_lag_max")) < 4


@pytest.mark.parametrize("accumulate", [0, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_slow_learner_bounds_the_lag_by_the_slots(tmp_path: Path, accumulate: int) -> None:
    """Actors could fill a slot in a few milliseconds; they stand still while there is none."""
    flags: dict[str, Any] = SMALL | {
        "inference": "local",
        "num_minibatches_to_accumulate": accumulate,
        "report_interval_seconds": 0.5,
    }
    run = run_command(tmp_path / "run", failpoints="learner.batch:sleep=0.3", **flags)
    assert run.returncode == 0, run.stderr
    batches_waiting = accumulate // MINIBATCHES
    slots_per_group = max(2, 1 + batches_waiting * COLUMNS // (2 * ENVS)) if accumulate else COLUMNS // (2 * ENVS)
    assert f"{slots_per_group} slots each" in run.stdout
    slots = 2 * slots_per_group
    # A step waits at most until all slots and what is copied out already have been trained on, all but its own batch.
    batches_before = -(-(slots * ENVS + COLUMNS) // COLUMNS)
    lags = run.series("train/policy_lag_max")
    assert lags
    assert max(lags) <= EPOCHS * MINIBATCHES * batches_before
    if accumulate:
        assert max(lags) >= EPOCHS * MINIBATCHES  # there really was a queue
    else:
        assert max(lags) < EPOCHS * MINIBATCHES  # a slot comes back only after training
    totals = run.totals
    assert totals["in_flight"] <= (slots * ENVS + COLUMNS) * ROLLOUT
    assert totals["actors_collected"] - totals["samples"] == totals["in_flight"] + totals["discarded"]
    assert run.metrics[-1]["elapsed_seconds"] >= 0.3 * totals["batches"]
