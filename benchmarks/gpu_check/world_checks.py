"""Checks in small worlds: the path of a GPU against the plain path."""

import time
from typing import Any

import numpy as np
import torch

from appo.algorithms.run.config import parse_train
from appo.algorithms.runtime.device_of import device_of
from appo.algorithms.runtime.learning.column_batches import ColumnBatches
from appo.algorithms.runtime.learning.gpu_batches import DeviceStaging
from appo.algorithms.runtime.memory.arena import Arena, Array
from appo.algorithms.runtime.memory.weights import WeightRing
from appo.algorithms.runtime.messages import TrajectoryReady
from appo.algorithms.runtime.sampling.gpu_policy_worker import GpuEngine
from appo.utils.errors import UsageError
from benchmarks.gpu_check.cases import FLOAT32, GROUPS, LIMITS, REPLAY, ROWS, SLOTS, STREAM, TRAINED, WHOLE
from benchmarks.gpu_check.report import Failed, Report, within
from benchmarks.gpu_check.twin import BufferedBlueprint, PlainBlueprint
from benchmarks.gpu_check.worlds import WAIT_SECONDS, World, act, arrays, blueprint_of, train_batches, world_of

SAME = 0.65  # above the share of equal random actions in two passes: a half, give or take 0.02


def slot_copies(report: Report) -> str:
    """Check that uploaded fields equal the slots, and that copies end before the release of a slot."""
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
    """Check that captured passes of padded batches equal plain passes."""
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
    """Check the captured values of Ape-X, whose actions are mostly random."""
    _, captured, differences = acted_alike(report, "mlp", ("recorded.q_max", "policy_version"), **REPLAY)
    found = arrays(captured.trajectories)
    if not (found["recorded.q_taken"] <= found["recorded.q_max"] + FLOAT32).all():
        raise Failed("an action is worth more than the best one")
    return within(max(differences), FLOAT32)


def acted_alike(report: Report, model: str, names: tuple[str, ...], **more: object) -> tuple[World, World, list[float]]:
    """Act in a plain and in a capturing world; return both, and the largest differences of the named arrays."""
    plain, captured = (world_of(kind, report.device, model, **more) for kind in (PlainBlueprint, BufferedBlueprint))
    for world in (plain, captured):
        act(world)
    engine = captured.policy_worker.engine
    if not (isinstance(engine, GpuEngine) and engine.capturable):
        raise Failed("the forward pass could not be captured")
    a, b = arrays(captured.trajectories), arrays(plain.trajectories)
    return plain, captured, [largest(a[name], b[name]) for name in names]


def largest(found: Any, expected: Any) -> float:
    """Return the largest |difference| / (1 + |value|)."""
    a, b = (np.asarray(x, dtype=np.float64) for x in (found, expected))
    return float(np.max(np.abs(a - b) / (1 + np.abs(b)), initial=0.0)) if np.isfinite(a).all() else float("inf")


def check_chance(action: Array) -> None:
    """Fail unless the actions [S, T, R, 1] of an untrained policy look random.

    The groups that act together repeat periodically, with one graph each. A graph with repeated random numbers would
    repeat the actions.
    """
    shares = np.bincount(action.reshape(-1), minlength=2) / action.size
    if not 0.4 < shares[0] < 0.6:
        raise Failed(f"a policy that knows nothing chooses its actions with shares {shares}")
    again = float(np.mean(action[:, :-GROUPS] == action[:, GROUPS:]))
    if again > SAME:
        raise Failed(f"{again:.0%} of the actions are those of the pass before: random numbers are repeated")


def captured_training(report: Report, model: str) -> str:
    """Check that captured optimizer steps train the weights of plain steps, and publish the weights."""
    plain, captured = (world_of(kind, report.device, model) for kind in (PlainBlueprint, BufferedBlueprint))
    expected: Any = plain.learner_worker.learner
    expected.quick = None
    detail = trained_alike(plain, captured)
    learner: Any = captured.learner_worker.learner
    if not learner.quick._steps:
        raise Failed("the optimizer step could not be captured")
    return detail


def streamed_training(report: Report, model: str) -> str:
    """Check that streamed batches of PPO train the weights of whole batches on the host."""
    plain = world_of(PlainBlueprint, report.device, model, **WHOLE, shuffle_minibatches=False)
    streamed = world_of(BufferedBlueprint, report.device, model, **STREAM)
    detail = trained_alike(plain, streamed)
    found = [report.metrics.get("train/grad_seconds", 0.0) for report in streamed.reports]  # a slow start reports early
    seconds = max([*found, streamed.learner_worker.learner.metrics().get("grad_seconds", 0.0)])
    if not seconds > 0:
        raise Failed(f"the gradients of a batch took {seconds} s")
    return detail


def replayed_training(report: Report) -> str:
    """Check that Ape-X on the device, with the replay on the host, learns the weights of the host alone."""
    kinds = (PlainBlueprint, BufferedBlueprint)
    plain, replayed = (world_of(kind, report.device, "mlp", **REPLAY) for kind in kinds)
    return trained_alike(plain, replayed)


def a3c_refuses(report: Report) -> str:
    """Check that A3C, which learns in actors, refuses a GPU in one line."""
    words = ["--algo=A3C", "--env=CartPole-v1", "--experiment=refused", f"--train_dir={report.directory}"]
    if report.device == "cpu":  # no refusal on the CPU: training must be accepted
        parse_train([*words, "--device=cpu"])
        return "the CPU is accepted"
    try:
        parse_train([*words, "--device=cuda"])
    except UsageError as refusal:
        return str(refusal)
    raise Failed("a GPU was accepted")


def trained_alike(plain: World, found: World) -> str:
    """Act in the first world, train both worlds; fail unless the weights agree and were published."""
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
    trained = slice(learner.flat.num_parameters)  # statistics follow the parameters
    moved = float(np.abs(published - before)[trained].max())
    apart = float((learner.flat.flat - expected.flat.flat).abs().max())
    if not (moved > 0 and apart <= TRAINED * moved):
        raise Failed(f"weights that moved by {moved:.1e} are {apart:.1e} apart")
    return f"after {learner.updates} updates weights that moved by {moved:.1e} are {apart:.1e} apart"
