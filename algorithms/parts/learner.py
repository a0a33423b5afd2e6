"""Parts that learners share: optimizer step, running statistics, counters, metrics, and the state of them all."""

import base64
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from appo.algorithms.models.actor_critic import ActorCritic
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.ops.distributions import ActionDistribution
from appo.algorithms.parts.config import STEP_METRICS
from appo.algorithms.parts.optimizer import FlatAdam, adam_of
from appo.algorithms.parts.rmsprop import FlatRMSProp
from appo.algorithms.parts.statistics import STATISTICS, RunningStatistics
from appo.algorithms.runtime.learning.batches import Batch, Feedback
from appo.algorithms.runtime.learning.rollback import SKIPPED_IN_A_ROW
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.learner_state import WEIGHTS, LearnerState, StateLayout, Vector, empty_vectors
from appo.envs.spec import MASK_KEY, EnvSpec
from appo.utils.errors import CheckpointError

LOSS = "loss"
"""The metric that must be finite, or the step is skipped."""

KL = "kl_divergence"
"""The metric that kl_adaptive schedules of the learning rate follow."""

RATE = "learning_rate"
"""The metric that is no mean: between two rates lies one that no step was made with."""


def _as_given(value: float) -> float:
    """Return the shortest number that is this one in float32; any other is returned as it is."""
    with np.errstate(over="ignore"):
        single = np.float32(value)
    return float(str(single)) if float(single) == value else value


Metrics = Mapping[str, Tensor] | Mapping[str, float]
"""The metrics of a step by name: scalars on the device, or numbers."""


def row_of(metrics: Metrics) -> Tensor:
    """Return the values [K] of metrics in one tensor, without gradient."""
    values: list[Any] = [*metrics.values()]
    return torch.stack(values).detach() if isinstance(values[0], Tensor) else torch.tensor(values)


class FlatLearner(ABC):
    """A learner whose weights, optimizer, statistics and further tensors are its state; how it learns is a subclass's.

    Args:
        flat: the model with all its weights in one vector, on its device.
        config: the learning flags.
        optimizer: that trains it.
        normalize_returns: whether the critic predicts in units of the returns' standard deviation.

    Attributes:
        version, updates: published weight sets, counted from 1, and optimizer steps so far.
        further: tensors by name that are part of the state, and so of every checkpoint, beside weights, optimizer and
            statistics. A subclass puts them here in its `__init__` and changes them in place only.
    """

    config: Any
    optimizer: FlatAdam | FlatRMSProp

    def __init__(
        self, flat: FlatModule, config: Any, optimizer: FlatAdam | FlatRMSProp, *, normalize_returns: bool
    ) -> None:
        assert isinstance(flat.module, ActorCritic)
        self.flat, self.config, self.optimizer = flat, config, optimizer
        self.version, self.updates = 1, 0
        self.further: dict[str, Tensor] = {}
        self.statistics = RunningStatistics(flat.module, normalize_returns)
        self._metric_names: tuple[str, ...] = ()
        self._metric_sum, self._metric_count = flat.flat.new_empty(0), 0
        self._rate = optimizer.learning_rate.clone()

    @abstractmethod
    def learn(self, batch: Batch, progress: float) -> Iterator[Feedback | None]:
        """Train on a batch; yields after each optimizer step, see `Learner.learn` of the learner worker."""

    def configure(self, config: Any) -> None:
        """Follow other flags from now on, between two batches."""
        self.config = config
        self.optimizer.configure(config)

    def step(self, learnable: Tensor, metrics: Metrics) -> None:
        """Apply the gradient, and add the metrics and `STEP_METRICS` to those that are reported.

        Args:
            learnable: [*] bool: false everywhere, nothing in the batch is valid.
            metrics: name -> scalar, "loss" among them.
        """
        values = row_of(metrics)
        names = (*metrics,)
        kl = values[names.index(KL)] if KL in metrics else values.new_zeros(())
        self._rate.copy_(self.optimizer.learning_rate)
        norm, skipped = self.optimizer.step(learnable.any() & values[names.index(LOSS)].isfinite(), kl)
        stepped = torch.stack((norm, self.optimizer.learning_rate, skipped))
        self.add_metrics((*names, *STEP_METRICS), torch.cat((values, stepped)))

    def add_metrics(self, names: tuple[str, ...], values: Tensor) -> None:
        """Add values [K] to the sums whose means are reported; sums of other names begin anew."""
        if names != self._metric_names:
            # In float64 a sum of one float32 number, times its count, is exact: means of constants do not move.
            self._metric_names, self._metric_sum = names, values.new_zeros(len(names), dtype=torch.float64)
            self._metric_count = 0
        self._metric_sum += values

    def metrics(self) -> dict[str, float]:
        """Means since the last call, the rate of the last step, and updates skipped since the last good one.

        It waits for the device.
        """
        if not self._metric_count:
            return {}
        means = map(_as_given, (self._metric_sum / self._metric_count).tolist())
        self._metric_sum.zero_()
        self._metric_count = 0
        found = dict(zip(self._metric_names, means, strict=True))
        found[SKIPPED_IN_A_ROW] = float(self.optimizer.skipped_in_a_row)
        if RATE in found:
            asked, used = float(self.config.learning_rate), float(self._rate)
            found[RATE] = asked if np.float32(asked) == np.float32(used) else _as_given(used)
        return found

    @property
    def layout(self) -> StateLayout:
        """Return the layout of its state."""
        further = {
            name: Vector(tensor.numel(), str(tensor.dtype).removeprefix("torch."), inherited=True)
            for name, tensor in self.further.items()
        }
        return self.optimizer.layout(len(self.flat.flat), {STATISTICS: self.statistics.vector, **further})

    def state(self, into: dict[str, Array] | None = None) -> LearnerState:
        """Everything that training continues from, its vectors in memory that is given, or in new one."""
        vectors = empty_vectors(self.layout.vectors) if into is None else into
        vectors[WEIGHTS][:] = self.flat.flat.cpu().numpy()
        self.optimizer.save(vectors)
        vectors[STATISTICS][:] = self.statistics.to_array()
        for name, tensor in self.further.items():
            vectors[name][:] = tensor.reshape(-1).cpu().numpy()
        return LearnerState(vectors, {"version": self.version, "updates": self.updates, **self.optimizer.meta()})

    def restore(self, state: LearnerState) -> None:
        """Continue from a state; the version is the caller's to raise.

        Raises:
            ValueError: the state belongs to another model.
        """
        if len(state.weights) != len(self.flat.flat):
            raise ValueError(f"the state has {len(state.weights)} weights, the model {len(self.flat.flat)}")
        self.flat.flat.copy_(torch.from_numpy(state.weights))
        self.optimizer.restore(state.vectors, state.meta)
        self.statistics.load_array(state.vectors[STATISTICS])
        for name, tensor in self.further.items():
            tensor.copy_(torch.from_numpy(state.vectors[name]).view_as(tensor))
        self.version, self.updates = int(state.meta["version"]), int(state.meta["updates"])


