"""A check of the whole data path: with a learning rate of 0 the learner must reproduce what the acting policy computed.

Everything between acting and learning is in it: rows and columns, resets, recurrent state, masks, normalization,
weights. A custom model whose `act` and `unroll` disagree is found by it in a minute.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from algorithms.appo.config import LearningConfig
from algorithms.appo.learner import Learner
from algorithms.runtime.batches import Batch
from algorithms.runtime.flat_module import FlatModule
from envs.spec import EnvSpec


class VerifyingLearner(Learner):
    """Compares, before it trains on a batch, behaviour logits and values with its own.

    Running statistics are part of what is published with a version. The weights do not change, the statistics do; so
    each step is recomputed with those of the version that acted.
    """

    def __init__(self, flat: FlatModule, spec: EnvSpec, config: LearningConfig, seed: int) -> None:
        super().__init__(flat, spec, config, seed)
        self.published: dict[int, Tensor] = {}
        self.largest = 0.0
        self.compared = 0

    def learn(self, batch: Batch, progress: float) -> Iterator[None]:
        """As `Learner.learn`, after the comparison."""
        self._remember()
        self.compare(batch)
        for _ in super().learn(batch, progress):
            self._remember()
            yield

    def metrics(self) -> dict[str, float]:
        """As `Learner.metrics`, with the largest |difference| / (1 + |value|) so far and the steps compared."""
        checked = {"reproduction_error": self.largest, "reproduction_steps": float(self.compared)}
        return super().metrics() | checked

    @torch.no_grad()
    def compare(self, batch: Batch) -> None:
        """Recompute every step of a batch [T, B] by the version that acted."""
        now = self.flat.flat.clone()
        versions = torch.unique(batch.policy_version[batch.valid])
        try:
            for version in versions.tolist():
                self.flat.flat.copy_(self.published[version])
                self._compare(batch, batch.valid & (batch.policy_version == version), versions)
        finally:
            self.flat.flat.copy_(now)

    def _compare(self, batch: Batch, acted: Tensor, versions: Tensor) -> None:
        # A recurrent state that several versions built is not that of any one of them: such columns are left out.
        if self.model.rnn_state_size and len(versions) > 1:
            version = batch.policy_version
            same = ((version == version[:1]) | ~batch.valid).all(dim=0)
            acted = acted & same
        policy, value = self._unroll(batch)
        pairs = (
            (policy.logits, batch.behavior_logits),
            (self.model.denormalize_value(value[:-1]), batch.behavior_value),
        )
        for mine, stored in pairs:
            difference = ((mine - stored).abs() / (1 + stored.abs()))[acted]
            if difference.numel():
                self.largest = max(self.largest, float(difference.max()))
        self.compared += int(acted.sum())

    def _remember(self) -> None:
        self.published[self.version] = self.flat.flat.clone()
