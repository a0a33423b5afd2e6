"""A3C: a worker beside an actor computes the gradient of one trajectory, and the learner applies the gradient.

`TrajectoryGradient.loss` is the algorithm. The module is independent of processes.
"""

import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from appo.algorithms.a3c.config import COMPUTED, A3CConfig
from appo.algorithms.models.actor_critic import ActorCritic
from appo.algorithms.models.flat_module import FlatModule, split
from appo.algorithms.ops import losses
from appo.algorithms.ops.distributions import ActionDistribution
from appo.algorithms.ops.returns import gae
from appo.algorithms.parts.config import STEP_METRICS
from appo.algorithms.parts.learner import LOSS, FlatLearner, row_of
from appo.algorithms.parts.optimizer import FlatAdam
from appo.algorithms.parts.rmsprop import FlatRMSProp
from appo.algorithms.parts.statistics import RunningStatistics
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.learning.batches import Batch
from appo.algorithms.runtime.learning.gradients import FIGURES, GRADIENT
from appo.algorithms.runtime.memory.arena import Array
from appo.envs.spec import MASK_KEY, EnvSpec
from appo.utils.errors import UsageError


class TrajectoryGradient:
    """Computes the gradient of the trajectories of one slot.

    Args:
        flat: model that acted in the trajectories; the weights are never changed.
        spec: spaces of the environment.
        config: flags.

    Attributes:
        gradient: gradient [N] of the parameters, after a call.
    """

    def __init__(self, flat: FlatModule, spec: EnvSpec, config: A3CConfig) -> None:
        assert isinstance(flat.module, ActorCritic)
        self.model, self.config, self.parts = flat.module, config, spec.action.parts
        self.masked = bool(spec.action_mask)
        self.gradient = torch.zeros(flat.num_parameters)
        for parameter, view in zip(self.model.parameters(), split(self.gradient, flat.parameter_table), strict=True):
            parameter.grad = view

    def __call__(self, batch: Batch) -> Array:
        """Set the gradient of a batch [T, B] with at least one valid step.

        Returns:
            Values of `COMPUTED`, followed by the statistics of the batch, see `RunningStatistics.to_array`.

        Raises:
            UsageError: the loss returns a metric that is not in `COMPUTED`.
        """
        self.gradient.zero_()
        loss, target, metrics = self.loss(batch)
        if unknown := metrics.keys() - COMPUTED.keys():
            names = ", ".join(sorted(unknown))
            raise UsageError(f"`loss` returns {names}, for which a gradient of A3C has no place: see COMPUTED")
        loss.backward()  # type: ignore[no-untyped-call]
        gathered = RunningStatistics(self.model, self.config.normalize_returns)
        gathered.gather(batch, [(target, batch.valid)])
        gathered.settle()
        computed = row_of({name: metrics[name] for name in COMPUTED}).numpy()
        figures: Array = np.concatenate((computed, gathered.to_array()), dtype=np.float64)
        return figures

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the objective of a trajectory, to be minimized: means over valid steps.

            R_t = r_t + gamma R_(t+1), from the value of the last state;    A_t = R_t - V(s_t)
            L   = - mean log pi(a_t|s_t) A_t  +  c_v mean (V(s_t) - R_t)^2  -  c_e mean entropy

        Returns:
            Scalar loss, value targets [T, B] in units of return, and metrics: name -> scalar.

        Source: Mnih et al. 2016, arXiv:1602.01783, algorithm S3 and section 4; with `--gae_lambda` below 1, advantages
        of Schulman et al. 2016, arXiv:1506.02438, eq. 16.
        """
        c, model, valid = self.config, self.model, batch.valid
        logits, value = model.unroll(batch.obs, batch.first, batch.rnn_state, c.segment_steps)
        mask = batch.obs[MASK_KEY][:-1].flatten(2) > 0 if self.masked else None
        policy = ActionDistribution(self.parts, logits, mask)
        log_prob = policy.log_prob(losses.zero_invalid(batch.action, valid))  # invalid steps may hold any action
        worth = model.denormalize_value(value.detach())
        advantage, target = gae(value=worth, gamma=c.gamma, gae_lambda=c.gae_lambda, **batch.signals())
        advantage = advantage / model.return_std
        terms = {
            "policy_loss": -log_prob * advantage,
            "value_loss": (value[:-1] - model.normalize_value(target)).square(),
            "entropy": policy.entropy(),
            "value_mean": worth[:-1],
        }
        means = losses.masked_means(terms, valid)
        loss = means["policy_loss"] + c.value_loss_coeff * means["value_loss"]
        loss = loss - c.exploration_loss_coeff * means["entropy"]
        _, std = losses.masked_mean_and_std(advantage, valid)
        acted = torch.stack((batch.recorded["log_prob"], batch.recorded["value"]))
        again = torch.stack((log_prob.detach(), worth[:-1]))
        error = ((again - acted).abs() / (1 + acted.abs())).masked_fill(~valid, 0.0).max()
        return loss, target, {"loss": loss, **means, "advantage_std": std, "reproduction_error": error}


class A3CLearner(FlatLearner):
    """Applies gradients one by one in the order of arrival, to weights that all actors share.

    Attributes:
        version, updates: number of published weight sets, counted from 1, and of optimizer steps.
    """

    config: A3CConfig

    def __init__(self, flat: FlatModule, context: Context) -> None:
        config: A3CConfig = context.flags
        weights = flat.flat[: flat.num_parameters]
        optimizer = FlatRMSProp(weights, config) if config.optimizer == "rmsprop" else FlatAdam(weights, config)
        super().__init__(flat, context, optimizer, normalize_returns=config.normalize_returns)
        self._num_statistics = len(self.statistics.to_array())
        self._idle_since: float | None = None

    def learn(self, batch: Batch, progress: float) -> Iterator[None]:
        """Apply one gradient; yield when the weights can be published.

        Args:
            batch: entry of the ring, see `GradientRing.apply`.
            progress: share of the training budget used before the batch, in [0, 1]; drives the linear schedule.
        """
        taken = time.perf_counter()
        waited = 0.0 if self._idle_since is None else taken - self._idle_since
        figures = batch.recorded[FIGURES].numpy()
        computed, gathered = figures[: len(COMPUTED)], figures[len(COMPUTED) :][: self._num_statistics]
        self.follow(progress)
        self.optimizer.gradient.copy_(batch.recorded[GRADIENT][: self.flat.num_parameters])
        self.optimizer.note_rate()
        is_finite = bool(np.isfinite(dict(zip(COMPUTED, computed, strict=True))[LOSS]))
        norm, lost = self.optimizer.step(torch.tensor(True), torch.tensor(is_finite), torch.zeros(()))
        self.statistics.merge(gathered)
        self.updates, self.version = self.updates + 1, self.version + 1
        applied = time.perf_counter()
        yield
        self._idle_since = time.perf_counter()
        stepped = [float(x) for x in (norm, self.optimizer.learning_rate, lost)]
        milliseconds = {
            "wait_ms": 1000 * waited,
            "apply_ms": 1000 * (applied - taken),
            "dispatch_ms": 1000 * (self._idle_since - applied),
        }
        values = torch.tensor((*computed, *stepped, *milliseconds.values()), dtype=torch.float64)
        self.add_metrics((*COMPUTED, *STEP_METRICS, *milliseconds), values)
        self._metric_count += 1

    def metrics(self) -> dict[str, float]:
        """Return means over at least `--grads_per_step` gradients since the last report; {} with fewer gradients."""
        return super().metrics() if self._metric_count >= self.config.grads_per_step else {}
