"""The APPO learner: V-trace (or GAE) targets, the PPO surrogate, one optimizer step per minibatch.

`APPOLearner.update` is the hot path, `APPOLearner.loss` the algorithm. The module is independent of processes.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from appo.algorithms.appo.config import APPOConfig
from appo.algorithms.ops import losses
from appo.algorithms.ops.distributions import ActionDistribution
from appo.algorithms.ops.returns import Returns, gae, vtrace
from appo.algorithms.parts.config import EXPLAINED
from appo.algorithms.parts.learner import NOISE, row_of
from appo.algorithms.parts.surrogate import SurrogateLearner
from appo.algorithms.runtime.learning.batches import IS_READ, Batch


class Whole(NamedTuple):
    """Scalars of a whole minibatch, with which the losses of all parts add up to the loss of the whole."""

    num_valid: Tensor
    advantage: tuple[Tensor, Tensor]  # mean and standard deviation
    ratio_max: Tensor
    explained: Tensor


class APPOLearner(SurrogateLearner):
    """Trains one policy.

    Args:
        flat, context: see `FlatLearner`; `generator` draws the order of minibatches.

    Attributes:
        quick: faster equivalent of `update`, or None.
        shared_moments: mean and deviation of the advantages of all ranks while the quick update compares; all ranks add
            up equally often, whichever compares. None otherwise.
    """

    config: APPOConfig
    quick: Callable[[Batch], Tensor] | None
    shared_moments: tuple[Tensor, Tensor] | None = None

    def learn(self, batch: Batch, progress: float) -> Iterator[None]:
        """Pass over a macro batch `ppo_epochs` times; yield after each optimizer step, when weights can be published.

        Args:
            batch: B columns on the device of the model.
            progress: share of the training budget used before the batch, in [0, 1]; drives linear schedules.
        """
        self.follow(progress)
        batch = cleaned(batch)
        c = self.config
        plan = [columns for _ in range(c.ppo_epochs) for columns in _minibatches(batch, c, self.generator)]
        per_epoch = len(plan) // c.ppo_epochs
        for i, columns in enumerate(plan):
            begins, ends = i % per_epoch == 0, (i + 1) % per_epoch == 0
            if begins:
                targets = list[tuple[Tensor, Tensor]]()  # of the last epoch, which sees every step once
                self.optimizer.sum_kl.zero_()
            minibatch = batch if columns is None else batch.columns(columns)
            if c.rpo_alpha:
                noise = self.draw_noise(*minibatch.valid.shape)
                minibatch = replace(minibatch, recorded=minibatch.recorded | {NOISE: noise})
            target = (self.quick or self.update)(minibatch)
            self.count_update()
            targets.append((target, minibatch.valid))
            self.optimizer.adapt(end_of_epoch=ends)
            is_last = i == len(plan) - 1 or (ends and self.has_moved_too_far(per_epoch))
            if is_last:
                self.statistics.update(batch, targets)
            self.version += 1
            yield
            if is_last:
                return

    def has_moved_too_far(self, minibatches: int) -> bool:
        """Return whether the iteration ends after an epoch of so many minibatches, see `--target_kl`."""
        target = self.config.target_kl  # without a target, the device need not answer
        return target > 0 and float(self.optimizer.sum_kl) > target * minibatches

    def update(self, batch: Batch) -> Tensor:
        """Make one optimizer step on a minibatch [T, B]; return value targets [T, B] in units of return."""
        target, metrics = self.differentiate(batch)
        self.step(batch.valid, metrics)
        return target

    def differentiate(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Set the gradient of a minibatch [T, B]; return value targets [T, B] in units of return, and metrics."""
        size, columns = self.config.microbatch_size // self.config.rollout, batch.valid.shape[1]
        self.optimizer.gradient.zero_()
        if not size or size >= columns:
            loss, target, metrics = self.loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return target, metrics
        # Microbatches save memory: their weighted gradients add up to the gradient of the whole minibatch.
        parts = [batch.columns(slice(i, i + size)) for i in range(0, columns, size)]
        whole, targets, total = self._whole(parts), [], self.optimizer.gradient.new_zeros(())
        for part in parts:
            loss, target, metrics = self.loss(part, whole)
            share = part.valid.sum() / whole.num_valid
            (loss * share).backward()  # type: ignore[no-untyped-call]
            targets.append(target)
            total = total + row_of(metrics) * share
        return torch.cat(targets, dim=1), dict(zip(metrics, total.unbind(), strict=True))

    def loss(self, batch: Batch, whole: Whole | None = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the APPO objective of a minibatch, or of a part of a minibatch.

        Args:
            batch: steps [T, B].
            whole: scalars of the whole minibatch if the batch is a part, else None.

        Returns:
            Scalar loss, value targets [T, B] in units of return, and metrics: name -> scalar.

        Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9; targets Espeholt et al. 2018, arXiv:1802.01561.
        """
        c, e, valid, model = self.config, self.clip_ratio, batch.valid, self.model
        current, value = self.unroll(batch)
        policy, ratio, exact_ratio = with_noise(batch, current)
        current_value = model.denormalize_value(value.detach())
        target = self.returns(batch, exact_ratio.detach(), current_value)
        known = whole.advantage if whole else self.shared_moments
        mean_and_std = known or self.mean_and_std(target.advantage, valid)
        advantage = losses.normalize_advantage(target.advantage, valid, mean_and_std)
        behavior_value = self.behavior_value(batch, value)
        with torch.set_grad_enabled(c.kl_loss_coeff > 0):  # from the acting policy to the current policy
            kl = ActionDistribution(policy.parts, batch.recorded["logits"], policy.action_mask).kl(current)
        if IS_READ in batch.recorded:  # the distance to the policies of datasets measures no step of this one
            kl = kl.masked_fill(batch.recorded[IS_READ], 0.0)
        goal = model.normalize_value(target.target)
        terms = {
            "policy_loss": self.policy_loss(ratio, advantage),
            "value_loss": losses.clipped_value_loss(value[:-1], behavior_value, goal, c.ppo_clip_value),
            "entropy": policy.entropy(),
            "kl_divergence": kl,
            "ratio_mean": ratio.detach(),
            "fraction_clipped": ((ratio > 1 + e) | (ratio < 1 / (1 + e))).float(),
            "value_mean": current_value[:-1],
        }
        means = losses.masked_means(terms, valid)
        exploration_loss = -self.exploration_coeff * means["entropy"]
        if c.exploration_loss == "symmetric_kl" and c.exploration_loss_coeff:
            to_uniform = losses.symmetric_kl_loss(policy.symmetric_kl_to_uniform(), valid)
            exploration_loss = self.exploration_coeff * to_uniform
        loss = means["policy_loss"] + c.value_loss_coeff * means["value_loss"] + exploration_loss
        loss = loss + c.kl_loss_coeff * means["kl_divergence"]
        ratio_max = whole.ratio_max if whole else losses.zero_invalid(ratio.detach(), valid).max()
        explained = whole.explained if whole else losses.explained_variance(behavior_value, goal, valid)
        others = {"ratio_max": ratio_max, "advantage_std": mean_and_std[1], EXPLAINED: explained}
        return loss, target.target, {"loss": loss, **means, **others}

    def behavior_value(self, batch: Batch, value: Tensor) -> Tensor:
        """Return the values [T, B] of the acting policy, in units of the critic, from the current values [T+1, B]."""
        behavior_value = self.model.normalize_value(torch.where(batch.valid, batch.recorded["value"], 0.0))
        if IS_READ in batch.recorded:  # values of another run's critic limit no change
            behavior_value = torch.where(batch.recorded[IS_READ], value[:-1].detach(), behavior_value)
        return behavior_value

    def policy_loss(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Return the surrogate of every step [T, B], to be minimized.

        Args:
            ratio: probability ratio [T, B] with gradient, trained policy to acting policy.
            advantage: normalized advantage [T, B].
        """
        return losses.ppo_policy_loss(ratio, advantage, self.clip_ratio)

    def returns(self, batch: Batch, ratio: Tensor, value: Tensor) -> Returns:
        """Return advantages and value targets [T, B] by the current values [T+1, B], in units of return."""
        c, signals = self.config, batch.signals()
        if not c.with_vtrace:
            return gae(value=value, gamma=c.gamma, gae_lambda=c.gae_lambda, **signals)
        return vtrace(
            ratio=ratio,
            value=value,
            gamma=c.gamma,
            vtrace_lambda=c.vtrace_lambda,
            rho_clip=c.vtrace_rho,
            c_clip=c.vtrace_c,
            **signals,
        )

    @torch.no_grad()
    def _whole(self, parts: list[Batch]) -> Whole:
        """Compute the shared scalars in one pass without gradients."""
        advantages, ratios, targets, values = [], [], [], []
        for part in parts:
            current, value = self.unroll(part)
            _, ratio, exact_ratio = with_noise(part, current)
            found = self.returns(part, exact_ratio, self.model.denormalize_value(value))
            advantages.append(found.advantage)
            targets.append(self.model.normalize_value(found.target))
            values.append(self.behavior_value(part, value))
            ratios.append(losses.zero_invalid(ratio, part.valid).max())
        valid = torch.cat([part.valid for part in parts], dim=1)
        advantage = self.mean_and_std(torch.cat(advantages, dim=1), valid)
        explained = losses.explained_variance(torch.cat(values, dim=1), torch.cat(targets, dim=1), valid)
        return Whole(valid.sum().clamp(min=1), advantage, torch.stack(ratios).max(), explained)


def with_noise(batch: Batch, current: ActionDistribution) -> tuple[ActionDistribution, Tensor, Tensor]:
    """Return the policy that the surrogate trains, with the noise of RPO, and ratios [T, B] with and without noise.

    Without noise, V-trace corrects for the age of steps alone, and the KL divergence measures steps of the optimizer:
    noise adds alpha^2 / (6 deviation^2) per number, enough to shorten traces and lower rates to the minimum.
    """
    ratio = _ratio(batch, current)
    if NOISE not in batch.recorded:
        return current, ratio, ratio
    policy = current.shifted(batch.recorded[NOISE])
    return policy, _ratio(batch, policy), ratio


def _ratio(batch: Batch, policy: ActionDistribution) -> Tensor:
    log_prob = policy.log_prob(batch.action)
    return losses.clamped_ratio(log_prob, torch.where(batch.valid, batch.recorded["log_prob"], log_prob.detach()))


def cleaned(batch: Batch) -> Batch:
    """Return the batch with zeros in the actions and logits of invalid steps: 0 * NaN in a gradient would be NaN."""
    return replace(
        batch,
        action=losses.zero_invalid(batch.action, batch.valid),
        recorded=batch.recorded | {"logits": losses.zero_invalid(batch.recorded["logits"], batch.valid)},
    )


def _minibatches(batch: Batch, config: APPOConfig, generator: torch.Generator) -> list[Tensor | None]:
    """Return the columns of every minibatch of one epoch; None for all columns."""
    count, size = batch.valid.shape[1], config.batch_size // config.rollout
    if size >= count:
        return [None]
    order = torch.randperm(count, generator=generator) if config.shuffle_minibatches else torch.arange(count)
    return list(torch.split(order.to(batch.valid.device, non_blocking=True), size))
