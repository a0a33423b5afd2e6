"""The framework alone: what an actor process costs per sample when environment, policy and learner cost nothing.

    python -m benchmarks.framework [--repeats=7] [--seconds=1] [--json=FILE] [--profile]

One process holds the objects of a real actor process: EnvGroup and its slots in an arena, ActorWorker, Node, heartbeat
and doorbell. The environment is `toy/Zero-v0` in its vector form; the policy writes random actions, drawn beforehand,
and nothing else; the learner gives every slot back at once. A sample is a valid step of one row.

The targets are for a core of one's own. Where other processes take turns on it, wall-clock rates are lower, and the
rate per second of CPU time, printed beside them, comes nearer to what an idle machine would do.
"""

import argparse
import cProfile
import json
import os
import platform
import pstats
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from algorithms.runtime.actor_worker import ActorWorker
from algorithms.runtime.arena import Arena
from algorithms.runtime.channels import Doorbell
from algorithms.runtime.env_group import EnvGroup, GroupPlan
from algorithms.runtime.messages import (
    ActionRequest,
    ActionsReady,
    Address,
    Begin,
    Message,
    SlotReleased,
    TrajectoryReady,
)
from algorithms.runtime.node import Node, Worker
from algorithms.runtime.process import Activity, Heartbeat
from algorithms.runtime.topology import Topology
from algorithms.runtime.trajectories import FinalObservations, Trajectories, sizes_of
from envs.config import EnvConfig
from envs.make import make_group

ROWS, ROLLOUT, SLOTS = 64, 32, 3
NUM_DRAWS = 257
WARM_UP_SECONDS = 0.5


class Case(NamedTuple):
    """What is measured, and what is asked of it."""

    obs_bytes: int
    target: float  # samples per second


CASES = (Case(16, 500_000), Case(28_224, 100_000))  # the second is a stack of four Atari frames of 84 x 84


class Rate(NamedTuple):
    """Samples per second."""

    wall: float
    cpu: float  # per second of CPU time


class RandomPolicy:
    """Answers every request with random actions."""

    def __init__(self, trajectories: Trajectories, num_actions: int) -> None:
        self.trajectories = trajectories
        shape = (NUM_DRAWS, *trajectories.action.shape[2:])
        self.draws = np.random.default_rng(0).integers(num_actions, size=shape, dtype=np.int32)
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
            self.trajectories.action[slot, step] = self.draws[self.answered % NUM_DRAWS]
            self.answered += 1
            yield ActionsReady(policy, group, slot, step, generation)


class IdleLearner:
    """Releases slots as they come."""

    def handle(self, message: Message) -> Iterator[Message]:
        if isinstance(message, TrajectoryReady):
            yield SlotReleased(message.policy, message.slot, message.sequence)

    def pending(self) -> bool:
        return False

    def work(self) -> Iterator[Message]:
        yield from ()


class ActorProcess:
    """An actor process without the process."""

    def __init__(self, obs_bytes: int) -> None:
        envs = make_group(EnvConfig(env="toy/Zero-v0", env_kwargs={"obs_bytes": obs_bytes}), ROWS)
        topology = Topology("local", 1, 1, SLOTS, 1, 1, ROWS, ROLLOUT)
        sizes = sizes_of(topology, envs.spec, rnn_state_size=0, recurrence=ROLLOUT)
        fields = Trajectories.declare(sizes, envs.spec) + FinalObservations.declare(sizes, envs.spec)
        arena = Arena.create([*fields, Heartbeat.declare(1)])
        trajectories = Trajectories.attach(arena, envs.spec)
        finals = FinalObservations.attach(arena, envs.spec)
        plan = GroupPlan(index=0, slots=topology.slots_of(0), start=0)
        self.group = EnvGroup(plan, envs, trajectories, finals, np.random.SeedSequence(0))
        workers: dict[Address, Worker] = {
            Address("actor", 0): ActorWorker(Address("actor", 0), [self.group]),
            Address("policy_worker", 0, 0): RandomPolicy(trajectories, envs.spec.action.num_logits),
            Address("learner", 0): IdleLearner(),
        }
        self.node = Node(workers, topology.address_of, lambda message: None)  # reports to main cost nothing here
        self.heartbeat, self.bell = Heartbeat(arena, 0), Doorbell()
        self.group.reset()
        self.node.deliver(Begin())

    def run(self, seconds: float) -> "Rate":
        """Step for about that long, whole trajectories."""
        totals = self.group.totals
        collected, begin, cpu_begin = totals["collected"], time.perf_counter(), time.process_time()
        while (elapsed := time.perf_counter() - begin) < seconds:
            until = totals["trajectories"] + 8
            while totals["trajectories"] < until:
                self.heartbeat.beat(Activity.WORKING)
                self.bell.wait(0.0)
                self.node.turn()
        samples = totals["collected"] - collected
        return Rate(samples / elapsed, samples / (time.process_time() - cpu_begin))


def measure(case: Case, repeats: int, seconds: float) -> dict[str, Any]:
    """Median and spread of several repeats."""
    process = ActorProcess(case.obs_bytes)
    process.run(WARM_UP_SECONDS)
    rates = [process.run(seconds) for _ in range(repeats)]
    median = statistics.median(rate.wall for rate in rates)
    return {
        "obs_bytes": case.obs_bytes,
        "samples_per_second": round(median),
        "lowest": round(min(rate.wall for rate in rates)),
        "highest": round(max(rate.wall for rate in rates)),
        "samples_per_cpu_second": round(statistics.median(rate.cpu for rate in rates)),
        "microseconds_per_step": round(1e6 * ROWS / median, 2),
        "target": round(case.target),
        "reached": median >= case.target,
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as people read them."""
    heads = ("obs bytes", "samples/s", "lowest - highest", "us/step", "per CPU s", "target")
    widths = (9, 11, 25, 8, 11, 9)
    lines = ["  ".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))]
    for r in results:
        spread = f"{r['lowest']:,} - {r['highest']:,}"
        verdict = "reached" if r["reached"] else "MISSED"
        lines.append(
            f"{r['obs_bytes']:>9,}  {r['samples_per_second']:>11,}  {spread:>25}  {r['microseconds_per_step']:>8}  "
            f"{r['samples_per_cpu_second']:>11,}  {r['target']:>9,}  {verdict}"
        )
    return "\n".join(lines)


def profile(case: Case, seconds: float) -> None:
    """What costs what; the profiler itself costs several times what it measures, so only the order counts."""
    process = ActorProcess(case.obs_bytes)
    process.run(WARM_UP_SECONDS)
    profiler = cProfile.Profile()
    profiler.runcall(process.run, seconds)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(14)


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description="Speed of the framework alone, per actor process.")
    parser.add_argument("--repeats", type=int, default=7, help="repeats per case; the median counts (default 7)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a repeat (default 1)")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--profile", action="store_true", help="print what costs what instead")
    arguments = parser.parse_args()
    if arguments.profile:
        for case in CASES:
            profile(case, arguments.seconds)
        return
    results = [measure(case, arguments.repeats, arguments.seconds) for case in CASES]
    print(f"one actor process, {ROWS} rows, rollout {ROLLOUT}, median of {arguments.repeats} x {arguments.seconds:g} s")
    print(table(results))
    if arguments.json:
        machine = {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
        }
        settings = {"rows": ROWS, "rollout": ROLLOUT, "repeats": arguments.repeats, "seconds": arguments.seconds}
        arguments.json.write_text(json.dumps({**settings, **machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
