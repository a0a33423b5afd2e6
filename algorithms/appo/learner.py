"""The APPO learner: V-trace (or GAE) targets, the PPO surrogate, one optimizer step per minibatch.

`Learner.update` is the hot path and `Learner.loss` is the algorithm; nothing here knows a process.
"""

import base64
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from algorithms.appo.config import METRICS, LearningConfig
from algorithms.models.actor_critic import ActorCritic
from algorithms.models.flat_module import FlatModule, split
from algorithms.ops import losses
from algorithms.ops.distributions import ActionDistribution
from algorithms.ops.returns import Returns, gae, vtrace
from algorithms.parts.optimizer import FlatAdam, adam_layout
from algorithms.parts.statistics import STATISTICS, RunningStatistics
from algorithms.runtime.learning.batches import Batch
from algorithms.runtime.learning.rollback import SKIPPED_IN_A_ROW
from algorithms.runtime.memory.arena import Array
from algorithms.runtime.memory.learner_state import WEIGHTS, LearnerState, StateLayout, empty_vectors
from envs.spec import MASK_KEY, EnvSpec
from utils.errors import CheckpointError

NAMES = tuple(METRICS)

QuickUpdate = Callable[[Batch], Tensor]


class Whole(NamedTuple):
    """What the parts of a minibatch must share so that they add up to the undivided one; scalars."""

    num_valid: Tensor
    advantage: tuple[Tensor, Tensor]  # mean and standard deviation
    ratio_max: Tensor


