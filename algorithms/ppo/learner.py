"""The PPO learner: advantages by GAE over whole columns, then epochs of clipped updates on shuffled steps.

`PPOLearner.loss` is the algorithm, `PPOLearner.learn` the loop. The module is independent of processes.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.ops import losses
from appo.algorithms.ops.distributions import ActionDistribution
from appo.algorithms.ops.normalization import Moments, inv_std, merge, merge_batch, normalize
from appo.algorithms.ops.returns import Returns, gae
from appo.algorithms.parts.config import EXPLAINED
from appo.algorithms.parts.learner import KL, NOISE, Metrics
from appo.algorithms.parts.optimizer import GradientSum
from appo.algorithms.parts.pooling import pool_mean, pool_moments
from appo.algorithms.parts.segments import drawn_segments, gather
from appo.algorithms.parts.statistics import faded
from appo.algorithms.parts.surrogate import SurrogateLearner
from appo.algorithms.ppo.config import PPOConfig
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.learning.batches import Batch
from appo.envs.spec import MASK_KEY

RATIO_MAX = "ratio_max"
"""The metric that is a maximum over the parts of a minibatch, not a mean."""
ADVANTAGES = "advantages"
"""Name of the vector in a state that holds the running moments of advantages."""


class PPOLearner(SurrogateLearner):
    """Trains one policy.

    An iteration ends with a new version of the weights. Weights between the updates of an iteration never act.

    Args:
        flat, context: see `FlatLearner`; `generator` draws the order of minibatches.

    Attributes:
        quick: faster equivalent of `differentiate`, or None.

    Raises:
        UsageError: flags contradict the model or other flags.

    Source: Schulman et al. 2017, arXiv:1707.06347, algorithm 1.
    """

    config: PPOConfig
    quick: Callable[[Batch], Metrics] | None

    def __init__(self, flat: FlatModule, context: Context) -> None:
        super().__init__(flat, context)
        self.config.check(recurrent=self.model.rnn_state_size > 0)
        if self.config.normalize_returns:
            self.smallest_deviation = 0.0  # advantages are normalized in units of the critic
        self.further[ADVANTAGES] = flat.flat.new_zeros(3, dtype=torch.float64)

    @property
    def advantages(self) -> Moments:
        """Return the running moments of advantages."""
        return Moments(*self.further[ADVANTAGES].clone().unbind())

    @advantages.setter
    def advantages(self, moments: Moments) -> None:
        self.further[ADVANTAGES].copy_(torch.stack((moments.count, moments.mean, moments.m2)))

    def learn(self, batch: Batch, progress: float) -> Iterator[None]:
        """Train on the columns of an iteration; yield after each optimizer step, and after raising the version.

        Args:
            batch: B columns on the device of the model.
            progress: share of the training budget used before the batch, in [0, 1]; drives linear schedules.
        """
        c = self.config
        self.follow(progress)
        batch = cleaned(batch)
        plan = self._plan(batch)
        per_epoch = len(plan) // c.ppo_epochs
        for i, segments in enumerate(plan):
            if i == 0 or (c.recompute_advantages and i % per_epoch == 0):
                batch = self.estimate(batch)
            minibatch = self.minibatch(batch, segments)
            metrics = (self.quick or self.differentiate)(minibatch)
            if self.stops_before(minibatch.valid, metrics):
                break
            self.descend_by(minibatch.valid, metrics)
            self.optimizer.adapt(end_of_epoch=(i + 1) % per_epoch == 0)
            yield
        # Only now: acting and all epochs must see observations on one scale.
        self.statistics.update(batch, [(batch.recorded["target"], batch.valid)])
        self.version += 1
        yield

    def stops_before(self, valid: Tensor, metrics: Metrics) -> bool:
        """Return whether the iteration ends before a step, see `--target_kl`; the rate then adapts to the short epoch.

        Args:
            valid: valid steps of the minibatch, or their number.
            metrics: metrics of the minibatch, by name.
        """
        if not (target := self.config.target_kl):
            return False
        kl = torch.as_tensor(metrics[KL]).detach()
        if self.ranks:
            kl = pool_mean(self.ranks, kl, valid.sum())
        stops = float(kl) > 1.5 * target  # the factor of Stable-Baselines3
        if stops:
            # The steps made, with smaller divergences, would raise a rate that is too high already.
            self.optimizer.count(kl)
            self.optimizer.adapt(end_of_epoch=True)
        return stops

    def differentiate(self, minibatch: Batch, moments: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
        """Set the gradient of a minibatch; return its metrics.

        Args:
            minibatch: result of `minibatch`.
            moments: mean and deviation of the advantages, if known.
        """
        size = self.config.microbatch_size // self.segment_steps
        recorded = minibatch.recorded
        explained = losses.explained_variance(recorded["value"], recorded["target"], minibatch.valid)
        if not size:
            self.optimizer.gradient.zero_()
            loss, metrics = self.loss(minibatch, moments)
            loss.backward()  # type: ignore[no-untyped-call]
            return metrics | {EXPLAINED: explained}
        moments = moments or self.mean_and_std(recorded["advantage"], minibatch.valid)
        total = GradientSum(self.optimizer.gradient, RATIO_MAX)
        for i in range(0, minibatch.valid.shape[1], size):
            part = minibatch.columns(slice(i, i + size))
            total.add(part.valid, *self.loss(part, moments))
        return total.finish() | {EXPLAINED: explained}

    def descend_by(self, valid: Tensor, metrics: Metrics) -> None:
        """Make an optimizer step by the current gradient."""
        self.step(valid, metrics)
        self.count_update()

    def loss(self, minibatch: Batch, moments: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the PPO objective, to be minimized, and metrics: name -> scalar.

        Args:
            minibatch: minibatch, or a part of a minibatch.
            moments: mean and deviation of the advantages of the whole minibatch, for a part.

        Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9.
        """
        c, m, e = self.config, minibatch, self.clip_ratio
        policy, value = self._evaluate(m)
        log_prob, advantage = m.recorded["log_prob"], m.recorded["advantage"]
        moments = moments or self.mean_and_std(advantage, m.valid)
        if c.normalize_advantages == "batch":
            advantage = losses.normalize_advantage(advantage, m.valid, moments)
        ratio = losses.clamped_ratio(policy.log_prob(m.action), log_prob)
        moved = ratio.detach()  # by the optimizer alone: noise is no step, and would end iterations and lower rates
        if NOISE in m.recorded:
            policy = policy.shifted(m.recorded[NOISE])
            ratio = losses.clamped_ratio(policy.log_prob(m.action), log_prob)
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - e, 1 + e) * advantage)
        behavior_value, target = (self.model.normalize_value(m.recorded[name]) for name in ("value", "target"))
        fixed = ratio.detach()
        terms = {
            "policy_loss": -surrogate,
            "value_loss": losses.clipped_value_loss(value, behavior_value, target, c.ppo_clip_value),
            "entropy": policy.entropy(),
            KL: (moved - 1) - moved.log(),  # KL(acting || current) without logits: Schulman 2020, estimator k3
            "ratio_mean": fixed,
            "fraction_clipped": ((fixed - 1).abs() > e).float(),
            "value_mean": self.model.denormalize_value(value.detach()),
        }
        means = losses.masked_means(terms, m.valid)
        loss = means["policy_loss"] + c.value_loss_coeff * means["value_loss"]
        loss = loss - self.exploration_coeff * means["entropy"]
        ratio_max = losses.zero_invalid(fixed, m.valid).max()
        return loss, {"loss": loss, **means, RATIO_MAX: ratio_max, "advantage_std": moments[1]}

    def estimate(self, batch: Batch) -> Batch:
        """Return the batch with recorded "advantage" and "target" [T, B] by the current values.

        Advantages are normalized unless the loss normalizes them; targets are in units of return.
        """
        advantage, target = self.returns(batch)
        before = self.advantages
        if self.ranks:
            own = with_advantages(Moments.empty((), advantage.device), advantage, batch.valid)
            self.advantages = faded(merge(before, *pool_moments(self.ranks, [own], [before.mean])))
        else:
            self.advantages = faded(with_advantages(before, advantage, batch.valid))
        return replace(batch, recorded=batch.recorded | {"advantage": self.scaled(advantage), "target": target})

    @torch.no_grad()
    def returns(self, batch: Batch) -> Returns:
        """Return advantages and value targets [T, B] by the current values, in units of return."""
        c = self.config
        # Parts need no more memory than training.
        width = max(1, (c.microbatch_size or c.batch_size) // c.rollout)
        parts = [batch.columns(slice(i, i + width)) for i in range(0, batch.valid.shape[1], width)]
        values = [self.model.unroll(part.obs, part.first, part.rnn_state, c.segment_steps)[1] for part in parts]
        value = self.model.denormalize_value(torch.cat(values, dim=1))
        return gae(value=value, gamma=c.gamma, gae_lambda=c.gae_lambda, **batch.signals())

    def scaled(self, advantage: Tensor) -> Tensor:
        """Return advantages [T, B] normalized by running moments, or in units of the critic."""
        if self.config.normalize_advantages == "running":
            return normalize(advantage, self.advantages.mean.float(), inv_std(self.advantages), float("inf"))
        return advantage / self.model.return_std

    @property
    def segment_steps(self) -> int:
        """Return S, the steps of a segment; minibatches consist of whole segments."""
        return self.config.segment_steps if self.model.rnn_state_size else 1

    def _plan(self, batch: Batch) -> list[Tensor]:
        """Return segments [N] of every minibatch of every epoch, numbered in the order of `Batch.rnn_state` [*, B]."""
        c, count = self.config, batch.valid.numel() // self.segment_steps
        random, device = self.generator if c.shuffle_minibatches else None, batch.valid.device
        plan = drawn_segments(count, c.batch_size // self.segment_steps, c.ppo_epochs, random)
        return [segments.to(device, non_blocking=True) for segments in plan]

    def minibatch(self, batch: Batch, segments: Tensor) -> Batch:
        """Gather segments [N] of a batch after `estimate`, and draw the noise of RPO."""
        steps, names = self.segment_steps, ("log_prob", "value", "advantage", "target")
        found = gather(batch, segments, steps, names, remembers=self.model.rnn_state_size > 0)
        if self.config.rpo_alpha:
            found.recorded[NOISE] = self.draw_noise(steps, len(segments))
        return found

    def _evaluate(self, m: Batch) -> tuple[ActionDistribution, Tensor]:
        """Return the current policy and normalized values, [S, N]."""
        if len(m.first) == 1:
            logits, value, _ = self.model.act({key: x[0] for key, x in m.obs.items()}, m.first[0], m.rnn_state[0])
            logits, value = logits.unsqueeze(0), value.unsqueeze(0)
        else:
            logits, value = self.model.unroll(m.obs, m.first, m.rnn_state, len(m.valid))
            value = value[:-1]
        mask = m.obs[MASK_KEY][: len(m.valid)].flatten(2) > 0 if self.masked else None
        return ActionDistribution(self.parts, logits, mask), value


def cleaned(batch: Batch) -> Batch:
    """Return the batch with zeros in actions and recorded numbers of invalid steps: 0 * NaN in a gradient is NaN."""
    recorded = {name: losses.zero_invalid(batch.recorded[name], batch.valid) for name in ("log_prob", "value")}
    return replace(batch, action=losses.zero_invalid(batch.action, batch.valid), recorded=batch.recorded | recorded)


def with_advantages(moments: Moments, advantage: Tensor, valid: Tensor) -> Moments:
    """Merge the valid and finite advantages [T, B] into moments."""
    return merge_batch(moments, advantage.flatten(), (valid & advantage.isfinite()).flatten())
