"""The PQN learner: lambda-returns of Q over whole columns, then epochs of regression on shuffled steps.

`PQNLearner.loss` is the algorithm, `PQNLearner.learn` the loop. The module is independent of processes.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.models.q_network import QNetwork
from appo.algorithms.ops import losses, q_learning
from appo.algorithms.ops.returns import gae
from appo.algorithms.parts.learner import FlatLearner
from appo.algorithms.parts.segments import drawn_segments, gather
from appo.algorithms.pqn.config import PQNConfig
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.learning.batches import Batch
from appo.algorithms.runtime.memory.learner_state import LearnerState


class PQNLearner(FlatLearner):
    """Trains one policy.

    An iteration ends with a new version of the weights. Weights between the updates of an iteration never act.

    Args:
        flat: Q-network with all weights in one vector, on the device.
        context: see `FlatLearner`; `generator` draws the order of minibatches.

    Raises:
        UsageError: flags contradict the network or other flags.

    Source: Gallici et al. 2024, arXiv:2407.04811, algorithm 1.
    """

    config: PQNConfig

    def __init__(self, flat: FlatModule, context: Context) -> None:
        assert isinstance(flat.module, QNetwork)
        super().__init__(flat, context)
        self.model = flat.module
        self.config.check(recurrent=self.model.rnn_state_size > 0)
        self._has_learned = False
        self._explore()

    def restore(self, state: LearnerState) -> None:
        """Continue from a state (ValueError); weights of others have the exploration of this run."""
        exploration = self.model.exploration
        assert exploration is not None
        own = float(exploration)
        super().restore(state)
        if not self.updates:
            self._explore()
        elif self._has_learned:
            exploration.fill_(own)

    def _explore(self) -> None:
        assert self.model.exploration is not None
        self.model.exploration.fill_(self.config.exploration(0.0, self.updates))

    def learn(self, batch: Batch, progress: float) -> Iterator[None]:
        """Train on the columns of an iteration; yield after each optimizer step, and after raising the version.

        Args:
            batch: B columns on the device of the model.
            progress: share of the training budget used before the batch, in [0, 1]; drives schedules.
        """
        c, count = self.config, batch.valid.numel() // self.segment_steps
        self.follow(progress)
        exploration, remembers = self.model.exploration, self.model.rnn_state_size > 0
        assert exploration is not None
        self._has_learned = True
        exploration.clamp_(max=c.exploration(progress, self.updates))  # never up again: a budget may grow
        batch = replace(batch, action=losses.zero_invalid(batch.action, batch.valid))
        batch = replace(batch, recorded={"target": self.returns(batch)})
        for drawn in drawn_segments(count, c.batch_size // self.segment_steps, c.ppo_epochs, self.generator):
            segments = drawn.to(batch.valid.device, non_blocking=True)
            minibatch = gather(batch, segments, self.segment_steps, ("target",), remembers=remembers)
            self.optimizer.gradient.zero_()
            loss, metrics = self.loss(minibatch)
            loss.backward()  # type: ignore[no-untyped-call]
            self.step(minibatch.valid, metrics | {"exploration": exploration})
            self.count_update()
            yield
        self.statistics.update(batch, [])  # only now: acting and all epochs must see observations on one scale
        self.version += 1
        yield

    @property
    def segment_steps(self) -> int:
        """Return S, the steps of a segment; minibatches consist of whole segments."""
        return self.config.segment_steps if self.model.rnn_state_size else 1

    @torch.no_grad()
    def returns(self, batch: Batch) -> Tensor:
        """Return the lambda-returns [T, B] by the current network; 0 where a step is not valid.

            G_t = r_t + gamma (lambda G_(t+1) + (1 - lambda) max_a Q(s_(t+1), a))

        A terminated step has the reward alone; after a truncated step, and behind the last step, max_a Q stands in for
        G. The recursion is the recursion of GAE plus V, for V = max_a Q, see `gae`.

        Source: Gallici et al. 2024, arXiv:2407.04811, eq. 5; Peng and Williams 1994.
        """
        c = self.config
        width = max(1, c.batch_size // c.rollout)  # parts need no more memory than training
        parts = [batch.columns(slice(i, i + width)) for i in range(0, batch.valid.shape[1], width)]
        value = torch.cat([self._value(part.obs, part.first, part.rnn_state) for part in parts], dim=1)
        return gae(value=value, gamma=c.gamma, gae_lambda=c.gae_lambda, **batch.signals()).target

    def _value(self, obs: dict[str, Tensor], first: Tensor, rnn_state: Tensor) -> Tensor:
        allowed = q_learning.allowed_only(self.model.unroll_all(obs, first, rnn_state), self.model.allowed(obs, 2))
        return q_learning.bootstrap_value(allowed, None, self.model.sizes)

    def loss(self, m: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return half the mean over valid steps and branches of (G - Q(s, a))^2, and metrics: name -> scalar."""
        if len(m.first) == 1:
            q = self.model.q_values({key: x[0] for key, x in m.obs.items()}, m.first[0], m.rnn_state[0])[0].unsqueeze(0)
        else:
            q = self.model.unroll_all(m.obs, m.first, m.rnn_state)[:-1]
        value = q_learning.taken(q, m.action, self.model.sizes)  # [S, N, K]
        target = m.recorded["target"]
        difference = target.unsqueeze(-1) - value
        terms = {
            "loss": q_learning.td_loss(difference, huber=False).mean(-1),
            "td_error": difference.detach().abs().mean(-1),
            "q_mean": value.detach().mean(-1),
            "target_mean": target,
        }
        means = losses.masked_means(terms, m.valid)
        return means["loss"], means
