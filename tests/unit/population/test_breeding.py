import pytest

from algorithms.appo.config import Config, parse_train
from algorithms.population.breeding import Breeding, Decision, alike, traits_of_start
from algorithms.runtime.traits import Traits
from utils.errors import CheckpointError, UsageError

SHAPING = {"health": 1.0}
SCORES = {0: 10.0, 1: 5.0, 2: 4.0, 3: 0.0}


def config_of(*words: str, policies: int = 4, pbt: bool = True) -> Config:
    flags = ["--with_pbt", "--pbt_mutation_rate=1"] if pbt else []
    return parse_train(["--env=CartPole-v1", f"--num_policies={policies}", *flags, *words])


def breeding_of(config: Config, seed: int = 1) -> Breeding:
    return Breeding.of(config, SHAPING, seed)


def test_what_is_tuned() -> None:
    names = {
        "learning_rate", "max_grad_norm", "ppo_clip_ratio", "ppo_clip_value", "exploration_loss_coeff",
        "value_loss_coeff",
    }  # fmt: skip
    assert set(breeding_of(config_of()).tuned) == names
    assert set(breeding_of(config_of("--pbt_optimize_batch_size")).tuned) == {*names, "batch_size"}
    assert set(breeding_of(config_of("--lr_schedule=kl_adaptive_epoch")).tuned) == names - {"learning_rate"}
    assert breeding_of(config_of(pbt=False)).tuned == {}


def test_the_command_line_is_within_the_limits_whatever_it_says() -> None:
    tuned = breeding_of(config_of("--learning_rate=5", "--max_grad_norm=0", "--pbt_optimize_batch_size")).tuned
    assert tuned["learning_rate"] == (5.0, 1e-8, 5.0, 0)
    assert tuned["max_grad_norm"][:2] == (0.0, 1e-2)
    assert tuned["batch_size"] == (256, 32, 384, 32)


def test_policy_0_begins_as_the_flags_say_and_the_others_mutated() -> None:
    config = config_of("--learning_rate=0.001")
    first = [breeding_of(config).first(policy, {}) for policy in range(4)]
    assert first[0].hyperparameters["learning_rate"] == 0.001
    assert first[0].reward_shaping == SHAPING
    rates = {one.hyperparameters["learning_rate"] for one in first}
    coefficients = {one.reward_shaping["health"] for one in first}
    assert len(rates) == len(coefficients) == 4
    assert first == [breeding_of(config).first(policy, {}) for policy in range(4)]
    assert first[1] != breeding_of(config, seed=2).first(1, {})


def test_given_values_are_where_a_policy_begins_and_frozen_ones_never_mutate() -> None:
    config = config_of("--per_policy", "learning_rate=1e-6,1e-5,1e-3,1e-1", "gamma=0.9,0.91,0.92,0.93",
                       "--frozen_policies=3")  # fmt: skip
    traits = traits_of_start(config, breeding_of(config), [{}] * 4)
    assert [one.hyperparameters["learning_rate"] for one in traits] == [1e-6, 1e-5, 1e-3, 1e-1]
    assert [one.hyperparameters["gamma"] for one in traits] == [0.9, 0.91, 0.92, 0.93]
    clips = [one.hyperparameters["ppo_clip_ratio"] for one in traits]
    assert clips[0] == clips[3] == config.learning.ppo_clip_ratio
    assert clips[1] != clips[0]


def test_without_training_of_a_population_only_what_was_given_differs() -> None:
    config = config_of("--per_policy", "gamma=0.9,0.91,0.92,0.93", pbt=False)
    traits = traits_of_start(config, breeding_of(config), [{}] * 4)
    assert traits == [Traits({"gamma": gamma}) for gamma in (0.9, 0.91, 0.92, 0.93)]


def decisions(policy: int, scores: dict[int, float] = SCORES, **flags: object) -> Decision:
    config = config_of(*(f"--{name}={value}" for name, value in flags.items()))
    breeding = breeding_of(config)
    traits = [breeding.first(one, {}) for one in range(4)]
    return breeding.decide(policy, 1000, scores, traits)


def test_the_best_stay_as_they_are() -> None:
    kind, source, traits = decisions(1)
    assert (kind, source) == ("none", 1)
    assert (traits.changes, traits.adoptions, traits.decided_env_steps) == (1, 0, 1000)
    assert traits.hyperparameters == breeding_of(config_of()).first(1, {}).hyperparameters


def test_the_middle_mutates() -> None:
    kind, source, traits = decisions(2, pbt_replace_fraction=0.25)
    assert (kind, source, traits.changes, traits.adoptions) == ("mutation", 2, 1, 0)


def test_the_worst_copies_weights_and_mutated_hyperparameters() -> None:
    kind, source, traits = decisions(3, pbt_replace_fraction=0.25)
    assert (kind, source, traits.changes, traits.adoptions) == ("copy", 0, 1, 1)
    first = breeding_of(config_of()).first(0, {})
    ratio = traits.hyperparameters["learning_rate"] / first.hyperparameters["learning_rate"]
    assert ratio != 1.0
    assert 1 / 1.5 <= ratio <= 1.5
    assert traits.reward_shaping != first.reward_shaping


