"""The objects of an actor process (group, slots, worker, node, heartbeat, doorbell) around random actions.

The policy only writes actions that were drawn beforehand; the learner releases every slot at once. The cost of a sample
(a valid step of one row) is the cost of the environment, its adapter and the framework.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from appo.algorithms.runtime.memory.arena import Arena, Array
from appo.algorithms.runtime.memory.heartbeat import Activity, Heartbeat
from appo.algorithms.runtime.memory.slots import FinalObservations, Trajectories, sizes_of
from appo.algorithms.runtime.messages import (
    ActionRequest,
    ActionsReady,
    Address,
    Begin,
    Message,
    SlotReleased,
    TrajectoryReady,
    Worker,
)
from appo.algorithms.runtime.processes.channels import Doorbell
from appo.algorithms.runtime.processes.node import Node
from appo.algorithms.runtime.sampling.actor_worker import ActorWorker
from appo.algorithms.runtime.sampling.env_group import EnvGroup, GroupPlan
from appo.algorithms.runtime.topology import Topology
from appo.envs.config import EnvConfig
from appo.envs.make import make_group
from appo.envs.spec import ActionSpec

SLOTS = 3
NUM_DRAWS = 257


class Rate(NamedTuple):
    """Samples per second."""

    wall: float
    cpu: float  # samples per second of CPU time


class RandomPolicy:
    """Answers every request with random actions."""

    def __init__(self, trajectories: Trajectories, action: ActionSpec) -> None:
        self.trajectories = trajectories
        self.draws = random_actions(action, NUM_DRAWS, trajectories.action.shape[2])
        self.answered = 0
        self.requests: list[ActionRequest] = []

    def handle(self, message: Message) -> Iterator[Message]:
        if isinstance(message, ActionRequest):
            self.requests.append(message)
        yield from ()

    def pending(self) -> bool:
        return bool(self.requests)

    def work(self) -> Iterator[Message]:
        requests, self.requests = self.requests, []
        for policy, group, slot, step, generation in requests:
            if step < self.trajectories.action.shape[1]:  # the step after the last requests values only
                self.trajectories.action[slot, step] = self.draws[self.answered % NUM_DRAWS]
            self.answered += 1
            yield ActionsReady(policy, group, slot, step, generation)


def random_actions(action: ActionSpec, draws: int, rows: int) -> Array:
    """Draw uniform actions, continuous actions within both the bounds and [-1, 1]; [draws, rows, A] as stored."""
    rng = np.random.default_rng(0)
    low, high = iter(action.low or ()), iter(action.high or ())
    columns: list[Array] = []
    for part in action.parts:
        if part.is_real:
            bounds = [(next(low), next(high)) for _ in range(part.size)]
            columns += [rng.uniform(max(a, -1.0), min(b, 1.0), (draws, rows)) for a, b in bounds]
        else:
            options = 2 if part.kind == "bernoulli" else part.size
            columns += [rng.integers(options, size=(draws, rows)) for _ in range(part.num_values)]
    return np.stack(columns, axis=2).astype(action.dtype)


class IdleLearner:
    """Releases slots at once."""

    def handle(self, message: Message) -> Iterator[Message]:
        if isinstance(message, TrajectoryReady):
            yield SlotReleased(message.policy, message.slot, message.sequence)

    def pending(self) -> bool:
        return False

    def work(self) -> Iterator[Message]:
        yield from ()


class ActorProcess:
    """The objects of an actor with one group.

    Args:
        env: id of the environment.
        num_envs: number of environments in the group.
        rollout: steps of a trajectory.
        seed: seed of the environments.
    """

    def __init__(self, env: EnvConfig, num_envs: int, rollout: int, seed: int = 0) -> None:
        envs = make_group(env, num_envs)
        topology = Topology("local", 1, 1, SLOTS, 1, 1, envs.num_rows, rollout)
        sizes = sizes_of(topology, envs.spec, rnn_state_size=0, recurrence=rollout)
        fields = Trajectories.declare(sizes, envs.spec) + FinalObservations.declare(sizes, envs.spec)
        arena = Arena.create([*fields, Heartbeat.declare(1)])
        trajectories = Trajectories.attach(arena, envs.spec)
        finals = FinalObservations.attach(arena, envs.spec)
        plan = GroupPlan(index=0, slots=topology.slots_of(0), start=0)
        self.group = EnvGroup(plan, envs, trajectories, finals, np.random.SeedSequence(seed))
        workers: dict[Address, Worker] = {
            Address("actor", 0): ActorWorker(Address("actor", 0), [self.group]),
            Address("policy_worker", 0, 0): RandomPolicy(trajectories, envs.spec.action),
            Address("learner", 0): IdleLearner(),
        }
        self.node = Node(
            workers, topology.address_book().address_of, lambda message: None
        )  # reports to main cost nothing here
        self.heartbeat, self.bell = Heartbeat(arena, 0), Doorbell()
        self.group.reset()
        self.node.deliver(Begin())

    def run(self, seconds: float) -> Rate:
        """Step whole trajectories for `seconds`."""
        totals = self.group.totals
        collected, begin, cpu_begin = totals["collected"], time.perf_counter(), time.process_time()
        while (elapsed := time.perf_counter() - begin) < seconds:
            until = totals["trajectories"] + 1
            while totals["trajectories"] < until:
                self.heartbeat.beat(Activity.WORKING)
                self.bell.wait(0.0)
                self.node.turn()
        samples = totals["collected"] - collected
        return Rate(samples / elapsed, samples / (time.process_time() - cpu_begin))

    def close(self) -> None:
        """Close the environments."""
        self.group.envs.close()
