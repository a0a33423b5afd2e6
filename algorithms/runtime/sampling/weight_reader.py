"""Loading of published weights into a model that acts, and the proof that they arrived undamaged."""

import logging

from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.runtime.memory.weights import WeightRing, checksum
from appo.utils.errors import ResourceError

log = logging.getLogger(__name__)

LOAD_ATTEMPTS = 3
DAMAGED_VERSIONS = 3
"""Damaged versions in a row before a worker fails."""

PROVED_LOADS = 64
"""Loads per load read back on a GPU; reading back costs as much as loading."""


class WeightReader:
    """Keeps a model at the newest weights of a ring.

    Damaged weights are never used: the model keeps its version until a later version arrives whole.

    Attributes:
        version: version of the weights in the model; 0 before the first.
    """

    def __init__(self, ring: WeightRing, flat: FlatModule) -> None:
        self.ring, self.flat = ring, flat
        self.version = self._loads = 0
        self._proved_loads = 1 if flat.flat.device.type == "cpu" else PROVED_LOADS
        self._damaged: list[int] = []  # versions since the last whole one

    def refresh(self) -> int:
        """Load newer weights, if published; return the version to act with.

        Raises:
            ResourceError: no attempt to load weights succeeds.
        """
        newest, weights = self.ring.fetch(self.version)
        if weights is not None:
            for _ in range(LOAD_ATTEMPTS):
                self.flat.load(weights)
                # Every load is read back on a CPU, one in `PROVED_LOADS` elsewhere.
                if self._loads % self._proved_loads or self._checksum_loaded() == checksum(weights):
                    self._loads += 1
                    self._damaged.clear()
                    self.version = newest
                    return newest
            raise ResourceError(
                f"the weights of version {newest} do not reach the model on {self.flat.flat.device}: in"
                f" {LOAD_ATTEMPTS} attempts their checksum was another one"
            )
        if self.ring.published != self.version and (damaged := self.ring.damaged()) is not None:
            if damaged not in self._damaged:  # may be chance
                self._damaged.append(damaged)
                log.warning("the weights of version %d are damaged; version %d acts on", damaged, self.version)
            if not self.version or len(self._damaged) > DAMAGED_VERSIONS:
                raise ResourceError(
                    f"the weights of version {damaged} are damaged where all processes share them: their checksum is"
                    " not the one they were published with"
                )
        return self.version

    def _checksum_loaded(self) -> int:
        return checksum(self.flat.flat.cpu().numpy())