class Learner:
    """Trains one policy.

    Args:
        flat: the model with all its weights in one vector, on its device.
        spec: of the environment.
        config: the learning flags.
        seed: of the order of minibatches.
        make_quick: makes the quick update of a learner that is ready, anew whenever its flags change.

    Attributes:
        version, updates: published weight sets, counted from 1, and optimizer steps so far.
        quick_update: does what `update` does, in less time; None: there is no such thing.
    """

    def __init__(
        self,
        flat: FlatModule,
        spec: EnvSpec,
        config: LearningConfig,
        seed: int,
        make_quick: "Callable[[Learner], QuickUpdate | None]" = lambda learner: None,
    ) -> None:
        assert isinstance(flat.module, ActorCritic)
        self.flat, self.model, self.config, self.parts = flat, flat.module, config, spec.action.parts
        self.masked = bool(spec.action_mask)
        self.version, self.updates = 1, 0
        self.generator = torch.Generator().manual_seed(seed)
        self.statistics = RunningStatistics(self.model, config.normalize_returns)
        # One vector for all weights and one for all gradients: clipping, Adam and publication are one call each.
        self.optimizer = FlatAdam(flat.flat[: flat.num_parameters], config)
        views = split(self.optimizer.gradient, flat.parameter_table)
        for parameter, view in zip(self.model.parameters(), views, strict=True):
            parameter.grad = view
        self._metric_sum, self._metric_count = torch.zeros(len(NAMES), device=flat.flat.device), 0
        self._make_quick = make_quick
        self.quick_update = make_quick(self)

    def configure(self, config: LearningConfig) -> None:
        """Follow other flags from now on, between two batches.

        Numbers are frozen in the quick update: in captured steps, and in the choice whether there is a twin in numpy.
        """
        float(self.optimizer.learning_rate)  # waits for steps under way, which still read what they captured
        self.config = config
        self.optimizer.configure(config)
        self.quick_update = self._make_quick(self)

    def learn(self, batch: Batch, progress: float) -> Iterator[None]:
        """Pass over a macro batch `ppo_epochs` times; yields after each optimizer step, when weights can be published.

        Args:
            batch: B columns on the device of the model.
            progress: share of the training budget used up before this batch, in [0, 1]; drives the linear schedule.
        """
        self.optimizer.follow(progress)
        batch = cleaned(batch)
        c = self.config
        plan = [columns for _ in range(c.ppo_epochs) for columns in _minibatches(batch, c, self.generator)]
        per_epoch = len(plan) // c.ppo_epochs
        targets: list[tuple[Tensor, Tensor]] = []
        for i, columns in enumerate(plan):
            minibatch = batch if columns is None else batch.columns(columns)
            target = (self.quick_update or self.update)(minibatch)
            self._metric_count += 1
            if i >= len(plan) - per_epoch:  # the last pass sees every step once
                targets.append((target, minibatch.valid))
            self.optimizer.adapt(end_of_epoch=(i + 1) % per_epoch == 0, minibatches=per_epoch)
            if i == len(plan) - 1:
                self.statistics.update(batch, targets)
            self.updates += 1
            self.version += 1
            yield

    def update(self, batch: Batch) -> Tensor:
        """Make one optimizer step on a minibatch [T, B]; its value targets [T, B] in units of return."""
        target, metrics = self.differentiate(batch)
        self.step(batch, metrics)
        return target

    def differentiate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Set the gradient of a minibatch [T, B]; its value targets [T, B] in units of return, and its metrics."""
        # Microbatches are a memory feature: their weighted gradients add up to that of the whole minibatch.
        parts = _microbatches(batch, self.config.microbatch_size // self.config.rollout)
        whole = self._whole(parts) if len(parts) > 1 else None
        self.optimizer.gradient.zero_()
        targets, metrics = [], torch.zeros_like(self._metric_sum)
        for part in parts:
            loss, target, part_metrics = self.loss(part, whole)
            loss.backward()  # type: ignore[no-untyped-call]
            targets.append(target)
            metrics[: len(part_metrics)] += part_metrics
        return torch.cat(targets, dim=1), metrics

    def step(self, batch: Batch, metrics: Tensor) -> None:
        """Apply the gradient of a minibatch; the last three of the metrics are for this to fill in."""
        learnable = batch.valid.any() & metrics[NAMES.index("loss")].isfinite()
        norm, skipped = self.optimizer.step(learnable, metrics[NAMES.index("kl_divergence")])
        metrics[-3:] = torch.stack((norm, self.optimizer.learning_rate, skipped))
        self._metric_sum += metrics

    def loss(self, batch: Batch, whole: Whole | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The APPO objective of a minibatch, or the share that a microbatch has in that of the whole.

        Returns:
            Scalar loss, value targets [T, B] in units of return, and the values of the first of `NAMES`.

        Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9; targets Espeholt et al. 2018, arXiv:1802.01561.
        """
        c, valid, model = self.config, batch.valid, self.model
        policy, value = self._unroll(batch)
        log_prob = policy.log_prob(batch.action)
        behavior_log_prob = torch.where(valid, batch.recorded["log_prob"], log_prob.detach())
        ratio = losses.clamped_ratio(log_prob, behavior_log_prob)
        current_value = model.denormalize_value(value.detach())
        target = self.returns(batch, ratio.detach(), current_value)
        mean_and_std = whole.advantage if whole else losses.masked_mean_and_std(target.advantage, valid)
        advantage = losses.normalize_advantage(target.advantage, valid, mean_and_std)
        behavior_value = model.normalize_value(torch.where(valid, batch.recorded["value"], 0.0))
        goal = model.normalize_value(target.target)
        means = losses.masked_means(
            (
                losses.ppo_policy_loss(ratio, advantage, c.ppo_clip_ratio),
                losses.clipped_value_loss(value[:-1], behavior_value, goal, c.ppo_clip_value),
                policy.entropy(),
                _kl(batch, policy, differentiable=c.kl_loss_coeff > 0),
                ratio.detach(),
                ((ratio > 1 + c.ppo_clip_ratio) | (ratio < 1 / (1 + c.ppo_clip_ratio))).float(),
                current_value[:-1],
            ),
            valid,
        )
        policy_loss, value_loss, entropy, kl, _, clipped, value_mean = means.unbind()
        exploration_loss = _exploration(policy, entropy, valid, c)
        loss = policy_loss + c.value_loss_coeff * value_loss + exploration_loss + c.kl_loss_coeff * kl
        ratio_max = whole.ratio_max if whole else losses.zero_invalid(ratio, valid).max()
        others = torch.stack((ratio_max, clipped, mean_and_std[1], value_mean))
        metrics = torch.cat((loss.view(1), means[:5], others)).detach()  # in the order of NAMES
        share = valid.sum() / whole.num_valid if whole else torch.ones((), device=loss.device)
        return loss * share, target.target, metrics * share

    def returns(self, batch: Batch, ratio: Tensor, value: Tensor) -> Returns:
        """Advantages and value targets [T, B] from the current values [T+1, B], in units of return."""
        c = self.config
        final_value = batch.recorded["final_value"] if len(batch.recorded["final_value"]) else None
        signals = {name: getattr(batch, name) for name in ("reward", "terminated", "truncated", "valid", "first")}
        if not c.with_vtrace:
            return gae(value=value, final_value=final_value, gamma=c.gamma, gae_lambda=c.gae_lambda, **signals)
        return vtrace(
            ratio=ratio,
            value=value,
            final_value=final_value,
            gamma=c.gamma,
            vtrace_lambda=c.vtrace_lambda,
            rho_clip=c.vtrace_rho,
            c_clip=c.vtrace_c,
            **signals,
        )

    def metrics(self) -> dict[str, float]:
        """Means since the last call, and updates skipped since the last good one; waits for the device."""
        if not self._metric_count:
            return {}
        means = (self._metric_sum / self._metric_count).tolist()
        self._metric_sum.zero_()
        self._metric_count = 0
        return {**dict(zip(NAMES, means, strict=True)), SKIPPED_IN_A_ROW: float(self.optimizer.skipped_in_a_row)}

    def state(self, into: dict[str, Array] | None = None) -> LearnerState:
        """Everything that training continues from, its vectors in memory that is given, or in new one."""
        vectors = empty_vectors(layout_of(self.flat, self.config).vectors) if into is None else into
        vectors[WEIGHTS][:] = self.flat.flat.cpu().numpy()
        self.optimizer.save(vectors)
        vectors[STATISTICS][:] = self.statistics.to_array()
        meta = {
            "version": self.version,
            "updates": self.updates,
            **self.optimizer.meta(),
            "generator": base64.b64encode(self.generator.get_state().numpy().tobytes()).decode(),
        }
        return LearnerState(vectors, meta)

    def restore(self, state: LearnerState) -> None:
        """Continue from a state; the version is the caller's to raise. One without random state keeps that of the seed.

        Raises:
            ValueError: the state belongs to another model.
        """
        if len(state.weights) != len(self.flat.flat):
            raise ValueError(f"the state has {len(state.weights)} weights, the model {len(self.flat.flat)}")
        self.flat.flat.copy_(torch.from_numpy(state.weights))
        self.optimizer.restore(state.vectors, state.meta)
        self.statistics.load_array(state.vectors[STATISTICS])
        self.version, self.updates = int(state.meta["version"]), int(state.meta["updates"])
        if "generator" in state.meta:
            _restore_generator(self.generator, state.meta["generator"])

    def _unroll(self, batch: Batch) -> tuple[ActionDistribution, Tensor]:
        """The current policy [T, B] and normalized values [T+1, B]."""
        logits, value = self.model.unroll(batch.obs, batch.first, batch.rnn_state, self.config.segment_steps)
        mask = batch.obs[MASK_KEY][:-1].flatten(2) > 0 if self.masked else None
        return ActionDistribution(self.parts, logits, mask), value

    @torch.no_grad()
    def _whole(self, parts: list[Batch]) -> Whole:
        """One pass without gradients for what all parts share."""
        advantages, ratios = [], []
        for part in parts:
            policy, value = self._unroll(part)
            log_prob = policy.log_prob(part.action)
            ratio = losses.clamped_ratio(log_prob, torch.where(part.valid, part.recorded["log_prob"], log_prob))
            advantages.append(self.returns(part, ratio, self.model.denormalize_value(value)).advantage)
            ratios.append(losses.zero_invalid(ratio, part.valid).max())
        valid = torch.cat([part.valid for part in parts], dim=1)
        advantage = losses.masked_mean_and_std(torch.cat(advantages, dim=1), valid)
        return Whole(valid.sum().clamp(min=1), advantage, torch.stack(ratios).max())


