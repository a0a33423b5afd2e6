"""The Ape-X learner: n-step double Q-learning with a target network on batches drawn from a replay.

`ApexLearner.loss` is the algorithm, `ApexLearner.learn` the step. The module is independent of processes.
"""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from appo.algorithms.apex.config import ApexConfig
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.models.q_network import QNetwork
from appo.algorithms.ops import losses, q_learning
from appo.algorithms.parts.learner import FlatLearner, Metrics
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.learning.batches import Batch, Feedback

TARGET = "target"
"""Name of the vector in a state that holds the weights of the target network."""


class ApexLearner(FlatLearner):
    """Trains one policy.

    Attributes:
        version, updates: number of published weight sets, counted from 1, and of optimizer steps.
        target: network that estimates the return after n steps.
        quick: faster equivalent of `differentiate`, or None.
    """

    config: ApexConfig
    quick: Callable[[Batch, float], tuple[Tensor, Metrics]] | None

    def __init__(self, flat: FlatModule, context: Context) -> None:
        assert isinstance(flat.module, QNetwork)
        super().__init__(flat, context)
        self.model = flat.module
        self.target = FlatModule(copy.deepcopy(flat.module).requires_grad_(False))
        self.further[TARGET] = self.target.flat

    def learn(self, batch: Batch, progress: float) -> Iterator[Feedback]:
        """Make one optimizer step; yield the absolute errors [T, B] of the batch, and the flags in use.

        `--max_weight_sync_delay` limits how often the version is raised, and so how often weights are published.

        Args:
            batch: batch of a `ReplaySource`, on the device of the model.
            progress: used share of the training budget, in [0, 1]; drives schedules.
        """
        c = self.config
        self.follow(progress)
        error, metrics = (self.quick or self.differentiate)(batch, self.beta(progress))
        self.step(error >= 0, metrics)
        self.statistics.update(batch, [])
        self.count_update()
        if self.updates % c.target_update_interval == 0:
            self.target.flat.copy_(self.flat.flat)
        if self.updates % c.updates_per_version == 0:
            self.version += 1
        yield {"priority": error.cpu().numpy(), "flags": c}

    def differentiate(self, batch: Batch, beta: float) -> tuple[Tensor, Metrics]:
        """Set the gradient of a batch; return the errors and metrics of `loss`."""
        self.optimizer.gradient.zero_()
        loss, error, metrics = self.loss(batch, beta)
        loss.backward()  # type: ignore[no-untyped-call]
        return error, metrics

    def beta(self, progress: float) -> float:
        """Return the exponent of importance weights; `progress` is the used share of the budget, in [0, 1]."""
        return self.config.beta(progress)

    def loss(self, batch: Batch, beta: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the loss, the mean over branches of absolute errors [T, B], and metrics: name -> scalar.

        The error of a step without a loss is -1.

        With `--cql_alpha` the loss of a step is the squared or Huber loss + alpha (log sum_a exp Q(s, a) - Q(s, a_t)).

        Source: Horgan et al. 2018, arXiv:1803.00933, eq. 1; weights Schaul et al. 2016, arXiv:1511.05952, section 3.4;
            the second term Kumar et al. 2020, arXiv:2006.04779, eq. 4.
        """
        q, target = self._sequences(batch) if self.config.batch_replay else self._steps(batch)
        value = q_learning.taken(q, batch.action, self.model.sizes)  # [T, B, K]
        difference = target.unsqueeze(-1) - value
        weight = batch.recorded["weight"] ** beta
        loss = q_learning.td_loss(difference, huber=self.config.huber_loss).mean(-1)
        gap = torch.zeros_like(loss)
        if alpha := self.config.cql_alpha:
            allowed = self.model.allowed({key: x[: len(q)] for key, x in batch.obs.items()}, 2)
            gap = q_learning.conservative_gap(q_learning.allowed_only(q, allowed), value, self.model.sizes)
            loss = loss + alpha * gap
        error = difference.detach().abs().mean(-1)
        learnable = batch.valid  # of a column, steps after the burn-in or after a reset
        if self.config.batch_replay and self.config.burn_in:
            is_late = torch.arange(len(learnable), device=learnable.device) >= self.config.burn_in
            learnable = learnable & (is_late.unsqueeze(1) | (batch.first[:-1].cumsum(0) > 0))
        terms = {
            "loss": weight * loss,
            "td_error": error,
            "q_mean": value.detach().mean(-1),
            "target_mean": target,
            "weight_mean": weight.expand_as(error),
            "conservative_gap": gap.detach(),
        }
        means = losses.masked_means(terms, learnable)
        # Errors become priorities, which must be finite.
        return means["loss"], torch.where(learnable, error.nan_to_num(nan=0.0, posinf=0.0), -1.0), means

    def _steps(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return Q [1, B, L] and targets [1, B] of single steps, in units of the network.

        A step has two observations: of the step, and of the state after n steps.
        """
        now, later = ({key: x[i] for key, x in batch.obs.items()} for i in (0, 1))
        (first, first_later), state = batch.first, batch.rnn_state[0]
        q = self.model.q_values(now, first, state)[0].unsqueeze(0)
        with torch.no_grad():
            assert isinstance(self.target.module, QNetwork)
            target_q = self.target.module.q_values(later, first_later, state)[0]
            online_q = self.model.q_values(later, first_later, state)[0] if self.config.double_q else None
            target = self._target(batch, self._bootstrap(later, target_q, online_q).unsqueeze(0))
        return q, target

    def _sequences(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return Q [T, B, L] and targets [T, B] of whole columns, in units of the network.

        Both networks start from the stored state of the acting network (Kapturowski et al. 2019, R2D2, section 3).
        """
        arguments = batch.obs, batch.first, batch.rnn_state[:1]
        q = self.model.unroll_all(*arguments)  # [T+1, B, L]
        with torch.no_grad():
            assert isinstance(self.target.module, QNetwork)
            target_q = self.target.module.unroll_all(*arguments)
            value = self._bootstrap(batch.obs, target_q, q.detach() if self.config.double_q else None)
            length = batch.recorded["length"]
            later = torch.arange(len(length), device=length.device).unsqueeze(1) + length
            target = self._target(batch, value.gather(0, later))
        return q[:-1], target  # outside of no_grad, where a view would have no gradient

    def _bootstrap(self, obs: dict[str, Tensor], target_q: Tensor, online_q: Tensor | None) -> Tensor:
        """Return the values [...] of states with Q [..., L], by the best allowed actions."""
        mask = self.model.allowed(obs, target_q.dim() - 1)
        online_q = online_q if online_q is None else q_learning.allowed_only(online_q, mask)
        return q_learning.bootstrap_value(q_learning.allowed_only(target_q, mask), online_q, self.model.sizes)

    def _target(self, batch: Batch, value: Tensor) -> Tensor:
        discount = batch.recorded["discount"]
        return q_learning.n_step_target(batch.reward, discount, value, rescaled=self.config.value_rescaling)
