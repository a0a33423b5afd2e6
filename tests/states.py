"""States of learners that train with Adam, written as one array."""

from typing import Any

import numpy as np

from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.learner_state import LearnerState, StateLayout, Vector

NAMES = ("weights", "exp_avg", "exp_avg_sq")


def adam_layout(size: int, statistics: int = 0, learning_rate: float = 1e-4) -> StateLayout:
    """P weights, both moments, and K running statistics."""
    vectors = {name: Vector(size, inherited=name == "weights") for name in NAMES}
    vectors |= {"statistics": Vector(statistics, "float64", inherited=True)}
    return StateLayout(vectors, {"adam_steps": 0.0, "learning_rate": learning_rate})


def adam_state(vectors: Array, statistics: Array, meta: dict[str, Any]) -> LearnerState:
    """The state with these vectors [3, P] and statistics [K]."""
    return LearnerState({**dict(zip(NAMES, vectors, strict=True)), "statistics": statistics}, meta)


def stacked(state: LearnerState) -> Array:
    """Weights and both moments, [3, P]."""
    return np.stack([state.vectors[name] for name in NAMES])
