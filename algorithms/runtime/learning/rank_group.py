"""The learners of several ranks as one: sums over their tensors, and a group that lost or new ranks form anew.

The launcher's store holds what ranks agree on, by epoch. An epoch is one group of learners; a learner that has a batch
announces itself for the next epoch. A member of the last epoch or the last rank to come closes the list, and after a
longer time any rank; all members take over the state of the member that is furthest. A collective that fails on one
rank fails on all within seconds, and begins the next epoch. A learner outside of the group announces itself too, and is
let in between rounds.

A *round* is a batch of every member: the same number of optimizer steps. A member without a batch takes part with one
that has no valid step.
"""

import contextlib
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from appo.algorithms.runtime.learning.batches import GroupBroken
from appo.algorithms.runtime.learning.rank_store import client_of, device_to
from appo.algorithms.runtime.memory.learner_state import LearnerState
from appo.algorithms.runtime.memory.plain_state import GENERATORS
from appo.algorithms.runtime.ranks import SHARED_GPU, Rank
from appo.utils.errors import AppoError
from appo.utils.logging import SHOWN

log = logging.getLogger(__name__)

COLLECTIVE_SECONDS = 6.0
"""Limit of a collective: a rank that takes longer is left out."""
WINDOW_SECONDS = 1.5
"""Time in which the members of a broken group announce themselves for the next one."""
START_SECONDS = 60.0
"""The same for the first group, as environments start at different speeds, and for a group without a former member."""
SAY_SECONDS = 10.0
"""Time after which a rank that others wait for is named."""
LOOK_SECONDS = 1.0
"""Seconds between looks for learners that wait to be let in, and for the end."""
ASK_SECONDS = 0.001
"""Seconds between questions whether the others wait: a question costs 50 to 100 us."""
PATIENCE = 0.5
"""Time that a round waits for a member without a batch, as a share of the time since the last round."""
SHORTEST_PATIENCE, LONGEST_PATIENCE = 0.005, 2.0

COUNTED = ("env_steps", "samples", "discarded", "used", "batches", "lost")
"""Totals of a learner that are sums over all ranks."""
T = TypeVar("T")


class Member(Protocol):
    """A learner worker, as the group uses it.

    Attributes:
        totals: counts of this rank.
        known: counts of all ranks in the state that the worker began with; {} without a state.
    """

    totals: dict[str, int]
    known: dict[str, int]
    learner: Any

    def go_on_from(self, state: LearnerState) -> None:
        """Replace the state of the learner."""


