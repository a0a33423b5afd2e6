"""Small environments, flags and trajectories that the tests of the models share."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from appo.algorithms.models.actor_critic import ActorCritic
from appo.algorithms.models.build import build_model
from appo.algorithms.models.config import ModelConfig
from appo.algorithms.runtime.algorithm import Context
from appo.envs.spec import ActionPart, ActionSpec, EnvSpec, ObservationSpec

VECTOR = ObservationSpec((5,), "float32")
IMAGE = ObservationSpec((3, 36, 40), "uint8")

CATEGORICAL = (ActionPart("categorical", 4),)
GAUSSIAN = (ActionPart("gaussian", 3),)
MIXED = (ActionPart("gaussian", 2), ActionPart("categorical", 3), ActionPart("bernoulli", 2), ActionPart("gaussian", 1))

CORES: dict[str, dict[str, object]] = {
    "none": {"use_rnn": False},
    "gru": {"rnn_type": "gru"},
    "lstm": {"rnn_type": "lstm"},
    "gru2": {"rnn_type": "gru", "rnn_num_layers": 2},
    "lstm2": {"rnn_type": "lstm", "rnn_num_layers": 2},
}

SEED = 3
SMALL = ModelConfig(encoder_mlp_layers=(16,), hidden_size=8)


def config_of(**flags: object) -> ModelConfig:
    return replace(SMALL, **flags)


class SeededContext(Context):
    """A context whose generators begin with `SEED`."""

    def torch_seed(self) -> int:
        return SEED


def context_of(flags: Any, env_spec: EnvSpec | None = None, model: ModelConfig = SMALL) -> Context:
    return SeededContext(env_spec or env_spec_of(), flags, model, "fp32", "cpu")


def env_spec_of(*parts: ActionPart, **observations: ObservationSpec) -> EnvSpec:
    return EnvSpec(observations or {"obs": VECTOR}, ActionSpec(parts or CATEGORICAL))


def model_of(env_spec: EnvSpec | None = None, *, seed: int = 0, **flags: object) -> ActorCritic:
    """A model whose logits depend visibly on the features: the small gain of the last layer would hide mistakes."""
    torch.manual_seed(seed)
    model = build_model(config_of(**flags), env_spec or env_spec_of())
    with torch.no_grad():
        model.policy_head.linear.weight.mul_(100.0)
    return model


def observation(env_spec: EnvSpec, *leading: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randint(0, 256, (*leading, *spec.shape), generator=generator, dtype=torch.uint8)
        if spec.dtype == "uint8"
        else torch.randn(*leading, *spec.shape, generator=generator)
        for key, spec in env_spec.observations.items()
    }


class Acted(NamedTuple):
    """What acting step by step produced and met."""

    obs: dict[str, Tensor]  # [T+1,B,*]
    first: Tensor  # [T+1,B]
    logits: Tensor  # [T,B,L]
    value: Tensor  # [T+1,B]
    rnn_state: Tensor  # [T+1,B,H] before each step


def act_through(model: ActorCritic, env_spec: EnvSpec, steps: int, columns: int, first: Tensor | None = None) -> Acted:
    """Act for `steps` + 1 steps from a state that is not zero, with episodes that start at random."""
    generator = torch.Generator().manual_seed(7)
    obs = observation(env_spec, steps + 1, columns)
    if first is None:
        first = torch.rand(steps + 1, columns, generator=generator) < 0.2
    state = 0.5 * torch.randn(columns, model.rnn_state_size, generator=generator)
    logits, values, states = [], [], []
    with torch.inference_mode():
        for t in range(steps + 1):
            states.append(state)
            step_logits, value, state = model.act({key: x[t] for key, x in obs.items()}, first[t], state)
            logits.append(step_logits)
            values.append(value)
    return Acted(obs, first, torch.stack(logits[:-1]), torch.stack(values), torch.stack(states))
