"""Acting without torch, for small networks: the hot path of environments that cost microseconds."""

from typing import NamedTuple

import numpy as np
from torch import nn

from algorithms.models.numpy_mlp import NumpyMlp, numpy_mlp
from algorithms.ops.numpy_twins import ActionSampler
from algorithms.runtime.memory.arena import Array
from algorithms.runtime.memory.slots import Trajectories


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
        self._scratch: list[Array] | None = None

    def act(self, slot: int, step: int, version: int) -> None:
        """Act in one step of a slot with weights of this version."""
        obs, action, logits, log_prob, value, version_row = self._step(slot, step)
        self._mlp.act(obs, logits, value)
        self._sampler.sample(logits, action, log_prob)
        version_row.fill(version)

    def act_in(self, rows: Array, slot: int, step: int, version: int) -> None:
        """The same in some of the rows, [R] bool: all others belong to other policies, and stay as they are.

        All rows are computed: small networks take less time for that than for gathering those that count.
        """
        obs, *fields, version_row = self._step(slot, step)
        if self._scratch is None:
            self._scratch = [np.empty_like(field) for field in fields]
        action, logits, log_prob, value = self._scratch
        self._mlp.act(obs, logits, value)
        self._sampler.sample(logits, action, log_prob)
        for field, found in zip(fields, self._scratch, strict=True):
            np.copyto(field, found, where=rows.reshape(-1, *[1] * (found.ndim - 1)))
        version_row[rows] = version

    def _step(self, slot: int, step: int) -> _Step:
        steps = self._steps.get(slot)
        if steps is None:
            steps = self._steps[slot] = self._steps_of(slot)
        return steps[step]

    def _steps_of(self, slot: int) -> list[_Step]:
        t = self._trajectories
        fields = (t.action, t.behavior_logits, t.behavior_log_prob, t.behavior_value, t.policy_version)
        obs = t.obs[self._mlp.key][slot]
        return [_Step(obs[step], *(field[slot, step] for field in fields)) for step in range(t.valid.shape[1])]


def numpy_acting(model: nn.Module, sampler: ActionSampler, trajectories: Trajectories) -> NumpyActing | None:
    """The acting path without torch, or None where the network is not of the simple kind."""
    mlp = numpy_mlp(model, trajectories.valid.shape[2])
    return None if mlp is None else NumpyActing(mlp, sampler, trajectories)
