"""The actor worker: steps the groups whose actions have arrived."""

import logging
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
from appo.utils import logging as logging_of_process
from appo.utils.system import limits
from appo.utils.system.memory import held_bytes

if TYPE_CHECKING:
    from appo.algorithms.runtime.callbacks import Hooks


# Whether an actor has grown so much that another one should take its place: some environments leak.


log = logging.getLogger(__name__)

MIB = 1 << 20

SHARE_OF_LIMIT, SHARE_OF_LIFE = 1 / 8, 1 / 4

LEAST_SECONDS = 5.0  # a look once a second may miss the end of an episode

MOST_PATIENCE = 8


class LeakWatch:
    """Compares the memory that a process holds with that of the first look.

    An environment that loads something late has grown as well, but grows no more; replaced, it would do the same again.
    So what has passed the limit is looked at for a quarter of its life so far. If it grows by an eighth of the limit
    meanwhile, it leaks. If not, that counts as its warming up, and growth is counted from there. A leak may come in
    steps as large as that, so the first life warms up once, and each life after it once more and is looked at for as
    much longer, up to eight times: what warms up in several steps, or slowly, is replaced ever more rarely.

    Args:
        most_bytes: by which it may grow, its children included.
        flag: that says so, in the message.
        lives_before: of processes in its place.
    """

    def __init__(self, most_bytes: int, flag: str, lives_before: int = 0) -> None:
        self.most_bytes, self.flag = most_bytes, flag
        self.patience = min(1 + lives_before, MOST_PATIENCE)
        self._warm_ups = 0
        self._bytes_before: int | None = None
        self._begun = 0.0  # growing, monotonic seconds
        self._passed: tuple[float, int] | None = None  # when and with what growth it passed the limit

    def reason(self) -> str | None:
        """Return why the process should be replaced, or None."""
        held, now = held_bytes(), time.monotonic()
        if self._bytes_before is None:
            self._bytes_before, self._begun = held, now
        grown = held - self._bytes_before
        if self._leaks(grown, now):
            return f"its memory has grown by {grown // MIB} MiB ({self.flag})"
        open_files, limit = limits.num_open(), limits.limit()
        if limit is not None and 2 * open_files > limit:
            return f"it has {open_files} open files of {limit}"
        return None

    def _leaks(self, grown: int, now: float) -> bool:
        """Return whether the process has grown too much and goes on growing."""
        if grown <= self.most_bytes:
            self._passed = None
            return False
        if self._warm_ups >= self.patience:
            return True
        if self._passed is None:
            self._passed = now, grown
        since, grown_then = self._passed
        if grown - grown_then > SHARE_OF_LIMIT * self.patience * self.most_bytes:
            return True
        if now - since >= max(LEAST_SECONDS, SHARE_OF_LIFE * self.patience * (since - self._begun)):
            self._warm_ups += 1
            self._bytes_before, self._begun, self._passed = (self._bytes_before or 0) + grown, now, None
            log.info("its memory has grown by %d MiB (%s) and grows no more: no leak", grown // MIB, self.flag)
        return False


REPORT_SECONDS = 1.0


class ActorWorker:
    """Owns some groups; knows no policy and no process.

    Args:
        address: of this worker.
        groups: the groups it steps.
        pause_seconds: how long it rests after its first trajectories, so that actors hand over at different times.
        leaks: asked once a second whether another one should take its place; None: never.
        hooks: callbacks that are told of the groups, if there are any.
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
        """Note a message that has arrived; one that is not current is dropped."""
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
        current = (group.slot, group.step, group.plan.generation)
        if current == message[2:] and message.policy in group.waiting:
            group.waiting.remove(message.policy)
            if not group.waiting:
                self.ready.append(group)

    def report(self) -> WorkerReport:
        """Report totals over all groups."""
        groups = self.groups.values()
        for group in groups:
            group.note_counts()  # what has been reported is never taken back
        totals = {name: sum(g.totals[name] for g in groups) for name in next(iter(groups)).totals}
        totals["episodes"] = sum(g.episodes.count for g in groups)
        if self.hooks is not None:
            totals["callbacks_off"] = self.hooks.off
        return WorkerReport(str(self.address), totals, logging_of_process.take_raised())
