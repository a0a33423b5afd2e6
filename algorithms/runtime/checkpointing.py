"""When checkpoints are written and what is in them; how a file becomes safe on disk is `utils.checkpoint`'s business.

Main writes them from the state blocks, in a thread of its own, so saving stalls neither training nor supervision.
"""

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from safetensors.numpy import load, save

from algorithms.runtime.arena import Array
from algorithms.runtime.best import Best
from algorithms.runtime.config import RunConfig
from algorithms.runtime.messages import Message, SaveState, StateSaved, WorkerRestarted
from algorithms.runtime.monitor import Monitor
from algorithms.runtime.plain_state import OF_MAIN, read_plain
from algorithms.runtime.state_block import LearnerState, StateBlock
from algorithms.runtime.traits import Traits
from utils import checkpoint
from utils.errors import AppoError, CheckpointError, NumericsError, UsageError

log = logging.getLogger(__name__)

Table = list[tuple[str, tuple[int, ...]]]
Kind = Literal["regular", "milestone", "best"]
FORMAT = 1
MOMENTS = ("exp_avg.", "exp_avg_sq.")


class Checkpointing:
    """Asks learners for their state from time to time, and writes it.

    Args:
        directory: of the run.
        config: of the run.
        blocks: the state block of every policy.
        table: name and shape of every weight, in the order of the flat vector.
        monitor: what else is known of the policies, and how good they are.
    """

    def __init__(
        self, directory: Path, config: RunConfig, blocks: list[StateBlock], table: Table, monitor: Monitor
    ) -> None:
        self.config, self.blocks, self.table, self.monitor = config, blocks, table, monitor
        self.directories = [directory / f"checkpoint_p{policy}" for policy in range(len(blocks))]
        self._best = [Best(parent, config) for parent in self.directories]
        self._writer = _new_writer()
        self._pending: dict[int, Future[None]] = {}
        self._saved_steps: dict[int, int] = {}
        self._owed: list[set[Kind]] = [set() for _ in blocks]  # asked for and not on disk yet
        now = time.monotonic()
        # Where a run goes on from must be a barrier, then, and no moment of the clock.
        self._regular: frozenset[Kind] = frozenset() if config.deterministic_resume else frozenset({"regular"})
        self._due = now + config.save_every_sec
        self._milestone_due = now + config.save_milestones_sec if config.save_milestones_sec > 0 else float("inf")
        self._best_due = now + config.save_best_every_sec

    def ask(self) -> None:
        """Let the next `tick` ask for the states of all policies, whatever the time."""
        self._due = -math.inf

    @property
    def busy(self) -> bool:
        """Whether states that were asked for are not on disk yet."""
        return any(self._owed) or any(not writing.done() for writing in self._pending.values())

    def handle(self, message: Message) -> None:
        """Write the state of a policy whose learner has put it into its block."""
        if isinstance(message, StateSaved):
            last = self._pending.get(message.policy)
            if last is None or last.done():
                if last is not None:
                    last.result()  # whatever is no `AppoError` is a bug, and must not pass unnoticed in a thread
                self._pending[message.policy] = self._writer.submit(self._write, self._order(message.policy))
        elif isinstance(message, WorkerRestarted) and any(self._owed):  # a learner may have died with the request
            self._due = min(self._due, time.monotonic())

    def tick(self, now: float) -> Iterator[Message]:
        """Ask for states when a checkpoint is due."""
        kinds: set[Kind] = set()
        if now >= self._milestone_due:
            self._due, self._milestone_due = now, now + self.config.save_milestones_sec
            kinds.add("milestone")
        if now >= self._due:
            self._due = now + self.config.save_every_sec
            kinds |= self._regular
        look = now >= self._best_due
        if look:
            self._best_due = now + self.config.save_best_every_sec
        for policy, progress in enumerate(self.monitor.policies):
            better: set[Kind] = {"best"} if look and self._best[policy].better(progress) is not None else set()
            if kinds | better:
                self._owed[policy] |= kinds | better
                yield SaveState(policy)

    def finish(self, *, regular: bool = True) -> None:
        """Write the latest state of every policy, and wait until it is on disk.

        Args:
            regular: as a checkpoint to go on from, too; without, only if it is the best.

        Raises:
            AppoError: it cannot be written.
        """
        self._writer.shutdown(wait=True)
        self._writer = _new_writer()
        kinds: tuple[Kind, ...] = ("regular", "best") if regular else ("best",)
        for policy in range(len(self.blocks)):
            self._save(self._order(policy, *kinds))

    def _order(self, policy: int, *kinds: Kind) -> "_Order":
        """What is to be written of a policy: these kinds, and those that are owed."""
        better = self._best[policy].better(self.monitor.policies[policy])
        wanted = self._owed[policy].union(kinds) or self._regular
        return _Order(policy, frozenset(wanted), self.monitor.snapshot(policy), better)

    def _write(self, order: "_Order") -> None:
        """A failed save, of a full disk for example, costs nothing but that save: the older checkpoints are intact."""
        try:
            self._save(order)
        except AppoError as error:
            log.warning("checkpoint of policy %d not saved, will be tried again: %s", order.policy, error)

    def _save(self, order: "_Order") -> None:
        policy, parent = order.policy, self.directories[order.policy]
        state = self.blocks[policy].read()
        if state is None:
            return
        if not state.is_finite:
            raise NumericsError("weights or moments are not finite; older checkpoints are kept")
        steps = int(state.meta["env_steps"])
        name = checkpoint.checkpoint_name(steps)
        state = replace(state, meta={**state.meta, "progress": order.progress})
        if "regular" in order.kinds and steps != self._saved_steps.get(policy):
            path = checkpoint.save(parent, name, encode(state, self.table))
            self._saved_steps[policy] = steps
            log.info("saved %s", path)
        if "milestone" in order.kinds:
            checkpoint.save(parent / "milestones", name, encode(state, self.table))
        same_weights = (Traits.in_state(state.meta) or Traits()).adoptions == order.progress.get("adoptions", 0)
        if "best" in order.kinds and order.better is not None and same_weights:
            best = self._best[policy]
            best.save(name, encode(best.mark(state, order.better), self.table), order.better)
        self._owed[policy] -= order.kinds
        checkpoint.prune(parent, self.config.keep_checkpoints)


