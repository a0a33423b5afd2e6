"""Does the CUDA path do what it should on this machine's GPU, and how fast is it?

    python -m benchmarks.gpu_check [--out=FILE] [--device=cuda|cpu]

Checks first, a line each: copies, captured inference and captured training against plain ones, batches of PPO that
stream, the replay of Ape-X, what A3C says of a GPU, the learner against what was acted, learning; a run fails that does
not capture what it could, or pin its memory. Then the figures, for which nothing is demanded. At most 8 minutes. Exit
code 0: all checks passed, 1: one failed, 2: there is no GPU. `--device=cpu` puts the CPU in the place of the GPU behind
the same buffers, buckets and uploads, in short; environments that are not installed are left out and named.
"""

import argparse
import importlib.util
import json
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from appo.algorithms.run.config import parse_train
from appo.algorithms.run.tuning.network import probe
from appo.algorithms.run.workers.blueprint import Blueprint
from appo.algorithms.run.workers.networks import make_learner, make_policy_worker
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.device_of import device_of
from appo.algorithms.runtime.learning.column_batches import ColumnBatches
from appo.algorithms.runtime.learning.gpu_batches import DeviceStaging
from appo.algorithms.runtime.learning.learner_worker import LearnerWorker
from appo.algorithms.runtime.memory.arena import Arena, Array
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.memory.weights import WeightRing
from appo.algorithms.runtime.messages import ActionRequest, Address, TrajectoryReady, Worker
from appo.algorithms.runtime.sampling.gpu_policy_worker import GpuEngine
from appo.algorithms.runtime.sampling.policy_worker import PolicyWorker
from appo.algorithms.runtime.topology import Topology
from appo.utils.errors import UsageError
from appo.utils.metrics import read_metrics
from appo.utils.system.machine import available_cores
from benchmarks.gpu_check.twin import BufferedBlueprint, PlainBlueprint

LIMIT_SECONDS = 470
# |difference| / (1 + |value|). Convolutions and recurrent cores of cuDNN multiply with 10 bits of mantissa: where the
# last bit of an input differs, that is seen; between a plain and a captured pass of other sizes too.
FLOAT32, TF32 = 1e-4, 2e-2
TRAINED = 0.02  # |difference| / largest movement of a weight, after some updates
GROUPS, SLOTS, ROWS, ROLLOUT = 3, 2, 24, 8
BATCHES = 6
SAME = 0.65  # share of two actions that chance chooses alike in two passes: a half, give or take 0.02
WAIT_SECONDS = 30
START_SECONDS = 60  # of a run: its processes import torch and set up CUDA one after another
FALLBACKS = ("cannot be captured and runs as it is", "cannot be pinned")
LOG_LINES = 15

TINY = {"encoder_mlp_layers": 24, "hidden_size": 24, "normalize_input": True, "normalize_returns": True}
ODD = "gru of odd size"  # whose vectors do not begin where cuDNN would like them to
MODELS = {
    "mlp": TINY | {"use_rnn": False},
    "gru": TINY | {"use_rnn": True},
    ODD: TINY | {"use_rnn": True, "hidden_size": 21},
}
LIMITS = {"mlp": FLOAT32, "gru": TF32, ODD: TF32}
WHOLE = {
    "algo": "PPO",
    "batch_size": ROLLOUT * 32,
    "num_batches_per_iteration": 1,
    "ppo_epochs": 1,
    "normalize_advantages": "off",
}
STREAM = WHOLE | {"microbatch_size": ROLLOUT * 4}
REPLAY = {
    "algo": "APEX",
    "batch_size": 32,
    "num_batches_per_iteration": None,  # it has no such flag
    "normalize_returns": None,
    "learning_starts": 64,
    "replay_capacity": 4096,
    "replay_ratio": 1,
    "max_weight_sync_delay": 1,
}
CARTPOLE = {"env": "CartPole-v1", "rollout": ROLLOUT, "batch_size": ROLLOUT * 32, "num_batches_per_iteration": 2}
PONG = {"env": "ALE/Pong-v5"}
VIZDOOM = {"env": "VizdoomBasic-v1"}


Flags = Mapping[str, object]


class Failed(Exception):
    """A check did not find what it must."""


