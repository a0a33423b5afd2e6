"""What must be known before memory is reserved: the environment's spaces, the size of the model, what a step costs."""

import time

import numpy as np
import torch

from algorithms.appo.blueprint import ModelDescription, Probe
from algorithms.appo.build import new_model
from algorithms.appo.config import Config
from algorithms.appo.statistics import RunningStatistics
from algorithms.models.actor_critic import ActorCritic
from algorithms.runtime.flat_module import FlatModule
from envs.make import make_group
from envs.spec import EnvSpec

MEASURE_SECONDS = 0.15


def probe(config: Config, rows: tuple[int, ...] = ()) -> Probe:
    """Make the environment and the model once, and time forward passes of that many rows.

    Raises:
        UsageError: the environment or the model cannot be made as the flags ask.
        EnvironmentFailure: the environment raised.
    """
    envs = make_group(config.env, 1)
    spec = envs.spec
    envs.close()
    flat = new_model(config, spec, "cpu")
    assert isinstance(flat.module, ActorCritic)
    statistics = RunningStatistics(flat.module, config.learning.normalize_returns)
    model = ModelDescription(flat.table, flat.module.rnn_state_size, statistics.to_array().size)
    return Probe(spec, model, {count: _forward_seconds(flat, spec, count) for count in sorted(set(rows))})


@torch.inference_mode()
def _forward_seconds(flat: FlatModule, spec: EnvSpec, rows: int) -> float:
    """The fastest of some passes, after a first one that warms up."""
    model = flat.module.eval()
    assert isinstance(model, ActorCritic)
    obs = {key: torch.from_numpy(np.zeros((rows, *o.shape), o.dtype)) for key, o in spec.observations.items()}
    first, state = torch.zeros(rows, dtype=torch.bool), torch.zeros(rows, model.rnn_state_size)
    model.act(obs, first, state)
    fastest, deadline = float("inf"), time.perf_counter() + MEASURE_SECONDS
    while time.perf_counter() < deadline:
        begin = time.perf_counter()
        model.act(obs, first, state)
        fastest = min(fastest, time.perf_counter() - begin)
    return fastest