class ActorCriticLearner(FlatLearner):
    """A learner of an actor-critic by Adam, but for its `learn` and the loss behind it.

    Args:
        flat: the model with all its weights in one vector, on its device.
        spec: of the environment.
        config: the learning flags.
        seed: of the generator.

    Attributes:
        generator: random numbers on the host that go on after a restart, as for the order of minibatches.
    """

    optimizer: FlatAdam

    def __init__(self, flat: FlatModule, spec: EnvSpec, config: Any, seed: int) -> None:
        assert isinstance(flat.module, ActorCritic)
        self.model, self.parts, self.masked = flat.module, spec.action.parts, bool(spec.action_mask)
        self.generator = torch.Generator().manual_seed(seed)
        # One vector for all weights and one for all gradients: clipping, Adam and publication are one call each.
        super().__init__(flat, config, adam_of(flat, config), normalize_returns=config.normalize_returns)

    def add_network(self, name: str, module: nn.Module) -> FlatAdam:
        """Put a network of a subclass, and the Adam that trains it, into the state; call it in `__init__`.

        Args:
            name: of the vector of its weights; those of Adam begin with it.
            module: on the device of the model. Its weights become views of one vector.

        Returns:
            The optimizer, see `FlatAdam.descend`.
        """
        flat = FlatModule(module)
        optimizer = adam_of(flat, self.config)
        self.further |= {name: flat.flat, **optimizer.named(f"{name}.")}
        return optimizer

    def unroll(self, batch: Batch) -> tuple[ActionDistribution, Tensor]:
        """Return the current policy [T, B] and values [T+1, B] in units of the critic."""
        logits, value = self.model.unroll(batch.obs, batch.first, batch.rnn_state, self.config.segment_steps)
        mask = batch.obs[MASK_KEY][:-1].flatten(2) > 0 if self.masked else None
        return ActionDistribution(self.parts, logits, mask), value

    def descend(self, batch: Batch, loss: Tensor, metrics: Mapping[str, Tensor]) -> None:
        """Make one optimizer step down a loss, and raise `updates` and `version`.

        Args:
            batch: [T, B] that the loss is of.
            loss: scalar with gradient.
            metrics: name -> scalar, beside the loss and `STEP_METRICS`.
        """
        self.optimizer.gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        self.step(batch.valid, {LOSS: loss, **metrics})
        self._metric_count, self.updates, self.version = self._metric_count + 1, self.updates + 1, self.version + 1

    def state(self, into: dict[str, Array] | None = None) -> LearnerState:
        """Everything that training continues from, its vectors in memory that is given, or in new one."""
        state = super().state(into)
        state.meta["generator"] = base64.b64encode(self.generator.get_state().numpy().tobytes()).decode()
        return state

    def restore(self, state: LearnerState) -> None:
        """Continue from a state; one without random numbers goes on with those of the seed. See `FlatLearner`."""
        super().restore(state)
        if "generator" in state.meta:
            _restore_generator(self.generator, state.meta["generator"])


def _restore_generator(generator: torch.Generator, text: str) -> None:
    random_state = np.frombuffer(base64.b64decode(text), np.uint8)
    try:
        generator.set_state(torch.from_numpy(random_state.copy()))
    except (RuntimeError, TypeError):
        raise CheckpointError("the random state in state.json is none of torch's") from None
