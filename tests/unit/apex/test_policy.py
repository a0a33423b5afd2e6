"""The epsilon-greedy policy: how often which rows explore, what masks forbid, what is recorded; what APEX refuses."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from appo.algorithms.apex.algorithm import APEX, OfflineAPEX
from appo.algorithms.apex.config import ApexConfig
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.models.q_network import build_q_network
from appo.algorithms.ops.q_learning import unscaled_value
from appo.algorithms.parts.choices import epsilon_of_rows
from appo.algorithms.parts.epsilon_greedy import EpsilonGreedyPolicy
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.sac.algorithm import SAC
from appo.envs.spec import MASK_KEY, ActionPart, EnvSpec, ObservationSpec
from appo.utils.errors import UsageError
from tests.unit.models.cases import GAUSSIAN, config_of, env_spec_of

SPEC = env_spec_of(ActionPart("categorical", 4), ActionPart("categorical", 3))
ROWS = 6000


def policy_of(spec: EnvSpec = SPEC, epsilon: torch.Tensor | None = None, **flags: Any) -> EpsilonGreedyPolicy:
    torch.manual_seed(1)
    flat = FlatModule(build_q_network(config_of(use_rnn=False), spec, dueling=True))
    return EpsilonGreedyPolicy(flat, spec, epsilon, rescaled=bool(flags.get("rescaled")))


def act(policy: EpsilonGreedyPolicy, obs: dict[str, torch.Tensor], rows: torch.Tensor | None, **how: Any) -> Any:
    count = len(next(iter(obs.values())))
    random = policy.random(3, count)
    with torch.inference_mode():
        return policy.act(obs, torch.zeros(count, dtype=torch.bool), torch.zeros(count, 0), rows, random, **how)[0]


def test_rows_explore_as_often_as_the_ladder_says() -> None:
    policy = policy_of(epsilon=torch.tensor([0.9, 0.3, 0.0]))
    obs = {"obs": torch.ones(ROWS, 5)}
    best = act(policy, obs, None)["action"]
    for row, epsilon in enumerate((0.9, 0.3, 0.0)):
        action = act(policy, obs, torch.full((ROWS,), row))["action"]
        differs = float((action != best).any(1).float().mean())
        # One of 12 random actions is the best one; five standard deviations of 6,000 draws.
        assert differs == pytest.approx(epsilon * 11 / 12, abs=5 * (0.25 / ROWS) ** 0.5 if epsilon else 0)
        assert action.dtype == torch.int32


def test_the_ladder_ends_with_the_rows_of_this_machine() -> None:
    """Rows that a bridge fills follow behind; each machine has a ladder of its own."""
    arena = {"Trajectories.group_counts": torch.zeros(3), "Trajectories.valid": torch.zeros(4, 1, 2)}
    flags = ApexConfig(epsilon=0.4, epsilon_alpha=7.0)
    for acting, ladder in ((2, [0.4, 0.4**8]), (0, [0.4 ** (1 + 7 * i / 5) for i in range(6)])):
        context = Context(SPEC, flags, config_of(), "fp32", "cpu", arena=arena, acting_rows=acting)  # type: ignore[arg-type]
        found = epsilon_of_rows(context)
        assert found is not None
        assert found.tolist() == pytest.approx([*ladder, *[ladder[-1]] * (6 - len(ladder))])


def test_players_and_who_asks_for_it_act_greedily() -> None:
    policy, obs = policy_of(epsilon=torch.tensor([1.0])), {"obs": torch.randn(ROWS, 5)}
    rows = torch.zeros(ROWS, dtype=torch.long)
    best = act(policy, obs, None)["action"]
    assert torch.equal(act(policy, obs, rows, greedy=True)["action"], best)
    first_alone = act(policy, obs, rows, greedy=torch.tensor([True, False]))["action"]
    assert torch.equal(first_alone[:, 0], best[:, 0])
    assert not torch.equal(first_alone[:, 1], best[:, 1])


def test_what_a_mask_forbids_is_never_done() -> None:
    spec = replace(
        env_spec_of(
            *SPEC.action.parts, obs=ObservationSpec((5,), "float32"), **{MASK_KEY: ObservationSpec((7,), "uint8")}
        ),
        action_mask=7,
    )
    mask = (torch.rand(ROWS, 7, generator=torch.Generator().manual_seed(0)) < 0.5).to(torch.uint8)
    mask[:, [1, 6]] = 1
    obs = {"obs": torch.randn(ROWS, 5), MASK_KEY: mask}
    for epsilon in (0.0, 1.0):
        action = act(policy_of(spec, torch.tensor([epsilon])), obs, torch.zeros(ROWS, dtype=torch.long))[
            "action"
        ].long()
        assert mask.gather(1, action[:, :1]).all()
        assert mask.gather(1, 4 + action[:, 1:]).all()


def test_bins_are_chosen_freely_beside_what_a_mask_forbids() -> None:
    parts = (ActionPart("bins", 5), ActionPart("categorical", 3), ActionPart("bins", 2))
    keys = {"obs": ObservationSpec((5,), "float32"), MASK_KEY: ObservationSpec((3,), "uint8")}
    spec = replace(env_spec_of(*parts, **keys), action_mask=3)
    mask = torch.tensor([[1, 0, 1]], dtype=torch.uint8).expand(ROWS, 3)
    obs = {"obs": torch.randn(ROWS, 5), MASK_KEY: mask}
    drawn = act(policy_of(spec, torch.tensor([1.0])), obs, torch.zeros(ROWS, dtype=torch.long))["action"]
    assert [sorted(set(column)) for column in drawn.T.tolist()] == [[0, 1, 2, 3, 4], [0, 2], [0, 1]]
    shares = torch.bincount(drawn[:, 0].long()) / ROWS
    assert shares == pytest.approx([0.2] * 5, abs=5 * (0.16 / ROWS) ** 0.5)
    policy = policy_of(spec)
    best, unmasked = act(policy, obs, None)["action"], act(policy, {"obs": obs["obs"]}, None)["action"]
    assert torch.equal(best[:, [0, 2]], unmasked[:, [0, 2]])
    assert (best[:, 1] != 1).all()
    assert (unmasked[:, 1] == 1).any()


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]),
        ([0, 0, 0, 0, 1, 0, 0], [1, 1, 1, 1, 1, 0, 0]),
        ([0, 1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 1, 1, 1]),
        ([1, 0, 1, 0, 0, 1, 1], [1, 0, 1, 0, 0, 1, 1]),
    ],
)
def test_a_branch_without_an_allowed_choice_has_the_value_of_its_best(mask: list[int], expected: list[int]) -> None:
    policy = policy_of()
    policy.records = frozenset({"final_value"})
    obs = {"obs": torch.randn(1, 5), MASK_KEY: torch.tensor([mask], dtype=torch.uint8)}
    allowed = policy.model.allowed(obs, 1)
    assert allowed is not None
    assert allowed.int().tolist() == [expected]
    first, state = torch.zeros(1, dtype=torch.bool), torch.zeros(1, 0)
    with torch.inference_mode():
        q = policy.model.q_values(obs, first, state)[0][0].masked_fill(torch.tensor(expected) == 0, -1e30)
        final = policy.final(obs, first, state)["final_value"]
    assert float(final) == pytest.approx(float(q[:4].max() + q[4:].max()) / 2, abs=1e-6)


@pytest.mark.parametrize("rescaled", [False, True])
def test_values_of_what_was_done_and_of_the_best_are_recorded(rescaled: bool) -> None:
    policy, obs = policy_of(epsilon=torch.tensor([1.0]), rescaled=rescaled), {"obs": torch.randn(50, 5)}
    said = act(policy, obs, torch.zeros(50, dtype=torch.long))
    q, _, _ = policy.model.act(obs, torch.zeros(50, dtype=torch.bool), torch.zeros(50, 0))
    for i in range(50):
        first, second = said["action"][i].tolist()
        taken, best = (q[i, first] + q[i, 4 + second]) / 2, (q[i, :4].max() + q[i, 4:].max()) / 2
        if rescaled:
            taken, best = unscaled_value(taken), unscaled_value(best)
        assert float(said["q_taken"][i]) == pytest.approx(float(taken.detach()), abs=1e-6)
        assert float(said["q_max"][i]) == pytest.approx(float(best.detach()), abs=1e-6)


def test_the_third_that_explores_least_says_how_good_it_is() -> None:
    algorithm = APEX()
    assert [algorithm.explores(row, 8) for row in range(8)] == [True] * 5 + [False] * 3
    assert [algorithm.explores(row, 2) for row in range(2)] == [True, False]
    assert not algorithm.explores(0, 1)


@pytest.mark.parametrize(
    ("flags", "spec", "words"),
    [
        ({}, env_spec_of(*GAUSSIAN), "continuous actions: add --continuous_as_bins=N"),
        ({}, env_spec_of(ActionPart("tanh_gaussian", 2)), "continuous"),
        ({}, env_spec_of(ActionPart("bernoulli", 3)), "MultiBinary"),
        ({"batch_size": 100}, None, "--batch_size=100 is not a multiple of --rollout=32"),
        ({"learning_starts": 11, "replay_capacity": 10}, None, "--learning_starts=11 is above"),
        ({"learning_starts": 10, "replay_capacity": 10, "n_steps": 11}, None, "--n_steps=11 is above --replay_capac"),
        ({"batch_replay": True, "rollout": 16, "burn_in": 16}, None, "--burn_in=16 leaves nothing of --rollout=16"),
        ({"lr_schedule": "kl_adaptive_epoch"}, None, "kl_adaptive_epoch"),
        ({"rollout": 2, "num_replay_shards": 2}, None, "--n_steps=3 is above --rollout=2: with --num_replay_shards"),
        ({"rollout": 2, "batch_replay": True}, None, "--n_steps=3 is above --rollout=2"),
        (
            {"num_replay_shards": 2, "input": ("sampler:0.5", "set:0.5")},
            None,
            "--num_replay_shards=2: datasets are mixed",
        ),
    ],
)
def test_what_it_cannot_learn_is_refused(flags: dict[str, Any], spec: EnvSpec | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        APEX().check(ApexConfig(**flags), spec)


@pytest.mark.parametrize(
    "flags",
    [
        {"rollout": 1},
        {"rollout": 3, "batch_replay": True},
        {"rollout": 1, "input": ("set",)},
        {"rollout": 1, "replay_capacity": 3, "learning_starts": 1},
        {"rollout": 1, "replay_capacity": 2, "learning_starts": 1, "input": ("set",)},
    ],
)
def test_sums_may_be_longer_than_a_trajectory_where_they_go_on_in_the_next(flags: dict[str, Any]) -> None:
    APEX().check(ApexConfig(n_steps=3, batch_size=12, **flags), None)


CORE = "tests.unit.models.custom_parts:Sum"
ENCODER = "tests.unit.models.custom_encoders:SumOfMeans"


@pytest.mark.parametrize(
    ("flags", "network", "words"),
    [
        ({}, {"use_rnn": True}, "take --batch_replay, or --use_rnn=False"),
        ({}, {"use_rnn": True, "encoder_custom": ENCODER}, "take --batch_replay, or --use_rnn=False"),
        ({}, {"use_rnn": False, "encoder_custom": CORE}, f"take --batch_replay, or a network without {CORE}"),
        ({"input": ("sampler:0.5", "set:0.5")}, {"encoder_custom": CORE}, f": take a network without {CORE}"),
        ({"input": ("set",)}, {"use_rnn": True}, ": take --use_rnn=False"),
    ],
)
def test_a_memory_is_refused_without_whole_trajectories(
    flags: dict[str, Any], network: dict[str, Any], words: str
) -> None:
    context = Context(SPEC, ApexConfig(**flags), config_of(**network), "fp32", "cpu")
    with pytest.raises(UsageError) as caught:
        APEX().make_model(context)
    assert str(caught.value).endswith(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "network", "size"),
    [
        ({"batch_replay": True}, {"use_rnn": False, "encoder_custom": CORE}, 16),
        ({}, {"use_rnn": True, "encoder_custom": "tests.unit.models.custom_parts:Stateless"}, 0),
    ],
)
def test_what_counts_is_whether_the_network_has_a_state(
    flags: dict[str, Any], network: dict[str, Any], size: int
) -> None:
    flat = APEX().make_model(Context(SPEC, ApexConfig(**flags), config_of(**network), "fp32", "cpu"))
    assert flat.module.rnn_state_size == size


@pytest.mark.parametrize("algorithm", [APEX(), OfflineAPEX()])
def test_a_whole_model_of_the_users_is_refused(algorithm: APEX) -> None:
    custom = "tests.unit.models.custom_parts:Remembering"
    context = Context(SPEC, ApexConfig(), config_of(encoder_custom=custom, use_rnn=False), "fp32", "cpu")
    with pytest.raises(UsageError) as caught:
        algorithm.make_model(context)
    assert str(caught.value).startswith(f"--encoder_custom={custom} is a whole model, ")
    assert "\n" not in str(caught.value)


def test_a_player_explores_as_often_as_it_is_told() -> None:
    policy, obs = policy_of(), {"obs": torch.ones(ROWS, 5)}
    best = act(policy, obs, None)["action"]
    policy.explore(0.3)
    differs = (act(policy, obs, None)["action"] != best).any(1).float().mean()
    assert float(differs) == pytest.approx(0.3 * 11 / 12, abs=5 * (0.25 / ROWS) ** 0.5)
    assert torch.equal(act(policy, obs, None, greedy=True)["action"], best)


@pytest.mark.parametrize("kind", [APEX, SAC])
def test_only_the_algorithm_itself_reads_datasets_alone(kind: type[APEX | SAC]) -> None:
    """A subclass would train with the built-in learner, without a word."""
    assert type(kind().without_actors()).__name__ == f"Offline{kind.__name__}"
    with pytest.raises(UsageError, match=f"--algo={kind.__name__} plays, too"):
        type("Own", (kind,), {})().without_actors()