def _new_writer() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="checkpoint")


class _Order(NamedTuple):
    """What the writer is told, as main knew it when the learner's state came."""

    policy: int
    kinds: frozenset[Kind]
    progress: dict[str, Any]
    better: float | None  # the metric, if it is the best so far


def encode(state: LearnerState, table: Table) -> dict[str, bytes]:
    """The files of a checkpoint."""
    weights, first, second = (named(vector, table) for vector in state.vectors)
    moments = zip(MOMENTS, (first, second), strict=True)
    optimizer = {prefix + name: value for prefix, vector in moments for name, value in vector.items()}
    optimizer["statistics"] = state.moments
    meta = {"format": FORMAT, **state.meta}
    return {
        "model.safetensors": save(weights),
        "optimizer.safetensors": save(optimizer),
        "state.json": json.dumps(meta, indent=1).encode(),
    }


def decode(files: dict[str, bytes], table: Table | None = None) -> tuple[LearnerState, Table]:
    """The inverse of `encode`, with the table of the weights.

    Args:
        files: of a checkpoint that verified. That says nothing of who wrote them.
        table: what the model expects; None accepts any, in alphabetical order.

    Raises:
        UsageError: the weights are those of another model.
        CheckpointError: the files are not what `encode` makes of a state that training can go on from.
    """
    weights, optimizer = _arrays(files, "model.safetensors"), _arrays(files, "optimizer.safetensors")
    found = {name: tuple(value.shape) for name, value in sorted(weights.items())}
    if table is None:
        table = list(found.items())
    expected = dict(table)
    if found != expected:
        names = [n for n in {**expected, **found} if found.get(n) != expected.get(n)]
        first = f"{names[0]}: saved {found.get(names[0], 'none')}, expected {expected.get(names[0], 'none')}"
        raise UsageError(f"the checkpoint belongs to another model; {len(names)} weights differ, first {first}")
    vectors = np.stack([_flat(weights, "", table), *(_flat(optimizer, name, table) for name in MOMENTS)])
    statistics = optimizer.get("statistics")
    if statistics is None or statistics.dtype != np.float64 or statistics.ndim != 1:
        raise CheckpointError("optimizer.safetensors holds no running statistics")
    state = LearnerState(vectors, statistics, read_plain(_file(files, "state.json")))
    if not state.is_finite:
        raise CheckpointError("weights, moments or statistics are not finite")
    return state, table


