"""Base classes of learners: optimizer step, running statistics, counters, metrics, and the saved state."""

import base64
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from appo.algorithms.models.actor_critic import ActingNetwork, ActorCritic
from appo.algorithms.models.encoders import share_images
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.ops import losses
from appo.algorithms.ops.distributions import ActionDistribution, noise_of_means
from appo.algorithms.ops.normalization import std
from appo.algorithms.parts.config import STEP_METRICS
from appo.algorithms.parts.flat_optimizer import as_given
from appo.algorithms.parts.optimizer import FlatAdam, adam_of
from appo.algorithms.parts.own_network import OwnNetwork, weights_of
from appo.algorithms.parts.pooling import Ranks, pool_gradients, pool_mean_and_std
from appo.algorithms.parts.rmsprop import FlatRMSProp
from appo.algorithms.parts.statistics import STATISTICS, RunningStatistics
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.learning.batches import Batch, Feedback
from appo.algorithms.runtime.learning.rollback import SKIPPED_IN_A_ROW
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.learner_state import WEIGHTS, LearnerState, StateLayout, Vector, empty_vectors
from appo.algorithms.runtime.memory.plain_state import GENERATORS
from appo.algorithms.runtime.messages import LARGEST
from appo.envs.spec import MASK_KEY
from appo.utils.errors import CheckpointError, UsageError

log = logging.getLogger(__name__)

LOSS = "loss"
"""The metric that must be finite, or the step is skipped."""

KL = "kl_divergence"
"""The metric that kl_adaptive schedules of the learning rate follow."""

NOISE = "noise"
"""Name in `Batch.recorded` of the noise [T, B, L] of RPO, in minibatches of `--rpo_alpha`."""

RATE = "learning_rate"
"""The metric that is the last value and no mean: no step used a mean of two rates."""


Metrics = Mapping[str, Tensor] | Mapping[str, float]
"""The metrics of a step by name: scalars on the device, or numbers."""


def row_of(metrics: Metrics) -> Tensor:
    """Return the values [K] of metrics in one tensor, without gradient."""
    values: list[Any] = [*metrics.values()]
    return torch.stack(values).detach() if isinstance(values[0], Tensor) else torch.tensor(values)


def of_learner(name: str) -> Any:
    """Return the property of a learner around another that is this attribute of `self.learner`."""
    return property(lambda self: getattr(self.learner, name), lambda self, value: setattr(self.learner, name, value))


