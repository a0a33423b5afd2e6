"""A slot as one contiguous buffer, for the way to another machine, and the checks of an arriving buffer."""

import json
from importlib import import_module
from typing import Any

import numpy as np

from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.envs.spec import ActionSpec
from appo.utils.errors import AppoError

OF_STEPS = ("first", "policy_id", "valid", "reward", "terminated", "truncated", "num_frames", "action")
AFTER = ("policy_version", "rnn_state")


class BadPacket(AppoError):
    """Bytes from a machine are no trajectories of the run."""


class SlotPacking:
    """Copies slots into buffers and back.

    Args:
        trajectories: shared arrays of the slots.
        action: parts of an action, for the check of choices.
        compression: `lz4` or `off`.

    Attributes:
        nbytes: size of a slot without compression.
        layout: names, shapes and types of the fields as text, equal on head and machines.
    """

    def __init__(self, trajectories: Trajectories, action: ActionSpec, compression: str = "off") -> None:
        t = trajectories
        named = {f"obs.{key}": array for key, array in sorted(t.obs.items())}
        named |= {name: getattr(t, name) for name in OF_STEPS}
        named |= {f"recorded.{name}": array for name, array in sorted(t.recorded.items())}
        named |= {name: getattr(t, name) for name in AFTER}
        self.trajectories, self.action = t, action
        self.fields = {name: array for name, array in named.items() if array.size}
        self.layout = json.dumps([(name, a.shape[1:], a.dtype.name) for name, a in self.fields.items()])
        self._places: dict[str, slice] = {}
        self.nbytes = 0
        for name, array in self.fields.items():
            self._places[name] = slice(self.nbytes, self.nbytes + array[0].nbytes)
            self.nbytes += array[0].nbytes
        self._lz4: Any = import_module("lz4.block") if compression == "lz4" else None

    def pack(self, slot: int) -> bytes:
        """Return the contents of a slot in a single buffer."""
        buffer = np.empty(self.nbytes, np.uint8)
        for name, array in self.fields.items():
            buffer[self._places[name]] = array[slot].reshape(-1).view(np.uint8)
        if self._lz4 is None:
            return buffer.tobytes()
        packed: bytes = self._lz4.compress(buffer, store_size=False)
        return packed

    def unpack(self, data: bytes | memoryview, slot: int, version: int) -> None:
        """Copy a buffer into a slot owned by the process.

        Args:
            data: result of `pack` on a machine with an equal layout.
            slot: number of the slot to fill.
            version: newest version of the weights; no step can be younger.

        Raises:
            BadPacket: wrong size, or values that no actor writes; the slot may then contain some of the values.
        """
        if self._lz4 is not None:
            try:
                data = self._lz4.decompress(data, uncompressed_size=self.nbytes)
            except (self._lz4.LZ4BlockError, ValueError, MemoryError) as error:
                raise BadPacket(f"a slot is not compressed by lz4: {error}") from None
        if len(data) != self.nbytes:
            raise BadPacket(f"a slot has {len(data)} bytes in place of {self.nbytes}")
        buffer = np.frombuffer(data, np.uint8)
        for name, array in self.fields.items():
            part = buffer[self._places[name]]
            if array.dtype == np.bool_ and part.max() > 1:
                raise BadPacket(f"{name} is neither true nor false")
            array[slot] = part.view(array.dtype).reshape(array.shape[1:])
        self._check(slot, version)

    def _check(self, slot: int, version: int) -> None:
        """Refuse numbers that would break indexing or counting."""
        t = self.trajectories
        valid = t.valid[slot]
        limits: list[tuple[str, Array, float, float]] = [
            ("policy_id", t.policy_id[slot], 0, 0),  # machines are for one policy
            ("num_frames", t.num_frames[slot][valid], 0, 2**20),
            ("policy_version", t.policy_version[slot][valid], 1, version),
        ]
        start = 0
        for part in self.action.parts:
            values = t.action[slot, ..., start : start + part.num_values][valid]
            start += part.num_values
            if not part.is_real:
                limits.append(("action", values, 0, 1 if part.kind == "bernoulli" else part.size - 1))
        for name, values, least, most in limits:
            if values.size and not (least <= values.min() and values.max() <= most):
                raise BadPacket(f"{name} is not within {least} and {most}")
