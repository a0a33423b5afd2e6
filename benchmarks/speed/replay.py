"""Costs of a replay of Atari's observations on one core: `python -m benchmarks.speed.replay`.

Nothing is trained. The benchmark inserts columns of 32 steps with stacks of four 84x84 frames until a capacity of 2^15
steps was filled twice. A separate tree has 2^20 leaves.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import numpy as np

from appo.algorithms.replay.storage import ReplayPlan, ReplayStorage, replay_fields
from appo.algorithms.replay.sum_tree import SumTree
from appo.algorithms.runtime.memory.arena import Arena, Field
from appo.algorithms.runtime.memory.slots import Recorded, Trajectories, sizes_of
from appo.algorithms.runtime.topology import Topology
from appo.envs.spec import ActionPart, ActionSpec, EnvSpec, ObservationSpec

ATARI = EnvSpec({"obs": ObservationSpec((4, 84, 84), "uint8")}, ActionSpec((ActionPart("categorical", 6),)))
PLAN = ReplayPlan(1 << 15, 0.6, 1e-6, True, 3, 0.99, 512, 8.0, 1000)
TOPOLOGY = Topology("serial", 1, 1, 1, 1, 1, rows=8, rollout=32)
RECORDED = {"q_taken": Recorded(("T", "R")), "q_max": Recorded(("T", "R"))}
LEAVES, BATCH, MILLION = 1 << 20, 512, 1_000_000
REPEATS = 200


def microseconds(function: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return 1e6 * median(times)


def filled(random: np.random.Generator) -> tuple[ReplayStorage, float]:
    """Return a replay that was filled twice, and the microseconds per inserted step."""
    sizes = sizes_of(TOPOLOGY, ATARI, 0, TOPOLOGY.rollout)
    fields: list[Field] = Trajectories.declare(sizes, ATARI, RECORDED)
    arena = Arena.create([*fields, *replay_fields(PLAN, ATARI, TOPOLOGY)])
    t, storage = Trajectories.attach(arena, ATARI, RECORDED), ReplayStorage(PLAN, ATARI, arena, 0)
    t.valid[:], t.num_frames[:] = True, 4
    obs = t.obs["obs"][0]
    seconds = 0.0
    for _ in range(2 * storage.columns // TOPOLOGY.rows):
        obs[0] = random.integers(0, 256, obs[0].shape, dtype=np.uint8)
        for step in range(1, len(obs)):
            obs[step, :, :-1] = obs[step - 1, :, 1:]
            obs[step, :, -1] = random.integers(0, 256, (84, 84), dtype=np.uint8)
        began = time.perf_counter()
        error = storage.first_errors(t, 0, t.valid[0])
        for row in range(TOPOLOGY.rows):
            storage.insert(t, 0, row, t.valid[0, :, row], error[:, row])
        seconds += time.perf_counter() - began
    return storage, 1e6 * seconds / storage.totals.samples


def measure() -> dict[str, float]:
    """Return the figures by name; the name contains the unit."""
    random = np.random.default_rng(0)
    tree = SumTree(random.random(LEAVES))
    index, value = random.integers(0, LEAVES, BATCH), random.random(BATCH)
    storage, insert_us = filled(random)
    out = np.zeros((BATCH, 4, 84, 84), np.uint8)
    samples = storage.draw(BATCH, random)
    million = replay_fields(replace(PLAN, capacity=MILLION), ATARI, TOPOLOGY)
    return {
        "draw of 512 from 2^20 leaves, us": microseconds(lambda: tree.sample(BATCH, random)),
        "512 updates of 2^20 leaves, us": microseconds(lambda: tree.set(index, value)),
        "insertion of an Atari step, us": insert_us,
        "copy of 512 stacks, us": microseconds(lambda: storage.read_obs("obs", samples.column, samples.step, out), 50),
        "n-step returns of 512, us": microseconds(lambda: storage.returns_of(samples)),
        "bytes of an Atari step": sum(field.nbytes for field in million) / MILLION,
    }


if __name__ == "__main__":
    for name, figure in measure().items():
        print(f"{name}: {figure:.1f}")
