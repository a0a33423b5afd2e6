"""The environment alone: random actions through the adapters and groups of actors.

    python -m benchmarks.speed.env_alone [--workload NAME ...] [--env=ID [flags of train_appo.py]] [--json=FILE]

The figures are core time of one agent step in microseconds, each process on a core of its own. `adapter` is the
environment behind the common interface (GroupEnv.step), `actor` the environment inside an actor (EnvGroup, slots,
messages); the difference is the framework. Measured in one process, and in one process per core at once.
"""

import argparse
import os
import sys
import time
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from appo.algorithms.cli import run_command
from appo.algorithms.run.placement import plan_workers
from appo.envs.make import make_group
from appo.envs.spec import EnvSpec, StepRow
from appo.utils.system import machine
from benchmarks.shared import measuring
from benchmarks.shared.workloads import Workload, add_workload_arguments, chosen_workloads
from benchmarks.speed.actor_process import NUM_DRAWS, ActorProcess, random_actions

START_SECONDS = 300


class Plan(NamedTuple):
    """Measurement of one process."""

    workload: Workload
    num_envs: int
    repeats: int
    seconds: float


def measure(workload: Workload, repeats: int, seconds: float) -> dict[str, Any]:
    """Return core-microseconds per agent step in one process, and in one process per core."""
    cores = machine.available_cores()
    rows = plan_workers(workload.config(), cores, "local").num_envs_per_worker
    plan = Plan(workload, rows, repeats, seconds)
    return {
        "what": workload.what,
        "rows": rows,
        "one": _measure_together(plan, 1),
        "all": _measure_together(plan, cores),
        "actors": cores,
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'':<16}  rows  adapter us  actor us    per core in {'all':<8}  steps/s of all"]
    for name, r in results.items():
        together = r["actors"] * 1e6 / r["all"]["actor"]["median"]
        lines.append(
            f"{name:<16}  {r['rows']:>4}  {r['one']['adapter']['median']:>10.2f}  {r['one']['actor']['median']:>8.2f}  "
            f"{r['all']['adapter']['median']:>10.2f}  {r['all']['actor']['median']:>8.2f}  {together:>14,.0f}"
        )
    return "\n".join(lines)


def _measure_together(plan: Plan, num_processes: int) -> dict[str, Any]:
    """Measure in several processes at once; return core-microseconds per step, spread over the repeats."""
    barrier = get_context("spawn").Barrier(num_processes)
    rates = measuring.in_fresh_processes(rates_in_process, [(plan, core, barrier) for core in range(num_processes)])
    return {
        part: measuring.spread([num_processes * 1e6 / sum(repeat) for repeat in zip(*steps, strict=True)])._asdict()
        for part, steps in (("adapter", [r[0] for r in rates]), ("actor", [r[1] for r in rates]))
    }


def rates_in_process(plan: Plan, core: int, barrier: Barrier) -> tuple[list[float], list[float]]:
    """Return steps per second of the adapter and of the actor for every repeat."""
    measuring.on_one_core(core)
    return _adapter_rates(plan, barrier), _actor_rates(plan, barrier)


def _adapter_rates(plan: Plan, barrier: Barrier) -> list[float]:
    config = plan.workload.config()
    envs = make_group(config.env, plan.num_envs)
    rows, first = step_rows(envs.spec, envs.num_rows, config.learning.rollout)
    actions = random_actions(envs.spec.action, NUM_DRAWS, envs.num_rows)
    envs.reset([int(s) >> 1 for s in np.random.SeedSequence(0).generate_state(plan.num_envs)], rows[-1].obs)
    drawn = 0

    def run(seconds: float) -> float:
        nonlocal drawn
        steps, begin = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds:
            for row in rows:
                envs.step(actions[drawn % NUM_DRAWS], row)
                drawn += 1
            steps += first.size if envs.spec.same_step else int(np.count_nonzero(~first))
        return steps / elapsed

    run(plan.seconds / 2)
    barrier.wait(START_SECONDS)
    rates = [run(plan.seconds) for _ in range(plan.repeats)]
    envs.close()
    return rates


def _actor_rates(plan: Plan, barrier: Barrier) -> list[float]:
    config = plan.workload.config()
    actor = ActorProcess(config.env, plan.num_envs, config.learning.rollout)
    actor.run(plan.seconds / 2)
    barrier.wait(START_SECONDS)
    rates = [actor.run(plan.seconds).wall for _ in range(plan.repeats)]
    actor.close()
    return rates


def step_rows(spec: EnvSpec, rows: int, steps: int) -> tuple[list[StepRow], np.ndarray]:
    """Return the rows of a trajectory to write steps into, and all `first` [steps, rows] in one array."""
    obs = {key: np.zeros((steps, rows, *o.shape), o.dtype) for key, o in spec.observations.items()}
    final_obs = {key: np.zeros_like(a[0]) for key, a in obs.items()} if spec.same_step else {}
    has_final = np.zeros(rows, np.bool_) if spec.same_step else None
    first, terminated, truncated = (np.zeros((steps, rows), np.bool_) for _ in range(3))
    reward, frames = np.zeros((steps, rows), np.float32), np.full((steps, rows), spec.frames_per_step, np.int32)
    made = [
        StepRow(
            obs={key: a[i] for key, a in obs.items()},
            first=first[i],
            reward=reward[i],
            terminated=terminated[i],
            truncated=truncated[i],
            num_frames=frames[i],
            final_obs=final_obs,
            has_final=has_final,
        )
        for i in range(steps)
    ]
    return made, first


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Core time of one step of an environment.")
    add_workload_arguments(parser)
    parser.add_argument("--repeats", type=int, default=3, help="repeats; the median counts (default 3)")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a repeat (default 1.5)")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments, flags = parser.parse_known_args()
    results = {}
    for name, workload in chosen_workloads(arguments, flags).items():
        results[name] = measure(workload, arguments.repeats, arguments.seconds)
        measuring.save(arguments.json, "env_alone", {name: results[name]})
    print(table(results))
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
