"""Side by side with Sample Factory 2, with PPO in the manner of CleanRL on EnvPool, and with PufferLib 3.

    python -m benchmarks.peers [--workload NAME ...] [--contender NAME ...] [--cache=DIR] [--json=FILE]

The runs of all contenders take turns, A B C A B C ..., so changes of the machine affect all contenders alike. A sample
is an agent step that was trained on. Each contender counts samples; the benchmark measures the time, after a warm-up.
`sample_factory_malloc` is Sample Factory with the fastest settings of glibc's allocator; all other contenders run with
defaults. The first start creates the interpreters of the peers in the cache directory (some GiB).
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from appo.algorithms.cli import run_command
from benchmarks.peers.interpreters import DEFAULT_CACHE, interpreter
from benchmarks.shared import runs
from benchmarks.shared.runs import Observed, Timing
from benchmarks.shared.workloads import WORKLOADS

OURS = "appo"
KEPT_BYTES = 2**33  # above any allocation, so malloc returns nothing to the kernel
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(KEPT_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES),
    "MALLOC_TOP_PAD_": str(2**28),
}


class Peer(NamedTuple):
    """A peer.

    Attributes:
        venv: name of the interpreter.
        driver: script in this folder.
        workloads: workloads of the comparison.
        environment: environment variables.
    """

    venv: str
    driver: str
    workloads: Sequence[str]
    environment: Mapping[str, str]


SAMPLE_FACTORY = Peer(
    "sample_factory",
    "sample_factory_driver.py",
    ("pong", "pong_4_epochs", "pong_fp32", "vizdoom", "cartpole", "cartpole_vector", "halfcheetah"),
    {},
)
PEERS = {
    "sample_factory": SAMPLE_FACTORY,
    "sample_factory_malloc": SAMPLE_FACTORY._replace(workloads=("pong", "vizdoom"), environment=MALLOC),
    "cleanrl_envpool": Peer(
        "envpool", "cleanrl_envpool_driver.py", ("pong", "pong_4_epochs", "cartpole", "halfcheetah"), {}
    ),
    "pufferlib": Peer("pufferlib", "pufferlib_driver.py", ("cartpole",), {}),
}
# Peers always compute in float32. Sample Factory steps single environments only, so our vector entry point is compared
# with Sample Factory's single environments.
SAME_FOR_PEERS = {"pong_fp32": "pong", "cartpole_vector": "cartpole"}


def contenders(workload: str, wanted: Sequence[str]) -> list[str]:
    """Return the contenders, ours first."""
    return [name for name in (OURS, *PEERS) if name in wanted and (name == OURS or workload in PEERS[name].workloads)]


class Plan(NamedTuple):
    """Settings of a comparison."""

    contenders: Sequence[str]
    repeats: int
    timing: Timing
    cache: Path


def measure(workload: str, plan: Plan, before: Mapping[str, Any]) -> dict[str, Any]:
    """Measure all contenders on one workload in turns, and add the runs to the earlier runs."""
    names = contenders(workload, plan.contenders)
    pythons = {name: interpreter(PEERS[name].venv, plan.cache) for name in names if name != OURS}
    observed = {name: list(found) for name, found in before.get("contenders", {}).items()}
    for _ in range(plan.repeats):
        for name in names:
            if name == OURS:
                run = runs.train(WORKLOADS[workload], plan.timing)
            else:
                run = _run_peer(name, pythons[name], workload, plan.timing)
            observed.setdefault(name, []).append(run._asdict())
            print(f"{workload}: {name}: {run.samples_per_second:,.0f} samples/s, {run.pss_mib:,.0f} MiB", flush=True)
    return {"what": WORKLOADS[workload].what, "seconds": plan.timing.seconds, "contenders": observed}


def ratios(result: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return our median speed and memory over each peer's; memory without games of VizDoom."""
    found = {name: runs.summary(of_one) for name, of_one in result["contenders"].items()}
    if OURS not in found:
        return {}
    ours = found.pop(OURS)
    return {
        name: (
            ours["samples_per_second"].median / peer["samples_per_second"].median,
            ours["pss_without_games_mib"] / peer["pss_without_games_mib"],
        )
        for name, peer in found.items()
    }


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"{'':<16}  {'':<22}  samples/s  lowest - highest   CPU  PSS MiB  ours is  with memory"]
    for workload, result in results.items():
        times = ratios(result)
        for name, of_one in result["contenders"].items():
            r = runs.summary(of_one)
            speed = r["samples_per_second"]
            ratio = "" if name not in times else f"{times[name][0]:>6.2f}x  {times[name][1]:>10.2f}x"
            extremes = f"{speed.lowest:,.0f} - {speed.highest:,.0f}"
            lines.append(
                f"{workload:<16}  {name:<22}  {speed.median:>9,.0f}  {extremes:>16}  {r['cpu_share']:>4.0%}  "
                f"{r['pss_mib']:>7,.0f}  {ratio}" + ("" if r["counts"] else "  DISCARDS TOO MUCH, does not count")
            )
    return "\n".join(lines)


def _run_peer(name: str, python: Path, workload: str, timing: Timing) -> Observed:
    peer = PEERS[name]
    driver = Path(__file__).with_name(peer.driver)
    with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder:
        log_path = Path(folder, "output.log")
        command = [str(python), str(driver), SAME_FOR_PEERS.get(workload, workload), folder]
        environment = {**peer.environment, "PYTHONPATH": ""}
        return runs.observe(command, lambda: runs.reported_progress(log_path), timing, log_path, environment)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="Speed and memory beside peers.")
    known = (OURS, *PEERS)
    parser.add_argument("--workload", nargs="*", choices=WORKLOADS, metavar="NAME", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--contender", nargs="*", choices=known, metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument(
        "--cache", type=Path, default=DEFAULT_CACHE, help=f"folder of interpreters (default {DEFAULT_CACHE})"
    )
    runs.add_run_arguments(parser)
    arguments = parser.parse_args()
    plan = Plan(arguments.contender or known, arguments.repeats, runs.timing_of(arguments), arguments.cache)
    names = arguments.workload or WORKLOADS
    print(table(runs.each_workload("peers", arguments, names, lambda name, before: measure(name, plan, before))))
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