def layout_of(flat: FlatModule, config: LearningConfig) -> StateLayout:
    """Return what the state of a learner of this network holds."""
    assert isinstance(flat.module, ActorCritic)
    statistics = RunningStatistics(flat.module, config.normalize_returns)
    return adam_layout(len(flat.flat), config, {STATISTICS: statistics.vector})


def _restore_generator(generator: torch.Generator, text: str) -> None:
    random_state = np.frombuffer(base64.b64decode(text), np.uint8)
    try:
        generator.set_state(torch.from_numpy(random_state.copy()))
    except (RuntimeError, TypeError):
        raise CheckpointError("the random state in state.json is none of torch's") from None


def cleaned(batch: Batch) -> Batch:
    """The batch with zeros in what invalid steps hold and the losses differentiate through: 0 * NaN would be NaN."""
    return replace(
        batch,
        action=losses.zero_invalid(batch.action, batch.valid),
        recorded=batch.recorded | {"logits": losses.zero_invalid(batch.recorded["logits"], batch.valid)},
    )


def _exploration(policy: ActionDistribution, entropy: Tensor, valid: Tensor, config: LearningConfig) -> Tensor:
    """The weighted exploration loss; `entropy` is the mean over valid steps."""
    coefficient = config.exploration_loss_coeff
    if config.exploration_loss == "symmetric_kl" and coefficient:
        return coefficient * losses.symmetric_kl_loss(policy.symmetric_kl_to_uniform(), valid)
    return -coefficient * entropy


def _kl(batch: Batch, policy: ActionDistribution, *, differentiable: bool) -> Tensor:
    """KL(acting policy || current policy) [T, B]."""
    behavior = ActionDistribution(policy.parts, batch.recorded["logits"], policy.action_mask)
    with torch.set_grad_enabled(differentiable):
        return behavior.kl(policy)


def _minibatches(batch: Batch, config: LearningConfig, generator: torch.Generator) -> list[Tensor | None]:
    """Columns of every minibatch of one epoch; None: all of them."""
    count = batch.valid.shape[1]
    size = min(count, config.batch_size // config.rollout)
    if size == count:
        return [None]
    order = torch.randperm(count, generator=generator) if config.shuffle_minibatches else torch.arange(count)
    return list(torch.split(order.to(batch.valid.device, non_blocking=True), size))


def _microbatches(batch: Batch, size: int) -> list[Batch]:
    """The batch in parts of `size` columns; whole if that is 0."""
    columns = batch.valid.shape[1]
    if not size or size >= columns:
        return [batch]
    return [batch.columns(slice(i, i + size)) for i in range(0, columns, size)]
