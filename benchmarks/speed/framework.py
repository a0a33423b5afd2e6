"""The framework alone: cost of an actor process per sample when environment, policy and learner cost nothing.

    python -m benchmarks.speed.framework [--repeats=7] [--seconds=1] [--json=FILE] [--profile]

One process holds the objects of a real actor process (`actor_process.py`). The environment is `toy/Zero-v0` in its
vector form. A sample is a valid step of one row.

The targets assume a free core. Where other processes share the core, wall-clock rates are lower; the rate per second of
CPU time, printed as well, is closer to the rate of an idle machine.
"""

import argparse
import cProfile
import os
import pstats
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from appo.algorithms.cli import run_command
from appo.envs.config import EnvConfig
from benchmarks.shared import measuring
from benchmarks.speed.actor_process import ActorProcess

ROWS, ROLLOUT = 64, 32
WARM_UP_SECONDS = 0.5


class Case(NamedTuple):
    """A measurement with a target."""

    obs_bytes: int
    target: float  # samples per second


CASES = (Case(16, 500_000), Case(28_224, 100_000))  # 28,224 bytes: a stack of four Atari frames of 84 x 84


def measure(case: Case, repeats: int, seconds: float) -> dict[str, Any]:
    """Return median and spread of several repeats."""
    process = _process(case)
    process.run(WARM_UP_SECONDS)
    rates = [process.run(seconds) for _ in range(repeats)]
    wall = measuring.spread([rate.wall for rate in rates])
    return {
        "obs_bytes": case.obs_bytes,
        "samples_per_second": round(wall.median),
        "lowest": round(wall.lowest),
        "highest": round(wall.highest),
        "samples_per_cpu_second": round(measuring.spread([rate.cpu for rate in rates]).median),
        "microseconds_per_step": round(1e6 * ROWS / wall.median, 2),
        "target": round(case.target),
        "reached": wall.median >= case.target,
    }


def _process(case: Case) -> ActorProcess:
    return ActorProcess(EnvConfig(env="toy/Zero-v0", env_kwargs={"obs_bytes": case.obs_bytes}), ROWS, ROLLOUT)


def table(results: Sequence[dict[str, Any]]) -> str:
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
    """Print the profile. The profiler costs several times the measured work: only the order counts."""
    process = _process(case)
    process.run(WARM_UP_SECONDS)
    profiler = cProfile.Profile()
    profiler.runcall(process.run, seconds)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(14)


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed of the framework alone, per actor process.")
    parser.add_argument("--repeats", type=int, default=7, help="repeats per case; the median counts (default 7)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a repeat (default 1)")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--profile", action="store_true", help="print a profile instead")
    arguments = parser.parse_args()
    if arguments.profile:
        for case in CASES:
            profile(case, arguments.seconds)
        return os.EX_OK
    results = [measure(case, arguments.repeats, arguments.seconds) for case in CASES]
    print(f"one actor process, {ROWS} rows, rollout {ROLLOUT}, median of {arguments.repeats} x {arguments.seconds:g} s")
    print(table(results))
    settings = {"rows": ROWS, "rollout": ROLLOUT, "repeats": arguments.repeats, "seconds": arguments.seconds}
    measuring.save(arguments.json, "framework", {f"{r['obs_bytes']} bytes": settings | r for r in results})
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
