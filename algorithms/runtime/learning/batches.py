"""Batches of trajectories, and the interface of their sources.

A batch contains `columns` trajectories of the rollout length; the columns of one slot may go to two batches.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.messages import SlotReleased, TrajectoryReady, Wake


@dataclass(frozen=True)
class Batch:
    """A batch of trajectories: B columns, time-major, with fields of `Trajectories`."""

    obs: dict[str, Tensor]  # [T+1, B, *]
    first: Tensor  # [T+1, B]
    valid: Tensor  # [T, B], and acted by the policy that trains
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    num_frames: Tensor
    action: Tensor  # [T, B, A]
    recorded: dict[str, Tensor]  # [T, B, *], or [F, B, *] where F is 0 unless the environment needs final values
    policy_version: Tensor
    rnn_state: Tensor  # [N, B, H]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Make a batch of tensors, named as in `named`."""
        grouped: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if "." not in name}
        for group in ("obs", "recorded"):
            start = f"{group}."
            grouped[group] = {n.removeprefix(start): tensor for n, tensor in tensors.items() if n.startswith(start)}
        return cls(**grouped)

    @classmethod
    def of_slot(cls, trajectories: Trajectories, slot: int) -> Self:
        """Return all columns of a slot, in the memory of the slot; `valid` includes the steps of every policy."""
        return cls.of({name: torch.from_numpy(array[slot]) for name, array in named_fields(trajectories).items()})

    def named(self) -> dict[str, Tensor]:
        """Return all tensors by name: names of fields, obs.KEY, and recorded.NAME."""
        return named_fields(self)

    def signals(self) -> dict[str, Any]:
        """Return the arguments of estimates of returns (`ops.returns`) by name."""
        final_value = self.recorded["final_value"] if len(self.recorded["final_value"]) else None
        names = ("reward", "terminated", "truncated", "valid", "first")
        return {"final_value": final_value, **{name: getattr(self, name) for name in names}}

    def columns(self, index: Tensor | slice) -> Self:
        """Return a batch of some of the columns."""
        if isinstance(index, slice):
            return self.map(lambda tensor: tensor[:, index])
        return self.map(lambda tensor: tensor.index_select(1, index))

    def copy(self) -> Self:
        """Return a copy in new memory; a `BatchSource` overwrites its batch with the next."""
        return self.map(lambda tensor: tensor.clone())

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in a fixed order."""
        return list(self.named().values())

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply the function to every tensor; return a batch of the results."""
        return self.of({name: function(tensor) for name, tensor in self.named().items()})


def named_fields(source: Batch | Trajectories) -> dict[str, Any]:
    """Return the fields of a batch, or the same fields of trajectories, by name."""
    named: dict[str, Any] = {}
    for field in fields(Batch):
        value = getattr(source, field.name)
        if isinstance(value, dict):
            named |= {f"{field.name}.{key}": one for key, one in value.items()}
        else:
            named[field.name] = value
    return named


IS_READ = "is_read"
"""Name in `Batch.recorded` of the mask [T, B] of steps from datasets, in batches mixed from datasets and actors."""

Feedback = Mapping[str, Any]
"""Values from a learner to the source of a batch after a step, such as priorities."""


class GroupBroken(Exception):
    """The learners of other ranks, which train on parts of the same batches, did not answer in time."""


class BatchCounts(NamedTuple):
    """Counts of the trajectories handed over so far, by their fate; steps are valid steps of the policy in training."""

    trajectories: int  # slots received
    released: int  # slots given back
    discarded: int  # steps too old to train on
    in_flight: int  # steps neither trained nor discarded yet
    held: int  # slots received and not given back


class Entered(NamedTuple):
    """Steps that entered training for the first time; steps of a replay enter once, however often used.

    Attributes:
        samples: valid steps.
        env_steps: frames of the steps.
        whole: whether the batch taken is complete; a partial batch does not count yet.
        earlier: valid steps in parts of the batch taken before.
    """

    samples: int = 0
    env_steps: int = 0
    whole: bool = True
    earlier: int = 0


class BatchSource(ABC):
    """Gives a learner worker its batches. Four members must be written; the others have defaults.

    Attributes:
        hold: whether slots are released only after training.
    """

    hold: bool = False

    @property
    def staged_samples(self) -> int:
        """Return the number of steps in the unfinished batch, which are lost with the process; default: 0."""
        return 0

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Return the number of slots, or of other inputs, that are not used up."""

    @abstractmethod
    def counts(self) -> BatchCounts:
        """Return the counts of the trajectories by their fate."""

    @abstractmethod
    def take(self) -> Batch | None:
        """Return the next batch, or None while the batch is not full."""

    @abstractmethod
    def entered(self) -> Entered:
        """Return the steps that have entered training since the last call."""

    def add(self, message: TrajectoryReady) -> None:  # noqa: B027 (a source may use no slots)
        """Take in a slot that has been handed over; default: leave the slot to other workers."""

    def fill(self, version: int) -> Iterator[SlotReleased | Wake]:
        """Move trajectories that were handed over towards the next batch."""
        return iter(())

    def trained(self, feedback: Sequence[Feedback] = ()) -> Iterator[SlotReleased | Wake]:
        """Go on after training on the last batch and publication of the weights.

        Args:
            feedback: values that the learner yields for the batch, such as priorities.
        """
        return iter(())

    def resize(self, columns: int) -> None:  # noqa: B027 (sizes may be fixed)
        """Make batches of so many columns, beginning with the next new batch; default: keep the size."""

    def blank(self) -> Batch | None:
        """Return a batch of zeros, without a valid step; None: the form of batches is not known before the first."""
        return None

    def retire(self) -> None:  # noqa: B027 (most sources keep nothing)
        """Keep no further steps: batches are not trained on any more, but slots go on being released."""

    def weights_replaced(self) -> None:  # noqa: B027 (batches may not depend on the weights that acted)
        """Drop steps that only the weights that acted may train on; default: keep all steps."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the source, tag -> mean since the last call."""
        return {}
