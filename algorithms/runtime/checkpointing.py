"""When checkpoints are written and what is in them; how a file becomes safe on disk is `utils.checkpoint`'s business.

Main writes them from the state blocks, in a thread of its own, so saving stalls neither training nor supervision.
"""

import json
import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from algorithms.runtime.arena import Array
from algorithms.runtime.config import RunConfig
from algorithms.runtime.messages import Message, SaveState, StateSaved
from algorithms.runtime.state_block import LearnerState, StateBlock
from utils import checkpoint
from utils.errors import AppoError, UsageError

log = logging.getLogger(__name__)

Table = list[tuple[str, tuple[int, ...]]]
FORMAT = 1


class Checkpointing:
    """Asks learners for their state from time to time, and writes it.

    Args:
        directory: of the run.
        config: of the run.
        blocks: the state block of every policy.
        table: name and shape of every weight, in the order of the flat vector.
    """

    def __init__(self, directory: Path, config: RunConfig, blocks: list[StateBlock], table: Table) -> None:
        self.directory, self.config, self.blocks, self.table = directory, config, blocks, table
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: dict[int, Future[None]] = {}
        self._saved_steps: dict[int, int] = {}
        now = time.monotonic()
        self._due = now + config.save_every_sec
        self._milestone_due = now + config.save_milestones_sec if config.save_milestones_sec > 0 else float("inf")
        self._owes_milestone: set[int] = set()  # policies

    def handle(self, message: Message) -> None:
        """Write the state of a policy whose learner has put it into its block."""
        if isinstance(message, StateSaved):
            last = self._pending.get(message.policy)
            if last is None or last.done():
                if last is not None:
                    last.result()  # whatever is no `AppoError` is a bug, and must not pass unnoticed in a thread
                self._pending[message.policy] = self._writer.submit(self._write, message.policy)

    def tick(self, now: float) -> Iterator[Message]:
        """Ask for states when a checkpoint is due."""
        if now >= self._milestone_due:
            self._due, self._milestone_due = now, now + self.config.save_milestones_sec
            self._owes_milestone.update(range(len(self.blocks)))
        if now >= self._due:
            self._due = now + self.config.save_every_sec
            for policy in range(len(self.blocks)):
                yield SaveState(policy)

    def finish(self) -> None:
        """Write the latest state of every policy, and wait until it is on disk.

        Raises:
            AppoError: it cannot be written.
        """
        self._writer.shutdown(wait=True)
        for policy in range(len(self.blocks)):
            self._save(policy)

    def _write(self, policy: int) -> None:
        """A failed save, of a full disk for example, costs nothing but that save: the older checkpoints are intact."""
        try:
            self._save(policy)
        except AppoError as error:
            log.warning("checkpoint of policy %d not saved, will be tried again: %s", policy, error)

    def _save(self, policy: int) -> None:
        state = self.blocks[policy].read()
        if state is None or state.meta["env_steps"] == self._saved_steps.get(policy):
            return
        steps = int(state.meta["env_steps"])
        parent = self.directory / f"checkpoint_p{policy}"
        files = encode(state, self.table)
        path = checkpoint.save(parent, checkpoint.checkpoint_name(steps), files)
        self._saved_steps[policy] = steps
        log.info("saved %s", path)
        if policy in self._owes_milestone:
            checkpoint.save(parent / "milestones", checkpoint.checkpoint_name(steps), files)
            self._owes_milestone.discard(policy)
        checkpoint.prune(parent, self.config.keep_checkpoints)


def encode(state: LearnerState, table: Table) -> dict[str, bytes]:
    """The files of a checkpoint."""
    weights, first, second = (_named(vector, table) for vector in state.vectors)
    optimizer = {f"exp_avg.{name}": value for name, value in first.items()}
    optimizer |= {f"exp_avg_sq.{name}": value for name, value in second.items()}
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
        files: of a checkpoint that verified.
        table: what the model expects; None accepts any, in alphabetical order.

    Raises:
        UsageError: the weights are those of another model.
    """
    weights, optimizer = load(files["model.safetensors"]), load(files["optimizer.safetensors"])
    found = {name: tuple(value.shape) for name, value in sorted(weights.items())}
    if table is None:
        table = list(found.items())
    expected = dict(table)
    if found != expected:
        names = [n for n in {**expected, **found} if found.get(n) != expected.get(n)]
        first = f"{names[0]}: saved {found.get(names[0], 'none')}, expected {expected.get(names[0], 'none')}"
        raise UsageError(f"the checkpoint belongs to another model; {len(names)} weights differ, first {first}")
    vectors = np.stack(
        [
            _flat(weights, "", table),
            _flat(optimizer, "exp_avg.", table),
            _flat(optimizer, "exp_avg_sq.", table),
        ]
    )
    meta: dict[str, Any] = json.loads(files["state.json"])
    return LearnerState(vectors, optimizer["statistics"], meta), table


def resume(directory: Path, blocks: list[StateBlock], table: Table) -> list[int]:
    """Put the newest checkpoint of every policy into its state block, before its learner starts.

    Returns:
        Env steps of each policy; 0 where there is no checkpoint.

    Raises:
        CheckpointError: there are checkpoints and none verifies. Nothing is started from scratch then.
        UsageError: it belongs to another model.
    """
    env_steps = []
    for policy, block in enumerate(blocks):
        parent = directory / f"checkpoint_p{policy}"
        if not parent.exists():
            env_steps.append(0)
            continue
        checkpoint.clean_temporaries(parent)
        loaded = checkpoint.load(parent)
        if loaded is None:
            env_steps.append(0)
            continue
        for path, reason in loaded.found.damaged:
            log.warning("damaged checkpoint skipped: %s: %s", path, reason)
        checkpoint.quarantine(parent, loaded.found.damaged)
        state, _ = decode(loaded.files, table)
        block.write(state)
        env_steps.append(int(state.meta["env_steps"]))
        log.info("resuming policy %d at env step %d from %s", policy, env_steps[-1], loaded.found.path)
    return env_steps


def _named(vector: Array, table: Table) -> dict[str, Array]:
    named, start = {}, 0
    for name, shape in table:
        size = int(np.prod(shape, dtype=np.int64))
        named[name] = vector[start : start + size].reshape(shape)
        start += size
    return named


def _flat(named: dict[str, Array], prefix: str, table: Table) -> Array:
    return np.concatenate([named[prefix + name].reshape(-1) for name, _ in table])
