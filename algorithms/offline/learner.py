"""Imitation of recorded actions: behaviour cloning, and MARWIL, which imitates good actions more than bad actions.

`CloningLearner.loss` and `MarwilLearner.loss` are the algorithms. The module is independent of processes and files.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.offline.config import CloningConfig, MarwilConfig
from appo.algorithms.ops import losses
from appo.algorithms.ops.returns import gae
from appo.algorithms.parts.learner import ActorCriticLearner
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.learning.batches import Batch

ADVANTAGE_SQUARE = "advantage_square"
"""Name of the vector in a state that holds the running mean square of advantages; 0 before the first batch."""


class CloningLearner(ActorCriticLearner):
    """Learns to repeat the recorded actions, good and bad alike.

    Source: Pomerleau 1991, "Efficient training of artificial neural networks for autonomous navigation"; Bain and
    Sammut 1995, "A framework for behavioural cloning".
    """

    config: CloningConfig

    def learn(self, batch: Batch, progress: float) -> Iterator[None]:
        """Make one optimizer step on a batch; yield when the weights can be published.

        Args:
            batch: B columns on the device of the model.
            progress: share of the training budget used before the batch, in [0, 1]; drives the linear schedule.
        """
        self.follow(progress)
        loss, target, metrics = self.loss(batch)
        self.descend(batch, loss, metrics)
        self.statistics.update(batch, [] if target is None else [(target, batch.valid)])
        yield

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """Return the objective, to be minimized: a mean over valid steps.

            L = - mean log pi(a_t|s_t)

        Returns:
            Scalar loss, value targets [T, B] in units of return (None: no critic is trained), and further metrics:
            name -> scalar.
        """
        policy, _ = self.unroll(batch)
        agrees = (policy.mode() == batch.action).all(dim=-1).float()
        terms = {"loss": -policy.log_prob(batch.action), "entropy": policy.entropy(), "agreement": agrees}
        means = losses.masked_means(terms, batch.valid)
        return means.pop("loss"), None, means


class MarwilLearner(CloningLearner):
    """Learns to repeat recorded actions whose return was above the critic's estimate.

    Source: Wang et al. 2018, "Exponentially weighted imitation learning for batched historical data", NeurIPS,
    algorithm 1.
    """

    config: MarwilConfig

    def __init__(self, flat: FlatModule, context: Context) -> None:
        super().__init__(flat, context)
        self.further[ADVANTAGE_SQUARE] = flat.flat.new_zeros(1, dtype=torch.float64)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """Return the objective, to be minimized: means over valid steps.

            R_t = r_t + gamma R_(t+1), from the value of the state behind the column;     A_t = R_t - V(s_t)
            c^2 = (1 - k) c^2 + k mean A^2
            L   = - mean min(exp(beta A_t / c), w) log pi(a_t|s_t)  +  c_v mean (V(s_t) - R_t)^2

        with `--gae_lambda` below 1 the advantages of Schulman et al. 2016, arXiv:1506.02438, eq. 16.

        Returns:
            Scalar loss, value targets [T, B] in units of return, and further metrics: name -> scalar.
        """
        c, model, valid = self.config, self.model, batch.valid
        policy, value = self.unroll(batch)
        advantage, target = gae(
            value=model.denormalize_value(value.detach()),
            gamma=c.gamma,
            gae_lambda=c.gae_lambda,
            **{name: getattr(batch, name) for name in ("reward", "terminated", "truncated", "valid", "first")},
        )
        square, running = losses.masked_mean(advantage.square(), valid), self.further[ADVANTAGE_SQUARE]
        rate = torch.where(running > 0, torch.full_like(running, c.advantage_norm_rate), 1.0)  # 1: the first batch
        running.lerp_(torch.where(square.isfinite(), square.double(), running), rate)
        norm = running.sqrt().float().clamp(min=1e-3).squeeze(0)  # advantages near 0 are noise, and stay small
        weight = (c.beta * advantage / norm).exp().clamp(max=c.max_weight)
        terms = {
            "policy_loss": -weight * policy.log_prob(batch.action),
            "value_loss": (value[:-1] - model.normalize_value(target)).square(),
            "entropy": policy.entropy(),
            "weight_mean": weight,
        }
        means = losses.masked_means(terms, valid)
        loss = means["policy_loss"] + c.value_loss_coeff * means["value_loss"]
        return loss, target, {**means, "advantage_norm": norm, "weight_max": losses.zero_invalid(weight, valid).max()}
