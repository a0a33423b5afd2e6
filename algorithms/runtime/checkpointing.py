"""Checkpoints of a run: when they are written, and their contents. `utils.checkpoint_files` makes files crash-safe.

Main writes checkpoints from the state blocks, in a thread: saving stalls neither training nor supervision.
"""

import functools
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from appo.algorithms.runtime.best_checkpoint import Best
from appo.algorithms.runtime.config import RunConfig
from appo.algorithms.runtime.disk import DiskThread
from appo.algorithms.runtime.memory.learner_state import ModelDescription, StateBlock, Table
from appo.algorithms.runtime.memory.plain_state import OF_MAIN
from appo.algorithms.runtime.memory.state_files import decode, encode
from appo.algorithms.runtime.messages import (
    Address,
    Message,
    PolicyTraits,
    SaveState,
    StateSaved,
    WorkerRestarted,
)
from appo.algorithms.runtime.monitor.monitor import Monitor
from appo.algorithms.runtime.roles import LEARNER
from appo.utils import checkpoint_files
from appo.utils.errors import AppoError, NumericsError
from appo.utils.run_folder import RunFolder

log = logging.getLogger(__name__)

Kind = Literal["regular", "milestone", "best"]
SAVING = "saving what was learned"


class Checkpointing:
    """Requests states from learners at intervals, and writes checkpoints.

    Args:
        blocks: state block of every policy.
        tables: for every policy, name and shape of every weight in the order of the flat vector.
        monitor: progress of the policies.
    """

    def __init__(
        self, directory: Path, config: RunConfig, blocks: list[StateBlock], tables: Sequence[Table], monitor: Monitor
    ) -> None:
        self.config, self.blocks, self.tables, self.monitor = config, blocks, tables, monitor
        self.folder = RunFolder(directory)
        self._best = [Best(self.folder.checkpoints(policy, "best"), config) for policy in range(len(blocks))]
        self._writer = DiskThread("checkpoint")
        self._pending: dict[int, Future[None]] = {}
        self._saved: dict[int, tuple[int, int]] = {}  # env steps and version of the newest checkpoint
        self._requests: list[deque[set[Kind]]] = [deque() for _ in blocks]  # kinds of each unanswered request
        self._late: list[set[Kind]] = [set() for _ in blocks]  # kinds of answers during a write
        self._owed: list[set[Kind]] = [set() for _ in blocks]  # kinds in the present write or in failed writes
        self._restarted = set[int]()  # policies whose learner may have died before answering
        now = time.monotonic()
        # With --deterministic_resume a run resumes from a barrier alone, never from a moment of the clock.
        self._regular: frozenset[Kind] = frozenset() if config.deterministic_resume else frozenset({"regular"})
        self._due = now + config.save_every_sec
        interval = config.save_milestones_sec if config.save_milestones_sec > 0 else math.inf
        self._milestone_due = now + interval - monitor.budget.earlier_seconds % interval  # of training in all starts
        self._best_due = now + config.save_best_every_sec

    def ask(self) -> None:
        """Make the next `tick` request the states of all policies."""
        self._due = -math.inf

    def lost(self) -> None:
        """Write again all files that may be gone: the next `tick` requests all states; the best are searched anew."""
        self.ask()
        for best in self._best:
            self._writer.submit(best.forget_what_is_gone)

    @property
    def busy(self) -> bool:
        """Return whether requested states are not on disk yet."""
        unsaved = (*self._requests, *self._late, *self._owed)
        return any(unsaved) or any(not writing.done() for writing in self._pending.values())

    def handle(self, message: Message) -> None:
        """Write the state that a learner has put into its block."""
        if isinstance(message, StateSaved):
            requests = self._requests[message.policy]
            kinds = requests.popleft() if requests else set[Kind]()  # a learner answers in order
            if self._is_writing(message.policy):  # perhaps a state from before the request
                self._late[message.policy] |= kinds
            else:
                self._begin_write(message.policy, kinds)
        elif isinstance(message, WorkerRestarted):
            policies = range(len(self._requests))
            self._restarted |= {p for p in policies if message.process == str(Address(LEARNER.name, p))}

    def tick(self, now: float) -> Iterator[Message]:
        """Request states when a checkpoint is due, and write late ones; without blocks, as in a rank above 0, never."""
        if not self.blocks:
            return
        for policy, late in enumerate(self._late):
            if late and not self._is_writing(policy):
                self._begin_write(policy, late)
                late.clear()
        for policy in self._restarted:
            yield from [SaveState(policy)] * len(self._requests[policy])
        self._restarted.clear()
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
                self._requests[policy].append(kinds | better)
                yield SaveState(policy)

    def finish(self, *, regular: bool = True) -> None:
        """Write the latest state of every policy, and wait for the disk without a deadline.

        Args:
            regular: whether to write a checkpoint to resume from; otherwise only a new best one is written.

        Raises:
            AppoError: a checkpoint cannot be written.
        """
        self._writer.finish(SAVING)
        kinds: tuple[Kind, ...] = ("regular", "best") if regular else ("best",)
        failed: AppoError | None = None
        for policy, (requests, late) in enumerate(zip(self._requests, self._late, strict=True)):
            self._owed[policy].update(late, *requests)  # no learner is left to answer
            requests.clear()
            late.clear()
            saving = self._writer.submit(self._order(policy, *kinds))
            self._writer.finish(SAVING)
            try:
                saving.result(0.0)  # already done
            except AppoError as error:  # the checkpoints of other policies may be smaller, or lie on another disk
                failed = failed or error
        if failed is not None:
            raise failed

    def _is_writing(self, policy: int) -> bool:
        return policy in self._pending and not self._pending[policy].done()

    def _begin_write(self, policy: int, kinds: set[Kind]) -> None:
        """Write the state in the block of a policy that is not being written."""
        if (last := self._pending.get(policy)) is not None:
            last.result()  # raises anything but `AppoError`: a bug must not pass unnoticed in a thread
        self._owed[policy] |= kinds
        save = functools.partial(self._write, policy, self._order(policy))
        self._pending[policy] = self._writer.submit(save)

    def _order(self, policy: int, *kinds: Kind) -> Callable[[], None]:
        """Make the action that writes checkpoints of a policy: these kinds, and the kinds still due.

        The action contains the present facts of main.
        """
        better = self._best[policy].better(self.monitor.policies[policy])
        wanted = frozenset(self._owed[policy].union(kinds) or self._regular)
        return functools.partial(self._save, policy, wanted, self.monitor.snapshot(policy), better)

    def _write(self, policy: int, save: Callable[[], None]) -> None:
        """Save. A failure, as on a full disk, leaves older checkpoints intact."""
        try:
            save()
        except AppoError as error:
            log.warning("checkpoint of policy %d not saved, will be tried again: %s", policy, error)

    def _save(self, policy: int, kinds: frozenset[Kind], progress: dict[str, Any], better: float | None) -> None:
        """Save a policy; `better` is the metric, if it is the best so far."""
        parent, table = self.folder.checkpoints(policy), self.tables[policy]
        state = self.blocks[policy].read()
        if state is None:
            return
        if not state.is_finite:
            raise NumericsError("weights or moments are not finite; older checkpoints are kept")
        moment = steps, _ = int(state.meta["env_steps"]), int(state.meta["version"])
        name = checkpoint_files.checkpoint_name(steps)
        state = replace(state, meta={**state.meta, "progress": progress})
        # Weights that are set from outside raise the version alone.
        is_new = moment != self._saved.get(policy) or not os.path.lexists(parent / name)  # or removed
        if "regular" in kinds and is_new:
            path = checkpoint_files.save(parent, name, encode(state, table))
            self._saved[policy] = moment
            log.info("saved %s", path)
        if "milestone" in kinds:
            checkpoint_files.save(self.folder.checkpoints(policy, "milestone"), name, encode(state, table))
        adoptions = (PolicyTraits.in_state(state.meta) or PolicyTraits()).adoptions
        if "best" in kinds and better is not None and adoptions == progress.get("adoptions", 0):
            best = self._best[policy]
            best.save(name, encode(best.mark(state, better), table), better)
        self._owed[policy] -= kinds
        checkpoint_files.prune(parent, self.config.keep_checkpoints)


