"""Every observation space, every action space and masks, trained to 95 % of the best return there is.

`toy/Spaces-v0` raises where a forbidden choice is taken, so a run that ends well has taken none.
"""

import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from appo import load_policy
from appo.envs.toys.spaces import ACTIONS, OBSERVATIONS, Spaces
from tests.integration.enjoying import enjoyed
from tests.integration.runs import record
from tests.unit.envs.test_mask_forms import CASES

TRAINING: dict[str, object] = {
    "env": "toy/Spaces-v0",
    "inference": "serial",
    "use_rnn": False,
    "encoder_mlp_layers": 32,
    "hidden_size": 32,
    "gamma": 0.5,  # a question has nothing to do with the next one
    "rollout": 16,
    "batch_size": 256,
    "ppo_epochs": 2,
    "ppo_clip_ratio": 0.2,
    "learning_rate": 0.003,
    "num_envs_per_worker": 32,
    "report_interval_seconds": 0.2,
    "train_for_env_steps": 150_000,  # about ten times what it takes
}
SHARE = 0.95


def solve(directory: Path, *, autoreset_mode: str = "", **settings: Any) -> None:
    """Train until the mean return of 100 episodes is the share of the best one; settings of the env are told apart."""
    of_env = {name: settings.pop(name) for name in ("observation", "action", "mask") if name in settings}
    best = Spaces(**of_env).optimal_return
    env_kwargs = of_env | ({"autoreset_mode": autoreset_mode} if autoreset_mode else {})
    flags = TRAINING | settings | {"env_kwargs": json.dumps(env_kwargs), "train_until_return": SHARE * best}
    assert SHARE * best <= record(directory, **flags).reached_return <= best


def all_but(quick: set[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, all but the quick ones marked slow."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("observation", all_but({"dict"}, OBSERVATIONS))
def test_every_observation_space_is_learned_from(tmp_path: Path, observation: str) -> None:
    solve(tmp_path / "run", observation=observation, obs_scale=255 if "image" in observation else 1)


@pytest.mark.parametrize("action", all_but({"tuple"}, ACTIONS))
def test_every_action_space_is_learned_in(tmp_path: Path, action: str) -> None:
    solve(tmp_path / "run", action=action)


STEPPING = {
    "python": {"env_vectorization": "python"},
    "next_step": {"env_vectorization": "native", "autoreset_mode": "NextStep"},
    "same_step": {"env_vectorization": "native", "autoreset_mode": "SameStep"},
    "disabled": {"env_vectorization": "native", "autoreset_mode": "Disabled"},
}
MASKED = product(("observation", "info"), STEPPING, ("discrete", "multi_discrete", "tuple", "dict"))


@pytest.mark.parametrize("case", all_but(set(), MASKED), ids="-".join)
def test_what_is_masked_is_never_taken_and_the_rest_is_learned(tmp_path: Path, case: tuple[str, str, str]) -> None:
    mask, by, action = case
    solve(tmp_path / "run", mask=mask, action=action, **STEPPING[by])


BETWEEN = product(("local", "central"), ("observation", "info"))


@pytest.mark.parametrize("case", all_but(set(), BETWEEN), ids="-".join)
def test_masks_hold_between_processes(tmp_path: Path, case: tuple[str, str]) -> None:
    inference, mask = case
    flags = {"inference": inference, "num_workers": 2, "num_envs_per_worker": 16, "worker_num_splits": 2}
    solve(tmp_path / "run", mask=mask, observation="tuple", action="multi_discrete", **flags)


@pytest.mark.slow
@pytest.mark.parametrize("rnn_type", ["gru", "lstm"])
def test_a_recurrent_network_learns_with_masks_too(tmp_path: Path, rnn_type: str) -> None:
    solve(tmp_path / "run", mask="info", observation="dict", action="tuple", use_rnn=True, rnn_type=rnn_type)


FORMS = [case for case in CASES if case[0] != "observation" or case[1] in ("flat", "backwards", "additive", "tuple")]


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["APPO", "APEX"])
@pytest.mark.parametrize("case", FORMS, ids="-".join)
def test_masks_in_every_form_hold_in_training_and_in_play(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], case: tuple[str, str, str], algo: str
) -> None:
    """Of 20 pairs one is legal in each of 8 steps, so that 8.0 is reached only within the masks."""
    where, form, action = case
    of_env = {"where": where, "form": form, "action": action}
    settings = {"env": "tests.unit.envs.mask_game:Game", "env_kwargs": json.dumps(of_env), "algo": algo}
    small: dict[str, object] = {
        "inference": "serial",
        "use_rnn": False,
        "encoder_mlp_layers": 16,
        "hidden_size": 16,
        "rollout": 8,
    }
    record(tmp_path / "run", **settings, **small, num_envs_per_worker=8, train_for_env_steps=3000)
    policy = load_policy(tmp_path / "run", seed=1)
    env = policy.make_env()
    returns = []
    for seed in range(10):
        observation, info = env.reset(seed=seed)
        over, total = False, 0.0
        while not over:
            taken = policy.act(observation, action_mask=info.get("action_mask"))
            observation, reward, over, _, info = env.step(taken)
            total += float(reward)
        returns.append(total)
    assert returns == [8.0] * 10
    played = enjoyed(capfd, tmp_path, "--experiment=run", "--max_num_episodes=10")["episodes"]
    assert [episode["return"] for episode in played] == [8.0] * 10
