"""Check the CUDA path on this machine's GPU, and measure the speed.

    python -m benchmarks.gpu_check [--out=FILE] [--device=cuda|cpu]

Each check prints a line: copies, captured inference and captured training against plain ones, streamed batches of PPO,
the replay of Ape-X, A3C's refusal of a GPU, the learner against recorded actions, learning. A run fails if a capture or
pinned memory is missing. Figures without a limit follow. The command takes at most 8 minutes. Exit code 0: all checks
passed, 1: a check failed, 2: no GPU. `--device=cpu` runs a short form with the CPU behind the buffers, buckets and
uploads of a GPU. Environments that are not installed are skipped and named.
"""

import argparse
import importlib.util
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from appo.utils.system.machine import available_cores
from benchmarks.gpu_check.cases import CARTPOLE, FIGURES, LIMITS, MODELS, PONG, ROLLOUT, STREAM, TF32
from benchmarks.gpu_check.report import Failed, Report
from benchmarks.gpu_check.whole_runs import learning, rate, reproduction, run
from benchmarks.gpu_check.world_checks import (
    a3c_refuses,
    captured_inference,
    captured_training,
    captured_values,
    replayed_training,
    slot_copies,
    streamed_training,
)


def checks(short: bool) -> Iterator[tuple[str, Callable[[Report], str]]]:
    """Yield all checks by name, quick checks first."""
    yield "slot copies", slot_copies
    for model in MODELS:
        yield f"captured inference, {model}", partial(captured_inference, model=model)
    for model in MODELS:
        yield f"captured training, {model}", partial(captured_training, model=model)
    for model in ("mlp", "gru"):
        yield f"PPO's batches stream, {model}", partial(streamed_training, model=model)
    yield "captured inference, Ape-X", captured_values
    yield "Ape-X learns from its replay", replayed_training
    yield "A3C and a GPU", a3c_refuses
    small: dict[str, object] = {**CARTPOLE, **MODELS["gru"], "num_workers": 2, "num_envs_per_worker": 8}
    yield "behaviour is reproduced", partial(reproduction, name="gru", limit=LIMITS["gru"], **small)
    together: dict[str, object] = {**small, "gpu_colocate": True}
    stream: dict[str, object] = {**small, **STREAM, "rollout": ROLLOUT}
    yield "behaviour is reproduced, PPO's stream", partial(reproduction, name="ppo", limit=LIMITS["gru"], **stream)
    yield "behaviour is reproduced, one process", partial(reproduction, name="one", limit=LIMITS["gru"], **together)
    goal = 100 if short else 475
    cartpole: dict[str, object] = {"env": "CartPole-v1", "inference": "central"}
    yield "CartPole is learned", partial(learning, name="cartpole", goal=goal, seconds=60, **cartpole)
    pendulum: dict[str, object] = {"env": "Pendulum-v1", "algo": "SAC"}
    yield (
        "Pendulum is learned by SAC",
        partial(learning, name="sac", goal=-1000 if short else -250, seconds=90, **pendulum),
    )
    if short or importlib.util.find_spec("ale_py") is None:
        return
    yield "behaviour is reproduced, Pong", partial(reproduction, name="pong", limit=TF32, **PONG)
    yield "Pong is learned", partial(learning, name="pong", goal=-10, seconds=120, **PONG)


def measure(report: Report, short: bool) -> None:
    """Measure the figures; a missing figure prints the reason."""
    seconds = 3 if short else 14
    for number, (name, (package, flags)) in enumerate(FIGURES.items()):
        if short and package is not None:
            continue
        if package is not None and importlib.util.find_spec(package) is None:
            report.figure(name, f"{package} is not installed")
            continue
        if report.seconds_left < seconds + 15:
            report.figure(name, "no time left")
            continue
        try:
            records = run(report, f"figure_{number}", train_for_seconds=seconds, **flags)
            report.figure(f"{name}, samples/s", rate(records))
        except Failed as error:
            report.figure(name, str(error))


def main(words: list[str] | None = None) -> int:
    """Check and measure; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description="Checks and figures of the CUDA path, in at most 8 minutes."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the short form (default cuda)")
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    arguments = parser.parse_args(words)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("error: torch sees no CUDA GPU here; --device=cpu checks the same code without one", file=sys.stderr)
        return 2
    short = arguments.device == "cpu"
    machine = {
        "device": "cpu" if short else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cores": available_cores(),
    }
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        report = Report(arguments.device, Path(directory))
        for name, function in checks(short):
            report.check(name, function)
        measure(report, short)
    if arguments.out:
        results = {"machine": machine, "checks": report.checks, "figures": report.figures}
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(check["passed"] for check in report.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
