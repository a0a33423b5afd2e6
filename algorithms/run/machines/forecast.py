"""A forecast for several machines: samples per second by measured costs, and the limiting part."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from appo.algorithms.run.config import Config
from appo.algorithms.run.placement import Sampling
from appo.algorithms.run.tuning.choice import RELIABLE, RELIABLE_LEARNER, Costs, at, predict, with_threads
from appo.algorithms.runtime.memory.arena import Field
from appo.algorithms.runtime.topology import Topology
from appo.utils.metrics import short_number

GIGABIT = 117e6
"""Payload of TCP in bytes per second on Ethernet of 1 Gbit/s."""

COUNTS = (1, 2, 4)
"""Numbers of machines in a forecast."""


def sample_bytes(fields: Sequence[Field], topology: Topology) -> float:
    """Return the bytes of a sample in a packed slot, without compression."""
    of_steps = (field for field in fields if field.name.startswith("Trajectories.") and len(field.shape) > 2)
    return sum(field.nbytes for field in of_steps) / (topology.num_slots * topology.rows * topology.rollout)


@dataclass(frozen=True)
class Forecast:
    """Samples per second of the parts of a run.

    Attributes:
        here: played and trained by the head alone.
        machine: played by a machine with the cores of the head.
        learner: trained by the learner.
        wire: carried to the head by the network.
    """

    here: float
    machine: float
    learner: float
    wire: float

    @classmethod
    def of(cls, costs: Costs, plan: Sampling, config: Config, num_agents: int, cores: int, wire: float) -> Self:
        """Return the forecast by the measured costs of a start, and the samples per second of the network."""
        envs = plan.num_envs_per_worker // plan.num_splits
        sample = (at(costs.env, envs) + at(costs.act, envs * num_agents)) / (envs * num_agents)
        return cls(
            predict(costs, plan, config, num_agents, cores),
            RELIABLE * cores / sample,
            RELIABLE_LEARNER / with_threads(costs.learn, plan.learner_threads),
            wire,
        )

    def rate(self, machines: int) -> float:
        """Return the samples per second with a number of machines beside the head."""
        return min(self.learner, self.here + min(machines * self.machine, self.wire))

    def limit(self, machines: int) -> str:
        """Return the limiting part of a run with a number of machines beside the head."""
        if self.rate(machines) == self.learner:
            return "the learner"
        return "the network" if self.wire < machines * self.machine else "the number of machines"

    def line(self) -> str:
        """Return the forecast as a line of text."""
        rates = ", ".join(short_number(self.rate(count)) for count in COUNTS)
        counts = ", ".join(map(str, COUNTS))
        return (
            f"predicted {short_number(self.here)} samples/s here, {rates} with {counts} machines like this one, where"
            f" the limit is {self.limit(COUNTS[-1])} (learner {short_number(self.learner)}, network"
            f" {short_number(self.wire)} samples/s)"
        )