@dataclass
class Report:
    """Everything that was found, printed as it comes.

    Attributes:
        device: "cuda" or "cpu".
        directory: for runs.
        checks: results by name.
        figures: by name.
    """

    device: str
    directory: Path
    checks: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float:
        return LIMIT_SECONDS - (time.monotonic() - self.began)

    def check(self, name: str, function: Callable[["Report"], str]) -> None:
        """Run a check and print its line."""
        try:
            passed, detail = True, function(self)
        except Failed as failure:
            passed, detail = False, str(failure)
        except Exception as error:  # a check that breaks has failed, and the others still count
            passed, detail = False, f"{type(error).__name__}: {error}"
            traceback.print_exc()
        self.checks.append({"name": name, "passed": passed, "detail": detail})
        print(f"{'ok' if passed else 'FAILED':6} {name}: {detail}", flush=True)

    def figure(self, name: str, value: Any) -> None:
        """Keep a figure and print it."""
        self.figures[name] = value
        print(f"       {name}: {value if isinstance(value, str) else f'{value:,.0f}'}", flush=True)


# --- small worlds, in this process


@dataclass
class World:
    """A shared memory with trajectories, and the workers of one kind around it."""

    blueprint: Blueprint
    arena: Arena
    trajectories: Trajectories
    acting: Worker
    learning: Worker
    learner_worker: LearnerWorker
    policy_worker: PolicyWorker


def blueprint_of(kind: type[Blueprint], device: str, model: str, more: Flags) -> Blueprint:
    """The blueprint of a central run with one policy."""
    flags = {"device": "cpu", "inference": "central", "experiment": "check", **CARTPOLE, **MODELS[model], **more}
    config = parse_train([f"--{name}={value}" for name, value in flags.items() if value is not None])
    found = probe(config)
    topology = Topology("central", 1, GROUPS, SLOTS, 1, 1, ROWS, ROLLOUT)
    budget = Budget(10**9, 10**9, 1e9, None, None)
    return kind(found.config, found.spec, found.models, topology, budget, device, 1)


def world_of(kind: type[Blueprint], device: str, model: str, **more: object) -> World:
    """Workers around random observations; worlds of one model have the same weights and the same observations."""
    blueprint = blueprint_of(kind, device, model, more)
    arena = Arena.create(blueprint.fields())
    trajectories, rng = blueprint.trajectories(arena), np.random.default_rng(0)
    for array in trajectories.obs.values():
        array[:] = rng.standard_normal(array.shape)
    trajectories.first[:] = rng.random(trajectories.first.shape) < 0.1
    trajectories.valid[:] = ~trajectories.first[:, 1:]
    trajectories.reward[:] = rng.standard_normal(trajectories.reward.shape)
    trajectories.num_frames[:] = 1
    learning = make_learner(blueprint, arena, Address("learner", 0))
    acting = make_policy_worker(blueprint, arena, Address("policy_worker", 0, 0))
    inner = [getattr(worker, "worker", worker) for worker in (learning, acting)]
    return World(blueprint, arena, trajectories, acting, learning, *inner)


