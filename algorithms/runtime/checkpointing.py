"""Checkpoints of a run: when they are written, and their contents.

How a file becomes safe on disk is the business of `utils.checkpoint_files`.

Main writes them from the state blocks, in a thread of its own, so saving stalls neither training nor supervision.
"""

import functools
import logging
import math
import os
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from appo.algorithms.runtime.best_checkpoint import Best
from appo.algorithms.runtime.config import RunConfig
from appo.algorithms.runtime.disk import DiskThread
from appo.algorithms.runtime.memory.learner_state import ModelDescription, StateBlock, Table
from appo.algorithms.runtime.memory.plain_state import OF_MAIN
from appo.algorithms.runtime.memory.state_files import decode, encode
from appo.algorithms.runtime.messages import Message, PolicyTraits, SaveState, StateSaved, WorkerRestarted
from appo.algorithms.runtime.monitor.monitor import Monitor
from appo.utils import checkpoint_files
from appo.utils.errors import AppoError, NumericsError
from appo.utils.run_folder import RunFolder

log = logging.getLogger(__name__)

Kind = Literal["regular", "milestone", "best"]
SAVING = "saving what was learned"


class Checkpointing:
    """Asks learners for their state from time to time, and writes it.

    Args:
        directory: of the run.
        config: of the run.
        blocks: the state block of every policy.
        tables: for every policy name and shape of every weight, in the order of the flat vector.
        monitor: what else is known of the policies, and how good they are.
    """

    def __init__(
        self, directory: Path, config: RunConfig, blocks: list[StateBlock], tables: Sequence[Table], monitor: Monitor
    ) -> None:
        self.config, self.blocks, self.tables, self.monitor = config, blocks, tables, monitor
        self.folder = RunFolder(directory)
        self._best = [Best(self.folder.checkpoints(policy, "best"), config) for policy in range(len(blocks))]
        self._writer = DiskThread("checkpoint")
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

    def lost(self) -> None:
        """Write all again that may have gone away: the next `tick` asks for all states, and the best are found anew."""
        self.ask()
        for best in self._best:
            self._writer.submit(best.forget_what_is_gone)

    @property
    def busy(self) -> bool:
        """Return whether states that were asked for are not on disk yet."""
        return any(self._owed) or any(not writing.done() for writing in self._pending.values())

    def handle(self, message: Message) -> None:
        """Write the state of a policy whose learner has put it into its block."""
        if isinstance(message, StateSaved):
            last = self._pending.get(message.policy)
            if last is None or last.done():
                if last is not None:
                    last.result()  # whatever is no `AppoError` is a bug, and must not pass unnoticed in a thread
                self._pending[message.policy] = self._writer.submit(
                    functools.partial(self._write, self._order(message.policy))
                )
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
        """Write the latest state of every policy, and wait until it is on disk, however long it does not answer.

        Args:
            regular: as a checkpoint to go on from, too; without, only if it is the best.

        Raises:
            AppoError: it cannot be written.
        """
        self._writer.finish(SAVING)
        kinds: tuple[Kind, ...] = ("regular", "best") if regular else ("best",)
        for policy in range(len(self.blocks)):
            saving = self._writer.submit(functools.partial(self._save, self._order(policy, *kinds)))
            self._writer.finish(SAVING)
            saving.result(0.0)  # it is done

    def _order(self, policy: int, *kinds: Kind) -> "_Order":
        """Make the order to write the checkpoints of a policy: these kinds, and those that are owed."""
        better = self._best[policy].better(self.monitor.policies[policy])
        wanted = self._owed[policy].union(kinds) or self._regular
        return _Order(policy, frozenset(wanted), self.monitor.snapshot(policy), better)

    def _write(self, order: "_Order") -> None:
        """Write an order. A save that fails, as on a full disk, costs only itself: older checkpoints are intact."""
        try:
            self._save(order)
        except AppoError as error:
            log.warning("checkpoint of policy %d not saved, will be tried again: %s", order.policy, error)

    def _save(self, order: "_Order") -> None:
        policy, parent = order.policy, self.folder.checkpoints(order.policy)
        table = self.tables[policy]
        state = self.blocks[policy].read()
        if state is None:
            return
        if not state.is_finite:
            raise NumericsError("weights or moments are not finite; older checkpoints are kept")
        steps = int(state.meta["env_steps"])
        name = checkpoint_files.checkpoint_name(steps)
        state = replace(state, meta={**state.meta, "progress": order.progress})
        is_new = steps != self._saved_steps.get(policy) or not os.path.lexists(parent / name)  # it was removed
        if "regular" in order.kinds and is_new:
            path = checkpoint_files.save(parent, name, encode(state, table))
            self._saved_steps[policy] = steps
            log.info("saved %s", path)
        if "milestone" in order.kinds:
            checkpoint_files.save(self.folder.checkpoints(policy, "milestone"), name, encode(state, table))
        same_weights = (PolicyTraits.in_state(state.meta) or PolicyTraits()).adoptions == order.progress.get(
            "adoptions", 0
        )
        if "best" in order.kinds and order.better is not None and same_weights:
            best = self._best[policy]
            best.save(name, encode(best.mark(state, order.better), table), order.better)
        self._owed[policy] -= order.kinds
        checkpoint_files.prune(parent, self.config.keep_checkpoints)


class _Order(NamedTuple):
    """An order to the writer, as main knew it when the learner's state came."""

    policy: int
    kinds: frozenset[Kind]
    progress: dict[str, Any]
    better: float | None  # the metric, if it is the best so far


def resume(
    directory: Path,
    blocks: list[StateBlock],
    models: Sequence[ModelDescription],
    changed: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Put the newest checkpoint of every policy into its state block, before its learner starts.

    Args:
        directory: of the run.
        blocks: the state block of every policy.
        models: of every policy.
        changed: plain values that begin anew, as the layout of the policy says, in place of those in the checkpoints.

    Returns:
        The plain state of each policy, with its progress as `Monitor` keeps it; {} where there is no checkpoint.

    Raises:
        CheckpointError: there are checkpoints and none verifies. Nothing is started from scratch then.
        UsageError: it belongs to another model.
    """
    folder = RunFolder(directory)
    both = enumerate(zip(blocks, models, strict=True))
    return [_resume(policy, folder, block, model, changed) for policy, (block, model) in both]


def _resume(
    policy: int,
    folder: RunFolder,
    block: StateBlock,
    model: ModelDescription,
    changed: Collection[str],
) -> dict[str, Any]:
    parent = folder.checkpoints(policy)
    for place in (parent, folder.checkpoints(policy, "milestone")):
        checkpoint_files.clean_temporaries(place)
    loaded = checkpoint_files.load(
        parent, check=lambda files: decode(files, model.table, model.layout), limit=model.limit
    )
    if loaded is None:
        return {}
    for path, reason in loaded.found.damaged:
        log.warning("damaged checkpoint skipped: %s: %s", path, reason)
    checkpoint_files.quarantine(parent, loaded.found.damaged)
    state, _ = decode(loaded.files, model.table, model.layout)
    # What main keeps is not the learner's, whose plain state must fit into its block.
    plain = {name: value for name, value in state.meta.items() if name not in OF_MAIN}
    anew = {name: value for name, value in model.layout.numbers.items() if name in changed}
    block.write(replace(state, meta={**plain, **anew}))
    log.info("resuming policy %d at env step %d from %s", policy, plain["env_steps"], loaded.found.path)
    return state.meta
