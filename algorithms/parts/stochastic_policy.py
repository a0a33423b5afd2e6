"""The policy of actor-critics: draws actions from a distribution, and records values and probabilities.

`StochasticPolicy` acts with torch for policy workers on the CPU, captured passes on a GPU, and players. `NumpyActing`
acts without torch for small networks: the hot path of environments that cost microseconds.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from appo.algorithms.models.actor_critic import ActingNetwork
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.models.numpy_mlp import NumpyMlp, numpy_mlp
from appo.algorithms.ops.distributions import ActionDistribution
from appo.algorithms.ops.numpy_twins import ActionSampler, is_supported
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.envs.spec import MASK_KEY, EnvSpec

THOUGHTS = ("logits", "log_prob", "value")
"""Records of a step beside the action."""


class ActionRandom(NamedTuple):
    """A source of random numbers for actions.

    Attributes:
        generator: generator of torch.
        sampler: sampler of whole groups without torch, on a CPU with simple actions.
    """

    generator: Generator
    sampler: ActionSampler | None = None


class StochasticPolicy:
    """Draws actions from the distribution of a network.

    Optional `records` are "logits" [N, L], "log_prob" [N] of the action and "value" [N]; leaving logits out saves
    memory. "final_value" [N] of true final observations is always recorded. Values are in units of return; a network
    without values records none.
    """

    def __init__(self, flat: FlatModule, spec: EnvSpec, records: Collection[str] = THOUGHTS) -> None:
        assert isinstance(flat.module, ActingNetwork)
        self.flat, self.model, self.spec, self.records = flat, flat.module, spec, frozenset(records)
        self.rnn_state_size = flat.module.rnn_state_size
        self._num_values, self._dtype = spec.action.num_values, spec.action.dtype  # properties that count every time

    def random(self, seed: int, rows: int) -> ActionRandom:
        """Make a source of random numbers for groups of R rows."""
        device, parts = self.flat.flat.device, self.spec.action.parts
        generator = torch.Generator(device).manual_seed(seed)
        if device.type != "cpu" or self.spec.action_mask or not is_supported(parts):
            return ActionRandom(generator)
        numbers = np.random.default_rng(seed % 2**64)  # torch takes negative seeds too
        return ActionRandom(generator, ActionSampler(parts, rows, numbers))

    def act(
        self,
        obs: dict[str, Tensor],
        first: Tensor,
        state: Tensor,
        rows: Tensor | None,
        random: ActionRandom | None,
        *,
        greedy: bool | Tensor = False,
        whole_groups: bool = False,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Act in N rows; arguments and results are those of `Policy.act`."""
        logits, value, state = self.model.act(obs, first, state)
        known = self.model.value_of(obs, logits, value)
        thought = {"logits": logits} | ({} if known is None else {"value": known})
        if whole_groups and greedy is False and random is not None and random.sampler is not None:
            drawn = self._sampled_by_group(logits, random.sampler)  # a dozen calls of torch less
            return self._recorded(drawn | thought), state
        mask = obs[MASK_KEY].flatten(1) > 0 if MASK_KEY in obs else None
        distribution = ActionDistribution(self.spec.action.parts, logits, mask)
        if greedy is True:
            action = distribution.mode()
        else:
            assert random is not None
            action = distribution.sample(random.generator)
            if isinstance(greedy, Tensor):
                action = torch.where(greedy, distribution.mode(), action)
        log_prob = {"log_prob": distribution.log_prob(action)} if "log_prob" in self.records else {}
        return self._recorded({"action": action, **log_prob, **thought}), state

    def _recorded(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in step.items() if name == "action" or name in self.records}

    def _sampled_by_group(self, logits: Tensor, sampler: ActionSampler) -> dict[str, Tensor]:
        """Draw actions [K*R, A] for logits [K*R, L], group by group."""
        numbers, rows = logits.numpy(), sampler.rows
        action = np.empty((len(numbers), self._num_values), self._dtype)
        log_prob = np.empty(len(numbers), np.float32)
        for start in range(0, len(numbers), rows):
            group = slice(start, start + rows)
            sampler.sample(numbers[group], action[group], log_prob[group])
        return {"action": torch.from_numpy(action), "log_prob": torch.from_numpy(log_prob)}

    def final(self, obs: dict[str, Tensor], first: Tensor, state: Tensor) -> dict[str, Tensor]:
        """Return the values [N] of true final observations [N, *], in units of return; {} without values."""
        if not self.model.has_value:
            return {}
        logits, value, _ = self.model.act(obs, first, state)
        known = self.model.value_of(obs, logits, value)
        assert known is not None
        return {"final_value": known}

    def fast(self, trajectories: Trajectories, random: ActionRandom) -> "NumpyActing | None":
        """Make the twin without torch that fills these slots; None if network or actions are not simple.

        A subclass may act differently, and therefore has no twin.
        """
        if random.sampler is None or type(self) is not StochasticPolicy:
            return None
        mlp = numpy_mlp(self.model, trajectories.valid.shape[2])
        return None if mlp is None else NumpyActing(mlp, random.sampler, trajectories, self.spec.action.num_logits)


class _Views(NamedTuple):
    """Views of the arrays of a step in a slot, made once."""

    obs: dict[str, Array]
    action: Array
    logits: Array
    log_prob: Array
    value: Array
    version: Array


class NumpyActing:
    """Acts for whole groups of R rows, one group after the other; made by `StochasticPolicy.fast`."""

    def __init__(self, mlp: NumpyMlp, sampler: ActionSampler, trajectories: Trajectories, num_logits: int) -> None:
        self._mlp, self._sampler, self._trajectories = mlp, sampler, trajectories
        rows = trajectories.valid.shape[2]
        shapes = {"logits": (rows, num_logits), "log_prob": (rows,), "value": (rows,)}
        unread = shapes.keys() - trajectories.recorded.keys()  # computed all the same
        self._unread = {name: np.empty(shapes[name], np.float32) for name in unread}
        self._steps: dict[int, list[_Views]] = {}
        self._scratch: list[Array] | None = None

    def act(self, slot: int, step: int, version: int) -> None:
        """Act in one step of a slot with weights of this version."""
        obs, action, logits, log_prob, value, version_row = self._step(slot, step)
        self._mlp.act(obs, logits, value)
        self._sampler.sample(logits, action, log_prob)
        version_row.fill(version)

    def act_in(self, rows: Array, slot: int, step: int, version: int) -> None:
        """Act in some rows, [R] bool; rows of other policies stay unchanged.

        All rows are computed, because small networks compute faster than numpy gathers rows.
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

    def _step(self, slot: int, step: int) -> _Views:
        steps = self._steps.get(slot)
        if steps is None:
            steps = self._steps[slot] = self._steps_of(slot)
        return steps[step]

    def _steps_of(self, slot: int) -> list[_Views]:
        t = self._trajectories
        action, version = t.action[slot], t.policy_version[slot]
        return [
            _Views(
                {key: t.obs[key][slot, step] for key in self._mlp.keys},
                action[step],
                **(self._unread | {name: array[slot, step] for name, array in t.recorded.items() if name in THOUGHTS}),
                version=version[step],
            )
            for step in range(t.valid.shape[1])
        ]
