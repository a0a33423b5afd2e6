"""The cost of an environment's step, measured with a real actor with one group and no learner."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np

from appo.algorithms.run.config import Config
from appo.algorithms.run.tuning.choice import Curve, rising
from appo.algorithms.runtime.memory.arena import Arena, Array
from appo.algorithms.runtime.memory.slots import FinalObservations, Trajectories, sizes_of
from appo.algorithms.runtime.messages import ActionRequest, ActionsReady, Address, Begin
from appo.algorithms.runtime.roles import ACTOR
from appo.algorithms.runtime.sampling.actor_worker import ActorWorker
from appo.algorithms.runtime.sampling.env_group import EnvGroup, GroupPlan
from appo.algorithms.runtime.topology import Topology
from appo.envs.loop.env_set import OnFailure
from appo.envs.make import make_group
from appo.envs.masks import random_action
from appo.envs.spec import MASK_KEY, EnvSpec, GroupEnv
from appo.utils.system.memory import held_bytes

STEPPING_SECONDS = 0.15  # per size of a group
LARGER_GROUPS = (64, 16, 4)
LARGER_GROUP_SECONDS = 0.3  # that making, resetting and warming up a larger group may take
WARM_UP_STEPS = 10
ROLLOUT = 8
NUM_DRAWS = 64
LARGEST_BYTES = 256 << 20  # of the observations in a rehearsal
IMPORTED_BYTES = 128 << 20  # of what a first environment takes: its packages, which further ones share


class GroupTimer:
    """An actor with one group that takes random actions."""

    def __init__(self, config: Config, envs: GroupEnv) -> None:
        self.spec, self.rows = envs.spec, envs.num_rows
        topology = Topology("serial", 1, 1, 1, 1, 1, self.rows, ROLLOUT)
        sizes = sizes_of(topology, envs.spec, rnn_state_size=0, recurrence=ROLLOUT)
        arena = Arena.create(Trajectories.declare(sizes, envs.spec) + FinalObservations.declare(sizes, envs.spec))
        self.trajectories = Trajectories.attach(arena, envs.spec)
        plan = GroupPlan(
            index=0,
            slots=topology.slots_of(0),
            start=0,
            reward_scale=config.env.reward_scale,
            reward_clip=config.env.reward_clip,
            keep=True,
        )
        group = EnvGroup(
            plan, envs, self.trajectories, FinalObservations.attach(arena, envs.spec), np.random.SeedSequence(0)
        )
        self.random = np.random.default_rng(0)
        self.draws = [self._draw([None] * self.rows) for _ in range(NUM_DRAWS)]
        group.reset()
        self.actor = ActorWorker(Address(ACTOR.name, 0), [group])
        self.requests = [m for m in self.actor.handle(Begin()) if isinstance(m, ActionRequest)]
        self.steps = 0

    def step(self) -> float:
        """Take one step; return the seconds it took."""
        for _, _, slot, step, _ in self.requests:
            if step < ROLLOUT:
                self.trajectories.action[slot, step] = self._actions(slot, step)
        replies = [ActionsReady(*request) for request in self.requests]
        begin = time.perf_counter()
        for reply in replies:
            for _ in self.actor.handle(reply):
                pass
        self.requests = [message for message in self.actor.work() if isinstance(message, ActionRequest)]
        self.steps += 1
        return time.perf_counter() - begin

    def mean_seconds(self, budget_seconds: float) -> float:
        """Return the seconds of a step, resets included, averaged over that time."""
        first, deadline = self.step(), time.perf_counter() + budget_seconds
        if first > budget_seconds:
            return first
        steps = [self.step()]  # without the first one, which may have loaded or compiled something
        while time.perf_counter() < deadline:
            steps.append(self.step())
        return sum(steps) / len(steps)

    def _actions(self, slot: int, step: int) -> Array:
        if not self.spec.action_mask:
            return self.draws[self.steps % NUM_DRAWS]
        return self._draw(list(self.trajectories.obs[MASK_KEY][slot, step].reshape(self.rows, -1) > 0))

    def _draw(self, masks: Sequence[Array | None]) -> Array:
        return np.concatenate([random_action(self.spec.action, mask, self.random) for mask in masks])


def stepping_costs(
    config: Config, envs: GroupEnv, making_seconds: float, bytes_before: int, made: ExitStack
) -> Iterator[tuple[Curve, int]]:
    """Yield the seconds of a step by environments in the group, and the bytes of one environment.

    The first result is for one environment. A second one follows if a larger group is quick to try: only a larger group
    shows the costs that do not depend on its size.

    Args:
        config: configuration of the run; a given number of environments is the limit.
        envs: group of one environment, or of a vector's environments, not stepped yet.
        making_seconds: seconds of making the group.
        bytes_before: memory before the group was made.
        made: stack that closes further groups.
    """
    begin = time.perf_counter()
    one = GroupTimer(config, envs)
    count = envs.num_rows // envs.spec.num_agents
    points = [(count, one.mean_seconds(STEPPING_SECONDS))]
    # The first environment brought its packages with it, which take long to load and are no part of the second one.
    once = min(making_seconds, time.perf_counter() - begin) + WARM_UP_STEPS * points[0][1]
    yield rising(points), max(0, held_bytes() - bytes_before - IMPORTED_BYTES) // count
    slot_bytes = (ROLLOUT + 1) * observation_bytes(envs.spec) * envs.spec.num_agents
    most = count if envs.spec.one_per_process or count > 1 else config.sampling.given_group_size or max(LARGER_GROUPS)
    groups = (min(n, most) for n in LARGER_GROUPS)
    num_envs = next((n for n in groups if n * once < LARGER_GROUP_SECONDS and n * slot_bytes <= LARGEST_BYTES), count)
    if num_envs > count:
        before = held_bytes()
        group = make_group(
            config.env.as_trained, num_envs, spec=envs.spec, on_failure=OnFailure(config.env.max_env_rebuilds)
        )
        made.callback(group.close)
        points.append((num_envs, GroupTimer(config, group).mean_seconds(STEPPING_SECONDS)))
        yield rising(points), max(0, held_bytes() - before) // num_envs


def observation_bytes(spec: EnvSpec) -> int:
    """Return the bytes of an observation of one agent in one step."""
    return sum(math.prod(o.shape) * np.dtype(o.dtype).itemsize for o in spec.observations.values())
