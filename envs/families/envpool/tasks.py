"""Names of envpool's environments."""

import functools

FRAMES_PER_SECOND = {"envpool.atari": 60, "envpool.vizdoom": 35}
"""Modules of games with a count of frames -> frames per second."""


@functools.cache
def task_modules() -> dict[str, str]:
    """Return task -> module of envpool."""
    from envpool.registration import registry

    return {task: spec[0] for task, spec in registry.specs.items()}


def counts_frames(task: str) -> bool:
    """Return whether the task is a game with a count of frames."""
    return task_modules()[task] in FRAMES_PER_SECOND