def arrays(trajectories: Trajectories) -> dict[str, Array]:
    """All arrays of trajectories by their names, those of observations as obs.KEY, recorded ones as recorded.NAME."""
    named: dict[str, Array] = {}
    for name in Trajectories.__dataclass_fields__:
        value = getattr(trajectories, name)
        named |= {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    return named


def act(world: World) -> None:
    """Act in every slot of every group, for one, two or all groups at once, so that batches must be filled up."""
    for slot in range(SLOTS):
        for step in range(ROLLOUT):
            groups = list(range(GROUPS))[: 1 + step % GROUPS], list(range(GROUPS))[1 + step % GROUPS :]
            for together in filter(None, groups):
                for group in together:
                    list(world.acting.handle(ActionRequest(0, group, group * SLOTS + slot, step, 0)))
                list(world.acting.work())


def train_batches(world: World) -> None:
    """Train on the same slots again and again."""
    t, learner, limit = world.trajectories, world.learner_worker, time.monotonic() + WAIT_SECONDS
    while learner.totals["batches"] < BATCHES or learner.publisher.busy:
        if learner.totals["batches"] < BATCHES and not world.learning.pending():
            for slot in range(GROUPS * SLOTS):
                t.sequence[slot] += 1
                list(world.learning.handle(TrajectoryReady(0, slot, int(t.sequence[slot]), 0)))
        list(world.learning.work())
        if time.monotonic() > limit:
            raise Failed(f"{learner.totals['batches']} of {BATCHES} batches in {WAIT_SECONDS} s")


def largest(found: Any, expected: Any) -> float:
    """The largest |difference| / (1 + |value|)."""
    a, b = (np.asarray(x, dtype=np.float64) for x in (found, expected))
    return float(np.max(np.abs(a - b) / (1 + np.abs(b)), initial=0.0)) if np.isfinite(a).all() else float("inf")


def within(difference: float, limit: float) -> str:
    """The difference in words, if it is small enough."""
    if not difference <= limit:
        raise Failed(f"largest difference {difference:.1e}, allowed {limit:.0e}")
    return f"largest difference {difference:.1e}"


def slot_copies(report: Report) -> str:
    """Every field of an uploaded batch is that of its slots, and no slot is released before its copies are done."""
    blueprint = blueprint_of(BufferedBlueprint, report.device, "gru", {})
    arena, device = Arena.create(blueprint.fields()), device_of(report.device)
    device.register(arena)
    t, rng = blueprint.trajectories(arena), np.random.default_rng(1)
    for name, array in arrays(t).items():
        if name not in ("owner", "sequence", "released", "columns_used", "policy_version"):
            array[:] = rng.random(array.shape) * 100
    batches = ColumnBatches(DeviceStaging(t, device), 0, GROUPS * SLOTS * ROWS, 10**9, False, 1)
    for slot in range(GROUPS * SLOTS):
        batches.add(TrajectoryReady(0, slot, int(t.sequence[slot]), 0))
    batch, released, deadline = None, 0, time.monotonic() + WAIT_SECONDS
    while (batch is None or released < GROUPS * SLOTS) and time.monotonic() < deadline:
        released += len(list(batches.fill(0)))
        batch = batch or batches.take()
    if batch is None:
        raise Failed("nothing has arrived")
    batch = batch.map(device.send)
    names = (*(f"obs.{key}" for key in t.obs), "first", "reward", "action", "recorded.logits", "rnn_state")
    pairs = [(batch.named()[name], arrays(t)[name]) for name in names]
    for uploaded, array in pairs:
        if not np.array_equal(uploaded.cpu().numpy(), np.concatenate(array, axis=1)):
            raise Failed("a copy differs from its slot")
    return f"{len(pairs)} fields of {released} slots are equal"


def captured_inference(report: Report, model: str) -> str:
    """Captured passes of filled-up batches say what plain ones say."""
    names = ("recorded.logits", "recorded.value", "rnn_state", "policy_version")
    plain, captured, differences = acted_alike(report, model, names)
    differences.append(largest(captured.policy_worker.live_state.cpu(), plain.policy_worker.live_state.cpu()))
    a = arrays(captured.trajectories)
    logits = torch.from_numpy(a["recorded.logits"])
    log_prob = logits.log_softmax(-1).gather(-1, torch.from_numpy(a["action"]).long())[..., 0]
    differences.append(largest(a["recorded.log_prob"], log_prob))
    check_chance(a["action"])
    return within(max(differences), LIMITS[model])


def captured_values(report: Report) -> str:
    """The same of the values of Ape-X; its actions are those of chance for most."""
    _, captured, differences = acted_alike(report, "mlp", ("recorded.q_max", "policy_version"), **REPLAY)
    found = arrays(captured.trajectories)
    if not (found["recorded.q_taken"] <= found["recorded.q_max"] + FLOAT32).all():
        raise Failed("an action is worth more than the best one")
    return within(max(differences), FLOAT32)


def acted_alike(report: Report, model: str, names: tuple[str, ...], **more: object) -> tuple[World, World, list[float]]:
    """Act in a plain world and in one that captures; both, and how far apart these arrays are."""
    plain, captured = (world_of(kind, report.device, model, **more) for kind in (PlainBlueprint, BufferedBlueprint))
    for world in (plain, captured):
        act(world)
    engine = captured.policy_worker.engine
    if not (isinstance(engine, GpuEngine) and engine.capturable):
        raise Failed("the forward pass could not be captured")
    a, b = arrays(captured.trajectories), arrays(plain.trajectories)
    return plain, captured, [largest(a[name], b[name]) for name in names]


def check_chance(action: Array) -> None:
    """Fail if the actions [S, T, R, 1] of a policy that knows nothing are not those of chance.

    Every so many steps the same groups act together, by the same graph: one that repeats its random numbers says the
    same again.
    """
    shares = np.bincount(action.reshape(-1), minlength=2) / action.size
    if not 0.4 < shares[0] < 0.6:
        raise Failed(f"a policy that knows nothing chooses its actions with shares {shares}")
    again = float(np.mean(action[:, :-GROUPS] == action[:, GROUPS:]))
    if again > SAME:
        raise Failed(f"{again:.0%} of the actions are those of the pass before: random numbers are repeated")


def captured_training(report: Report, model: str) -> str:
    """Captured optimizer steps make the same weights as plain ones, and what is published are these weights."""
    plain, captured = (world_of(kind, report.device, model) for kind in (PlainBlueprint, BufferedBlueprint))
    expected: Any = plain.learner_worker.learner
    expected.quick_update = None
    detail = trained_alike(plain, captured)
    learner: Any = captured.learner_worker.learner
    if not learner.quick_update._steps:
        raise Failed("the optimizer step could not be captured")
    return detail


def streamed_training(report: Report, model: str) -> str:
    """Batches of PPO that stream through the memory of the device make the weights that whole ones make on the host."""
    plain = world_of(PlainBlueprint, report.device, model, **WHOLE, shuffle_minibatches=False)
    streamed = world_of(BufferedBlueprint, report.device, model, **STREAM)
    detail = trained_alike(plain, streamed)
    metrics = streamed.learner_worker.learner.metrics()
    if not metrics["grad_seconds"] > 0:
        raise Failed(f"the gradients of a batch took {metrics['grad_seconds']} s")
    return detail


def replayed_training(report: Report) -> str:
    """Ape-X learns on the device from its replay on the host what it learns on the host alone."""
    kinds = (PlainBlueprint, BufferedBlueprint)
    plain, replayed = (world_of(kind, report.device, "mlp", **REPLAY) for kind in kinds)
    return trained_alike(plain, replayed)


def a3c_refuses(report: Report) -> str:
    """A3C, whose home are the actors, says in one line that it has no use for a GPU."""
    words = ["--algo=A3C", "--env=CartPole-v1", "--experiment=refused", f"--train_dir={report.directory}"]
    if report.device == "cpu":  # where the line cannot come, training on the CPU is what must be accepted
        parse_train([*words, "--device=cpu"])
        return "the CPU is accepted"
    try:
        parse_train([*words, "--device=cuda"])
    except UsageError as refusal:
        return str(refusal)
    raise Failed("a GPU was accepted")


def trained_alike(plain: World, found: World) -> str:
    """Let the first world act and both train on that; fail unless they make the same weights, and publish these."""
    act(plain)
    slots = arrays(found.trajectories)
    for name, array in arrays(plain.trajectories).items():
        if not name.startswith("obs."):
            slots[name][:] = array
    before = WeightRing(found.arena, 0).fetch(0)[1]
    for world in (plain, found):
        train_batches(world)
    expected, learner = plain.learner_worker.learner, found.learner_worker.learner
    version, published = WeightRing(found.arena, 0).fetch(0)
    if (
        before is None
        or published is None
        or version != learner.version
        or not np.array_equal(published, learner.flat.flat.cpu())
    ):
        raise Failed("what was published is not what was learned")
    if expected.updates != learner.updates:
        raise Failed(f"{learner.updates} updates instead of {expected.updates}")
    trained = slice(learner.flat.num_parameters)  # behind them are statistics
    moved = float(np.abs(published - before)[trained].max())
    apart = float((learner.flat.flat - expected.flat.flat).abs().max())
    if not (moved > 0 and apart <= TRAINED * moved):
        raise Failed(f"weights that moved by {moved:.1e} are {apart:.1e} apart")
    return f"after {learner.updates} updates weights that moved by {moved:.1e} are {apart:.1e} apart"


# --- whole runs


def run(report: Report, name: str, **flags: object) -> list[dict[str, Any]]:
    """The reports of a training run in a process of its own."""
    given = {"experiment": name, "train_dir": report.directory, "device": report.device, "seed": 1} | flags
    given = {"tensorboard": False, "report_interval_seconds": 1, "experiment_summaries_interval": 1} | given
    words = [f"--{key}={value}" for key, value in given.items()]
    limit = max(10.0, min(report.seconds_left, START_SECONDS + float(str(flags.get("train_for_seconds", 60)))))
    command = [sys.executable, "-m", "benchmarks.gpu_check.twin", *words]
    logs = report.directory / name / "logs"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        raise Failed(f"not done after {limit:.0f} s\n{_ends_of(logs)}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-800:]
        raise Failed(f"exit code {done.returncode}: {said}\n{_ends_of(logs)}")
    for line in (line for path in sorted(logs.glob("*.log")) for line in path.read_text().splitlines()):
        if any(words in line for words in FALLBACKS):
            raise Failed(line)
    return read_metrics(report.directory / name / "metrics.jsonl")


def _ends_of(logs: Path) -> str:
    """Return the last lines of every process."""
    ends = {
        path.name: path.read_text(errors="replace").splitlines()[-LOG_LINES:] for path in sorted(logs.glob("*.log"))
    }
    return "\n".join(f"  {name}: {line}" for name, lines in ends.items() for line in lines)


def rate(records: list[dict[str, Any]]) -> float:
    """Samples per second after the start: from a third of the run's time to its end."""
    last = records[-1]
    first = next(r for r in records if r["elapsed_seconds"] >= last["elapsed_seconds"] / 3)
    seconds = last["elapsed_seconds"] - first["elapsed_seconds"]
    return (last["samples"] - first["samples"]) / seconds if seconds else 0.0


def last_of(records: list[dict[str, Any]], key: str) -> float:
    values = [record[key] for record in records if key in record]
    if not values:
        raise Failed(f"{key} was never reported")
    return float(values[-1])


def reproduction(report: Report, name: str, limit: float, **flags: object) -> str:
    """With a learning rate of 0 the learner computes the logits and values that acting has computed."""
    given = {"inference": "central", "learning_rate": 0, "verify_reproduction": True, "train_for_env_steps": 4000}
    records = run(report, f"reproduction_{name}", **given | flags)
    detail = within(last_of(records, "train/reproduction_error"), limit)
    return f"{detail} in {last_of(records, 'train/reproduction_steps'):.0f} steps"


def learning(report: Report, name: str, goal: float, seconds: float, **flags: object) -> str:
    """A return is reached, in so many seconds at most."""
    seconds = min(seconds, report.seconds_left - START_SECONDS)
    if seconds <= 0:
        raise Failed("no time left")
    records = run(report, f"learning_{name}", train_until_return=goal, train_for_seconds=seconds, **flags)
    reached = max(float(r["reward/mean"]) for r in records if "reward/mean" in r)
    if reached < goal:
        raise Failed(f"a mean return of {reached:.1f} instead of {goal:g}")
    return f"a mean return of {reached:.1f} in {records[-1]['elapsed_seconds']:.0f} s, {rate(records):,.0f} samples/s"


def checks(short: bool) -> Iterator[tuple[str, Callable[[Report], str]]]:
    """All checks by name, the quick ones first."""
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
    if short or importlib.util.find_spec("ale_py") is None:
        return
    yield "behaviour is reproduced, Pong", partial(reproduction, name="pong", limit=TF32, **PONG)
    yield "Pong is learned", partial(learning, name="pong", goal=-10, seconds=150, **PONG)


def measure(report: Report, short: bool) -> None:
    """The figures; one that cannot be had says why."""
    seconds, cores = (3 if short else 12), available_cores()
    vector: dict[str, object] = {"env": "CartPole-v1", "inference": "local", "normalize_input": False, "ppo_epochs": 1}
    cases: dict[str, dict[str, object]] = {"CartPole, acting in the actors": vector}
    if not short:
        for package, name, flags in (("ale_py", "Pong", PONG), ("vizdoom", "VizDoom", VIZDOOM)):
            if importlib.util.find_spec(package) is None:
                report.figure(name, f"{package} is not installed")
                continue
            central: dict[str, object] = {**flags, "inference": "central"}
            all_actors = max(1, cores - 1)
            cases[f"{name}, {all_actors} actors"] = {**central, "num_workers": all_actors}
            cases[f"{name}, 1 actor"] = {**central, "num_workers": 1}
            cases[f"{name}, one GPU process"] = {**central, "num_workers": all_actors, "gpu_colocate": True}
    for number, (name, flags) in enumerate(cases.items()):
        if report.seconds_left < seconds + 15:
            report.figure(name, "no time left")
            continue
        try:
            records = run(report, f"figure_{number}", train_for_seconds=seconds, **flags)
            report.figure(f"{name}, samples/s", rate(records))
        except Failed as error:
            report.figure(name, str(error))


def main(words: list[str] | None = None) -> int:
    """The exit code."""
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
