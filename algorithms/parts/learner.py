"""Base classes of learners: optimizer step, running statistics, counters, metrics, and the saved state."""

import base64
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from appo.algorithms.models.actor_critic import ActorCritic
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.ops import losses
from appo.algorithms.ops.distributions import ActionDistribution, noise_of_means
from appo.algorithms.parts.config import STEP_METRICS
from appo.algorithms.parts.optimizer import FlatAdam, adam_of
from appo.algorithms.parts.pooling import Ranks, pool_gradient, pool_mean_and_std
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
"""The metric that is the last value and no mean: no step used a mean of two rates."""


def _as_given(value: float) -> float:
    """Return the shortest decimal with the same float32 value; a number that is no float32 stays unchanged."""
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
    """A learner whose state consists of weights, optimizer, statistics and further tensors; a subclass defines `learn`.

    Args:
        flat: model with all weights in one vector, on the device.
        config: learning flags.
        optimizer: optimizer of the weights.
        normalize_returns: whether the critic predicts in units of the returns' standard deviation.

    Attributes:
        version, updates: number of published weight sets, counted from 1, and of optimizer steps.
        further: name -> tensor of the state, and of every checkpoint, beside weights, optimizer and statistics. A
            subclass adds tensors in `__init__`, and changes tensors in place only.
        ranks: learners that each have a part of every batch, see `join`; None for a single learner.
    """

    config: Any
    optimizer: FlatAdam | FlatRMSProp
    ranks: Ranks | None = None

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
        """Train on a batch; yield after each optimizer step, see `Learner.learn` of the learner worker."""

    def configure(self, config: Any) -> None:
        """Follow new flags; called between two batches."""
        self.config = config
        self.optimizer.configure(config)

    def join(self, ranks: Ranks) -> None:
        """Train with other learners from now on: every step is the step of the parts of all ranks together."""
        self.ranks = self.statistics.ranks = ranks
        self.configure(self.config)

    def mean_and_std(self, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation over the valid steps [T, B] of all ranks, scalars without gradient."""
        return pool_mean_and_std(self.ranks, x, valid) if self.ranks else losses.masked_mean_and_std(x, valid)

    def step(self, learnable: Tensor, metrics: Metrics) -> None:
        """Apply the gradient, and add metrics and `STEP_METRICS` to the sums.

        Args:
            learnable: [*] bool; if false everywhere, the step is skipped.
            metrics: name -> scalar, including "loss".
        """
        values = row_of(metrics)
        if self.ranks:
            learnable, values = pool_gradient(self.ranks, self.optimizer.gradient, values, learnable.sum())
        names = (*metrics,)
        kl = values[names.index(KL)] if KL in metrics else values.new_zeros(())
        self._rate.copy_(self.optimizer.learning_rate)
        norm, skipped = self.optimizer.step(learnable.any() & values[names.index(LOSS)].isfinite(), kl)
        stepped = torch.stack((norm, self.optimizer.learning_rate, skipped))
        self.add_metrics((*names, *STEP_METRICS), torch.cat((values, stepped)))

    def add_metrics(self, names: tuple[str, ...], values: Tensor) -> None:
        """Add values [K] to the sums; new names reset the sums."""
        if names != self._metric_names:
            # In float64 a sum of one float32 number, times its count, is exact: means of constants do not move.
            self._metric_names, self._metric_sum = names, values.new_zeros(len(names), dtype=torch.float64)
            self._metric_count = 0
        self._metric_sum += values

    def metrics(self) -> dict[str, float]:
        """Return means since the last call, the rate of the last step, and the number of updates skipped in a row.

        Waits for the device.
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
        """Return the layout of the state."""
        further = {
            name: Vector(tensor.numel(), str(tensor.dtype).removeprefix("torch."), inherited=True)
            for name, tensor in self.further.items()
        }
        return self.optimizer.layout(len(self.flat.flat), {STATISTICS: self.statistics.vector, **further})

    def state(self, into: dict[str, Array] | None = None) -> LearnerState:
        """Return the state to continue from, with vectors in the memory `into`, or in new memory."""
        vectors = empty_vectors(self.layout.vectors) if into is None else into
        vectors[WEIGHTS][:] = self.flat.flat.cpu().numpy()
        self.optimizer.save(vectors)
        vectors[STATISTICS][:] = self.statistics.to_array()
        for name, tensor in self.further.items():
            vectors[name][:] = tensor.reshape(-1).cpu().numpy()
        return LearnerState(vectors, {"version": self.version, "updates": self.updates, **self.optimizer.meta()})

    def restore(self, state: LearnerState) -> None:
        """Continue from a state; the caller raises the version.

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
    """A learner of an actor-critic by Adam; a subclass defines `learn` and the loss.

    Args:
        flat: model with all weights in one vector, on the device.
        spec: spaces of the environment.
        config: learning flags.
        seed: seed of the generator.

    Attributes:
        generator: random numbers on the host, for example for the order of minibatches; part of the state.
    """

    optimizer: FlatAdam

    def __init__(self, flat: FlatModule, spec: EnvSpec, config: Any, seed: int) -> None:
        assert isinstance(flat.module, ActorCritic)
        self.model, self.parts, self.masked = flat.module, spec.action.parts, bool(spec.action_mask)
        self.generator = torch.Generator().manual_seed(seed)
        # One vector for all weights and one for all gradients: clipping, Adam and publication are one call each.
        super().__init__(flat, config, adam_of(flat, config), normalize_returns=config.normalize_returns)

    def add_network(self, name: str, module: nn.Module) -> FlatAdam:
        """Add a network of a subclass, with an Adam, to the state; call in `__init__`.

        Args:
            name: name of the vector of weights, and prefix of the names of Adam's vectors.
            module: network on the device of the model; the weights become views of one vector.

        Returns:
            Optimizer of the network, see `FlatAdam.descend`.
        """
        flat = FlatModule(module)
        optimizer = adam_of(flat, self.config)
        self.further |= {name: flat.flat, **optimizer.named(f"{name}.")}
        return optimizer

    def unroll(self, batch: Batch) -> tuple[ActionDistribution, Tensor]:
        """Return the current policy [T, B], and values [T+1, B] in units of the critic."""
        logits, value = self.model.unroll(batch.obs, batch.first, batch.rnn_state, self.config.segment_steps)
        mask = batch.obs[MASK_KEY][:-1].flatten(2) > 0 if self.masked else None
        return ActionDistribution(self.parts, logits, mask), value

    def draw_noise(self, *shape: int) -> Tensor:
        """Return the noise of `--rpo_alpha` for logits, [*shape, L] on the device; [*shape, 0] if the flag is 0."""
        device, alpha = self.flat.flat.device, self.config.rpo_alpha
        if not alpha:
            return torch.empty(*shape, 0, device=device)
        # A seed from the host, and a generator of the device: nothing waits, and the state has all random numbers.
        seed = int(torch.randint(1 << 31, (), generator=self.generator))
        return noise_of_means(self.parts, shape, alpha, torch.Generator(device).manual_seed(seed))

    def descend(self, batch: Batch, loss: Tensor, metrics: Mapping[str, Tensor]) -> None:
        """Make one optimizer step down a loss, and raise `updates` and `version`.

        Args:
            batch: steps [T, B] of the loss.
            loss: scalar with gradient.
            metrics: name -> scalar, in addition to the loss and `STEP_METRICS`.
        """
        self.optimizer.gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        self.step(batch.valid, {LOSS: loss, **metrics})
        self._metric_count, self.updates, self.version = self._metric_count + 1, self.updates + 1, self.version + 1

    def state(self, into: dict[str, Array] | None = None) -> LearnerState:
        """Return the state to continue from, with vectors in the memory `into`, or in new memory."""
        state = super().state(into)
        state.meta["generator"] = base64.b64encode(self.generator.get_state().numpy().tobytes()).decode()
        return state

    def restore(self, state: LearnerState) -> None:
        """Continue from a state, see `FlatLearner`; without random numbers in the state, from the seed."""
        super().restore(state)
        if "generator" in state.meta:
            _restore_generator(self.generator, state.meta["generator"])


def _restore_generator(generator: torch.Generator, text: str) -> None:
    random_state = np.frombuffer(base64.b64decode(text), np.uint8)
    try:
        generator.set_state(torch.from_numpy(random_state.copy()))
    except (RuntimeError, TypeError):
        raise CheckpointError("the random state in state.json is none of torch's") from None
