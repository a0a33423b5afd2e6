"""The network alone: cost of acting and training per sample, in one process on one core.

    python -m benchmarks.speed.network_alone [--workload NAME ...] [--env=ID [flags of train_appo.py]] [--json=FILE]

The workers of a run first play a batch. Figures are microseconds per sample:

- `forward`: the model's `act` at the batch sizes of local and central placement;
- `acting`: `PolicyWorker.answer` (gather, act, sample, write) for the rows of one local group;
- `update`: `Learner.update`, one optimizer step on a minibatch (times `epochs`, for a sample);
- `learning`: `Learner.learn`, all work of the learner on a batch, all epochs.

`faults` are page faults per sample of an update, from memory that was returned to the kernel and requested again.
`floor` is the time of the arithmetic alone at the speed of a large matrix product on one core, in the dtype of the
network: one pass for acting; three for training, without the gradient of the observation.
"""

import argparse
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from appo.algorithms.cli import run_command
from appo.algorithms.run.placement import plan_workers
from appo.utils.system import machine
from benchmarks.shared import measuring
from benchmarks.shared.workloads import Workload, add_workload_arguments, chosen_workloads

if TYPE_CHECKING:
    from appo.algorithms.runtime.learning.batches import Batch
    from appo.algorithms.runtime.learning.learner_worker import LearnerWorker
    from appo.algorithms.runtime.sampling.policy_worker import PolicyWorker

SLOTS = 3
MATRIX_SIZE = 1024


class Played(NamedTuple):
    """Workers of one group with a batch."""

    policy_worker: "PolicyWorker"
    learner_worker: "LearnerWorker"
    batch: "Batch"


