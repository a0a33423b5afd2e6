"""Training end to end: steady-state speed, memory and CPU time of whole runs, beside the limit of this machine.

    python -m benchmarks.speed.end_to_end [--workload NAME ...] [--env=ID [flags of train_appo.py]] [--json=FILE]

The limit is the speed with all cores busy with the isolated costs of a sample and nothing else. `env_alone` measures
the environment's step, `network_alone` acting and training, each on one core just before every run. The cost of the
environment's step with all cores busy shows whether the cores are as fast together as one alone. A run that drops more
than 1 % of the collected samples does not count.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from appo.algorithms.cli import run_command
from appo.utils.system import machine
from benchmarks.shared import measuring, runs
from benchmarks.shared.measuring import Spread
from benchmarks.shared.runs import Timing
from benchmarks.shared.workloads import Workload, add_workload_arguments, chosen_workloads
from benchmarks.speed.network_alone import inference_microseconds, training_microseconds

UNIT_COSTS = ("environment", "inference", "training")
TOGETHER = "environment_on_all_cores"  # core time per step, with a process per core


def measure(name: str, workload: Workload, repeats: int, timing: Timing, before: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one workload several times with unit costs per run, add the runs to the earlier runs, take medians."""
    observed, costs = list(before.get("runs", ())), list(before.get("costs", ()))
    for _ in range(repeats):
        costs.append(unit_costs(workload, timing.prefix))
        observed.append(runs.train(workload, timing)._asdict())
        print(f"{name}: {observed[-1]['samples_per_second']:,.0f} samples/s", flush=True)
    return {
        "what": workload.what,
        "seconds": timing.seconds,
        "cores": machine.available_cores(),
        "unit_costs": {
            part: statistics.median(of[part] for of in costs if part in of) for part in (*UNIT_COSTS, TOGETHER)
        },
        "costs": costs,
        "runs": observed,
    }


def unit_costs(workload: Workload, prefix: Sequence[str]) -> dict[str, float]:
    """Measure microseconds per sample in isolation, by separate commands."""
    with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder:
        found = {}
        for name in ("env_alone", "network_alone"):
            path = Path(folder, f"{name}.json")
            runs.run_to_end(
                [sys.executable, "-m", f"benchmarks.speed.{name}", *workload.words(), f"--json={path}"], prefix
            )
            (found[name],) = measuring.read(path)["results"].values()
    return {
        "environment": found["env_alone"]["one"]["adapter"]["median"],
        "inference": inference_microseconds(found["network_alone"]),
        "training": training_microseconds(found["network_alone"]),
        TOGETHER: found["env_alone"]["all"]["adapter"]["median"],
    }


def limit(result: Mapping[str, Any]) -> float:
    """Return the samples per second that no framework could exceed on this machine."""
    return _at_most(result, result["unit_costs"])


def reached(result: Mapping[str, Any]) -> Spread:
    """Return the share of the limit by run; unit costs are measured just before, because a machine's pace changes."""
    costs, observed = result["costs"], result["runs"]
    if len(costs) != len(observed):
        costs = [result["unit_costs"]] * len(observed)
    return measuring.spread(
        [run["samples_per_second"] / _at_most(result, of) for run, of in zip(observed, costs, strict=True)]
    )


def _at_most(result: Mapping[str, Any], costs: Mapping[str, float]) -> float:
    return measuring.steps_per_second_at_most(result["cores"], [costs[name] for name in UNIT_COSTS])


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    head = "samples/s  lowest - highest     limit  reached  env + act + train us  env on all   PSS MiB  CPU us by role"
    lines = [f"{'':<16}  {head}"]
    for name, result in results.items():
        r = runs.summary(result["runs"])
        speed = r["samples_per_second"]
        extremes = f"{speed.lowest:,.0f} - {speed.highest:,.0f}"
        units = " + ".join(f"{result['unit_costs'][part]:.1f}" for part in UNIT_COSTS)
        roles = ", ".join(f"{role} {us:.1f}" for role, us in r["cpu_microseconds"].items())
        share = reached(result).median
        lines.append(
            f"{name:<16}  {speed.median:>9,.0f}  {extremes:>16}  {limit(result):>8,.0f}  {share:>7.0%}  "
            f"{units:>20}  {result['unit_costs'][TOGETHER]:>10.1f}  {r['pss_mib']:>8,.0f}  {roles}"
            + ("" if r["counts"] else "  DISCARDS TOO MUCH, does not count")
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="Speed, memory and CPU time of training, beside the limit."
    )
    add_workload_arguments(parser)
    runs.add_run_arguments(parser)
    arguments, flags = parser.parse_known_args()
    timing, workloads = runs.timing_of(arguments), chosen_workloads(arguments, flags)

    def measure_one(name: str, before: Mapping[str, Any]) -> dict[str, Any]:
        return measure(name, workloads[name], arguments.repeats, timing, before)

    print(table(runs.each_workload("end_to_end", arguments, workloads, measure_one)))
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
