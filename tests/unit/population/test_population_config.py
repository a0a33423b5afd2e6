from dataclasses import replace

import pytest

from appo.algorithms.run.config import parse_train
from appo.algorithms.run.placement import plan_workers, topology_of
from appo.utils.errors import UsageError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--with_pbt"], "--with_pbt needs at least 2 policies that learn, got 1: raise --num_policies"),
        (["--num_policies=2", "--with_pbt", "--frozen_policies=1"], "at least 2 policies that learn, got 1"),
        (["--num_policies=2", "--frozen_policies=2"], "--frozen_policies=2: there are --num_policies=2"),
        (["--policies_to_train=1"], "--policies_to_train=1: there are --num_policies=1"),
        (["--num_policies=2", "--frozen_policies=0,1"], "leave no policy that learns"),
        (["--policy_mapping=a.b:c"], "--policy_mapping chooses among policies: raise --num_policies"),
        (
            ["--num_policies=2", "--per_policy", "lerning_rate=1,2"],
            "is no flag of learning or of the network; did you mean learning_rate?",
        ),
        (
            ["--num_policies=2", "--algo=APEX", "--input=a", "--per_policy", "input=a,sampler"],
            "--per_policy input: either all policies learn from datasets alone",
        ),
        (["--num_policies=2", "--per_policy", "rollout=8,16"], "rollout is the same for all policies"),
        (
            ["--num_policies=2", "--algo=SAC", "--per_policy", "replay_capacity=400,4000"],
            "replay_capacity is the same for all policies",
        ),
        (
            ["--num_policies=2", "--with_pbt", "--algo=APEX", "--per_policy", "epsilon-alpha=0,1"],
            "--per_policy epsilon-alpha: --with_pbt copies policies, and the start alone reads this flag",
        ),
        (
            ["--num_policies=2", "--with_pbt", "--algo=APEX", "--per_policy", "prioritized_replay=True,False"],
            "--per_policy prioritized_replay: --with_pbt copies policies, and the start alone reads this flag",
        ),
        (
            ["--num_policies=2", "--with_pbt", "--algo=SAC", "--per_policy", "num-critics=2,4"],
            "--per_policy num_critics: --with_pbt copies weights and state, which need one num_critics for all",
        ),
        (
            ["--num_policies=2", "--with_pbt", "--algo=APEX", "--per_policy", "value_rescaling=True,False"],
            "--per_policy value_rescaling: --with_pbt copies weights and state",
        ),
        (
            ["--num_policies=2", "--with_pbt", "--pbt_min_episodes=6", "--stats_avg=5"],
            "--pbt_min_episodes=6: returns of the last --stats_avg=5 episodes count",
        ),
        (["--num_policies=2", "--per_policy", "algo=APPO,PPO"], "--per_policy algo: algo is the same for all policies"),
        (["--num_policies=2", "--per_policy", "gamma=0.9"], "--per_policy gamma has 1 values for --num_policies=2"),
        (["--num_policies=2", "--per_policy", "gamma=0.9,2"], "--gamma must be at most 1, got 2.0"),
        (["--num_policies=2", "--per_policy", "batch_size=64,100"], "--batch_size=100 is not a multiple"),
        (["--lockstep", "--num_policies=2", "--with_pbt"], "--lockstep is for one policy"),
        (
            ["--num_policies=2", "--verify_reproduction", "--learning_rate=0", "--per_policy", "learning_rate=0,0.5"],
            "--verify_reproduction needs --learning_rate=0, got 0.5",
        ),
    ],
)
def test_what_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_train(["--env=CartPole-v1", *words])
    assert message in str(error.value)


@pytest.mark.parametrize("words", [["num_critics=4,4"], ["temperature=0.5,1"], ["gamma=0.9,0.99"]])
def test_what_a_population_can_copy_is_taken(words: list[str]) -> None:
    """One value for all, a mere beginning of what the state holds, and a value that a copy brings along."""
    flags = ["--env=Pendulum-v1", "--algo=SAC", "--num_policies=2", "--with_pbt", "--per_policy"]
    assert parse_train([*flags, *words]).population.with_pbt


def test_who_learns() -> None:
    config = parse_train(["--env=CartPole-v1", "--num_policies=4", "--policies_to_train=0,1,2", "--frozen_policies=1"])
    assert config.frozen == {1, 3}
    assert parse_train(["--env=CartPole-v1", "--num_policies=4"]).frozen == frozenset()


def test_values_are_of_the_kind_of_their_flag() -> None:
    words = ["--per_policy", "learning_rate=[1e-6, 1e-4]", "with_vtrace=True,False", "ppo_epochs=1, 3"]
    config = parse_train(["--env=CartPole-v1", "--num_policies=2", *words])
    assert config.per_policy == [
        {"learning_rate": 1e-6, "with_vtrace": True, "ppo_epochs": 1},
        {"learning_rate": 1e-4, "with_vtrace": False, "ppo_epochs": 3},
    ]
    assert type(config.per_policy[0]["ppo_epochs"]) is int


def test_slots_suffice_for_the_largest_batch_that_there_may_be() -> None:
    words = [
        "--env=CartPole-v1",
        "--num_policies=2",
        "--batch_size=256",
        "--rollout=32",
        "--num_batches_per_iteration=1",
    ]
    plain = parse_train(words)
    assert plain.largest_batch_size == 256
    grown = parse_train([*words, "--with_pbt", "--pbt_optimize_batch_size", "--per_policy", "batch_size=256,1024"])
    assert grown.largest_batch_size == 1536
    sampling = replace(plan_workers(plain, 2, "local"), num_workers=2, num_envs_per_worker=2, num_splits=1)
    slots = [topology_of(config, sampling, 1).slots_per_group for config in (plain, grown)]
    # a macro batch of both policies, in two groups of two rows, and the slot that is filled
    assert slots == [1 + 4, 1 + 24]
