"""The actor worker: steps the groups whose actions have arrived."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from appo.algorithms.runtime.messages import (
    ActionsReady,
    Address,
    Begin,
    Message,
    OpponentTable,
    ShapeRewards,
    SlotReleased,
    Stop,
    WorkerReport,
    WorkerRetires,
)
from appo.algorithms.runtime.sampling.env_group import EnvGroup
from appo.algorithms.runtime.sampling.leak_watch import LeakWatch
from appo.utils import logging as logging_of_process

if TYPE_CHECKING:
    from appo.algorithms.runtime.callbacks import Hooks


REPORT_SECONDS = 1.0


class ActorWorker:
    """Steps groups of environments; independent of policies and processes.

    Args:
        pause_seconds: pause after the first trajectories, which makes actors hand over at different times.
        leaks: check, once a second, whether another actor should replace this one; None: no check.
    """

    def __init__(
        self,
        address: Address,
        groups: Sequence[EnvGroup],
        pause_seconds: float = 0.0,
        leaks: LeakWatch | None = None,
        hooks: "Hooks | None" = None,
    ) -> None:
        self.address, self.pause_seconds, self.leaks, self.hooks = address, pause_seconds, leaks, hooks
        self.groups = {group.plan.index: group for group in groups}
        self.group_of_slot = {slot: group for group in groups for slot in group.plan.slots}
        self.ready: deque[EnvGroup] = deque()
        self._rested_at: float | None = None
        self._retires_for: str | None = None
        self._reported = time.monotonic()

    def handle(self, message: Message) -> Iterator[Message]:
        """Note a message; an outdated message is dropped."""
        match message:
            case ActionsReady():
                self._note(message)
            case SlotReleased(_, slot):
                yield from self.group_of_slot[slot].release(message)
            case ShapeRewards(_, policy, shaping):
                for group in self.groups.values():
                    group.matchmaker.shape(policy, shaping, group.envs)
            case OpponentTable():
                for group in self.groups.values():
                    group.matchmaker.take_table(message)
                    yield from group.matchmaker.answer(group.plan.index)
            case Begin():
                for group in self.groups.values():
                    yield from group.begin()
            case Stop():
                yield from self._end()

    def pending(self) -> bool:
        """Return whether a group can be stepped."""
        return bool(self.ready) and not (self.pause_seconds and self._resting())

    def work(self) -> Iterator[Message]:
        """Step every group that was ready at the call."""
        for _ in range(len(self.ready)):
            yield from self.ready.popleft().advance()
        if time.monotonic() - self._reported >= REPORT_SECONDS:
            self._reported = time.monotonic()
            yield self.report()
            if self.leaks is not None and self._retires_for is None:
                self._retires_for = self.leaks.reason()
                for group in self.groups.values():
                    group.retiring = self._retires_for is not None
        if self._retires_for and all(group.slot < 0 for group in self.groups.values()):
            yield from self._end()
            yield WorkerRetires(str(self.address), self._retires_for)

    def _end(self) -> Iterator[Message]:
        self.ready.clear()
        for group in self.groups.values():
            yield from group.end()
        yield self.report()
        for group in self.groups.values():
            group.envs.close()
        if self.hooks is not None:
            self.hooks.tell("on_end")

    def _resting(self) -> bool:
        if self._rested_at is None and all(group.totals["trajectories"] for group in self.groups.values()):
            self._rested_at = time.monotonic() + self.pause_seconds
        return self._rested_at is not None and time.monotonic() < self._rested_at

    def _note(self, message: ActionsReady) -> None:
        group = self.groups[message.group]
        if (group.slot, group.step, group.plan.generation) == message[2:] and message.policy in group.waiting:
            group.waiting.remove(message.policy)
            if not group.waiting:
                self.ready.append(group)

    def report(self) -> WorkerReport:
        """Report totals over all groups."""
        groups = self.groups.values()
        for group in groups:
            group.note_counts()  # reported totals never decrease
        totals = {name: sum(g.totals[name] for g in groups) for name in next(iter(groups)).totals}
        totals["episodes"] = sum(g.episodes.count for g in groups)
        if self.hooks is not None:
            totals["callbacks_off"] = self.hooks.off
        return WorkerReport(str(self.address), totals, logging_of_process.take_raised())