def test_too_small_a_gap_only_mutates() -> None:
    close = {0: 1.0, 1: 1.0, 2: 0.99, 3: 0.95}
    kind, source, traits = decisions(3, close)
    assert (kind, source, traits.adoptions) == ("mutation", 3, 0)


def test_the_reference_copies_without_mutation() -> None:
    worst = {0: 0.0, 1: 5.0, 2: 4.0, 3: 10.0}
    kind, source, traits = decisions(0, worst, pbt_replace_fraction=0.25)
    assert (kind, source, traits.adoptions) == ("copy", 3, 1)
    other = breeding_of(config_of()).first(3, {})
    assert traits.hyperparameters == other.hyperparameters
    assert traits.reward_shaping == other.reward_shaping
    assert decisions(0, {0: 5.0, 1: 9.0, 2: 1.0, 3: 5.0}, pbt_replace_fraction=0.25).kind == "none"


def test_decisions_depend_on_seed_policy_and_number_alone() -> None:
    config = config_of()
    breeding, traits = breeding_of(config), [Traits({"learning_rate": 1e-3, **dict.fromkeys(
        ("max_grad_norm", "ppo_clip_ratio", "ppo_clip_value", "exploration_loss_coeff", "value_loss_coeff"), 0.1
    )}, SHAPING, changes=n) for n in (3, 3, 3, 4)]  # fmt: skip
    equal = dict.fromkeys(range(4), 1.0)

    def rate(policy: int, breeding: Breeding = breeding) -> float:
        return breeding.decide(policy, 1000, equal, traits).traits.hyperparameters["learning_rate"]

    assert rate(3) == rate(3)
    assert len({rate(2), rate(3), rate(3, breeding_of(config, seed=2))}) == 3


def kept(**traits: object) -> dict[str, object]:
    return {"traits": Traits(**traits).plain()}  # type: ignore[arg-type]


def test_a_resumed_policy_goes_on_with_its_own() -> None:
    config = config_of(policies=2)
    state = kept(hyperparameters={"learning_rate": 0.5}, reward_shaping={"health": 9.0}, changes=4, adoptions=2)
    traits = traits_of_start(config, breeding_of(config), [state, {}])
    assert traits[0].hyperparameters["learning_rate"] == 0.5
    assert traits[0].hyperparameters["ppo_clip_ratio"] == config.learning.ppo_clip_ratio  # older than this flag
    assert (traits[0].reward_shaping, traits[0].changes, traits[0].adoptions) == ({"health": 9.0}, 4, 2)
    assert traits[1] == breeding_of(config).first(1, {})
    other = traits_of_start(config, Breeding.of(config, {"armor": 1.0}, 1), [state, {}])
    assert other[0].reward_shaping == {"armor": 1.0}  # the environment has changed


def test_flags_hold_on_resume_where_no_population_has_changed_anything() -> None:
    config = config_of("--per_policy", "gamma=0.9,0.95", policies=2, pbt=False)
    states = [kept(hyperparameters={"gamma": 0.5}), kept(hyperparameters={"gamma": 0.6}, changes=1)]
    traits = traits_of_start(config, breeding_of(config), states)
    assert [one.hyperparameters["gamma"] for one in traits] == [0.9, 0.6]


@pytest.mark.parametrize(
    "values", [{"rollout": 64}, {"nonsense": 1}, {"learning_rate": -1}, {"gamma": "x"}, {"batch_size": "many"}]
)
def test_foreign_hyperparameters_are_refused(values: dict[str, object]) -> None:
    config = config_of(policies=2)
    with pytest.raises(CheckpointError, match=r"state\.json has"):
        traits_of_start(config, breeding_of(config), [kept(hyperparameters=values, changes=1), {}])


def test_a_batch_never_becomes_larger_than_there_is_memory_for() -> None:
    config = config_of("--pbt_optimize_batch_size", policies=2)
    states = [kept(hyperparameters={"batch_size": size}, changes=1) for size in (10**9, 1)]
    traits = traits_of_start(config, breeding_of(config), states)
    assert [one.hyperparameters["batch_size"] for one in traits] == [384, 32]


def test_too_many_coefficients_are_refused() -> None:
    with pytest.raises(UsageError, match="the reward shaping of CartPole-v1 takes"):
        Breeding.of(config_of(), {str(i): 1.0 for i in range(2000)}, 1)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"a": 1}, {"a": 2.5}, True), ({"a": 1}, {"b": 1}, False), ({"a": [1, 2]}, {"a": [1]}, False),
        ({"a": True}, {"a": 1}, False), ({"a": {"b": 1}}, {"a": 1}, False), ({"a": "x"}, {"a": "y"}, True),
    ],
)  # fmt: skip
def test_alike(one: object, other: object, expected: bool) -> None:
    assert alike(one, other) is expected