class FlatLearner(ABC):
    """A learner whose state consists of networks with optimizers, statistics, random numbers and further tensors.

    A subclass defines `learn`.

    Args:
        flat: model with all weights in one vector, on the device.
        context: spaces, flags of learning and of the network, scale of the rewards, and seeds.
        optimizer: optimizer of the weights; None: Adam.
        normalize_returns: whether the critic predicts in units of the returns' standard deviation.

    Attributes:
        version, updates: number of published weight sets, counted from 1, and of optimizer steps.
        networks: networks of `add_network`, by name.
        further: name -> tensor of the state, and of every checkpoint, beside networks, optimizers and statistics. A
            subclass adds tensors in `__init__`, and changes tensors in place only.
        generator: random numbers on the host, for example for the order of minibatches; part of the state.
        device_generator: random numbers on the device, part of the state; on a CPU the generator of the host.
        ranks: learners that each have a part of every batch, see `join`; None for a single learner.
        quick: faster equivalent of a method, see `accelerate`, or None.
        smallest_deviation: deviation of returns below which a warning says that nothing is learned; 0: none.
    """

    config: Any
    optimizer: FlatAdam | FlatRMSProp
    ranks: Ranks | None = None
    quick: Any = None
    smallest_deviation = 1e-4  # the limits of advantages and of the critic's unit hide smaller differences

    def __init__(
        self,
        flat: FlatModule,
        context: Context,
        optimizer: FlatAdam | FlatRMSProp | None = None,
        *,
        normalize_returns: bool = False,
    ) -> None:
        assert isinstance(flat.module, ActingNetwork)
        self.flat, self.context, self.config = flat, context, context.flags
        self.optimizer = optimizer or adam_of(flat, context.flags)
        self.version, self.updates = 1, 0
        self.networks: dict[str, OwnNetwork] = {}
        self.further: dict[str, Tensor] = {}
        seed, device = context.torch_seed(), flat.flat.device
        self.generator = torch.Generator().manual_seed(seed)
        on_host = device.type == "cpu"
        self.device_generator = self.generator if on_host else torch.Generator(device).manual_seed(seed)
        self.statistics = RunningStatistics(flat.module, normalize_returns)
        self._make_quick: Callable[[Any], object] = lambda learner: None
        self._metric_names: tuple[str, ...] = ()
        self._metric_sum, self._metric_max, self._metric_count = flat.flat.new_empty(0), flat.flat.new_empty(0), 0

    @abstractmethod
    def learn(self, batch: Batch, progress: float) -> Iterator[Feedback | None]:
        """Train on a batch; yield after each optimizer step, see `Learner.learn` of the learner worker."""

    def add_network(self, name: str, module: nn.Module, rate: str = "learning_rate") -> OwnNetwork:
        """Add a network that never acts, with an Adam, to state, schedules and metrics; call in `__init__`.

        The state contains the weights as `networks.NAME.WEIGHT`. The algorithm describes the metrics by
        `network_metrics(name)`.

        Args:
            name: name of the network.
            module: network on the device of the model; the weights become views of one vector.
            rate: flag of the learning rate. A linear `--lr_schedule` lets every rate fall; the adaptive schedules
                change the rate of the acting network alone.
        """
        share_images(module)
        self.networks[name] = network = OwnNetwork(name, module, self.config, rate)
        return network

    def keep_network(self, name: str, module: nn.Module) -> FlatModule:
        """Add a network without an optimizer, such as a target network, to the state; call in `__init__`.

        Args:
            name: name of the network; the state contains the weights as `networks.NAME.WEIGHT`.
            module: network on the device of the model; the weights become views of one vector.
        """
        share_images(module)
        flat = FlatModule(module.requires_grad_(False))
        self.further |= weights_of(name, flat)
        return flat

    @property
    def optimizers(self) -> list[FlatAdam | FlatRMSProp]:
        """Return the optimizers of all networks."""
        return [self.optimizer, *(network.optimizer for network in self.networks.values())]

    def accelerate(self, make_quick: Callable[[Any], object]) -> Self:
        """Train by `quick`, which a function makes of the learner: now, and again after every change of flags.

        A captured step and a twin in numpy contain the numbers of the flags.
        """
        self._make_quick = make_quick
        self.quick = make_quick(self)
        return self

    def configure(self, config: Any) -> None:
        """Follow new flags; called between two batches."""
        float(self.optimizer.learning_rate)  # waits for running steps, which still read captured memory
        self.config = config
        for optimizer in self.optimizers:
            optimizer.configure(config)
        self.quick = self._make_quick(self)

    def follow(self, progress: float) -> None:
        """Set the rates of linear schedules, when this share of the training budget is used up, in [0, 1]."""
        for optimizer in self.optimizers:
            optimizer.follow(progress)

    def join(self, ranks: Ranks) -> None:
        """Train with other learners from now on: every step is the step of the parts of all ranks together."""
        self.ranks = self.statistics.ranks = ranks
        self.configure(self.config)

    def drop_unfinished(self) -> None:
        """Forget what a batch that was broken off has left: ranks have come differently far in the batch."""
        self.statistics.drop()
        if isinstance(self.optimizer, FlatAdam):  # alone adapts the rate to a sum over an epoch
            self.optimizer.drop()

    def mean_and_std(self, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation over the valid steps [T, B] of all ranks, scalars without gradient."""
        return pool_mean_and_std(self.ranks, x, valid) if self.ranks else losses.masked_mean_and_std(x, valid)

    def step(self, learnable: Tensor, metrics: Metrics, networks: Sequence[OwnNetwork] = ()) -> None:
        """Apply the gradient, and add metrics and `STEP_METRICS` to the sums.

        Args:
            learnable: [*] bool; if false everywhere, the step is skipped.
            metrics: name -> scalar, including "loss"; with other networks all must be finite, or the step is skipped.
            networks: other networks that have a gradient of the same batch, and step or skip together.
        """
        values, gradients = row_of(metrics), [self.optimizer.gradient, *(one.optimizer.gradient for one in networks)]
        if self.ranks:
            learnable, values = pool_gradients(self.ranks, gradients, values, learnable.sum())
        names = (*metrics,)
        kl = values[names.index(KL)] if KL in metrics else values.new_zeros(())
        is_finite = values.isfinite().all() if networks else values[names.index(LOSS)].isfinite()
        learnable = learnable.any()
        for network in networks:
            network.step(learnable, is_finite)
        self.optimizer.note_rate()
        norm, lost = self.optimizer.step(learnable, is_finite, kl)
        stepped = torch.stack((norm, self.optimizer.learning_rate, lost))
        self.add_metrics((*names, *STEP_METRICS), torch.cat((values, stepped)))

    def count_update(self) -> None:
        """Count an optimizer step, in `updates` and for the means of metrics; never within captured code."""
        self._metric_count, self.updates = self._metric_count + 1, self.updates + 1

    def add_metrics(self, names: tuple[str, ...], values: Tensor) -> None:
        """Add values [K] to sums and maxima; new names reset both."""
        if names != self._metric_names:
            # In float64 a sum of one float32 number, times its count, is exact: means of constants do not move.
            self._metric_names, self._metric_sum = names, values.new_zeros(len(names), dtype=torch.float64)
            self._metric_max, self._metric_count = self._metric_sum - math.inf, 0
        self._metric_sum += values
        torch.maximum(self._metric_max, values, out=self._metric_max)

    def metrics(self) -> dict[str, float]:
        """Return means (names that end with `LARGEST`: maxima) since the last call, and how the last step was.

        Waits for the device.
        """
        if not self._metric_count:
            return {}
        sums, maxima = torch.stack((self._metric_sum, self._metric_max)).tolist()
        found = {
            name: as_given(most if name.endswith(LARGEST) else total / self._metric_count)
            for name, total, most in zip(self._metric_names, sums, maxima, strict=True)
        }
        self._metric_sum.zero_()
        self._metric_max.fill_(-math.inf)
        self._metric_count = 0
        found[SKIPPED_IN_A_ROW] = self._skipped_in_a_row()
        if RATE in found:
            found[RATE] = self.optimizer.rate_in_use()
        for network in self.networks.values():
            found |= network.metrics()
        self._warn_of_small_returns()
        return found

    def _warn_of_small_returns(self) -> None:
        """Log once if returns differ so little that the limits of advantages and of the critic's unit hide them."""
        returns, deviation = self.statistics.returns, float(std(self.statistics.returns, eps=0.0))
        rounding = 1e-6 * abs(float(returns.mean))  # constant returns differ by it
        if self.smallest_deviation and returns.count and rounding < deviation < self.smallest_deviation:
            self.smallest_deviation = 0.0
            scale = self.context.reward_scale * 10.0 ** -round(math.log10(deviation))
            text = "returns differ by %.1e only, so little or nothing is learned: give --reward_scale=%g"
            log.warning(text, deviation, scale)

    @property
    def empty_updates(self) -> int:
        """Return the number of updates that had no valid step, which are neither good nor lost."""
        return int(self.optimizer.empty)

    def _skipped_in_a_row(self) -> float:
        return max(float(optimizer.skipped_in_a_row) for optimizer in self.optimizers)

    def _named_tensors(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield name and tensor of the state beside the acting network, and whether `--init_from` copies the tensor."""
        for network in self.networks.values():
            yield from network.state()
        yield from ((name, tensor, True) for name, tensor in self.further.items())

    @property
    def layout(self) -> StateLayout:
        """Return the layout of the state."""
        further = {
            name: Vector(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), inherited)
            for name, tensor, inherited in self._named_tensors()
        }
        return self.optimizer.layout(len(self.flat.flat), {STATISTICS: self.statistics.vector, **further})

    def state(self, into: dict[str, Array] | None = None) -> LearnerState:
        """Return the state to continue from, with vectors in the memory `into`, or in new memory."""
        vectors = empty_vectors(self.layout.vectors) if into is None else into
        vectors[WEIGHTS][:] = self.flat.flat.cpu().numpy()
        self.optimizer.save(vectors)
        vectors[STATISTICS][:] = self.statistics.to_array()
        for name, tensor, _ in self._named_tensors():
            vectors[name][...] = tensor.cpu().numpy()
        counts = {"version": self.version, "updates": self.updates, **self.optimizer.meta()}
        random = {
            name: base64.b64encode(generator.get_state().numpy().tobytes()).decode()
            for name, generator in self._generators().items()
        }
        return LearnerState(vectors, {**counts, SKIPPED_IN_A_ROW: self._skipped_in_a_row(), **random})

    def restore(self, state: LearnerState) -> None:
        """Continue from a state; the caller raises the version. Without random numbers in the state, from the seed.

        Raises:
            ValueError: the state belongs to another model.
            CheckpointError: the random numbers are of another library.
        """
        if len(state.weights) != len(self.flat.flat):
            raise ValueError(f"the state has {len(state.weights)} weights, the model {len(self.flat.flat)}")
        self.flat.flat.copy_(torch.from_numpy(state.weights))
        self.optimizer.restore(state.vectors, state.meta)
        self.statistics.load_array(state.vectors[STATISTICS])
        for name, tensor, _ in self._named_tensors():
            tensor.copy_(torch.from_numpy(state.vectors[name]))
        for network in self.networks.values():
            network.optimizer.skipped_in_a_row.zero_()
        self.version, self.updates = int(state.meta["version"]), int(state.meta["updates"])
        for name, generator in self._generators().items():
            if name not in state.meta:
                continue
            try:
                generator.set_state(torch.frombuffer(bytearray(base64.b64decode(state.meta[name])), dtype=torch.uint8))
            except (RuntimeError, TypeError, ValueError):
                raise CheckpointError("the random state in state.json is none of torch's") from None

    def _generators(self) -> dict[str, torch.Generator]:
        generators = (self.generator, self.device_generator)
        return dict(zip(GENERATORS[: 1 + (self.device_generator is not self.generator)], generators, strict=False))


class ActorCriticLearner(FlatLearner):
    """A learner of an actor-critic by Adam; a subclass defines `learn` and the loss."""

    optimizer: FlatAdam

    def __init__(self, flat: FlatModule, context: Context) -> None:
        if not isinstance(flat.module, ActorCritic):
            raise UsageError(f"{type(self).__name__} needs a network with values, an ActorCritic")
        spec = context.spec
        self.model, self.parts, self.masked = flat.module, spec.action.parts, bool(spec.action_mask)
        # One vector for all weights and one for all gradients: clipping, Adam and publication are one call each.
        super().__init__(flat, context, normalize_returns=context.flags.normalize_returns)

    def unroll(self, batch: Batch) -> tuple[ActionDistribution, Tensor]:
        """Return the current policy [T, B], and values [T+1, B] in units of the critic."""
        logits, value = self.model.unroll(batch.obs, batch.first, batch.rnn_state, self.config.segment_steps)
        mask = batch.obs[MASK_KEY][:-1].flatten(2) > 0 if self.masked else None
        return ActionDistribution(self.parts, logits, mask), value

    def draw_noise(self, *shape: int) -> Tensor:
        """Return the noise of `--rpo_alpha` for logits, [*shape, L] on the device."""
        device, alpha = self.flat.flat.device, self.config.rpo_alpha
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
        self.count_update()
        self.version += 1
