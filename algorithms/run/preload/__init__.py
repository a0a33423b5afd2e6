"""Modules that the fork server of a run loads, for its children to share."""

FIRST, LAST = f"{__name__}.first", f"{__name__}.last"
NETWORK = "algorithms.run.build_learner"


def preloaded(*, with_torch: bool) -> tuple[str, ...]:
    """Return the modules in the order in which they are loaded."""
    return (FIRST, *[NETWORK] * with_torch, LAST)
