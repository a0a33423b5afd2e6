"""Fitted Q evaluation of a policy on a small chain, whose values are known exactly."""

import numpy as np
import pytest
import torch

from appo.algorithms.models.build import build_model
from appo.algorithms.models.config import ModelConfig
from appo.algorithms.offline.fitted_q import FittedQ, Transitions
from appo.envs.spec import ActionPart, ActionSpec, EnvSpec, ObservationSpec

STATES, GAMMA = 4, 0.8
SPEC = EnvSpec({"obs": ObservationSpec((STATES,), "uint8", high=1)}, ActionSpec((ActionPart("categorical", 2),)))
POLICY = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.2, 0.8], [0.5, 0.5]])


def test_values_of_a_chain_are_found() -> None:
    """Choice 0 moves on and pays the number of the state, choice 1 stays and pays -1; the last state ends it."""
    random = np.random.default_rng(0)
    rows, here, action, reward, terminated = [], [], [], [], []
    for _ in range(300):
        state = int(random.integers(STATES - 1))
        while state < STATES - 1:
            chosen = int(random.integers(2))
            here.append(len(rows))
            rows.append(state)
            action.append(chosen)
            reward.append(-1.0 if chosen else float(state))
            state += 1 - chosen
            terminated.append(state == STATES - 1)
        rows.append(state)
    states = torch.tensor(rows)
    data = Transitions(
        {"obs": torch.eye(STATES, dtype=torch.uint8)[states]},
        torch.tensor(here),
        torch.tensor(action),
        torch.tensor(reward),
        torch.tensor(terminated),
        POLICY[states],
    )
    config = ModelConfig(encoder_mlp_layers=(32,), use_rnn=False, nonlinearity="tanh", use_spectral_norm=True)
    torch.manual_seed(0)
    fitted = FittedQ(SPEC, config, build_model(config, SPEC), seed=1)
    loss = fitted.fit(data, GAMMA, 1_500)
    assert loss < 0.01
    value, expected = 0.0, []
    for state in (2, 1, 0):
        p = float(POLICY[state, 0])
        # Q(stay) = -1 + gamma V and V = p Q(move) + (1 - p) Q(stay)
        move = state + GAMMA * value
        value = (p * move - (1 - p)) / (1 - GAMMA * (1 - p))
        expected.append([move, -1 + GAMMA * value])
    found = fitted.values({"obs": torch.eye(STATES, dtype=torch.uint8)})
    for state, of_state in zip((2, 1, 0), expected, strict=True):
        assert found[state].tolist() == pytest.approx(of_state, abs=0.1)
