"""The cost of further policies: total speed and memory with 1, 2, 4 and 8 policies.

    python -m benchmarks.speed.policies [--json=FILE]

The numbers of actors and environments stay constant, so each policy receives a share of the steps. A further policy
adds a learner, weights, optimizer and state in shared memory, and a forward pass answers fewer rows. `toy/Zero-v0`
costs next to nothing: the cost is framework and network.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from appo.algorithms.cli import run_command
from benchmarks.shared import runs
from benchmarks.shared.runs import Timing
from benchmarks.shared.workloads import ONE_PASS, Workload

POLICIES = (1, 2, 4, 8)
HEADS = ("policies", "samples/s", "PSS MiB", "CPU us")
FLAGS: Mapping[str, object] = ONE_PASS | {
    "inference": "local", "num_workers": 2, "num_envs_per_worker": 64, "auto_tune": False,
    "use_rnn": False, "encoder_mlp_layers": "64,64",
}  # fmt: skip
WORKLOADS = {
    "cartpole": Workload("CartPole-v1", FLAGS, "CartPole, MLP 64x64, 2 actors x 64 environments"),
    "zero": Workload("toy/Zero-v0", FLAGS, "an environment without cost, the same otherwise"),
}


def measure(workload: Workload, repeats: int, timing: Timing, before: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one workload with every number of policies in turns, and add the runs to the earlier runs."""
    observed = {str(n): list(before.get("policies", {}).get(str(n), ())) for n in POLICIES}
    for _ in range(repeats):
        for n in POLICIES:
            run = runs.train(workload, timing, num_policies=n)
            observed[str(n)].append(run._asdict())
            print(f"{workload.env}: {n} policies: {run.samples_per_second:,.0f} samples/s", flush=True)
    return {"what": workload.what, "seconds": timing.seconds, "policies": observed}


class Row(NamedTuple):
    """Medians for a number of policies; the CPU time per sample counts all processes."""

    policies: int
    samples_per_second: float
    pss_mib: float
    cpu_microseconds: float

    def cells(self) -> tuple[str, ...]:
        speed, memory = (f"{value:,.0f}" for value in (self.samples_per_second, self.pss_mib))
        return f"{self.policies}", speed, memory, f"{self.cpu_microseconds:.2f}"


def rows(result: Mapping[str, Any]) -> list[Row]:
    return [Row(int(n), *_medians(found)) for n, found in result["policies"].items()]


def _medians(found: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    for name in ("samples_per_second", "pss_mib"):
        yield statistics.median(run[name] for run in found)
    yield statistics.median(sum(run["cpu_microseconds"].values()) for run in found)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Speed and memory by the number of policies.")
    runs.add_run_arguments(parser)
    arguments = parser.parse_args()
    timing = runs.timing_of(arguments)

    def measure_one(name: str, before: Mapping[str, Any]) -> dict[str, Any]:
        return measure(WORKLOADS[name], arguments.repeats, timing, before)

    results = runs.each_workload("policies", arguments, WORKLOADS, measure_one)
    print("".join(f"{head:>12}" for head in ("", *HEADS)))
    for name, result in results.items():
        for row in rows(result):
            print("".join(f"{cell:>12}" for cell in (name, *row.cells())))
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