def measure(workload: Workload, seconds: float) -> dict[str, Any]:
    """Measure all costs of one workload, in a process without torch."""
    cores = machine.available_cores()
    measuring.on_one_core()
    config = workload.config(device="cpu", learning_rate=0, inference="serial")
    local, central = (plan_workers(config, cores, placement) for placement in ("local", "central"))
    rows, all_rows = local.num_envs_per_worker, central.num_envs_per_worker * central.num_workers // central.num_splits
    played = play(workload, rows)
    minibatch = played.batch.columns(slice(0, config.learning.batch_size // config.learning.rollout))
    samples, all_samples = int(minibatch.valid.sum()), int(played.batch.valid.sum())
    learner: Any = played.learner_worker.learner
    dtype = computed_in(learner.model)
    update, faults = _cost(lambda: learner.update(minibatch), samples, seconds)
    learning, _ = _cost(lambda: list(learner.learn(played.batch, 0.0)), all_samples, seconds)
    acting, _ = _cost(_acting(played.policy_worker), rows, seconds / 2)
    return {
        "what": workload.what,
        "weights": int(learner.flat.num_parameters),
        "dtype": str(dtype).removeprefix("torch."),
        "forward": {
            str(count): _cost(_forward(played, count), count, seconds / 2)[0]._asdict()
            for count in sorted({rows, all_rows})
        },
        "rows": rows,
        "acting": acting._asdict(),
        "minibatch": config.learning.batch_size,
        "epochs": config.learning.ppo_epochs,
        "update": update._asdict(),
        "learning": learning._asdict(),
        "faults": round(faults, 3),
        "floor": floor(learner.model, played.batch.obs, dtype, seconds / 2),
    }


def computed_in(model: Any) -> Any:
    """Return the dtype of a built-in model's matrix products."""
    import torch

    return torch.bfloat16 if any(getattr(module, "bf16", False) for module in model.modules()) else torch.float32


def floor(model: Any, obs: dict[str, Any], dtype: Any, seconds: float) -> dict[str, float]:
    """Return multiplications (millions) per forward pass, speed (billions per second), and least microseconds."""
    import torch

    matrix = torch.rand(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype)
    fastest = min(measuring.seconds_per_call(lambda: matrix @ matrix, seconds))
    per_second = MATRIX_SIZE**3 / fastest
    forward, observation = multiplications(model, {key: a.flatten(0, 1)[:1] for key, a in obs.items()})
    return {
        "forward_millions": forward / 1e6,
        "billions_per_second": per_second / 1e9,
        "acting": 1e6 * forward / per_second,
        "training": 1e6 * (3 * forward - observation) / per_second,
    }


def multiplications(model: Any, obs: dict[str, Any]) -> tuple[int, int]:
    """Count multiplications of a forward pass of one row {key} [1, *], in total and in layers on observations.

    A matrix multiplies once per row, a kernel once per output pixel. The pass runs in float32, because kernels in bf16
    are not called as modules.
    """
    import torch
    from torch import nn

    pixels: dict[nn.Module, int] = {}
    kernels = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    hooks = [k.register_forward_hook(lambda k, _, out: pixels.update({k: out[0, 0].numel()})) for k in kernels]
    in_bf16 = [module for module in model.modules() if getattr(module, "bf16", False)]
    for module in in_bf16:
        module.bf16 = False
    try:
        with torch.inference_mode():
            model.act(obs, torch.zeros(1, dtype=torch.bool), torch.zeros(1, model.rnn_state_size))
    finally:
        for module in in_bf16:
            module.bf16 = True
        for hook in hooks:
            hook.remove()
    of_kernels = [kernel.weight.numel() * pixels[kernel] for kernel in kernels]
    matrices = [p.numel() for p in model.parameters() if p.dim() == 2]
    first = of_kernels[0] if of_kernels else 0  # negligible in small networks
    return sum(of_kernels) + sum(matrices), first


def play(workload: Workload, rows: int) -> Played:
    """Let one group and its policy play until the learner has a batch."""
    from appo.algorithms.run.tuning.network import probe
    from appo.algorithms.run.workers.blueprint import Blueprint
    from appo.algorithms.runtime.budget import Budget
    from appo.algorithms.runtime.memory.arena import Arena
    from appo.algorithms.runtime.memory.heartbeat import Heartbeat
    from appo.algorithms.runtime.messages import Address, Begin, Message
    from appo.algorithms.runtime.processes.node import Node
    from appo.algorithms.runtime.processes.process import ProcessPlan
    from appo.algorithms.runtime.topology import Topology

    config = workload.config(device="cpu", learning_rate=0, inference="serial")
    found = probe(config)
    topology = Topology("serial", 1, 1, SLOTS, 1, 1, rows * found.spec.num_agents, config.learning.rollout)
    budget = Budget.of(config.run, config.sampling, found.spec.frames_per_step)
    blueprint = Blueprint(config, found.spec, found.models, topology, budget, "cpu", seed=0)
    arena = Arena.create(blueprint.fields())
    addresses = topology.processes()["main"]
    plan = ProcessPlan("main", 0, addresses, None, arena, Path("/dev/null"), 0, 0, frozenset(), 1)
    workers = dict(blueprint(plan, Heartbeat(arena, 0)))
    learner: Any = workers.pop(Address("learner", 0))
    policy_worker: Any = workers[Address("policy_worker", 0, 0)]
    handed_over: list[Message] = []
    node = Node(workers, topology.address_book().address_of, handed_over.append)
    node.deliver(Begin())
    while (batch := learner.batches.take()) is None:
        node.turn()
        while handed_over:
            list(learner.handle(handed_over.pop(0)))
        for released in learner.batches.fill(learner.learner.version):
            node.deliver(released)
    batch = batch.copy()
    workers[Address("actor", 0)].groups[0].envs.close()  # type: ignore[attr-defined]
    return Played(policy_worker, learner, batch)


def inference_microseconds(result: dict[str, Any]) -> float:
    """Return the lowest cost of acting per sample, over all ways and batch sizes of a result."""
    ways = [result["acting"], *result["forward"].values()]
    return float(min(way["median"] for way in ways))


def training_microseconds(result: dict[str, Any]) -> float:
    """Return the cost of the optimizer steps of all epochs, per sample of a result."""
    return float(result["epochs"] * result["update"]["median"])


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'':<16}  {'us per sample':<40}  acting (rows)   update x epochs (minibatch)  learning  faults  floor"]
    for name, r in results.items():
        forward = ", ".join(f"forward {size}: {cost['median']:.2f}" for size, cost in r["forward"].items())
        lines.append(
            f"{name:<16}  {forward:<40}  {r['acting']['median']:>7.2f} ({r['rows']})  {r['update']['median']:>9.2f} x "
            f"{r['epochs']} ({r['minibatch']})  {r['learning']['median']:>17.2f}  {r['faults']:>6.2f}  "
            f"{r['floor']['acting']:.2f} + {r['floor']['training']:.2f}"
        )
    return "\n".join(lines)


def _acting(policy_worker: "PolicyWorker") -> Callable[[], object]:
    """Answer one request repeatedly."""
    from appo.algorithms.runtime.messages import ActionRequest

    request = ActionRequest(0, 0, slot=0, step=1, generation=0)
    return lambda: list(policy_worker.answer([request]))


def _forward(played: Played, rows: int) -> Callable[[], object]:
    """Return a forward pass over `rows` observations."""
    import torch

    model: Any = played.policy_worker.policy.flat.module
    batch = played.batch
    obs = {key: _rows(a.flatten(0, 1), rows) for key, a in batch.obs.items()}
    first, state = torch.zeros(rows, dtype=torch.bool), torch.zeros(rows, model.rnn_state_size)

    def forward() -> None:
        with torch.inference_mode():
            model.act(obs, first, state)

    return forward


def _rows(tensor: Any, rows: int) -> Any:
    """Return `rows` rows, repeated if the batch has fewer."""
    repeats = -(-rows // len(tensor))
    return tensor.repeat(repeats, *[1] * (tensor.dim() - 1))[:rows].contiguous()


def _cost(function: Callable[[], object], samples: int, seconds: float) -> tuple[measuring.Spread, float]:
    """Return microseconds and page faults per sample of a call."""
    function()
    function()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    durations = measuring.seconds_per_call(function, seconds, warm_up=0)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return measuring.spread([1e6 * s / samples for s in durations]), faults / samples / len(durations)


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="Cost of acting and training per sample, on one core."
    )
    add_workload_arguments(parser)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each measurement (default 4)")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments, flags = parser.parse_known_args()
    results = {}
    for name, workload in chosen_workloads(arguments, flags).items():
        results[name] = measuring.in_fresh_processes(measure, [(workload, arguments.seconds)])[0]
        measuring.save(arguments.json, "network_alone", {name: results[name]})
    print(table(results))
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
