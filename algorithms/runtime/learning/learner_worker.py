"""The learner worker: feeds batches to a learner, publishes weights and writes the state block; contains no loss."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.device_of import device_of
from appo.algorithms.runtime.learning.batches import Batch, BatchSource, Entered, Feedback
from appo.algorithms.runtime.learning.publisher import Publisher
from appo.algorithms.runtime.learning.rollback import SKIPPED_IN_A_ROW, RollbackRule, giving_up
from appo.algorithms.runtime.memory.arena import Arena, Array
from appo.algorithms.runtime.memory.learner_state import LearnerState, StateBlock, StateLayout, replace_weights
from appo.algorithms.runtime.memory.ownership import LearnerLedger
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.memory.weights import WeightRing
from appo.algorithms.runtime.messages import (
    Address,
    Begin,
    CopyWeights,
    LearnerReport,
    Message,
    ReplaceWeights,
    SaveState,
    SetHyperparameters,
    SlotReleased,
    StateSaved,
    Stop,
    TrajectoryReady,
    VersionDue,
    Wake,
    WorkerReport,
)
from appo.utils.errors import UsageError
from appo.utils.failpoints import failpoint
from appo.utils.logging import take_raised
from appo.utils.timing import COPYING, FRAMEWORK, TRAINING, clock

log = logging.getLogger(__name__)

REPORT_SECONDS = 0.5
STATE_SECONDS = 1.0


class Learner(Protocol):
    """Trains one policy, independent of processes.

    Attributes:
        flat: network with all weights in one vector.
        version: version of the weights, counted from 1.
        updates: optimizer steps so far.
    """

    flat: FlatModule
    version: int
    updates: int

    def learn(self, batch: Batch, progress: float) -> Iterator[Feedback | None]:
        """Train on a batch; raise `version` and `updates` and yield after each optimizer step.

        The source of the batch receives every value yielded, unless None.
        """

    def configure(self, config: Any) -> None:
        """Use other flags of the algorithm from now on; called between two batches."""

    def metrics(self) -> dict[str, float]:
        """Return means since the last call; also the present `skipped_in_a_row`, if updates can be skipped."""

    def state(self, into: dict[str, Array] | None = None) -> LearnerState:
        """Return everything needed to continue training, with vectors in the given memory, or in new memory."""

    def restore(self, state: LearnerState) -> None:
        """Continue from a state."""

    @property
    def layout(self) -> StateLayout:
        """Return names, sizes and types of the vectors of `state`, and the numbers of a new learner."""


@dataclass(frozen=True)
class TrainingPlan:
    """The settings of a learner worker.

    Attributes:
        budget: limits of training, which schedules follow.
        max_policy_lag: restored weights raise the version by `max_policy_lag` + 1, which makes older trajectories too
            old.
        max_skipped_updates: skipped updates in a row before a rollback to the last good state.
        incidents: folder for incidents; None: a trial writes no incident.
        alone: whether the policy has no opponents or partners in training; a policy alone stops at its budget.
        pause_env_steps: env steps at which training stops whatever the budget; None: no pause.
        version_env_steps: env steps between past versions; 0: no past versions.
        measures_lag: whether the age of steps is reported; steps from files and replays have no such age.
        metrics: names of the metrics that the algorithm describes; None: any name.
    """

    budget: Budget
    max_policy_lag: int
    device: str
    max_skipped_updates: int
    incidents: Path | None
    alone: bool = True
    pause_env_steps: int | None = None
    version_env_steps: int = 0
    measures_lag: bool = True
    metrics: Collection[str] | None = None


SAVED_COUNTS = ("env_steps", "samples", "discarded", "used")


def saved_counts(state: LearnerState) -> dict[str, int]:
    """Return the counts in a state; one saved before steps could be used more than once has used each once."""
    return {name: int(state.meta.get(name, state.meta["samples"])) for name in SAVED_COUNTS}


class LearnerMemory(NamedTuple):
    """The memory of a policy's learner in the arena; a replacement finds the contents."""

    ring: WeightRing
    block: StateBlock
    ledger: LearnerLedger

    @classmethod
    def attach(cls, arena: Arena, trajectories: Trajectories, policy: int) -> Self:
        """Return the memory of a policy."""
        return cls(WeightRing(arena, policy), StateBlock(arena, policy), LearnerLedger(trajectories, policy))


