"""A forecast for several machines or learners: samples per second by measured costs, and the limiting part."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from appo.algorithms.run.config import Config
from appo.algorithms.run.placement import Sampling
from appo.algorithms.run.tuning.choice import RELIABLE, RELIABLE_LEARNER, Costs, at, in_unit, predict, with_threads
from appo.algorithms.runtime.memory.arena import Field
from appo.algorithms.runtime.topology import Topology
from appo.utils.metrics import short_number

GIGABIT = 117e6
"""Payload of TCP in bytes per second on Ethernet of 1 Gbit/s."""

SUM_SECONDS, LOOPBACK = 1e-3, 1e9
"""Sum of a short vector by gloo, seconds, and bytes per second between ranks of one machine (docs/clusters.md)."""

COUNTS = (1, 2, 4)
"""Numbers of machines in a forecast."""


def sample_bytes(fields: Sequence[Field], topology: Topology) -> float:
    """Return the bytes of a sample in a packed slot, without compression."""
    of_steps = (field for field in fields if field.name.startswith("Trajectories.") and len(field.shape) > 2)
    return sum(field.nbytes for field in of_steps) / (topology.num_slots * topology.rows * topology.rollout)


class Sums(NamedTuple):
    """Sums of gradients of float32 over `size` learners, with `speed` bytes per second between two learners."""

    size: int
    num_weights: int
    speed: float = LOOPBACK

    @property
    def seconds(self) -> float:
        """Return the seconds of a sum: in a ring of N learners, each sends 2 (N - 1) / N of the gradient."""
        return SUM_SECONDS + 8 * self.num_weights * (self.size - 1) / self.size / self.speed


@dataclass(frozen=True)
class Forecast:
    """Samples per second of the parts of a run.

    Attributes:
        here: played and trained by the head alone.
        machine: played by a machine with the cores of the head.
        learner: trained by the learner.
        wire: carried to the head by the network; of one of several learners: of a step, per time of a sum.
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

    def rate_of_learners(self, size: int) -> float:
        """Return the samples per second of several learners, each with actors of its own."""
        return size * min(self.here, 1 / (1 / self.learner + 1 / self.wire))

    def line_of_learners(self, size: int) -> str:
        """Return the forecast for several learners as a line of text."""
        limit = "the actors"
        if self.rate_of_learners(size) < size * self.here:
            limit = "the sums of gradients" if self.wire < self.learner else "the learners"
        rate, *parts = map(short_number, (self.rate_of_learners(size), self.here, self.learner, self.wire))
        return (
            f"predicted {rate} samples/s, the limit is {limit} (samples/s of each rank without the sums {parts[0]}, of"
            f" training alone {parts[1]}, of the sums alone {parts[2]})"
        )


def learners_text(costs: Costs | None, plan: Sampling, config: Config, num_agents: int, cores: int, sums: Sums) -> str:
    """Return a line about several learners: the time of a sum, and a forecast if costs were measured.

    Plan, cores and the flags' batch size are of one learner.
    """
    nbytes = short_number(4 * sums.num_weights)
    text = f"{sums.size} learners: a sum of gradients, {nbytes} bytes, takes about {in_unit(sums.seconds)}"
    if costs is None:
        return f"{text}, and limits the run if an update takes less"
    wire = config.learning.batch_size / config.learning.ppo_epochs / sums.seconds
    return f"{text}; {Forecast.of(costs, plan, config, num_agents, cores, wire).line_of_learners(sums.size)}"
