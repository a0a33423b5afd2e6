"""The PPO learner: advantages by GAE over whole columns, then epochs of clipped updates on shuffled steps.

`PPOLearner.loss` is the algorithm and `PPOLearner.learn` its loop; nothing here knows a process.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from algorithms.models.actor_critic import ActorCritic
from algorithms.models.flat_module import FlatModule, split
from algorithms.ops import losses
from algorithms.ops.distributions import ActionDistribution
from algorithms.ops.normalization import Moments, inv_std, merge_batch, normalize
from algorithms.ops.returns import Returns, gae
from algorithms.parts.optimizer import FlatAdam, GradientSum, adam_layout
from algorithms.parts.statistics import STATISTICS, RunningStatistics, faded
from algorithms.ppo.config import METRICS, PPOConfig
from algorithms.ppo.minibatch import Minibatch, cleaned, gather
from algorithms.runtime.learning.batches import Batch
from algorithms.runtime.learning.rollback import SKIPPED_IN_A_ROW
from algorithms.runtime.memory.arena import Array
from algorithms.runtime.memory.learner_state import WEIGHTS, LearnerState, StateLayout, Vector, empty_vectors
from envs.spec import MASK_KEY, EnvSpec

NAMES = tuple(METRICS)
STEPPED = NAMES[:-3]
"""Metrics that are known before the step."""
KL, RATIO_MAX, ADVANTAGE_STD = (NAMES.index(name) for name in ("kl_divergence", "ratio_max", "advantage_std"))

ADVANTAGES = "advantages"
"""Name of the vector in a state that holds the running moments of advantages."""

KL_TOLERANCE = 1.5
"""Factor of `--target_kl` at which an iteration ends, as in Stable-Baselines3."""


class PPOLearner:
    """Trains one policy.

    A version is what the weights are after an iteration: between its updates there is nothing that should act.

    Args:
        flat: the model with all its weights in one vector, on its device.
        spec: of the environment.
        config: the flags.
        seed: of the order of minibatches.

    Attributes:
        version, updates: published weight sets, counted from 1, and optimizer steps so far.

    Raises:
        UsageError: the flags contradict each other, or the model.

    Source: Schulman et al. 2017, arXiv:1707.06347, algorithm 1.
    """

    def __init__(self, flat: FlatModule, spec: EnvSpec, config: PPOConfig, seed: int) -> None:
        assert isinstance(flat.module, ActorCritic)
        self.flat, self.model, self.config, self.parts = flat, flat.module, config, spec.action.parts
        config.check(recurrent=self.model.rnn_state_size > 0)
        self.masked, self.seed = bool(spec.action_mask), seed
        self.version, self.updates = 1, 0
        device = flat.flat.device
        self.statistics = RunningStatistics(self.model, config.normalize_returns)
        self.advantages = Moments.empty((), device)
        self.clip_ratio = torch.tensor(config.ppo_clip_ratio, device=device)
        self.optimizer = FlatAdam(flat.flat[: flat.num_parameters], config)
        views = split(self.optimizer.gradient, flat.parameter_table)
        for parameter, view in zip(self.model.parameters(), views, strict=True):
            parameter.grad = view
        self._metric_sum, self._metric_count = torch.zeros(len(NAMES), device=device), 0

    def learn(self, batch: Batch, progress: float) -> Iterator[None]:
        """Train on the columns of an iteration; yields after each optimizer step, and when the version is raised.

        Args:
            batch: B columns on the device of the model.
            progress: share of the training budget used up before this batch, in [0, 1]; drives linear schedules.
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
            metrics = self.differentiate(minibatch)
            if self.has_moved_too_far(metrics):
                break
            self.step(minibatch.valid, metrics)
            self.optimizer.adapt(end_of_epoch=(i + 1) % per_epoch == 0, minibatches=per_epoch)
            self.updates += 1
            yield
        # Not before: acting and all epochs must see the observations on one scale.
        self.statistics.update(batch, [(batch.recorded["target"], batch.valid)])
        self.version += 1
        yield

    def follow(self, progress: float) -> None:
        """Set what linear schedules say, when this share of the training budget is used up, in [0, 1]."""
        c = self.config
        self.optimizer.follow(progress)
        self.clip_ratio.fill_(c.ppo_clip_ratio * (max(0.0, 1.0 - progress) if c.ppo_clip_schedule == "linear" else 1.0))

    def has_moved_too_far(self, metrics: Tensor) -> bool:
        """Whether an iteration ends before the step of these metrics, see `--target_kl`."""
        target = self.config.target_kl
        return target > 0 and float(metrics[KL]) > KL_TOLERANCE * target

    def differentiate(self, minibatch: Minibatch) -> Tensor:
        """Set the gradient of a minibatch; its metrics, of which the last three are for `step` to fill in."""
        size = self.config.microbatch_size // self.segment_steps
        if not size:
            self.optimizer.gradient.zero_()
            loss, metrics = self.loss(minibatch)
            loss.backward()  # type: ignore[no-untyped-call]
            return metrics
        moments = losses.masked_mean_and_std(minibatch.advantage, minibatch.valid)
        total = GradientSum(self.optimizer.gradient, len(STEPPED), RATIO_MAX)
        for i in range(0, minibatch.valid.shape[1], size):
            part = minibatch.part(slice(i, i + size))
            total.add(part.valid, *self.loss(part, moments))
        return total.finish()

    def step(self, valid: Tensor, metrics: Tensor) -> None:
        """Apply the gradient of a minibatch with these valid steps."""
        learnable = valid.any() & metrics[0].isfinite()
        norm, skipped = self.optimizer.step(learnable, metrics[KL])
        self._metric_sum += torch.cat((metrics, torch.stack((norm, self.optimizer.learning_rate, skipped))))
        self._metric_count += 1

    def loss(self, minibatch: Minibatch, moments: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """The PPO objective, to be minimized, and the values of `STEPPED`.

        Args:
            minibatch: or a part of one.
            moments: mean and deviation of the advantages of the whole, if it is a part.

        Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9.
        """
        c, m, e = self.config, minibatch, self.clip_ratio
        policy, value = self._evaluate(m)
        mean, std = moments or losses.masked_mean_and_std(m.advantage, m.valid)
        advantage = m.advantage
        if c.normalize_advantages == "batch":
            advantage = losses.normalize_advantage(advantage, m.valid, (mean, std))
        ratio = losses.clamped_ratio(policy.log_prob(m.action), m.log_prob)
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - e, 1 + e) * advantage)
        behavior_value, target = self.model.normalize_value(m.value), self.model.normalize_value(m.target)
        fixed = ratio.detach()
        means = losses.masked_means(
            (
                -surrogate,
                losses.clipped_value_loss(value, behavior_value, target, c.ppo_clip_value),
                policy.entropy(),
                (fixed - 1) - fixed.log(),  # KL(acting || current) without logits: Schulman 2020, estimator k3
                fixed,
                ((fixed - 1).abs() > e).float(),
                self.model.denormalize_value(value.detach()),
            ),
            m.valid,
        )
        policy_loss, value_loss, entropy = means[:3].unbind()
        loss = policy_loss + c.value_loss_coeff * value_loss - c.exploration_loss_coeff * entropy
        ratio_max, clipped, value_mean = losses.zero_invalid(fixed, m.valid).max(), means[5], means[6]
        others = torch.stack((ratio_max, clipped, std, value_mean))
        return loss, torch.cat((loss.view(1), means[:5], others)).detach()

    def estimate(self, batch: Batch) -> Batch:
        """The batch with "advantage" and "target" [T, B] by the current values recorded, see `Minibatch`."""
        advantage, target = self.returns(batch)
        self.advantages = faded(with_advantages(self.advantages, advantage, batch.valid))
        return replace(batch, recorded=batch.recorded | {"advantage": self.scaled(advantage), "target": target})

    @torch.no_grad()
    def returns(self, batch: Batch) -> Returns:
        """Advantages and value targets [T, B] by the current values, in units of return."""
        c = self.config
        width = max(
            1, (c.microbatch_size or c.batch_size) // c.rollout
        )  # in parts that take no more memory than training does
        parts = [batch.columns(slice(i, i + width)) for i in range(0, batch.valid.shape[1], width)]
        values = [self.model.unroll(part.obs, part.first, part.rnn_state, c.segment_steps)[1] for part in parts]
        return gae(
            value=self.model.denormalize_value(torch.cat(values, dim=1)),
            final_value=batch.recorded["final_value"] if len(batch.recorded["final_value"]) else None,
            gamma=c.gamma,
            gae_lambda=c.gae_lambda,
            **{name: getattr(batch, name) for name in ("reward", "terminated", "truncated", "valid", "first")},
        )

    def scaled(self, advantage: Tensor) -> Tensor:
        """Advantages [T, B] by running moments, or in units of the critic."""
        if self.config.normalize_advantages == "running":
            return normalize(advantage, self.advantages.mean.float(), inv_std(self.advantages), float("inf"))
        return advantage / self.model.return_std

    def configure(self, config: PPOConfig) -> None:
        """Follow other flags from now on, between two batches."""
        self.config = config
        self.optimizer.configure(config)

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
        m = self.advantages
        vectors[ADVANTAGES][:] = torch.stack((m.count, m.mean, m.m2)).cpu().numpy()
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
        moments = torch.from_numpy(state.vectors[ADVANTAGES].copy()).to(self.flat.flat.device)
        self.advantages = Moments(*moments.unbind())
        self.version, self.updates = int(state.meta["version"]), int(state.meta["updates"])

    @property
    def segment_steps(self) -> int:
        """S: what is drawn into minibatches and evaluated as one piece."""
        return self.config.segment_steps if self.model.rnn_state_size else 1

    def _plan(self, batch: Batch) -> list[Tensor]:
        """The segments [N] of every minibatch of every epoch, numbered in the order of `Batch.rnn_state` [*, B]."""
        c, count = self.config, batch.valid.numel() // self.segment_steps
        # A count that is saved anyway takes the place of a random state; seeds of runs are far apart.
        generator = torch.Generator().manual_seed(self.seed + self.updates)
        plan: list[Tensor] = []
        for _ in range(c.ppo_epochs):
            order = torch.randperm(count, generator=generator) if c.shuffle_minibatches else torch.arange(count)
            order = order.to(batch.valid.device, non_blocking=True)
            plan += torch.split(order, c.batch_size // self.segment_steps)
        return plan

    def minibatch(self, batch: Batch, segments: Tensor) -> Minibatch:
        """Gather segments [N]."""
        return gather(batch, segments, self.segment_steps, remembers=self.model.rnn_state_size > 0)

    def _evaluate(self, m: Minibatch) -> tuple[ActionDistribution, Tensor]:
        """The current policy and normalized values, [S, N]."""
        if len(m.first) == 1:
            logits, value, _ = self.model.act({key: x[0] for key, x in m.obs.items()}, m.first[0], m.rnn_state)
            logits, value = logits.unsqueeze(0), value.unsqueeze(0)
        else:
            logits, value = self.model.unroll(m.obs, m.first, m.rnn_state.unsqueeze(0), len(m.valid))
            value = value[:-1]
        mask = m.obs[MASK_KEY][: len(m.valid)].flatten(2) > 0 if self.masked else None
        return ActionDistribution(self.parts, logits, mask), value


def layout_of(flat: FlatModule, config: PPOConfig) -> StateLayout:
    """Return what the state of a learner of this network holds."""
    assert isinstance(flat.module, ActorCritic)
    statistics = RunningStatistics(flat.module, config.normalize_returns)
    others = {STATISTICS: statistics.vector, ADVANTAGES: Vector(3, "float64", inherited=True)}
    return adam_layout(len(flat.flat), config, others)


def with_advantages(moments: Moments, advantage: Tensor, valid: Tensor) -> Moments:
    """Moments of everything seen so far and the valid advantages [T, B]; what is not finite is left out."""
    return merge_batch(moments, advantage.flatten(), (valid & advantage.isfinite()).flatten())
