"""The legs of a run with --deterministic_resume: every checkpoint ends one, and the next begins like a later start."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

from algorithms.appo.blueprint import Blueprint
from algorithms.appo.starting import seed_of_leg
from algorithms.runtime.arena import Arena
from algorithms.runtime.runner import Workers
from algorithms.runtime.state_block import LearnerState, StateBlock
from utils.errors import NumericsError


class Legs:
    """Divides a run of one policy at fixed numbers of env steps.

    A leg begins with the learner's state alone, as a start does that resumes: memory is empty, workers and environments
    are new, and the seeds of all of them follow from the run's and the env steps in the state. So it makes no
    difference whether the state came from disk or from the leg before.

    Args:
        blueprint: of the run.
        arena: its memory.
        block: of its policy; holds the state to go on from, if there is one.
        make_workers: those of a blueprint.

    Attributes:
        end: env steps after which the present leg is over.
    """

    def __init__(
        self, blueprint: Blueprint, arena: Arena, block: StateBlock, make_workers: Callable[[Blueprint], Workers]
    ) -> None:
        self._blueprint, self._arena, self._block, self._make_workers = blueprint, arena, block, make_workers
        self._every = blueprint.config.run.save_every_env_steps
        self.end = 0

    @classmethod
    def of(cls, blueprint: Blueprint, *parts: Any) -> Self | None:
        """Those of the run of a blueprint, if it has any; the other arguments are those of the constructor."""
        return cls(blueprint, *parts) if blueprint.config.run.deterministic_resume else None

    def begin(self) -> Workers:
        """The workers of the leg that goes on from the state in the block, not started yet."""
        env_steps = env_steps_of(self._block.read())
        self.end = (env_steps // self._every + 1) * self._every
        seed = seed_of_leg(self._blueprint.seed, env_steps)
        return self._make_workers(replace(self._blueprint, seed=seed, pause_env_steps=self.end))

    def next(self) -> Workers:
        """The workers of the next leg, when those of the last one have ended.

        Raises:
            NumericsError: the last one has no state to go on from.
        """
        state = self._block.read()
        if state is None or env_steps_of(state) < self.end:
            raise NumericsError(f"the learner's state at {self.end} env steps is not finite, or was not saved")
        self._arena.clear()
        gc.collect()  # networks of the last leg, if they lived in this process
        self._block.write(state)
        return self.begin()


def env_steps_of(state: LearnerState | None) -> int:
    """Env steps learned from, 0 before the first."""
    return 0 if state is None else int(state.meta["env_steps"])
