"""Other hyperparameters for a learner while it trains."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from algorithms.appo.learner import Learner
from algorithms.runtime.batches import Batch


class Tune:
    """Changes the flags that a learner follows, between two batches.

    Args:
        learner: that changes.
        quick_update: makes what takes the place of its `update`. Numbers are frozen in that: in captured steps, and in
            the choice whether there is a twin in numpy. So it is made anew.
    """

    def __init__(self, learner: Learner, quick_update: Callable[[], Callable[[Batch], Tensor] | None]) -> None:
        self.learner, self._quick_update = learner, quick_update
        learner.quick_update = quick_update()

    def __call__(self, values: Mapping[str, Any]) -> int:
        """Follow these flags and the others as before; the columns of a macro batch then."""
        config = replace(self.learner.config, **values)
        float(self.learner.optimizer.learning_rate)  # waits for steps under way, which still read what they captured
        self.learner.config = config
        self.learner.optimizer.configure(config)
        self.learner.quick_update = self._quick_update()
        return config.macro_batch_columns
