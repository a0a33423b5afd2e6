"""PPO on batches that are never whole in memory: each microbatch adds a gradient, and is dropped.

An iteration must be one batch and one epoch, because a microbatch can be used only once. Weights and statistics change
only at the optimizer step: all microbatches of a batch act and are differentiated with equal weights.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from appo.algorithms.ops.losses import explained_share
from appo.algorithms.ops.normalization import Moments, merge_batch, std
from appo.algorithms.parts.config import EXPLAINED
from appo.algorithms.parts.learner import of_learner
from appo.algorithms.parts.optimizer import GradientSum
from appo.algorithms.parts.statistics import faded
from appo.algorithms.ppo.config import PPOConfig
from appo.algorithms.ppo.learner import RATIO_MAX, PPOLearner, cleaned, with_advantages
from appo.algorithms.runtime.learning.batches import Batch
from appo.algorithms.runtime.memory.learner_state import LearnerState


class StreamingLearner:
    """Trains like a `PPOLearner` with iterations of one batch and one epoch, but holds only a microbatch.

    A saved state is the state after the last optimizer step. Microbatches after the step are lost with the process, and
    dropped by `restore`.
    """

    version: int = of_learner("version")
    updates: int = of_learner("updates")
    empty_updates: int = of_learner("empty_updates")

    def __init__(self, learner: PPOLearner) -> None:
        self.learner, self.flat, self.state, self.layout = learner, learner.flat, learner.state, learner.layout
        self.times = _Times(learner.flat.flat.device)
        self._sum = GradientSum(learner.optimizer.gradient, RATIO_MAX)
        self._later: PPOConfig | None = None  # flags from the next batch on
        self.parts = 0
        # Moments of advantages: of all batches, used after the step, and of the current batch.
        self._advantages, self._of_batch = learner.advantages, Moments.empty((), learner.flat.flat.device)
        self._of_values = Moments.empty((2,), learner.flat.flat.device)  # of targets and errors of the batch
        self._drop()

    def learn(self, batch: Batch, progress: float) -> Iterator[None]:
        """Add a microbatch to the gradient; the last microbatch of a batch makes the step and yields like `PPOLearner`.

        Args:
            batch: B columns on the device of the model.
            progress: share of the training budget used before the batch, in [0, 1]; drives linear schedules.
        """
        config = self.learner.config
        if not self.parts:
            self.learner.follow(progress)
        self.times.measure("grad", lambda: self._add(cleaned(batch)))
        self.parts += 1
        if self.parts < config.batch_size // config.microbatch_size:
            return
        metrics = self._sum.finish()
        metrics["advantage_std"] = std(self._of_batch, eps=0.0).float()
        metrics[EXPLAINED] = explained_share(*self._of_values.m2.unbind())
        if not self.learner.stops_before(self._sum.num_valid, metrics):
            self.times.measure("update", lambda: self.learner.descend_by(self._sum.num_valid, metrics))
            self.learner.optimizer.adapt(end_of_epoch=True)
            yield
        self.learner.statistics.apply()
        self.learner.advantages = faded(self._advantages)
        self._drop()
        self.learner.version += 1
        self.times.end_batch(config.batch_size)
        yield

    def configure(self, config: PPOConfig) -> None:
        """Follow new flags from the next batch on: all microbatches of a batch use one loss."""
        if self.parts:
            self._later = config
        else:
            self.learner.configure(config)

    def metrics(self) -> dict[str, float]:
        """Return the learner's means since the last call, and the times of the parts of a batch."""
        metrics = self.learner.metrics()
        return metrics | self.times.take() if metrics else {}

    def restore(self, state: LearnerState) -> None:
        """Continue from a state, and drop the gradient so far; the source must begin a batch too.

        Raises:
            ValueError: the state belongs to another model.
        """
        self.learner.restore(state)
        self._drop()

    def _add(self, batch: Batch) -> None:
        """Add a microbatch to gradient, moments and statistics."""
        learner = self.learner
        advantage, target = learner.returns(batch)
        self._advantages = with_advantages(self._advantages, advantage, batch.valid)
        batch = replace(batch, recorded=batch.recorded | {"advantage": learner.scaled(advantage), "target": target})
        segments = torch.arange(batch.valid.numel() // learner.segment_steps, device=batch.valid.device)
        part = learner.minibatch(batch, segments)
        self._of_batch = with_advantages(self._of_batch, part.recorded["advantage"], part.valid)
        goal = part.recorded["target"]
        values = torch.stack((goal, goal - part.recorded["value"]), dim=-1).flatten(0, 1)
        self._of_values = merge_batch(self._of_values, values, part.valid.flatten())
        self._sum.add(part.valid, *learner.loss(part))
        learner.statistics.gather(batch, [(target, batch.valid)])

    def _drop(self) -> None:
        """Begin a batch, with empty sums and moments."""
        self.parts = 0
        self._sum.clear()
        self.learner.statistics.drop()
        self._advantages, self._of_batch = self.learner.advantages, Moments.empty((), self.flat.flat.device)
        self._of_values = Moments.empty((2,), self.flat.flat.device)
        if self._later is not None:
            self.learner.configure(self._later)
            self._later = None


class _Times:
    """Times of a batch: gradients, optimizer step, and the rest, when the learner waits for samples.

    Args:
        device: measured device; on a GPU, events in the queue measure without a wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._ended: float | None = None
        self._begin()

    def measure(self, name: str, function: Callable[[], None]) -> None:
        """Call a function, and add the time to the sum of the name."""
        if self._on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            function()
            end.record()
            self._events.append((name, begin, end))
            return
        began = time.perf_counter()
        function()
        self._seconds[name] += time.perf_counter() - began

    def end_batch(self, samples: int) -> None:
        """Note the end of a batch; the time of the first batch is unknown."""
        now = time.perf_counter()
        if self._ended is None:
            self._begin()
        else:
            self._wall += now - self._ended
            self._batches += 1
            self._samples += samples
        self._ended = now

    def take(self) -> dict[str, float]:
        """Return means per batch and peak throughputs since the last call; waits for the device."""
        if not self._batches:
            return {}
        for name, begin, end in self._events:
            end.synchronize()
            self._seconds[name] += begin.elapsed_time(end) / 1e3
        grad, update = self._seconds["grad"], self._seconds["update"]
        sample = max(0.0, self._wall - grad - update)
        found = {
            "sample_seconds": sample / self._batches,
            "grad_seconds": grad / self._batches,
            "update_seconds": update / self._batches,
            "sample_peak_per_second": self._samples / max(sample, 1e-9),
            "train_peak_per_second": self._samples / max(grad + update, 1e-9),
        }
        self._begin()
        return found

    def _begin(self) -> None:
        self._seconds = {"grad": 0.0, "update": 0.0}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._wall, self._batches, self._samples = 0.0, 0, 0
