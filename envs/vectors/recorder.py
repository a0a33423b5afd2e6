"""Records the calls of a vector of environments, and how they end."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from appo.envs.conversion import failure_of
from appo.envs.journal import NOBODY, Journal
from appo.envs.loop.env_set import OnFailure
from appo.envs.spec import Array


class VectorRecorder:
    """Context around the code of a vector; an error inside is raised as a failure of the environment.

    Args:
        name: name of the environment in messages.
        on_failure: record of the steps before a failure, and memory that outlives the process.
    """

    def __init__(self, name: str, on_failure: OnFailure) -> None:
        memory = on_failure.memory
        self._name, self._incidents = name, on_failure.incidents
        self._journal = Journal(len(memory.begun), memory, together=True) if memory else None

    def making(self) -> Self:
        """Enter the construction of the vector."""
        if self._journal is not None:
            self._journal.place = "init"
        return self

    def resetting(self, seeds: Sequence[int]) -> Self:
        """Enter the first reset of all environments."""
        if self._journal is not None:
            for index, seed in enumerate(seeds):
                self._journal.begins(index, int(seed), None)
        return self

    def stepping(self, action: Array) -> Self:
        """Enter a step with action [R, A]."""
        if self._journal is not None:
            self._journal.add(action)
        return self

    def closes(self) -> None:
        """Note that `close` comes next, the last call of the vector."""
        if self._journal is not None:
            self._journal.enters(0, "close")

    def __enter__(self) -> Self:
        if self._journal is not None:
            self._journal.inside[0] = 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        failure = None if error is None else failure_of(self._name, error)
        if failure is not None:
            if self._journal is not None and self._incidents is not None:
                self._incidents.write(-1, failure, self._journal.story_of_all())
            if failure is not error:
                raise failure
        if self._journal is not None:
            self._journal.enters(NOBODY, "step")
