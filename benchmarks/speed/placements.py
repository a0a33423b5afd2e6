"""Placement of policies: the speed of every placement, and of the choice of `--inference=auto`.

    python -m benchmarks.speed.placements [--workload NAME ...] [--env=ID [flags of train_appo.py]] [--json=FILE]

The runs take turns. The benchmark compares `auto` with the fastest placement.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any

from appo.algorithms.cli import run_command
from benchmarks.shared import measuring, runs
from benchmarks.shared.runs import Timing
from benchmarks.shared.workloads import Workload, add_workload_arguments, chosen_workloads

PLACEMENTS = ("central", "local", "serial", "auto")


def measure(name: str, workload: Workload, repeats: int, timing: Timing, before: Mapping[str, Any]) -> dict[str, Any]:
    """Measure all placements of one workload in turns, and add the runs to the earlier runs."""
    observed = {placement: list(before.get("placements", {}).get(placement, ())) for placement in PLACEMENTS}
    for _ in range(repeats):
        for placement in PLACEMENTS:
            run = runs.train(workload, timing, inference=placement)
            observed[placement].append(run._asdict())
            print(f"{name}: {placement}: {run.samples_per_second:,.0f} samples/s", flush=True)
    return {"what": workload.what, "seconds": timing.seconds, "placements": observed}


def speeds(result: Mapping[str, Any]) -> dict[str, float]:
    """Return median samples per second by placement."""
    of_runs = {name: [run["samples_per_second"] for run in found] for name, found in result["placements"].items()}
    return {name: measuring.spread(values).median for name, values in of_runs.items()}


def auto_to_best(result: Mapping[str, Any]) -> float:
    """Return the median speed of `auto` over the speed of the best placement."""
    found = speeds(result)
    return found.pop("auto") / max(found.values())


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"{'samples/s':<16}" + "".join(f"  {placement:>9}" for placement in PLACEMENTS) + "  auto / best"]
    for name, r in results.items():
        cells = "".join(f"  {speeds(r)[placement]:>9,.0f}" for placement in PLACEMENTS)
        lines.append(f"{name:<16}{cells}  {auto_to_best(r):>11.2f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Speed by placement of the policy.")
    add_workload_arguments(parser)
    runs.add_run_arguments(parser)
    arguments, flags = parser.parse_known_args()
    timing, workloads = runs.timing_of(arguments), chosen_workloads(arguments, flags)

    def measure_one(name: str, before: Mapping[str, Any]) -> dict[str, Any]:
        return measure(name, workloads[name], arguments.repeats, timing, before)

    print(table(runs.each_workload("placements", arguments, workloads, measure_one)))
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
