"""Growth of costs: an actor's vector step with the number of envs, a run with actors, memory with slots.

    python -m benchmarks.speed.growth [--part NAME ...] [--repeats=3] [--json=FILE]

The environment is `toy/Zero-v0` in its vector form, which costs next to nothing. Rows are measured in one process with
the objects of an actor (`actor_process.py`); actors and slots in whole runs with a small network. All figures are CPU
time, because many actors share few cores. Costs that grow with the samples by nature (copies of observations,
evaluations of networks) are separate from the framework's cost per vector step. With Ape-X (`apex`) the cost is per
agent step in all processes, without the phases of environment steps, network evaluation and training.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from appo.algorithms.cli import run_command
from appo.envs.config import EnvConfig
from appo.utils.metrics import read_metrics
from benchmarks.shared import measuring, runs
from benchmarks.shared.runs import Timing
from benchmarks.shared.workloads import ONE_PASS, Workload
from benchmarks.speed.actor_process import ActorProcess

PARTS = ("envs", "actors", "apex", "slots")
ENVS = (1, 8, 64, 512)
ACTORS = (1, 4, 16)
SLOTS = (2, 32, 128)  # per group
ROLLOUT, RUN_ENVS, SLOT_OBS_BYTES = 32, 16, 16_384
WARM_UP_SECONDS, STEP_SECONDS = 0.5, 1.0
FLAGS: Mapping[str, object] = ONE_PASS | {
    "inference": "local", "num_envs_per_worker": RUN_ENVS, "auto_tune": False,
    "use_rnn": False, "encoder_mlp_layers": "64,64",
}  # fmt: skip
APEX: Mapping[str, object] = {
    "algo": "APEX", "env": "toy/Zero-v0", "rollout": ROLLOUT, "num_envs_per_worker": RUN_ENVS, "auto_tune": False,
    "use_rnn": False, "encoder_mlp_layers": "64,64", "batch_size": 512, "replay_ratio": 1, "replay_capacity": 100_000,
    "learning_starts": 10_000, "device": "cpu", "experiment_summaries_interval": 1,
}  # fmt: skip
FRAMEWORK = ("framework", "copying", "waiting", "waiting_for_slots")
"""Phases that are neither the environment's nor the network's."""


def step_microseconds(num_envs: int, repeats: int) -> list[float]:
    """Return CPU time of a vector step without policy and learner, with its share of a slot's hand-over."""
    process = ActorProcess(EnvConfig(env="toy/Zero-v0"), num_envs, ROLLOUT)
    process.run(WARM_UP_SECONDS)
    return [1e6 * num_envs / process.run(STEP_SECONDS).cpu for _ in range(repeats)]


def of_actors(count: int, timing: Timing) -> dict[str, float]:
    """Return CPU time by role of a run: per vector step of an actor, per slot elsewhere."""
    run = runs.train(Workload("toy/Zero-v0", FLAGS, ""), timing, num_workers=count)
    samples = {"actor": RUN_ENVS}  # samples of a vector step
    return {role: us * samples.get(role, RUN_ENVS * ROLLOUT) for role, us in run.cpu_microseconds.items()}


def apex_microseconds(count: int, timing: Timing) -> float:
    """Return CPU time per agent step of the framework's phases, summed over processes."""
    seconds = timing.warm_up_seconds + timing.seconds
    with runs.finished({**APEX, "num_workers": count, "train_for_seconds": seconds}, timing.prefix) as run:
        found = [
            sum(value for name, value in record.items() if name in {f"perf/cpu_us/{phase}" for phase in FRAMEWORK})
            for record in read_metrics(run.directory / "metrics.jsonl")
            if record["elapsed_seconds"] >= timing.warm_up_seconds
        ]
    return statistics.median(found)


def slot_memory(slots: int, timing: Timing) -> float:
    """Return the MiB of a run with one actor."""
    flags = FLAGS | {"num_workers": 1, "min_traj_buffers_per_worker": slots}
    flags |= {"env_kwargs": f"obs_bytes={SLOT_OBS_BYTES}"}
    return runs.train(Workload("toy/Zero-v0", flags, ""), timing).pss_mib


def measure(parts: Sequence[str], repeats: int, timing: Timing) -> dict[str, dict[str, Any]]:
    """Measure the selected parts in turns."""
    steps: dict[int, list[float]] = {count: [] for count in ENVS}
    actors: dict[int, list[dict[str, float]]] = {count: [] for count in ACTORS}
    apex: dict[int, list[float]] = {count: [] for count in ACTORS}
    for _ in range(repeats):
        for count in ENVS if "envs" in parts else ():
            steps[count] += step_microseconds(count, 1)
        for count in ACTORS:
            if "actors" in parts:
                actors[count].append(of_actors(count, timing))
            if "apex" in parts:
                apex[count].append(apex_microseconds(count, timing))
    memory = {slots: slot_memory(slots, timing) for slots in SLOTS if "slots" in parts}
    costs: dict[str, dict[str, Any]] = {
        "envs": {str(count): measuring.spread(us)._asdict() for count, us in steps.items() if us},
        "actors": {str(count): _by_role(found) for count, found in actors.items() if found},
        "apex": {str(count): measuring.spread(us)._asdict() for count, us in apex.items() if us},
        "slots": {str(slots): mib for slots, mib in memory.items()},
    }
    return {part: {"costs": costs[part]} for part in parts}


def _by_role(found: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    return {role: measuring.spread([one[role] for one in found])._asdict() for role in ("actor", "learner")}


def slot_mib() -> float:
    """Return the MiB of one slot's observations."""
    return SLOT_OBS_BYTES * RUN_ENVS * (ROLLOUT + 1) / 2**20


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    envs, actors, apex, slots = (results[part]["costs"].items() if part in results else () for part in PARTS)
    lines = []
    for count, us in envs:
        spread = f"({us['lowest']:.1f} - {us['highest']:.1f})"
        lines.append(f"{count:>4} envs    vector step of an actor {us['median']:8.1f} CPU us {spread}")
    for count, roles in actors:
        actor, learner = (roles[role]["median"] for role in ("actor", "learner"))
        lines.append(f"{count:>4} actors  vector step {actor:7.1f} CPU us, learner per slot {learner:8.1f} CPU us")
    for count, us in apex:
        spread = f"({us['lowest']:.2f} - {us['highest']:.2f})"
        lines.append(f"{count:>4} actors  Ape-X, framework per agent step {us['median']:7.2f} CPU us {spread}")
    for count, mib in slots:
        lines.append(f"{count:>4} slots   {mib:8.1f} MiB in all processes ({slot_mib():.1f} of observations in a slot)")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="How costs grow with envs, actors and slots.")
    parser.add_argument("--part", nargs="*", choices=PARTS, default=PARTS, help=f"of {', '.join(PARTS)} (default: all)")
    runs.add_run_arguments(parser)
    arguments = parser.parse_args()
    results = measure(arguments.part, arguments.repeats, runs.timing_of(arguments))
    measuring.save(arguments.json, "growth", results)
    print(table(results))
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
