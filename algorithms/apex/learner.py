"""The Ape-X learner: n-step double Q-learning with a target network on batches drawn from a replay.

`ApexLearner.loss` is the algorithm and `ApexLearner.learn` its step; nothing here knows a process.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from algorithms.apex.config import METRICS, ApexConfig
from algorithms.models.flat_module import FlatModule, split
from algorithms.models.q_network import QNetwork
from algorithms.ops import q_learning
from algorithms.parts.optimizer import FlatAdam, adam_layout
from algorithms.parts.statistics import STATISTICS, RunningStatistics
from algorithms.runtime.learning.batches import Batch, Feedback
from algorithms.runtime.learning.rollback import SKIPPED_IN_A_ROW
from algorithms.runtime.memory.arena import Array
from algorithms.runtime.memory.learner_state import WEIGHTS, LearnerState, StateLayout, Vector, empty_vectors
from envs.spec import MASK_KEY

NAMES = tuple(METRICS)

TARGET = "target"
"""Name of the vector in a state that holds the weights of the target network."""


class ApexLearner:
    """Trains one policy.

    Args:
        flat: the Q-network with all its weights in one vector, on its device.
        config: the learning flags.

    Attributes:
        version, updates: published weight sets, counted from 1, and optimizer steps so far.
        target: the network whose values stand in for what comes after n steps.
    """

    def __init__(self, flat: FlatModule, config: ApexConfig) -> None:
        assert isinstance(flat.module, QNetwork)
        self.flat, self.model, self.config = flat, flat.module, config
        self.version, self.updates = 1, 0
        self.target = FlatModule(copy.deepcopy(flat.module).requires_grad_(False))
        self.statistics = RunningStatistics(self.model, normalize_returns=False)
        self.optimizer = FlatAdam(flat.flat[: flat.num_parameters], config)
        views = split(self.optimizer.gradient, flat.parameter_table)
        for parameter, view in zip(self.model.parameters(), views, strict=True):
            parameter.grad = view
        self._metric_sum, self._metric_count = torch.zeros(len(NAMES), device=flat.flat.device), 0

    def configure(self, config: ApexConfig) -> None:
        """Follow other flags from now on, between two batches."""
        self.config = config
        self.optimizer.configure(config)

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
        norm, skipped = self.optimizer.step(loss.detach().isfinite(), torch.zeros_like(loss.detach()))
        self._metric_sum += torch.cat((metrics, torch.stack((norm, self.optimizer.learning_rate, skipped))))
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
        vectors[TARGET][:] = self.target.flat.cpu().numpy()
        self.optimizer.save(vectors)
        vectors[STATISTICS][:] = self.statistics.to_array()
        return LearnerState(vectors, {"version": self.version, "updates": self.updates, **self.optimizer.meta()})

    def restore(self, state: LearnerState) -> None:
        """Continue from a state; the version is the caller's to raise.

        Raises:
            ValueError: the state belongs to another model.
        """
        if len(state.weights) != len(self.flat.flat):
            raise ValueError(f"the state has {len(state.weights)} weights, the model {len(self.flat.flat)}")
        self.flat.flat.copy_(torch.from_numpy(state.weights))
        self.target.flat.copy_(torch.from_numpy(state.vectors[TARGET]))
        self.optimizer.restore(state.vectors, state.meta)
        self.statistics.load_array(state.vectors[STATISTICS])
        self.version, self.updates = int(state.meta["version"]), int(state.meta["updates"])


def layout_of(flat: FlatModule, config: ApexConfig) -> StateLayout:
    """Return what the state of a learner of this network holds."""
    assert isinstance(flat.module, QNetwork)
    statistics = RunningStatistics(flat.module, normalize_returns=False)
    others = {TARGET: Vector(len(flat.flat), inherited=True), STATISTICS: statistics.vector}
    return adam_layout(len(flat.flat), config, others)
