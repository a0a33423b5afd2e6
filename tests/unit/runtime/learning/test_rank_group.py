"""The group of learners: rounds, counts, and what happens when ranks go and come. Ranks are threads here."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from appo.algorithms.runtime.learning import rank_group, rank_store
from appo.algorithms.runtime.learning.batches import GroupBroken
from appo.algorithms.runtime.learning.rank_group import COUNTED, RankGroup
from appo.algorithms.runtime.memory.learner_state import LearnerState
from appo.algorithms.runtime.memory.plain_state import GENERATORS
from appo.algorithms.runtime.ranks import Rank
from appo.utils.errors import UsageError
from tests.patience import HANG_SECONDS


@dataclass
class FakeLearner:
    """Weights that are a number, and a float64 vector beside them."""

    value: float
    updates: int = 0
    drops: int = field(default=0, compare=False)

    def drop_unfinished(self) -> None:
        self.drops += 1

    def state(self) -> LearnerState:
        vectors = {"weights": np.full(3, self.value, np.float32), "statistics": np.full(2, 10 * self.value)}
        return LearnerState(
            vectors, {"version": 1, "updates": self.updates, **dict.fromkeys(GENERATORS, f"of {self.value}")}
        )


@dataclass
class FakeMember:
    learner: FakeLearner
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    taken: list[dict[str, Any]] = field(default_factory=list)
    known: dict[str, int] = field(default_factory=dict)

    def go_on_from(self, state: LearnerState) -> None:
        assert state.vectors["statistics"][0] == 10 * state.vectors["weights"][0]
        self.learner.value = float(state.vectors["weights"][0])
        self.taken.append(dict(state.meta))


class Ranks:
    """Groups that are formed and used by a thread each."""

    def __init__(self, size: int) -> None:
        self.store = rank_store.serve()
        self.size, self.pool = size, ThreadPoolExecutor(size)
        self.members = [FakeMember(FakeLearner(1.0)) for _ in range(size)]
        self.groups = [self.new(number) for number in range(size)]

    def new(self, number: int) -> RankGroup:
        return RankGroup(Rank(number, self.size, port=self.store.port), torch.device("cpu"))

    def each(self, function: Callable[[int], Any], ranks: Iterator[int] | range | list[int]) -> list[Any]:
        return list(self.pool.map(function, ranks))

    def form(self, ranks: list[int]) -> None:
        def until_ready(rank: int) -> None:
            while not self.groups[rank].ready(self.members[rank]):
                threading.Event().wait(0.001)

        # All ranks form at once, however slow the machine is; without one of them, the others do not wait for it.
        self.announce(ranks)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank_group, "WINDOW_SECONDS", HANG_SECONDS if len(ranks) == self.size else 0.0)
            self.each(until_ready, ranks)

    def announce(self, ranks: list[int]) -> None:
        """Let ranks come before any of them looks who has come."""
        for rank in ranks:
            if not (self.groups[rank]._stands or self.groups[rank]._announced):
                self.groups[rank]._announce(self.members[rank], time.monotonic())

    def round(self, ranks: list[int], progress: float = 0.0) -> list[float | None]:
        return self.each(lambda r: self.groups[r].begin(self.members[r].totals, progress + r), ranks)

    def sum(self, ranks: list[int]) -> list[float]:
        def add(rank: int) -> float:
            x = torch.tensor([float(10**rank)])
            self.groups[rank].add_up(x)
            return x.item()

        return self.each(add, ranks)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "WINDOW_SECONDS", 0.05)
    monkeypatch.setattr(rank_group, "LOOK_SECONDS", 0.0)


def count(member: FakeMember, steps: int) -> None:
    for name in COUNTED:
        member.totals[name] += steps


def test_a_round_adds_up_and_counts_all() -> None:
    ranks = Ranks(3)
    ranks.form([0, 1, 2])
    assert [member.taken for member in ranks.members] == [[], [], []]  # equal weights: nothing to take over
    for rank, member in enumerate(ranks.members):
        count(member, 5 + rank)
    assert ranks.round([0, 1, 2], 0.5) == [2.5, 2.5, 2.5]  # of 0.5, 1.5 and 2.5
    assert {group.totals["samples"] for group in ranks.groups} == {18}
    assert ranks.sum([0, 1, 2]) == [111.0, 111.0, 111.0]


def test_the_first_group_takes_over_the_state_of_a_resumed_rank() -> None:
    ranks = Ranks(2)
    ranks.members[0].learner = FakeLearner(7.0, updates=40)
    count(ranks.members[0], 1000)  # as the checkpoint says
    count(ranks.members[1], 64)  # a batch of other weights, which is dropped
    ranks.form([0, 1])
    assert ranks.members[1].learner == FakeLearner(7.0, 40)
    assert [taken["updates"] for taken in ranks.members[1].taken] == [40]
    assert "of 7.0" not in json.dumps(ranks.members[1].taken)  # random numbers stay its own
    ranks.round([0, 1])
    assert {group.totals["env_steps"] for group in ranks.groups} == {1000}
    count(ranks.members[1], 10)
    ranks.round([0, 1])
    assert {group.totals["env_steps"] for group in ranks.groups} == {1010}


def test_survivors_go_on_and_a_new_rank_takes_over_their_state() -> None:
    ranks = Ranks(3)
    ranks.form([0, 1, 2])
    for member in ranks.members:
        count(member, 10)
    ranks.round([0, 1, 2])
    ranks.groups[2]._close()  # as the kernel closes the connections of a process that is killed

    def goes_on(rank: int) -> None:
        with pytest.raises(GroupBroken) as broken:
            ranks.groups[rank].add_up(torch.ones(1))
        ranks.groups[rank].broken(broken.value)  # at once, as learners do: the other rank need not wait for its limit
        ranks.members[rank].learner = FakeLearner(2.0, 5)

    ranks.each(goes_on, [0, 1])
    ranks.form([0, 1])
    count(ranks.members[0], 10)
    ranks.round([0, 1])
    assert ranks.sum([0, 1]) == [11.0, 11.0]
    assert {ranks.groups[rank].totals["samples"] for rank in (0, 1)} == {40}  # what rank 2 had counted stays counted

    drops = [member.learner.drops for member in ranks.members[:2]]
    ranks.members[2], ranks.groups[2] = FakeMember(FakeLearner(1.0)), ranks.new(2)  # started again
    count(ranks.members[2], 64)
    assert not ranks.groups[2].ready(ranks.members[2])  # waits to be let in
    assert ranks.round([0, 1]) == [None, None]  # instead of a round, the group forms anew
    ranks.form([0, 1, 2])
    assert ranks.members[2].learner == FakeLearner(2.0, 5)
    assert [member.learner.drops for member in ranks.members] == [drops[0] + 1, drops[1] + 1, 1]
    count(ranks.members[2], 1)
    ranks.round([0, 1, 2])
    assert {group.totals["samples"] for group in ranks.groups} == {41}


def test_a_replaced_learner_goes_on_if_no_member_of_the_last_group_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2)
    ranks.form([0, 1])
    ranks.groups[1]._close()  # rank 1 is gone for good
    ranks.groups[0].broken(GroupBroken("closed"))
    ranks.form([0])
    ranks.groups[0] = ranks.new(0)
    begun = time.monotonic()
    while time.monotonic() - begun < 2 * rank_group.WINDOW_SECONDS:
        assert not ranks.groups[0].ready(ranks.members[0])  # a member of the last group comes within the window
    monkeypatch.setattr(rank_group, "START_SECONDS", 0.2)
    ranks.form([0])
    assert (ranks.groups[0]._epoch, ranks.groups[0].size) == (3, 1)
    assert ranks.sum([0]) == [1.0]


def test_counts_of_all_outlive_the_replacement_of_all_learners() -> None:
    """The replacements know what each has counted, and the counts of all in the states saved last."""
    ranks = Ranks(3)
    for group in ranks.groups:
        group._close()
    for rank, steps in enumerate((5_000, 2_000, 1_000)):  # rank 0 saved last, all 9000 of what ranks had then done
        known = dict.fromkeys(("env_steps", "samples", "discarded", "used"), 9_000 - rank)
        ranks.members[rank] = FakeMember(FakeLearner(1.0 + rank, 50 - rank), known=known)
        count(ranks.members[rank], steps)
    ranks.form([0, 1, 2])
    assert [group.totals["env_steps"] for group in ranks.groups] == [9_000, 9_000, 9_000]
    count(ranks.members[2], 10)
    ranks.round([0, 1, 2])
    assert [group.totals["samples"] for group in ranks.groups] == [9_010, 9_010, 9_010]


def test_the_rank_that_is_furthest_is_taken_over() -> None:
    """A sum that succeeds on one rank and fails on the other leaves them a step apart."""
    ranks = Ranks(2)
    ranks.form([0, 1])
    ranks.groups[1]._done += 1
    ranks.members[1].learner = FakeLearner(3.0, 1)
    for group in ranks.groups:
        group.broken(GroupBroken("half of a sum"))
    ranks.form([0, 1])
    assert ranks.members[0].learner == FakeLearner(3.0, 1)
    ranks.members[0].learner = FakeLearner(1.5, 1)  # a rollback
    ranks.groups[0].lead()
    assert ranks.round([0, 1]) == [None, None]
    ranks.form([0, 1])
    assert ranks.members[1].learner == FakeLearner(1.5, 1)


def test_a_rank_without_a_batch_is_asked_for_after_its_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "SHORTEST_PATIENCE", 0.0)
    monkeypatch.setattr(rank_group, "ASK_SECONDS", 0.0)
    ranks = Ranks(2)
    ranks.form([0, 1])
    assert not ranks.groups[1].is_awaited()
    begun = ranks.pool.submit(ranks.groups[0].begin, ranks.members[0].totals, 0.0)
    while not ranks.groups[1].is_awaited():
        pass
    ranks.groups[1].begin(ranks.members[1].totals, 0.0)
    assert begun.result(HANG_SECONDS) == 0.0


def test_rank_0_ends_the_run_of_all() -> None:
    ranks = Ranks(2)
    ranks.form([0, 1])
    ranks.groups[0].leave()
    assert not ranks.groups[1].is_awaited()
    assert ranks.groups[1].over
    assert not ranks.groups[1].ready(ranks.members[1])
    for rank in (0, 1):  # rank 0 died before its last save, and trains on
        ranks.groups[rank] = ranks.new(rank)
    ranks.form([0, 1])


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(rank_group, "SAY_SECONDS", 0.0)
    monkeypatch.setattr(rank_group, "START_SECONDS", HANG_SECONDS)
    ranks = Ranks(3)
    ranks.announce([0, 2])
    for rank in (0, 2):
        assert not ranks.groups[rank].ready(ranks.members[rank])
    monkeypatch.setattr(rank_group, "START_SECONDS", 0.0)
    ranks.form([0, 2])
    assert caplog.messages.count(f"rank 1 is not there yet: the others wait up to {HANG_SECONDS} s") == 2
    assert "rank 1 is not there: 2 of 3 learn on" in caplog.messages


def test_an_error_of_torch_is_its_first_sentence() -> None:
    error = RuntimeError("[/a/pair.cc:553] Connection closed by peer [10.0.0.2]:4. This means that it died.\nmore")
    assert rank_group._cause(error) == "Connection closed by peer [10.0.0.2]:4"


def test_an_interface_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = rank_store.serve()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(UsageError, match=r"rank 1: GLOO_SOCKET_IFNAME=eth77: .*; there are .*lo"):
        rank_store.device_to(Rank(1, 2, port=store.port))


def test_a_store_that_nobody_keeps_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_store, "FIND_SECONDS", 0.0)
    with pytest.raises(UsageError, match=r"rank 1: nothing answers at MASTER_ADDR=127.0.0.1 MASTER_PORT=9: "):
        rank_store.client_of(Rank(1, 2, port=9), "x")


def test_a_replaced_learner_of_a_restarted_rank_keeps_the_counts_of_all() -> None:
    """Its weights may equal the leader's: the saved state is of the last update."""
    ranks = Ranks(2)
    ranks.form([0, 1])

    def replaced(member: FakeMember) -> None:
        """Rank 1 has ended and is replaced, after an update of both."""
        ranks.groups[1]._close()
        with pytest.raises(GroupBroken) as broken:
            ranks.sum([0])
        ranks.groups[0].broken(broken.value)
        ranks.members[1], ranks.groups[1] = member, ranks.new(1)
        ranks.form([0, 1])

    def trained(steps: int) -> int:
        for member in ranks.members:
            count(member, steps)
        ranks.round([0, 1])
        return ranks.groups[0].totals["env_steps"]

    assert trained(1000) == 2000
    ranks.members[0].learner = FakeLearner(2.0, 5)
    replaced(FakeMember(FakeLearner(1.0)))  # the rank itself
    assert trained(10) == 2020
    counted = FakeMember(FakeLearner(2.0, 5), known=dict.fromkeys(COUNTED, 2020))
    count(counted, 10)
    replaced(counted)  # its learner alone
    assert trained(10) == 2040
