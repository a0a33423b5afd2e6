"""How costs grow: an actor's vector step with the number of envs, a run with the number of actors, memory with slots.

    python -m benchmarks.growth [--repeats=3] [--json=FILE]

The environment is `toy/Zero-v0`, which costs next to nothing, in its vector form. Rows are measured in one process
with the objects of an actor (`actor_process.py`); actors and slots in whole runs with a small network. All are CPU
time, as many actors share few cores. What grows with the samples by its nature (observations are copied, networks are
evaluated) is told apart from what the framework costs per vector step.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from algorithms.cli import run_command
from benchmarks import measuring, runs
from benchmarks.actor_process import ActorProcess
from benchmarks.runs import Timing
from benchmarks.workloads import ONE_PASS, Workload
from envs.config import EnvConfig

ENVS = (1, 8, 64, 512)
ACTORS = (1, 4, 16)
SLOTS = (2, 32, 128)  # of a group
ROLLOUT, RUN_ENVS, SLOT_OBS_BYTES = 32, 16, 16_384
WARM_UP_SECONDS, STEP_SECONDS = 0.5, 1.0
FLAGS: Mapping[str, object] = ONE_PASS | {
    "inference": "local", "num_envs_per_worker": RUN_ENVS, "auto_tune": False,
    "use_rnn": False, "encoder_mlp_layers": "64,64",
}  # fmt: skip


def step_microseconds(num_envs: int, repeats: int) -> list[float]:
    """CPU time of one vector step without policy and learner, its share of a slot's hand-over included."""
    process = ActorProcess(EnvConfig(env="toy/Zero-v0"), num_envs, ROLLOUT)
    process.run(WARM_UP_SECONDS)
    return [1e6 * num_envs / process.run(STEP_SECONDS).cpu for _ in range(repeats)]


def of_actors(count: int, timing: Timing) -> dict[str, float]:
    """CPU time by role of a run with that many actors: per vector step of an actor, per slot elsewhere."""
    run = runs.train(Workload("toy/Zero-v0", FLAGS, ""), timing, num_workers=count)
    samples = {"actor": RUN_ENVS}  # of a vector step
    return {role: us * samples.get(role, RUN_ENVS * ROLLOUT) for role, us in run.cpu_microseconds.items()}


def slot_memory(slots: int, timing: Timing) -> float:
    """MiB of a run with one actor and that many slots."""
    flags = FLAGS | {"num_workers": 1, "min_traj_buffers_per_worker": slots}
    flags |= {"env_kwargs": f"obs_bytes={SLOT_OBS_BYTES}"}
    return runs.train(Workload("toy/Zero-v0", flags, ""), timing).pss_mib


def measure(repeats: int, timing: Timing) -> dict[str, dict[str, Any]]:
    """Everything, taking turns."""
    steps: dict[int, list[float]] = {count: [] for count in ENVS}
    actors: dict[int, list[dict[str, float]]] = {count: [] for count in ACTORS}
    for _ in range(repeats):
        for count in ENVS:
            steps[count] += step_microseconds(count, 1)
        for count in ACTORS:
            actors[count].append(of_actors(count, timing))
    memory = {slots: slot_memory(slots, timing) for slots in SLOTS}
    return {
        "envs": {"costs": {str(count): measuring.spread(values)._asdict() for count, values in steps.items()}},
        "actors": {"costs": {str(count): _by_role(found) for count, found in actors.items()}},
        "slots": {"costs": {str(slots): mib for slots, mib in memory.items()}},
    }


def _by_role(found: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    return {role: measuring.spread([one[role] for one in found])._asdict() for role in ("actor", "learner")}


def slot_mib() -> float:
    """Of the observations of one slot."""
    return SLOT_OBS_BYTES * RUN_ENVS * (ROLLOUT + 1) / 2**20


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The results as people read them."""
    envs, actors, slots = (results[name]["costs"].items() for name in ("envs", "actors", "slots"))
    lines = ["vector step of an actor, CPU us:"]
    for count, us in envs:
        lines.append(f"  {count:>4} envs  {us['median']:8.1f}  ({us['lowest']:.1f} - {us['highest']:.1f})")
    lines.append(f"runs with {RUN_ENVS} envs per actor, CPU us:")
    for count, roles in actors:
        actor, learner = (roles[role]["median"] for role in ("actor", "learner"))
        lines.append(f"  {count:>4} actors  step {actor:7.1f}  learner per slot {learner:8.1f}")
    lines.append(f"memory of all processes, MiB ({slot_mib():.1f} MiB of observations in a slot):")
    lines += [f"  {count:>4} slots  {mib:8.1f}" for count, mib in slots]
    return "\n".join(lines)


def main() -> int:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description="How costs grow with envs, actors and slots.")
    runs.add_run_arguments(parser)
    arguments = parser.parse_args()
    results = measure(arguments.repeats, runs.timing_of(arguments))
    measuring.save(arguments.json, "growth", results)
    print(table(results))
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
