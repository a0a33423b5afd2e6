"""A check of the whole data path: with a learning rate of 0 the learner must reproduce the acting policy's numbers.

The check covers everything between acting and learning: rows and columns, resets, recurrent state, masks,
normalization, weights. It finds a custom model with different `act` and `unroll` within a minute.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from appo.algorithms.models.actor_critic import ActorCritic
from appo.algorithms.ops.distributions import ActionDistribution
from appo.algorithms.ops.losses import zero_invalid
from appo.algorithms.parts.learner import of_learner
from appo.algorithms.runtime.learning.batches import Batch, Feedback
from appo.algorithms.runtime.learning.learner_worker import Learner
from appo.envs.spec import MASK_KEY, EnvSpec

LARGEST = torch.finfo(torch.float32).max


class VerifyingLearner:
    """A learner that compares recorded with recomputed values before training on a batch.

    Compared are values, and logits if recorded, otherwise the log-probability of the action. Running statistics are
    published with a version and change while the weights do not; each step is recomputed with those of the acting
    version.

    Args:
        learner: compared learner, of an actor-critic.
        spec: spaces of the environment.
        max_policy_lag: lag, in versions, from which a column is discarded.
    """

    version: int = of_learner("version")
    updates: int = of_learner("updates")
    empty_updates: int = of_learner("empty_updates")

    def __init__(self, learner: Learner, spec: EnvSpec, max_policy_lag: int) -> None:
        assert isinstance(learner.flat.module, ActorCritic)
        self.learner, self.flat, self.model, self.spec = learner, learner.flat, learner.flat.module, spec
        self.max_policy_lag = max_policy_lag
        self.configure, self.state, self.restore = learner.configure, learner.state, learner.restore
        self.layout = learner.layout
        self.published: dict[int, Tensor] = {}
        self._began = 0  # version at the beginning of the last batch
        self.largest = 0.0
        self.compared = 0

    def learn(self, batch: Batch, progress: float) -> Iterator[Feedback | None]:
        """Compare, then train."""
        self._remember()
        # The columns of a batch are chosen by their lag while the learner trains on the batch before.
        for version in [version for version in self.published if self._began - version >= self.max_policy_lag]:
            del self.published[version]
        self._began = self.version
        self.compare(batch)
        for feedback in self.learner.learn(batch, progress):
            self._remember()
            yield feedback

    def metrics(self) -> dict[str, float]:
        """Return the learner's metrics, the largest |difference| / (1 + |value|), and the number of compared steps."""
        checked = {"reproduction_error": self.largest, "reproduction_steps": float(self.compared)}
        return self.learner.metrics() | checked

    @torch.no_grad()
    def compare(self, batch: Batch) -> None:
        """Recompute every step of a batch [T, B], observations scaled by the statistics of the acting version."""
        now, model = self.flat.flat.clone(), self.model
        obs = {key: batch.obs[key].flatten(0, 1) for key in model.keys}
        unscaled = [key for key in model.keys_scaled_later if not model.scaling_of(key).running]  # until in the network
        scaled = model.scaled(obs) | {key: obs[key] for key in unscaled}
        try:
            for version in torch.unique(batch.policy_version[batch.valid]).tolist():
                self.flat.flat.copy_(self.published[version])
                acted = batch.policy_version == version
                rows = torch.cat((acted, acted[-1:])).flatten()  # the bootstrap observation is compared with nothing
                for key, value in model.scaled(obs).items():
                    if key not in unscaled:
                        scaled[key][rows] = value[rows]
            logits, value = model.unroll_scaled(scaled, batch.first, batch.rnn_state)
            value = model.denormalize_value(value)
        finally:
            self.flat.flat.copy_(now)
        if "logits" in batch.recorded:
            self._record(logits, batch.recorded["logits"], batch.valid)
        else:
            mask = batch.obs[MASK_KEY][:-1].flatten(2) > 0 if MASK_KEY in batch.obs else None
            action = zero_invalid(batch.action, batch.valid)
            log_prob = ActionDistribution(self.spec.action.parts, logits, mask).log_prob(action)
            self._record(log_prob, batch.recorded["log_prob"], batch.valid)
        self._record(value[:-1], batch.recorded["value"], batch.valid)
        self.compared += int(batch.valid.sum())

    def _record(self, mine: Tensor, stored: Tensor, valid: Tensor) -> None:
        difference = ((mine - stored).abs() / (1 + stored.abs()))[valid]
        # No comparison with NaN is true, so it would count as no difference.
        self.largest = max(self.largest, float(difference.nan_to_num(nan=LARGEST, posinf=LARGEST).max()))

    def _remember(self) -> None:
        self.published[self.version] = self.flat.flat.clone()
