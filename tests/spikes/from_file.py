"""Behaviour cloning of a recording: a run without actors, whose learner reads a file and minimizes -log pi(a|s).

    appo train --algo=tests.spikes.from_file:Cloning --env=CartPole-v1 --recording=cartpole.npz

The recording holds `obs` [N, *], `first` [N] and `action` [N, A]: N steps in the order in which they were played.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.appo.config import APPOConfig
from appo.algorithms.appo.learner import APPOLearner
from appo.algorithms.ops.losses import masked_mean
from appo.algorithms.parts.config import STEP_METRICS
from appo.algorithms.runtime.learning.batches import Batch
from appo.algorithms.runtime.learning.read_batches import ReadBatches
from appo.algorithms.runtime.memory.ownership import LearnerLedger
from appo.envs.spec import SINGLE_KEY
from appo.utils.flags import flag


class Recording:
    """Columns of T steps of a file, each once per epoch, in an order that the number of the epoch decides."""

    def __init__(self, context: Any, trajectories: Any) -> None:
        with np.load(context.flags.recording, allow_pickle=False) as file:
            self.obs, self.first, self.action = file["obs"], file["first"], file["action"]
        self.rollout, self.spec = context.flags.rollout, context.spec
        self.segments, _, self.state_size = trajectories.rnn_state.shape[1:]

    def read(self, samples: int, columns: int) -> Batch:
        shape, of_epoch = (self.rollout, columns), (len(self.first) - 1) // self.rollout
        epoch, place = divmod(samples // self.rollout, of_epoch)
        epochs = range(epoch, epoch + 1 + (place + columns) // of_epoch)
        order = np.concatenate([np.random.default_rng(e).permutation(of_epoch) for e in epochs])
        steps = np.add.outer(np.arange(self.rollout + 1), order[place : place + columns] * self.rollout)  # [T+1, B]
        arrays = {f"obs.{SINGLE_KEY}": self.obs[steps], "first": self.first[steps], "action": self.action[steps[:-1]]}
        arrays |= {name: np.zeros(shape, bool) for name in ("terminated", "truncated")}
        arrays |= {"valid": np.ones(shape, bool), "num_frames": np.full(shape, self.spec.frames_per_step)}
        arrays |= {"reward": np.zeros(shape, np.float32), "policy_version": np.zeros(shape, np.int64)}
        arrays["rnn_state"] = np.zeros((self.segments, columns, self.state_size), np.float32)
        return Batch.of({name: torch.from_numpy(array) for name, array in arrays.items()})


class CloningLearner(APPOLearner):
    def learn(self, batch: Batch, progress: float) -> Iterator[None]:
        self.follow(progress)
        self.statistics.update(batch, [(self.update(batch), batch.valid)])
        self._metric_count, self.updates, self.version = self._metric_count + 1, self.updates + 1, self.version + 1
        yield

    def loss(self, batch: Batch, whole: Any = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss = -masked_mean(self.unroll(batch)[0].log_prob(batch.action), batch.valid)
        return loss, torch.zeros_like(batch.reward), {"loss": loss}


@dataclass(frozen=True)
class CloningFlags(APPOConfig):
    recording: str = flag("", "npz file of obs, first and action that is learned from")


class Cloning(APPO):
    needs_actors, flags = False, CloningFlags
    metrics = {"loss": "cross entropy of what was done"} | STEP_METRICS

    def learner_class(self) -> type[APPOLearner]:
        return CloningLearner

    def make_source(self, context: Any, trajectories: Any, sampling: Any, device: Any) -> ReadBatches:
        ledger = LearnerLedger(trajectories, context.policy)
        return ReadBatches(Recording(context, trajectories).read, context.flags.macro_batch_columns, ledger)