def resume(
    directory: Path, blocks: list[StateBlock], models: Sequence[ModelDescription], changed: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Load the newest checkpoint of every policy into its state block, before its learner starts.

    Plain values in `changed` are reset to the policy's layout instead of loaded.

    Returns:
        The plain state of each policy, with its progress as `Monitor` stores it; {} without a checkpoint.

    Raises:
        CheckpointError: checkpoints exist and none verifies; the run never starts from scratch then.
        UsageError: the checkpoint belongs to another model.
    """
    folder, resumed = RunFolder(directory), list[dict[str, Any]]()
    for policy, (block, model) in enumerate(zip(blocks, models, strict=True)):
        parent = folder.checkpoints(policy)
        for place in (parent, folder.checkpoints(policy, "milestone")):
            checkpoint_files.clean_temporaries(place)
        check = functools.partial(decode, table=model.table, layout=model.layout)
        resumed.append({})
        if (loaded := checkpoint_files.load(parent, check=check, limit=model.limit)) is None:
            continue
        for path, reason in loaded.found.damaged:
            log.warning("damaged checkpoint skipped: %s: %s", path, reason)
        checkpoint_files.quarantine(parent, loaded.found.damaged)
        state, _ = check(loaded.files)
        # The values of main stay out: the learner's plain state must fit into its block.
        plain = {name: value for name, value in state.meta.items() if name not in OF_MAIN}
        anew = {name: value for name, value in model.layout.numbers.items() if name in changed}
        block.write(replace(state, meta={**plain, **anew}))
        log.info("resuming policy %d at env step %d from %s", policy, plain["env_steps"], loaded.found.path)
        resumed[policy] = state.meta
    return resumed
