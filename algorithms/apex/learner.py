"""The Ape-X learner: n-step double Q-learning with a target network on batches drawn from a replay.

`ApexLearner.loss` is the algorithm and `ApexLearner.learn` its step; nothing here knows a process.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from algorithms.apex.config import METRICS, ApexConfig
from algorithms.models.flat_module import FlatModule
from algorithms.models.q_network import QNetwork
from algorithms.ops import q_learning
from algorithms.parts.config import STEP_METRICS
from algorithms.parts.learner import FlatLearner
from algorithms.parts.optimizer import adam_of
from algorithms.runtime.learning.batches import Batch, Feedback
from envs.spec import MASK_KEY

NAMES = tuple(METRICS)

TARGET = "target"
"""Name of the vector in a state that holds the weights of the target network."""


class ApexLearner(FlatLearner):
    """Trains one policy.

    Args:
        flat: the Q-network with all its weights in one vector, on its device.
        config: the learning flags.

    Attributes:
        version, updates: published weight sets, counted from 1, and optimizer steps so far.
        target: the network whose values stand in for what comes after n steps.
    """

    names = NAMES
    config: ApexConfig

    def __init__(self, flat: FlatModule, config: ApexConfig) -> None:
        assert isinstance(flat.module, QNetwork)
        super().__init__(flat, config, adam_of(flat, config), normalize_returns=False)
        self.model = flat.module
        self.target = FlatModule(copy.deepcopy(flat.module).requires_grad_(False))
        self.further = {TARGET: self.target.flat}

    def learn(self, batch: Batch, progress: float) -> Iterator[Feedback]:
        """Make one optimizer step; yields the absolute errors of the batch, which are its priorities.

        The version is raised, and so weights are published, only as often as `--max_weight_sync_delay` says.

        Args:
            batch: B steps on the device of the model: observations [2, B, *] of the step and of the state after n,
                n-step rewards [1, B], and "discount" and "weight" [1, B] among what is recorded.
            progress: share of the training budget used up, in [0, 1]; drives schedules.
        """
        self.optimizer.follow(progress)
        self.optimizer.gradient.zero_()
        loss, error, metrics = self.loss(batch, self.beta(progress))
        loss.backward()  # type: ignore[no-untyped-call]
        self.step(batch.valid, torch.cat((metrics, metrics.new_zeros(len(STEP_METRICS)))))
        self._metric_count += 1
        self.statistics.update(batch, [])
        self.updates += 1
        if self.updates % self.config.target_update_interval == 0:
            self.target.flat.copy_(self.flat.flat)
        if self.updates % self.config.updates_per_publication == 0:
            self.version += 1
        # An error that is not finite must not decide what is drawn.
        yield {"priority": error.nan_to_num(nan=0.0, posinf=0.0).cpu().numpy()}

    def beta(self, progress: float) -> float:
        """Return the exponent of importance weights when this share of the budget is used up."""
        c = self.config
        return c.priority_beta + min(1.0, progress) * (c.priority_beta_final - c.priority_beta)

    def loss(self, batch: Batch, beta: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, the mean over branches of absolute errors [B], and the first of `NAMES`.

        Source: Horgan et al. 2018, arXiv:1803.00933, eq. 1; weights Schaul et al. 2016, arXiv:1511.05952, section 3.4.
        """
        q, _, _ = self.model.act({key: x[0] for key, x in batch.obs.items()}, batch.first[0], batch.rnn_state[0])
        value = q_learning.taken(q, batch.action[0], self.model.sizes)  # [B, K]
        target = self.targets(batch)
        difference = target.unsqueeze(-1) - value
        weight = batch.recorded["weight"][0] ** beta
        loss = (weight * q_learning.td_loss(difference, huber=self.config.huber_loss).mean(-1)).mean()
        error = difference.detach().abs().mean(-1)
        means = torch.stack((loss.detach(), error.mean(), value.detach().mean(), target.mean(), weight.mean()))
        return loss, error, means

    @torch.no_grad()
    def targets(self, batch: Batch) -> Tensor:
        """Return the targets [B] of a batch, in units of the network."""
        obs, first, state = {key: x[1] for key, x in batch.obs.items()}, batch.first[1], batch.rnn_state[0]
        mask = obs[MASK_KEY].flatten(1) > 0 if MASK_KEY in obs else None
        assert isinstance(self.target.module, QNetwork)
        target_q = q_learning.allowed_only(self.target.module.act(obs, first, state)[0], mask)
        online_q = None
        if self.config.double_q:
            online_q = q_learning.allowed_only(self.model.act(obs, first, state)[0], mask)
        value = q_learning.bootstrap_value(target_q, online_q, self.model.sizes)
        discount = batch.recorded["discount"][0]
        return q_learning.n_step_target(batch.reward[0], discount, value, rescaled=self.config.value_rescaling)