def _file(files: dict[str, bytes], name: str) -> bytes:
    if name not in files:
        raise CheckpointError(f"the checkpoint has no {name}")
    return files[name]


def _arrays(files: dict[str, bytes], name: str) -> dict[str, Array]:
    """The arrays of a safetensors file, whose own parser checks its header against its size."""
    content = _file(files, name)
    try:
        return load(content)
    except Exception as error:  # of the parser's own kinds, and KeyError or TypeError for types that numpy has not
        raise CheckpointError(f"{name} cannot be read: {type(error).__name__}") from None


def resume(
    directory: Path, blocks: list[StateBlock], table: Table, changed: Mapping[str, object] | None = None
) -> list[dict[str, Any]]:
    """Put the newest checkpoint of every policy into its state block, before its learner starts.

    Args:
        directory: of the run.
        blocks: the state block of every policy.
        table: of the weights.
        changed: plain values that take the place of those in the checkpoints.

    Returns:
        The plain state of each policy, with its progress as `Monitor` keeps it; {} where there is no checkpoint.

    Raises:
        CheckpointError: there are checkpoints and none verifies. Nothing is started from scratch then.
        UsageError: it belongs to another model.
    """
    return [_resume(policy, directory, block, table, changed or {}) for policy, block in enumerate(blocks)]


def _resume(
    policy: int, directory: Path, block: StateBlock, table: Table, changed: Mapping[str, object]
) -> dict[str, Any]:
    parent = directory / f"checkpoint_p{policy}"
    for place in (parent, parent / "milestones"):
        checkpoint.clean_temporaries(place)
    loaded = checkpoint.load(parent, check=lambda files: decode(files, table))
    if loaded is None:
        return {}
    for path, reason in loaded.found.damaged:
        log.warning("damaged checkpoint skipped: %s: %s", path, reason)
    checkpoint.quarantine(parent, loaded.found.damaged)
    state, _ = decode(loaded.files, table)
    if state.moments.size != block.num_moments:
        found = f"{state.moments.size} running statistics, expected {block.num_moments}"
        raise UsageError(f"the checkpoint belongs to another model; it has {found}")
    # What main keeps is not the learner's, whose plain state must fit into its block.
    plain = {name: value for name, value in state.meta.items() if name not in OF_MAIN}
    block.write(replace(state, meta={**plain, **changed}))
    log.info("resuming policy %d at env step %d from %s", policy, plain["env_steps"], loaded.found.path)
    return state.meta


def named(vector: Array, table: Table) -> dict[str, Array]:
    """The views of a flat vector [P] that a table describes."""
    views, start = {}, 0
    for name, shape in table:
        size = int(np.prod(shape, dtype=np.int64))
        views[name] = vector[start : start + size].reshape(shape)
        start += size
    return views


def _flat(named: dict[str, Array], prefix: str, table: Table) -> Array:
    for name, shape in table:
        array = named.get(prefix + name)
        if array is None or array.shape != shape or array.dtype != np.float32:
            raise CheckpointError(f"{prefix}{name} is missing, or no float32 array of shape {shape}")
    return np.concatenate([np.zeros(0, np.float32), *(named[prefix + name].reshape(-1) for name, _ in table)])