class Member(Protocol):
    """Connects the policy of a learner worker with a population."""

    def obey(self, order: SetHyperparameters | CopyWeights, worker: LearnerWorker) -> Message:
        """Execute an order of main between two batches; return the answer."""

    def plain(self) -> dict[str, Any]:
        """Return the values saved with the weights."""


class LearnerWorker:
    """Trains one policy on the batches of a source.

    Args:
        address: address of this worker; the index is the policy.
        memory: memory in the arena, which outlives the worker.
        member: receiver of the orders of main in a population.
    """

    def __init__(
        self,
        address: Address,
        plan: TrainingPlan,
        learner: Learner,
        batches: BatchSource,
        memory: LearnerMemory,
        member: Member | None = None,
    ) -> None:
        self.address, self.plan, self.learner, self.batches, self.member = address, plan, learner, batches, member
        self.ring, self.block, self.ledger = ring, block, ledger = memory
        self.device = device_of(plan.device)
        self.publisher = Publisher(ring, learner.flat.flat, self.device)
        zero = dict.fromkeys(("env_steps", "samples", "batches", "lost", "used"), 0)
        self.totals: dict[str, int] = {**zero, **batches.counts()._asdict()}
        self._lags: list[Tensor] = []  # policy lag [N] of the steps since the last report
        self.rollback_rule = RollbackRule(plan.max_skipped_updates)
        self.stopped = self._refused = False  # refused: whether the latest state was not finite
        if (state := block.read()) is not None:
            learner.restore(state)
            self.totals |= saved_counts(state)
        if state is not None or ring.published:
            # Weights of another run begin like new ones: no step of this run was acted with them.
            before = max(learner.version * (state is not None), ring.published)
            learner.version = before + plan.max_policy_lag + 1 if before else 1
        self._before = {"discarded": self.totals["discarded"]}  # counts added to the counts of `batches`
        noted = ledger.noted()
        self._began_ms = noted.pop("began_ms")  # of this start, whichever learner began; 0: training has not begun
        replaces = any(noted.values())  # a dead learner
        if replaces:
            # Steps in the unfinished batch are discarded. Steps used after the last save count as lost. They stay in
            # the samples, because no counter decreases. Slots that were not released will be received again.
            lost = noted["lost"] + max(0, noted["used"] - self.totals["used"])  # a rank saves the counts of all
            self.totals |= {name: noted[name] for name in ("env_steps", "samples", "batches", "used")} | {"lost": lost}
            self._before = dict.fromkeys(("trajectories", "released"), noted["released"])
            self._before["discarded"] = noted["discarded"] + noted["staged"]
            learner.updates = noted["updates"]
        self._heard = self.totals["env_steps"]  # env steps already checked for due versions
        if state is not None and not replaces:
            self._note()  # before policies act: some follow the env steps
        self.publisher.publish(learner.version)
        self.publisher.flush()
        self._reported = self._saved = time.monotonic()
        self._gives_up = False
        if replaces:
            self.save()
            self._note()

    def handle(self, message: Message) -> Iterator[Message]:
        """Add a trajectory, or answer main."""
        match message:
            case TrajectoryReady():
                if self.ledger.accept(message):
                    self.batches.add(message)
            case Begin():  # settle the hand-overs of a predecessor, and report the totals from before this start
                for unsettled in self.ledger.unsettled():
                    yield from [unsettled] if isinstance(unsettled, SlotReleased) else self.handle(unsettled)
                self._began_ms = self._began_ms or round(1000 * time.monotonic())
                yield self._report()
            case SaveState():
                yield self.save(asked=False)
            case SetHyperparameters() | CopyWeights():
                if self.member is not None:
                    yield self.member.obey(message, self)
            case ReplaceWeights(_, path):
                state = self.learner.state()
                replace_weights(state, np.fromfile(path, np.float32))
                self.go_on_from(state)
                Path(path).unlink()  # the answer to main
            case Stop():
                self.stopped = True
                self._enter()  # last steps of the workers stopped before
                yield self.save()
                yield self._report()

    def pending(self) -> bool:
        """Return whether something waits to be copied or trained on."""
        waiting = self.batches.waiting > 0 or self.publisher.busy
        return waiting and not self.stopped and not (self.plan.alone and self._budget_reached())

    def work(self) -> Iterator[Message]:
        """Fill the batch; train on a full batch, and publish after every optimizer step.

        Beyond its budget a policy still plays with and against learning policies, which need the slots. The worker
        discards its batches.
        """
        if spent := self._budget_reached():
            self.batches.retire()
        clock.enter(COPYING)
        self.publisher.poll()
        batch = yield from self._next(enter=not spent)
        clock.enter(FRAMEWORK)
        if spent:
            self._before["discarded"] += self.batches.entered().samples
            if batch is not None:
                yield from self._released(self.batches.trained())
        else:
            yield from self._use(batch)
        before, self._heard = self._heard, self.totals["env_steps"]
        period = self.plan.version_env_steps  # of past versions: a fixed grid, which no crash can change
        if period > 0 and before // period != self._heard // period:
            self.save(asked=False)
            yield VersionDue()
        now = time.monotonic()
        if now - self._saved >= STATE_SECONDS:
            self.save(asked=False)
        due = now - self._reported >= REPORT_SECONDS or (batch is not None and self._gives_up)
        if due or (self._budget_reached() and not spent):
            if raised := take_raised():
                yield WorkerReport(str(self.address), {}, raised)
            yield (report := self._report())
            skipped = report.metrics.get(f"train/{SKIPPED_IN_A_ROW}")  # None: no update since the last report
            if skipped is not None:
                self._heed(int(skipped), batch)

    def _next(self, *, enter: bool) -> Generator[Message, None, Batch | None]:
        """Fill the batch; return a full one. With `enter`, inserted steps are counted, see `_released`."""
        yield from self._released(self.batches.fill(self.learner.version), enter=enter)
        return self.batches.take()  # waits for the reader, if the learner reads files

    def _use(self, batch: Batch | None) -> Iterator[Message]:
        """Train on a batch, if there is one."""
        if batch is None:
            self._enter()  # steps of a replay, perhaps without a batch
            self.device.nap()
        else:
            yield from self._train(batch, self._account(batch))

    def _progress(self) -> float:
        """Return the used share of the budget."""
        seconds = time.monotonic() - self._began_ms / 1000 if self._began_ms else 0.0
        return self.plan.budget.progress(self.of_all["env_steps"], seconds)

    def _account(self, batch: Batch) -> float:
        """Count a batch that was taken; return the progress before the batch: else the last would train at rate 0."""
        if not self.block.writes:
            self.save()  # a rollback needs a state from the first update on
        progress, entered = self._progress(), self._enter()
        self.totals["batches"] += entered.whole
        if entered.whole:  # steps of a partial batch are staged, and count with the last part
            self.totals["used"] += int(batch.valid.sum()) + entered.earlier
        if self.plan.measures_lag:
            self._lags.append((self.learner.version - batch.policy_version)[batch.valid])
        self._note()
        failpoint("learner.batch")
        return progress

    def _train(self, batch: Batch, progress: float) -> Iterator[Message]:
        """Train on a batch and publish after every optimizer step."""
        feedback = self._learn(batch, progress)
        if self.batches.hold:
            self.publisher.flush()  # sampling continues with the new weights
        yield from self._released(self.batches.trained(feedback))

    def _learn(self, batch: Batch, progress: float) -> list[Feedback]:
        """Make the optimizer steps of a batch, and publish after each; return the feedback for the source."""
        feedback: list[Feedback] = []
        clock.enter(TRAINING)
        for said in self.learner.learn(batch.map(self.device.send), progress):
            if said is not None:
                feedback.append(said)
            clock.enter(COPYING)
            self.publisher.publish(self.learner.version)
            failpoint("learner.step")
            clock.enter(TRAINING)
        clock.enter(FRAMEWORK)
        return feedback

    def _heed(self, skipped_in_a_row: int, batch: Batch | None) -> None:
        """Roll back after too many skipped updates; raise NumericsError, with a batch, if rollbacks have not helped."""
        updates = self.learner.updates - getattr(self.learner, "empty_updates", 0)
        verdict = self.rollback_rule.judge(skipped_in_a_row, updates)
        self._gives_up = verdict == "give up" and batch is None  # the incident needs the next batch
        if verdict == "go on" or self._gives_up:
            return
        reason = f"{skipped_in_a_row} updates in a row were not finite"
        if verdict == "give up":
            assert batch is not None
            table, policy = self.learner.flat.table, self.address.index
            raise giving_up(reason, self.plan.incidents, policy, self.learner.state(), table, batch)
        state = self.block.read()
        assert state is not None  # written before the first batch
        log.warning("%s: back to the state of %d env steps", reason, state.meta["env_steps"])
        self.totals["lost"] += self.of_all["used"] - saved_counts(state)["used"]
        self.go_on_from(state)

    def go_on_from(self, state: LearnerState) -> None:
        """Replace the weights, and raise the version until steps acted with the old weights are too old."""
        self.batches.weights_replaced()
        version, updates = self.learner.version, self.learner.updates
        self.learner.restore(state)
        self.learner.version, self.learner.updates = version + self.plan.max_policy_lag + 1, updates
        self.publisher.publish(self.learner.version)
        self.save()
        self._note()

    def _released(
        self, messages: Iterator[SlotReleased | Wake], *, enter: bool = False
    ) -> Iterator[SlotReleased | Wake]:
        """Yield the messages of the source; releases and counts are noted before a release is sent.

        With `enter`, steps that the source has inserted are counted before, so that the next steps act by this count.
        """
        for message in messages:
            if isinstance(message, SlotReleased):
                if enter:
                    self._enter()
                self.ledger.release(message)
                self._note()
            yield message
        self._note()

    def _note(self) -> None:
        self._refresh_totals()
        self.ledger.note({**self.totals, "staged": self.batches.staged_samples, "began_ms": self._began_ms})

    @property
    def of_all(self) -> dict[str, int]:
        """Return the totals of all learners of the policy, which budgets, checkpoints and reports count."""
        return self.totals

    def _budget_reached(self) -> bool:
        env_steps, pause = self.of_all["env_steps"], self.plan.pause_env_steps
        return (pause is not None and env_steps >= pause) or self.plan.budget.trained(env_steps, self.of_all["samples"])

    def _enter(self) -> Entered:
        """Count, and return, the steps that have entered training since the last call."""
        entered = self.batches.entered()
        self.totals["samples"] += entered.samples
        self.totals["env_steps"] += entered.env_steps
        clock.trained += entered.samples
        return entered

    def save(self, *, asked: bool = True) -> StateSaved:
        """Write a finite state; unasked, not after a skipped update, perhaps caused by these weights."""
        before = clock.enter(COPYING)
        state = self.learner.state(self.block.begin())
        self._refresh_totals()
        state.meta.update({name: self.of_all[name] for name in SAVED_COUNTS})
        if self.member is not None:
            state.meta.update(self.member.plain())
        is_finite = state.is_finite
        if is_finite and (asked or not state.meta.get(SKIPPED_IN_A_ROW)):
            self.block.commit(state.meta)
        elif not (is_finite or self._refused):
            log.warning("version %d is not finite: the last good state is kept", self.learner.version)
        self._refused = not is_finite
        clock.enter(before)
        self._saved = time.monotonic()
        return StateSaved(self.address.index)

    def _refresh_totals(self) -> None:
        counts = self.batches.counts()._asdict()
        self.totals |= {name: count + self._before.get(name, 0) for name, count in counts.items()}
        self.totals["updates"] = self.learner.updates

    def _report(self) -> LearnerReport:
        self._reported = time.monotonic()
        self._refresh_totals()
        found = self.learner.metrics()
        described = {*(self.plan.metrics or ()), SKIPPED_IN_A_ROW, "reproduction_error", "reproduction_steps"}
        if self.plan.metrics is not None and (unknown := found.keys() - described):
            names = ", ".join(sorted(unknown))
            raise UsageError(f"`metrics` of the algorithm does not describe {names}, which its learner reports")
        metrics = {f"train/{name}": value for name, value in found.items()}
        metrics["train/rollbacks"] = self.rollback_rule.rollbacks
        lag = torch.cat(self._lags) if self._lags else torch.empty(0)
        if len(lag):
            smallest, largest = (int(end) for end in torch.aminmax(lag))
            ends = {"train/policy_lag_min": smallest, "train/policy_lag_max": largest}
            metrics |= {"train/policy_lag_mean": int(lag.sum()) / len(lag), **ends}
        self._lags = []
        metrics |= self.batches.metrics()
        totals = self.of_all
        if totals["used"] != totals["samples"]:
            metrics["train/replay_ratio"] = totals["used"] / max(1, totals["samples"])
        return LearnerReport(self.address.index, self.learner.version, dict(totals), metrics)
