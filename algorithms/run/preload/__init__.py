"""Modules that the fork server of a run loads, for its children to share."""

FIRST, LAST = f"{__name__}.first", f"{__name__}.last"
NETWORK = (
    "algorithms.run.build_learner",
    # The algorithms import these only when they make something: each child would load them once more, for itself.
    "algorithms.models.build",
    "algorithms.parts.columns",
    "algorithms.parts.stochastic_policy",
    "algorithms.parts.verify",
    "algorithms.appo.learner",
    "algorithms.appo.numpy_learner",
    "algorithms.ppo.learner",
    "algorithms.ppo.streaming",
    "algorithms.a3c.worker",
    "algorithms.apex.learner",
    "algorithms.apex.policy",
    "algorithms.apex.replay",
)


def preloaded(*, with_torch: bool) -> tuple[str, ...]:
    """Return the modules in the order in which they are loaded."""
    return (FIRST, *(NETWORK if with_torch else ()), LAST)
