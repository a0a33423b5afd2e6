"""Rewards and observations that are NaN or infinite, found for the price of a small product per array and step."""

import logging
from math import isfinite
from typing import Any

import numpy as np

from appo.envs.spec import Array, EnvSpec, row_name
from appo.utils.errors import NotFinite
from appo.utils.logging import SHOWN
from appo.utils.values import ABSURD

log = logging.getLogger(__name__)
LIMIT = "; float32, which keeps observations, ends at 3.4e38"
_huge: set[tuple[str, str]] = set()
"""Environments and keys of observations about which the process has logged that they are huge."""


class FiniteCheck:
    """Looks for what is not finite in a step of a group; observations of bytes need no look."""

    def __init__(self, name: str, spec: EnvSpec) -> None:
        self.name, self._num_agents = name, spec.num_agents
        self._keys = [key for key, o in spec.observations.items() if o.dtype == "float32"]

    def __call__(self, obs: dict[str, Array], reward: Array) -> dict[int, NotFinite]:
        """The failures in observations [R, *] and rewards [R], by row; nearly always none."""
        # A sum of squares is finite only if all numbers are. It is not, too, if numbers are huge, so a search decides.
        # BLAS takes a third of the time of `np.isfinite().all()`, and `vdot`, unlike `dot`, warns of no overflow.
        rewards: Any = reward
        fine = isfinite(np.vdot(rewards, rewards))
        for key in self._keys:
            numbers: Any = obs[key]
            fine = fine and isfinite(np.vdot(numbers, numbers))
        if fine:
            return {}
        failures = self._search(obs, reward)
        if not failures:
            # Observations with squares beyond float32, once in a process; rewards show in the returns.
            for key in self._keys:
                size = float(np.abs(obs[key]).max(initial=0.0))
                if size > ABSURD and (self.name, key) not in _huge:
                    _huge.add((self.name, key))
                    said = f"{self.name}: observation key {key} is as large as {size:.3g}"
                    log.warning("%s: float32 cannot hold its square, let it be smaller", said, extra=SHOWN)
        return failures

    def require(self, obs: dict[str, Array], row: int | None = None) -> None:
        """Raise `NotFinite` if the observations of a row, or of any, are not finite."""
        own = obs if row is None else {key: array[row : row + 1] for key, array in obs.items()}
        for failure in self._search(own, np.zeros(1, np.float32), row or 0).values():
            raise failure

    def _search(self, obs: dict[str, Array], reward: Array, first_row: int = 0) -> dict[int, NotFinite]:
        """Look at every number."""
        failures: dict[int, NotFinite] = {}
        for what, array in [("reward", reward), *((f"observation key {key}", obs[key]) for key in self._keys)]:
            for row, *place in np.argwhere(~np.isfinite(array)).tolist():
                value, at = array[(row, *place)], f" at {place}" if place else ""
                who = row_name(first_row + row, self._num_agents)
                more = LIMIT if what != "reward" and np.isinf(value) else ""
                failure = NotFinite(f"{self.name}: {who}: {what} is not finite: {value}{at}{more}")
                failures.setdefault(first_row + row, failure)
        return failures
