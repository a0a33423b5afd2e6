"""Modules that the fork server of a run loads for its children."""

FIRST, LAST = f"{__name__}.first", f"{__name__}.last"
NETWORK = (
    "appo.algorithms.run.workers.networks",
    # The algorithms import these only when they make something: each child would load them once more, for itself.
    "appo.algorithms.models.build",
    "appo.algorithms.parts.columns",
    "appo.algorithms.parts.stochastic_policy",
    "appo.algorithms.parts.verify",
    "appo.algorithms.appo.learner",
    "appo.algorithms.appo.numpy_learner",
    "appo.algorithms.ppo.learner",
    "appo.algorithms.ppo.numpy_learner",
    "appo.algorithms.ppo.streaming",
    "appo.algorithms.a3c.worker",
    "appo.algorithms.apex.learner",
    "appo.algorithms.apex.numpy_learner",
    "appo.algorithms.sac.learner",
    "appo.algorithms.sac.quick_gradients",
    "appo.algorithms.sac.policy",
    "appo.algorithms.pqn.learner",
    "appo.algorithms.parts.epsilon_greedy",
    "appo.algorithms.replay.source",
    "appo.algorithms.parts.captured_update",
    "appo.algorithms.run.tuning.network",
)


def preloaded(*, with_torch: bool) -> tuple[str, ...]:
    """Return the modules in the order of loading."""
    return (FIRST, *(NETWORK if with_torch else ()), LAST)
