"""The place of a run among several learners of one policy, as launchers describe the place. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from appo.utils.errors import UsageError
from appo.utils.values import shown

STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Variable that is "True" if the launcher keeps a store at MASTER_ADDR and MASTER_PORT."""
SHARED_GPU = "APPO_SHARED_GPU"
"""Variable that is set in ranks that share a GPU, which NCCL refuses."""


@dataclass(frozen=True)
class Rank:
    """A run of its own actors and learner, one of several.

    Attributes:
        number: number of the rank; rank 0 owns the run's folder.
        size: number of ranks.
        local: number of the rank on this machine.
        local_size: number of ranks on this machine.
        host, port: address of the store that the launcher keeps.
        start: number of the launcher's start, which separates the entries of starts in the store.
    """

    number: int
    size: int
    local: int = 0
    local_size: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    start: str = "0"

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> Self | None:
        """Return the rank that a launcher's variables describe, as torchrun sets; None for a single learner.

        Raises:
            UsageError: a variable is missing or no number.
        """
        if variables.get("WORLD_SIZE", "1") in ("", "0", "1") or "RANK" not in variables:
            return None
        if variables.get(STORE) != "True":
            raise UsageError("RANK and WORLD_SIZE are set, and no launcher keeps a store: start with torchrun")
        try:
            number, size, local, local_size, port = (
                int(variables[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
            )
            host = variables["MASTER_ADDR"]
        except (KeyError, ValueError) as error:
            raise UsageError(f"RANK is set, and of what torchrun sets this is wrong: {shown(str(error))}") from None
        return cls(number, size, local, local_size, host, port, variables.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def variables(self) -> dict[str, str]:
        """Return the variables that `of` reads."""
        return {
            "RANK": str(self.number),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RESTART_COUNT": self.start,
            STORE: "True",
        }
