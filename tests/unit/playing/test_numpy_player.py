"""Evaluations without torch: the same choices as a player's, the same distribution, and who cannot do without."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from appo.algorithms.parts.stochastic_policy import StochasticPolicy
from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.playing.player import NumpyPlayer, Player, cheapest
from appo.envs.spec import ActionPart, EnvSpec
from tests.unit.models.test_numpy_mlp import MIXED, PLAIN, VECTOR, flat_of, spec_of

AGENTS = 4


def player_of(spec: EnvSpec, *, deterministic: bool, **config: Any) -> Player:
    spec = replace(spec, num_agents=AGENTS)
    flags = EvaluationConfig(deterministic=deterministic)
    policy = StochasticPolicy(flat_of(replace(PLAIN, **config), spec), spec)
    return Player(policy, spec, flags, seed=3)


def test_the_most_probable_actions_are_those_of_the_player() -> None:
    player = player_of(spec_of(MIXED), deterministic=True)
    other = cheapest(player, 5, deterministic=True)
    assert isinstance(other, NumpyPlayer)
    first, rng = np.zeros(AGENTS, np.bool_), np.random.default_rng(1)
    for _ in range(250):
        obs = {"obs": rng.standard_normal((AGENTS, *VECTOR.shape)).astype(VECTOR.dtype)}
        expected, found = player.act(obs, first), other.act(obs, first)
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_samples_have_the_distribution_of_the_players() -> None:
    player = player_of(spec_of((ActionPart("categorical", 3),)), deterministic=False)
    obs = {"obs": np.tile(np.float32([1.0, -1.0, 0.5, 0.0, 2.0, -2.0]), (AGENTS, 1))}
    first = np.zeros(AGENTS, np.bool_)

    def shares(acts: Any) -> np.ndarray:
        actions = np.concatenate([acts.act(obs, first).copy() for _ in range(2000)])
        return np.bincount(actions[:, 0].astype(int), minlength=3) / len(actions)

    one, again = (cheapest(player, 5, deterministic=False) for _ in range(2))
    found = shares(one)
    np.testing.assert_allclose(found, shares(player), atol=0.025)
    np.testing.assert_array_equal(found, shares(again))  # the same seed, the same episodes
    assert np.all(found > 0)


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        (spec_of(MIXED), {"use_rnn": True}),
        (replace(spec_of((ActionPart("categorical", 3),)), action_mask=3), {}),
        (spec_of((ActionPart("bernoulli", 3),)), {}),
    ],
    ids=["memory", "masks", "bits"],
)
def test_others_play_as_they_are(spec: EnvSpec, config: dict[str, Any]) -> None:
    player = player_of(spec, deterministic=False, **config)
    assert cheapest(player, 5, deterministic=False) is player