class RankGroup:
    """The group of learners, as seen by the learner of one rank.

    Attributes:
        totals: totals of all ranks by name, at the begin of the last round.
        over: whether rank 0 has ended the run.
        is_back: whether this is rank 0 and the others have learned before, so that their state is the newest.
    """

    def __init__(self, rank: Rank, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self.store = client_of(rank, "learners")
        if rank.number == 0:  # an earlier learner may have died between the end of the run and its last save
            self._ask(lambda: self.store.delete_key("end"))
        self.over, self.is_back = False, rank.number == 0 and self._has("1/members")
        self._epoch, self._members = 0, tuple[int, ...]()  # of the last epoch with this learner
        self._whom = set[str]()  # the same with pids
        self._group: Any = None
        self._stands = self._leads = self._wanted = self._is_nccl = False
        self._announced, self._since = 0, 0.0  # epoch, and since when
        self._awaits_since = 0.0  # the last of these times at which missing ranks were named
        self._done = self._round = 0  # collectives since the first epoch; rounds of this one
        self._table = np.zeros((rank.size, len(COUNTED)))  # of every rank, at the last round
        self._offset = np.zeros(len(COUNTED))  # from the totals of this process to its row
        self._looked = self._awaited = self._asked = 0.0
        self._patience = self._began = 0.0

    @property
    def totals(self) -> dict[str, int]:
        """Return the totals of all ranks."""
        return dict(zip(COUNTED, map(int, self._table.sum(axis=0).tolist()), strict=True))

    @property
    def size(self) -> int:
        """Return the number of members."""
        return len(self._members)

    def add_up(self, x: Tensor) -> None:
        """Replace a tensor by its sum over all members (GroupBroken)."""
        self._collective(x, lambda group, whole: group.allreduce([whole]))

    def _collective(self, x: Tensor, start: Callable[[Any, Tensor], Any]) -> None:
        if not self._stands:
            raise GroupBroken("the group is not formed")
        if self._group is not None:
            whole = x if self._is_nccl or x.device.type == "cpu" else x.cpu()
            try:
                start(self._group, whole).wait(timedelta(seconds=2 * COLLECTIVE_SECONDS))
            except RuntimeError as error:
                raise GroupBroken(_cause(error)) from None
            if whole is not x:
                x.copy_(whole)
        self._done += 1

    # A round.

    def is_awaited(self) -> bool:
        """Return whether another member has begun the next round, and waited for a batch of this one long enough."""
        now = time.monotonic()
        if self._group is not None and now - self._asked < ASK_SECONDS:
            return False
        self._asked = now
        begun = b"0 0" if self._group is None else self._ask(lambda: self.store.get(f"{self._epoch}/round"))
        number, seconds = map(float, begun.split())
        if number <= self._round:
            self._awaited = 0.0
            self._look(now)
            return False
        if not self._awaited:  # the patience of the first that waits, which was the fastest
            self._awaited = now
            self._patience = min(LONGEST_PATIENCE, max(SHORTEST_PATIENCE, PATIENCE * seconds))
        return now - self._awaited >= self._patience

    def begin(self, totals: Mapping[str, int], progress: float) -> float | None:
        """Begin a round with all members; return the largest progress of all.

        Each has used another share by the clock, and a rank that was started again counts from its own start. Returns
        None if the group is to form anew, for a rank that waits to be let in: nothing has begun.

        Raises:
            GroupBroken: a rank did not take part in time.
        """
        now = time.monotonic()
        self._look(now)
        if self._group is not None:
            words = f"{self._round + 1} {now - self._began:.4f}"
            self._ask(lambda: self.store.set(f"{self._epoch}/round", words))
        table = np.zeros_like(self._table)
        table[self.rank.number] = [totals[name] for name in COUNTED] + self._offset
        shares = np.zeros(self.rank.size)
        shares[self.rank.number] = progress
        own = np.concatenate(([float(self._leads or self._wanted)], shares, table.reshape(-1)))
        vector = torch.from_numpy(own).to(self.device)
        self.add_up(vector)
        anew, shares, counts = np.split(vector.cpu().numpy(), [1, 1 + self.rank.size])
        if anew[0]:
            self._close()
            return None
        there = list(self._members)
        self._table[there] = counts.reshape(table.shape)[there]
        self._round, self._awaited, self._began = self._round + 1, 0.0, time.monotonic()
        return float(shares.max())

    def is_wanted(self) -> bool:
        """Return whether a learner waits to be let in; for members that only await that, or the end."""
        self._look(time.monotonic(), often=10.0)
        return self._wanted

    def _look(self, now: float, often: float = 1.0) -> None:
        """Look from time to time whether a learner waits to be let in, and whether the run is over."""
        if now - self._looked >= LOOK_SECONDS / often:
            self._looked = now
            self.over, self._wanted = self._has("end"), self._has(f"{self._epoch + 1}/wanted")

    def broken(self, error: GroupBroken) -> None:
        """Leave a group in which a collective failed."""
        log.info("epoch %d of ranks %s has ended: %s", self._epoch, ", ".join(sorted(self._whom)), error)
        self._close()

    def lead(self) -> None:
        """Let all ranks take over the state of this learner, which goes on from another one, before the next round."""
        self._leads = True

    def leave(self) -> None:
        """Leave for good; rank 0 ends the run of all."""
        if self.rank.number == 0:
            with contextlib.suppress(AppoError):  # without a launcher, all ranks end; the last state is still saved
                self._ask(lambda: self.store.set("end", "1"))
        self._close()

    def _close(self) -> None:
        if self._group is not None:
            with contextlib.suppress(RuntimeError):  # of a group that failed
                self._group.abort()
        self._group, self._stands, self._announced = None, False, 0

    # The group.

    def ready(self, member: Member) -> bool:
        """Return whether the group stands; form a group, if all who may come have come. Does not wait for others.

        The member may go on from another state afterwards.
        """
        if self._stands or self.over:
            return self._stands and not self.over
        now = time.monotonic()
        if not self._announced:
            self._announce(member, now)
        if now - self._looked < 0.01:
            return False
        self._looked = now
        if self._has("end"):
            self.over = True
            return False
        epoch = self._announced
        if not self._has(f"{epoch}/members") and not self._decide(epoch, now):
            return False
        decision: dict[str, Any] = json.loads(self._ask(lambda: self.store.get(f"{epoch}/members")))
        if self.rank.number not in decision["members"]:
            self._announced = 0
            return False
        try:
            self._form(epoch, decision, member)
        except GroupBroken as error:
            self.broken(error)
        return self._stands

    def _announce(self, member: Member, now: float) -> None:
        """Announce this learner for the first epoch without a list of members."""
        epoch = self._epoch + 1
        while self._has(f"{epoch}/members"):
            epoch += 1
        words = {"updates": member.learner.updates, "done": self._done + self._leads}
        words |= {"pid": os.getpid(), "host": socket.gethostname(), "nccl": self._has_nccl}
        self._ask(lambda: self.store.set(f"{epoch}/{self.rank.number}", json.dumps(words)))
        self._ask(lambda: self.store.set(f"{epoch}/wanted", "1"))
        self._announced, self._since = epoch, now

    def _decide(self, epoch: int, now: float) -> bool:
        """Close the list of members if this learner may; return whether the list is closed."""
        came = [number for number in range(self.rank.size) if self._has(f"{epoch}/{number}")]
        was_member = self._epoch == epoch - 1
        window = WINDOW_SECONDS if was_member and epoch > 1 else START_SECONDS  # a member may still be in a long round
        if len(came) < self.rank.size and now - self._since < window:
            if self._awaits_since != self._since and now - self._since > SAY_SECONDS:
                self._awaits_since = self._since
                missing = _names(set(range(self.rank.size)) - set(came))
                log.warning("%s not there yet: the others wait up to %g s", missing, window, extra=SHOWN)
            return False
        words = {one: json.loads(self._ask(lambda one=one: self.store.get(f"{epoch}/{one}"))) for one in came}  # type: ignore[misc]
        leader = max(came, key=lambda one: (words[one]["updates"], words[one]["done"], -one))
        whom = {one: f"{one} (pid {words[one]['pid']} on {words[one]['host']})" for one in came}
        nccl = all(words[one]["nccl"] for one in came)
        decision = json.dumps({"members": came, "leader": leader, "whom": whom, "nccl": nccl})
        self._ask(lambda: self.store.compare_set(f"{epoch}/members", "", decision))
        return True

    def _form(self, epoch: int, decision: Mapping[str, Any], member: Member) -> None:
        """Connect the members of an epoch, and take over the state of the leader (GroupBroken)."""
        members, leader = tuple(decision["members"]), int(decision["leader"])
        self._epoch, self._members, self._round, self._looked = epoch, members, 0, time.monotonic()
        self._is_nccl = bool(decision["nccl"])
        self._ask(lambda: self.store.compare_set(f"{epoch}/round", "", "0 0"))  # a quicker member may be in a round
        if len(members) > 1:
            self._group = self._connect(PrefixStore(f"{epoch}", self.store), members.index(self.rank.number))
        self._stands = True
        self._say_changes(epoch, decision["whom"])
        member.learner.drop_unfinished()  # is no part of the state that the members take over
        self._take_over(leader, member)
        self._leads = self._wanted = False
        self._began = time.monotonic()

    def _say_changes(self, epoch: int, whom: Mapping[str, str]) -> None:
        """Log the members of an epoch, and since the last epoch the ranks that are gone and that have come."""
        before, self._whom = self._whom, set(whom.values())
        log.info("epoch %d: ranks %s learn together", epoch, ", ".join(sorted(self._whom)))
        if min(self._members) == self.rank.number:  # one of them is enough
            gone, come = sorted(before - self._whom), sorted(self._whom - before)
            words = [f"rank {one} is gone" for one in gone] + [f"rank {one} is there" for one in come if before]
            if not before and (missing := set(range(self.rank.size)) - set(self._members)):
                words = [f"{_names(missing)} not there"]
            if words:
                log.warning("%s: %d of %d learn on", ", ".join(words), self.size, self.rank.size, extra=SHOWN)

    def _connect(self, store: Any, index: int) -> Any:
        timeout = timedelta(seconds=COLLECTIVE_SECONDS)
        try:
            if self._is_nccl:
                os.environ |= {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                return dist.ProcessGroupNCCL(store, index, self.size, options)
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout, options._devices = timeout, [device_to(self.rank)]
            return dist.ProcessGroupGloo(store, index, self.size, options)
        except RuntimeError as error:
            raise GroupBroken(_cause(error)) from None

    @property
    def _has_nccl(self) -> bool:
        """Return whether every rank of this machine has a GPU of its own, as NCCL requires of all members."""
        return self.device.type == "cuda" and dist.is_nccl_available() and not os.environ.get(SHARED_GPU)

    def _take_over(self, leader: int, member: Member) -> None:
        """Continue with state and totals of the leader (GroupBroken)."""
        state, key, is_new = member.learner.state(), f"{self._epoch}/state", not self._done
        own = np.concatenate([vector.reshape(-1).view(np.uint8) for vector in state.vectors.values()])
        if is_leader := leader == self.rank.number:
            if not self._table.any():  # all learners are new: the saved state alone says how much the others have done
                others = [max(0, member.known.get(name, 0) - member.totals[name]) for name in COUNTED]
                self._table[(leader + 1) % self.rank.size] = others
            self._table[leader] = [member.totals[name] for name in COUNTED] + self._offset
            meta = {name: value for name, value in state.meta.items() if name not in GENERATORS}
            words = json.dumps({"meta": meta, "table": self._table.tolist(), "done": self._done})
            self._ask(lambda: self.store.set(key, words))
        whole = torch.from_numpy(own.copy()).to(self.device if self._is_nccl else "cpu")
        options = dist.BroadcastOptions()
        options.rootRank = self._members.index(leader)
        self._collective(whole, lambda group, x: group.broadcast([x], options))
        if is_leader:
            return
        told = json.loads(self._ask(lambda: self.store.get(key)))  # the leader set the key before
        self._table, self._done = np.array(told["table"]), told["done"] + 1
        found, counts = whole.cpu().numpy(), np.array([member.totals[name] for name in COUNTED])
        # A new learner may begin with the leader's weights, but never knows which part of its counts is of other ranks.
        row = self._table[self.rank.number]
        if not np.array_equal(found, own) or (is_new and row.any() and (row != counts).any()):
            parts = np.split(found, np.cumsum([vector.nbytes for vector in state.vectors.values()])[:-1])
            for vector, part in zip(state.vectors.values(), parts, strict=True):
                vector[...] = part.view(vector.dtype).reshape(vector.shape)
            state.meta.update(told["meta"])
            member.go_on_from(state)
            self._offset = row - [member.totals[name] for name in COUNTED]
            log.info("rank %d goes on from the state of rank %d", self.rank.number, leader)
        member.learner.updates = told["meta"]["updates"]

    def _has(self, key: str) -> bool:
        return bool(self._ask(lambda: self.store.check([key])))

    def _ask(self, question: Callable[[], T]) -> T:
        """Return the answer of the store (AppoError: the store is gone, and with it the launcher)."""
        try:
            return question()
        except dist.DistError as error:
            where = f"{self.rank.host}:{self.rank.port}"
            raise AppoError(f"rank {self.rank.number}: the launcher's store at {where} is gone: {error}") from None


def _cause(error: RuntimeError) -> str:
    """Return the first sentence of an error of torch, without the place in its source."""
    text = str(error).split("\n")[0]
    return re.sub(r"^\[[^]]*\] ", "", text).split(". ")[0]


def _names(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))} {'are' if len(ranks) > 1 else 'is'}"
