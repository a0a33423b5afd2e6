"""Acting without torch, for small networks: the hot path of environments that cost microseconds."""

from typing import NamedTuple

import numpy as np
from torch import nn

from algorithms.models.numpy_mlp import NumpyMlp, numpy_mlp
from algorithms.ops.numpy_distributions import ActionSampler, is_supported
from algorithms.runtime.arena import Array
from algorithms.runtime.trajectories import Trajectories
from envs.spec import EnvSpec


class _Step(NamedTuple):
    """Views of what acting reads and writes in one step of one slot, made once."""

    obs: Array
    action: Array
    logits: Array
    log_prob: Array
    value: Array
    version: Array


class NumpyActing:
    """Acts for whole groups of R rows, one group after the other; make it with `numpy_acting`.

    Args:
        mlp: the network.
        sampler: of its actions.
        trajectories: the shared arrays.
    """

    def __init__(self, mlp: NumpyMlp, sampler: ActionSampler, trajectories: Trajectories) -> None:
        self._mlp, self._sampler, self._trajectories = mlp, sampler, trajectories
        self._steps: dict[int, list[_Step]] = {}

    def act(self, slot: int, step: int, version: int) -> None:
        """Act in one step of a slot with weights of this version."""
        steps = self._steps.get(slot)
        if steps is None:
            steps = self._steps[slot] = self._steps_of(slot)
        obs, action, logits, log_prob, value, version_row = steps[step]
        self._mlp.act(obs, logits, value)
        self._sampler.sample(logits, action, log_prob)
        version_row.fill(version)

    def _steps_of(self, slot: int) -> list[_Step]:
        t = self._trajectories
        fields = (t.action, t.behavior_logits, t.behavior_log_prob, t.behavior_value, t.policy_version)
        obs = t.obs[self._mlp.key][slot]
        return [_Step(obs[step], *(field[slot, step] for field in fields)) for step in range(t.valid.shape[1])]


def numpy_acting(model: nn.Module, spec: EnvSpec, trajectories: Trajectories, seed: int) -> NumpyActing | None:
    """The acting path without torch, or None where the network or the actions are not of the simple kind."""
    rows = trajectories.valid.shape[2]
    if spec.action_mask or not is_supported(spec.action.parts):
        return None
    mlp = numpy_mlp(model, rows)
    if mlp is None:
        return None
    return NumpyActing(mlp, ActionSampler(spec.action.parts, rows, np.random.default_rng(seed)), trajectories)
