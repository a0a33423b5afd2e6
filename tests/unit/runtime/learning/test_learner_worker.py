import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.learning import learner_worker as module
from appo.algorithms.runtime.learning.batches import Batch, Entered
from appo.algorithms.runtime.learning.column_batches import ColumnBatches
from appo.algorithms.runtime.learning.learner_worker import REPORT_SECONDS, LearnerMemory, LearnerWorker, TrainingPlan
from appo.algorithms.runtime.learning.staging import Staging
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.learner_state import LearnerState, StateBlock, empty_vectors
from appo.algorithms.runtime.memory.weights import WeightRing
from appo.algorithms.runtime.messages import (
    Address,
    Begin,
    LearnerReport,
    Message,
    ReplaceWeights,
    SaveState,
    SlotReleased,
    StateSaved,
    Stop,
    TrajectoryReady,
    WorkerReport,
)
from appo.utils import checkpoint_files, failpoints
from appo.utils.errors import NumericsError, UsageError
from tests.states import NAMES, adam_layout, adam_state
from tests.unit.runtime.devices import LateDevice
from tests.unit.runtime.worlds import World, hand_over, number_all, world_of

WEIGHTS = 3
LAYOUT = adam_layout(WEIGHTS, 1)
ROWS, ROLLOUT = 3, 4


class CountingLearner:
    """An algorithm that takes two steps on every batch, each of which adds 1 to every weight."""

    def __init__(self) -> None:
        module = nn.Linear(2, 1)
        self.flat = FlatModule(module)
        self.flat.flat.zero_()
        self.version, self.updates = 1, 0
        self.progress: list[float] = []
        self.samples: list[int] = []
        self.skipped_in_a_row = 0

    def learn(self, batch: Batch, progress: float) -> Iterator[None]:
        self.progress.append(progress)
        self.samples.append(int(batch.valid.sum()))
        for _ in range(2):
            bad = not bool(batch.reward.isfinite().all())
            self.skipped_in_a_row = (self.skipped_in_a_row + 1) * bad
            self.flat.flat.add_(1.0 - bad)
            self.version += 1
            self.updates += 1
            yield

    def metrics(self) -> dict[str, float]:
        return {"loss": 0.5, "skipped_in_a_row": float(self.skipped_in_a_row)}

    def state(self, into: Array | None = None) -> LearnerState:
        vectors = empty_vectors(LAYOUT.vectors) if into is None else into
        for name in NAMES:
            vectors[name][:] = self.flat.flat.numpy()
        vectors["statistics"][:] = self.updates
        meta = {name: getattr(self, name) for name in ("version", "updates", "skipped_in_a_row")}
        return LearnerState(vectors, meta)

    def restore(self, state: LearnerState) -> None:
        self.flat.flat.copy_(torch.from_numpy(state.weights))
        self.version, self.updates, self.skipped_in_a_row = state.meta["version"], state.meta["updates"], 0


class Training:
    """A learner worker of batches of one slot, and the clock it looks at."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        world: World | None = None,
        incidents: Path = Path("unused"),
        **plan: Any,
    ) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        if world is None:
            more = (*WeightRing.declare(0, WEIGHTS), *StateBlock.declare(0, LAYOUT.vectors))
            world = world_of(more=more)
            number_all(world)
        self.world = world
        memory = LearnerMemory.attach(world.arena, world.trajectories, 0)
        self.ring, self.block = memory.ring, memory.block
        limits = {"env_steps": 10**9, "samples": 10**9, "max_policy_lag": 20, "max_skipped_updates": 4, **plan}
        seconds = {name: limits.pop(name) for name in ("seconds", "earlier_seconds") if name in limits}
        limits["budget"] = Budget(limits.pop("env_steps"), limits.pop("samples"), **seconds)
        self.learner = CountingLearner()
        batches = ColumnBatches(Staging(world.trajectories), 0, ROWS, limits["max_policy_lag"], False, 1)
        plans = TrainingPlan(**limits, device="cpu", incidents=incidents)
        self.worker = LearnerWorker(Address("learner", 0), plans, self.learner, batches, memory)

    def told(self, message: Message) -> list[Message]:
        return list(self.worker.handle(message))

    def give(self, slot: int) -> TrajectoryReady:
        message = hand_over(self.world, slot)
        assert self.told(message) == []
        return message

    def work(self) -> list[Message]:
        return list(self.worker.work())

    def report(self) -> LearnerReport:
        """What it would report now."""
        return self.worker._report()


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    return Training(monkeypatch)


def test_initial_weights_are_published_as_version_1(training: Training) -> None:
    version, weights = training.ring.fetch(0)
    assert version == 1
    assert weights is not None
    assert weights.tolist() == [0.0] * WEIGHTS
    assert not training.worker.pending()


def test_a_report_comes_with_the_warnings_for_main(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "take_raised", lambda: ("updates run in torch",))
    training.now += REPORT_SECONDS
    warnings, report = training.work()
    assert warnings == WorkerReport("learner_0", {}, ("updates run in torch",))
    assert isinstance(report, LearnerReport)


def test_weights_are_published_after_every_optimizer_step(training: Training) -> None:
    training.give(0)
    assert training.worker.pending()
    seen = []
    for _ in training.worker.work():
        seen.append(training.ring.fetch(0))
    version, weights = training.ring.fetch(0)
    assert version == training.learner.version == 3
    assert weights is not None
    assert weights.tolist() == [2.0] * WEIGHTS
    assert training.world.arena["weights.0.sequence"].tolist() == [4, 6]  # version 2 was published too
    assert not training.worker.pending()


def test_slots_are_released_before_training_starts(training: Training) -> None:
    training.give(2)
    messages = training.worker.work()
    assert next(messages) == SlotReleased(0, 2, 1)
    assert training.learner.samples == []
    assert list(messages) == []
    assert training.learner.samples == [ROWS * ROLLOUT]


def test_every_valid_step_is_counted_once(training: Training) -> None:
    training.world.trajectories.valid[0, 1, 2] = False
    for slot in (0, 1):
        training.give(slot)
        training.work()
    report = training.report()
    assert report.policy == 0
    assert report.version == 5
    assert report.totals == {
        "samples": 23, "env_steps": 92, "discarded": 0, "updates": 4, "batches": 2, "trajectories": 2, "released": 2,
        "in_flight": 0, "held": 0, "lost": 0, "used": 23,
    }  # fmt: skip
    assert training.learner.progress == [0, 44 / 10**9]


def test_progress_follows_the_time_over_starts_and_over_the_death_of_a_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {"env_steps": 10**10, "seconds": 60.0, "earlier_seconds": 20.0}
    first = Training(monkeypatch, **plan)
    first.now += 500.0  # until all processes are ready
    first.told(Begin())
    for slot, seconds in enumerate((0.0, 20.0)):
        first.now += seconds
        first.give(slot)
        first.work()
    assert first.learner.progress == [20 / 80, 40 / 80]
    second = Training(monkeypatch, first.world, **plan)
    second.now = first.now + 30.0
    second.told(Begin())
    second.world.trajectories.policy_version[:] = second.learner.version
    second.give(2)
    second.work()
    assert second.learner.progress == [70 / 80]


def test_lag_is_measured_in_updates_at_training_time(training: Training) -> None:
    training.world.trajectories.policy_version[1, 0, 0] = 0
    training.give(0)
    training.work()
    training.give(1)
    training.work()
    metrics = training.report().metrics
    assert metrics["train/loss"] == 0.5
    assert metrics["train/policy_lag_mean"] == (0 * 12 + 2 * 11 + 3) / 24
    assert metrics["train/policy_lag_max"] == 3
    nothing_new = {"train/loss": 0.5, "train/skipped_in_a_row": 0.0, "train/rollbacks": 0}
    assert training.report().metrics == nothing_new


def test_trajectories_that_are_too_old_are_discarded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch, max_policy_lag=2)
    training.give(0)
    training.work()
    training.give(1)
    assert training.work() == [SlotReleased(0, 1, 1)]
    totals = training.report().totals
    assert (totals["samples"], totals["discarded"], totals["batches"], totals["updates"]) == (12, 12, 1, 2)


def test_a_trajectory_of_an_earlier_hand_over_is_dropped(training: Training) -> None:
    old = training.give(0)
    training.work()
    training.world.trajectories.sequence[0] += 1
    training.told(old)
    assert not training.worker.pending()
    assert training.report().totals["trajectories"] == 1


def test_state_is_saved_on_request(training: Training) -> None:
    assert training.block.writes == 0
    training.give(0)
    training.work()
    assert training.told(SaveState(0)) == [StateSaved(0)]
    state = training.block.read()
    assert state is not None
    assert state.weights.tolist() == [2.0] * WEIGHTS
    counts = {"version": 3, "updates": 2, "env_steps": 48, "samples": 12, "discarded": 0, "used": 12}
    assert state.meta == {**counts, "skipped_in_a_row": 0}


def test_state_and_reports_follow_the_clock(training: Training) -> None:
    def work(seconds: float) -> tuple[int, int]:
        training.now += seconds
        training.give(0)
        before = training.block.writes
        reports = [m for m in training.work() if isinstance(m, LearnerReport)]
        return training.block.writes - before, len(reports)

    assert work(0.0) == (1, 0)  # the state before the first batch
    assert work(1.1 * module.REPORT_SECONDS) == (0, 1)
    assert work(0.9 * module.REPORT_SECONDS) == (1, 0)  # together more than STATE_SECONDS
    assert work(0.2 * module.REPORT_SECONDS) == (0, 1)
    assert work(1.1 * module.STATE_SECONDS) == (1, 1)


def test_stop_saves_and_reports_and_ends_training(training: Training) -> None:
    training.give(0)
    training.work()
    training.give(1)
    saved, report = training.told(Stop())
    assert saved == StateSaved(0)
    state = training.block.read()
    assert state is not None
    assert state.meta["env_steps"] == 48
    assert isinstance(report, LearnerReport)
    assert (report.totals["samples"], report.totals["in_flight"], report.totals["held"]) == (12, 12, 1)
    assert not training.worker.pending()
    assert training.block.writes == 2


@pytest.mark.parametrize("limit", [{"env_steps": 96}, {"samples": 24}, {"env_steps": 95}, {"samples": 13}])
def test_training_ends_at_once_when_the_budget_is_spent(monkeypatch: pytest.MonkeyPatch, limit: dict[str, int]) -> None:
    training = Training(monkeypatch, **limit)
    for slot in range(3):
        training.give(slot)
    assert [type(m) for m in training.work()] == [SlotReleased]
    assert training.worker.pending()
    _, report = training.work()
    assert isinstance(report, LearnerReport)
    assert report.totals["env_steps"] == 96
    assert not training.worker.pending()
    assert training.learner.progress == [0, 48 / training.worker.plan.budget.env_steps]


def test_a_policy_beyond_its_budget_keeps_no_slot_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It learns no more, but goes on giving slots back, and what was in them counts as discarded."""
    training = Training(monkeypatch, samples=12, alone=False)
    training.give(0)
    assert [type(m) for m in training.work()] == [SlotReleased, LearnerReport]
    for slot in (1, 2, 3):
        training.give(slot)
    for slot in (1, 2, 3):
        assert training.worker.pending()
        assert training.work() == [SlotReleased(0, slot, 1)]
    assert not training.worker.pending()
    totals = training.report().totals
    assert (totals["samples"], totals["discarded"], totals["updates"], totals["batches"]) == (12, 36, 2, 1)
    assert (totals["released"], totals["held"], totals["in_flight"]) == (4, 0, 0)
    successor = Training(monkeypatch, training.world, samples=12, alone=False)  # counts nothing twice
    assert successor.report().totals["discarded"] == 36


def test_training_continues_from_the_state_block(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Training(monkeypatch)
    for slot in (0, 1):
        first.give(slot)
        first.work()
    first.told(SaveState(0))
    first.give(2)
    first.work()  # is not in the state: lost with the learner
    assert first.ring.published == 7
    second = Training(monkeypatch, first.world)
    assert second.learner.updates == 6  # no counter goes back
    assert second.learner.version == 7 + 20 + 1  # beyond everything that was published, and too far for any old step
    version, weights = second.ring.fetch(7)
    assert version == 28
    assert weights is not None
    assert weights.tolist() == [4.0] * WEIGHTS
    second.give(3)
    assert second.work() == [SlotReleased(0, 3, 1)]
    totals = second.report().totals
    assert (totals["samples"], totals["env_steps"], totals["discarded"], totals["lost"]) == (36, 144, 12, 12)


def test_what_was_learned_before_is_reported_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Training(monkeypatch)
    first.give(0)
    first.work()
    first.told(SaveState(0))
    (report,) = Training(monkeypatch, first.world).told(Begin())
    assert isinstance(report, LearnerReport)
    assert (report.totals["env_steps"], report.totals["samples"], report.totals["updates"]) == (48, 12, 2)


def test_the_version_never_decreases_without_a_past_in_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after resuming from a checkpoint: the state is there, the ring is empty."""
    first = Training(monkeypatch)
    first.give(0)
    first.work()
    first.told(SaveState(0))
    first.world.arena["weights.0.published"][0] = 0
    assert Training(monkeypatch, first.world).learner.version == 3 + 20 + 1


def test_weights_of_another_run_begin_as_version_1(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Training(monkeypatch).world
    world.arena["weights.0.published"][0] = 0
    meta = dict.fromkeys(("version", "updates", "env_steps", "samples", "discarded"), 0)
    StateBlock(world.arena, 0).write(adam_state(np.full((3, WEIGHTS), 5.0, np.float32), np.zeros(1), meta))
    training = Training(monkeypatch, world)
    assert training.learner.version == training.ring.published == 1
    assert training.learner.flat.flat.tolist() == [5.0] * WEIGHTS


def test_the_env_steps_of_earlier_starts_are_noted_before_anybody_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Training(monkeypatch).world
    meta = dict.fromkeys(("version", "updates", "discarded"), 0) | {"env_steps": 44, "samples": 11}
    StateBlock(world.arena, 0).write(adam_state(np.zeros((3, WEIGHTS), np.float32), np.zeros(1), meta))
    training = Training(monkeypatch, world)
    assert training.worker.ledger.noted()["env_steps"] == 44


def test_steps_that_a_source_inserts_are_counted_before_their_slot_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    training, noted = Training(monkeypatch), []
    training.worker.batches.entered = lambda: Entered(3, 12)  # type: ignore[method-assign]
    training.give(0)
    for message in training.worker.work():
        noted.append((type(message), training.worker.ledger.noted()["env_steps"]))
    assert noted[0] == (SlotReleased, 12)


def test_discarded_steps_of_earlier_starts_stay_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Training(monkeypatch, max_policy_lag=1)
    first.give(0)
    first.work()
    first.give(1)
    first.work()
    assert first.report().totals["discarded"] == 12
    first.told(SaveState(0))
    second = Training(monkeypatch, first.world, max_policy_lag=1)
    assert second.report().totals["discarded"] == 12
    second.give(2)
    second.work()
    assert second.report().totals["discarded"] == 24
    second.told(SaveState(0))
    third = Training(monkeypatch, first.world, max_policy_lag=1)
    assert third.report().totals["discarded"] == 24


def test_a_publication_under_way_keeps_the_worker_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice()
    monkeypatch.setattr(module, "device_of", lambda name: device)
    training = Training(monkeypatch)
    events = device.streams[0].events
    assert training.ring.published == 1  # the first weights are waited for
    training.give(0)
    training.work()
    assert (training.learner.version, training.ring.published) == (3, 1)
    assert training.worker.pending()
    events[-1].reached = True
    training.work()
    assert (training.ring.published, training.worker.pending()) == (2, True)
    events[-1].reached = True
    training.work()
    assert (training.ring.published, training.worker.pending()) == (3, False)
    assert training.ring.fetch(0)[1].tolist() == [2.0] * WEIGHTS  # type: ignore[union-attr]


def test_slots_that_are_held_are_released_when_the_weights_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice()
    monkeypatch.setattr(module, "device_of", lambda name: device)
    training = Training(monkeypatch)
    training.worker.batches.hold = True
    training.give(0)
    assert [message for message in training.work() if isinstance(message, SlotReleased)] == [SlotReleased(0, 0, 1)]
    assert (training.learner.version, training.ring.published) == (3, 3)


def test_a_state_that_is_not_finite_never_takes_the_place_of_a_good_one(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    training.told(SaveState(0))
    assert training.block.writes == 1
    training.learner.flat.flat[1] = np.nan
    for _ in range(2):
        training.told(SaveState(0))
    assert training.block.writes == 1
    assert caplog.text.count("the last good state is kept") == 1
    training.learner.flat.flat[1] = 0.0
    training.told(SaveState(0))
    assert training.block.writes == 2


class TestRollback:
    """Batches that cannot be trained on; two updates each, four skipped in a row are too many."""

    @pytest.fixture
    def training(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Training:
        return Training(monkeypatch, incidents=tmp_path / "incidents")

    def train(self, training: Training, reward: float, seconds: float = 1.1 * module.REPORT_SECONDS) -> None:
        """Train on a batch of this reward, acted with the newest weights; after 0.5 s its metrics are looked at."""
        slot = training.world.trajectories
        slot.reward[0], slot.policy_version[0] = reward, training.learner.version
        slot.owner[0] = 0
        training.now += seconds
        training.give(0)
        training.work()

    def test_too_many_skipped_updates_lead_back_to_the_last_good_state(self, training: Training) -> None:
        self.train(training, 0.0)
        training.told(SaveState(0))
        self.train(training, 0.0, 0.0)
        self.train(training, np.nan)
        assert training.learner.flat.flat.tolist() == [4.0] * WEIGHTS
        assert training.learner.version == 7
        self.train(training, np.nan)
        assert training.learner.flat.flat.tolist() == [2.0] * WEIGHTS
        version, weights = training.ring.fetch(0)
        assert version == training.learner.version == 9 + 20 + 1
        assert weights is not None
        assert weights.tolist() == [2.0] * WEIGHTS
        report = training.report()
        assert report.metrics["train/rollbacks"] == 1
        assert (report.totals["samples"], report.totals["updates"], report.totals["lost"]) == (48, 8, 36)
        state = training.block.read()
        assert state is not None
        assert (state.meta["version"], state.meta["updates"], state.meta["skipped_in_a_row"]) == (30, 8, 0)

    def test_a_state_after_a_skipped_update_is_no_good_one(self, training: Training) -> None:
        self.train(training, np.nan)
        assert training.block.writes == 1  # before the first batch
        self.train(training, np.nan, 1.1 * module.STATE_SECONDS)
        assert training.block.writes == 2  # after a rollback
        self.train(training, np.nan, 1.1 * module.STATE_SECONDS)
        assert training.block.writes == 2
        self.train(training, 0.0, 1.1 * module.STATE_SECONDS)
        assert training.block.writes == 3
        self.train(training, np.nan)
        assert len(training.told(SaveState(0))) == 1  # the answer; the state of before is the one to save
        assert training.block.writes == 3

    def test_the_run_ends_when_rollbacks_do_not_help(self, training: Training, tmp_path: Path) -> None:
        for _ in range(7):
            self.train(training, np.inf)
        assert training.report().metrics["train/rollbacks"] == 3
        with pytest.raises(NumericsError, match="4 updates in a row were not finite, also after 3 rollbacks") as error:
            self.train(training, np.inf)
        (incident,) = (tmp_path / "incidents").iterdir()
        assert str(error.value).endswith(f"; batch and weights are in {incident}")
        checkpoint_files.verify(incident)
        assert json.loads((incident / "incident.json").read_text())["not_finite"] == ["reward"]
        assert load_file(incident / "batch.safetensors")["reward"].tolist() == [[np.inf] * ROWS] * ROLLOUT
        assert load_file(incident / "model.safetensors")["bias"].tolist() == [0.0]

    def test_reports_between_two_batches_count_too(self, training: Training) -> None:
        for rollbacks in (1, 2, 3):
            for _ in range(2):
                self.train(training, np.inf, 0.0)
            training.now += 1.1 * module.REPORT_SECONDS
            training.work()
            assert training.report().metrics["train/rollbacks"] == rollbacks
        for _ in range(2):
            self.train(training, np.inf, 0.0)
        training.now += 1.1 * module.REPORT_SECONDS
        training.work()
        with pytest.raises(NumericsError, match="6 updates in a row were not finite, also after 3 rollbacks"):
            self.train(training, np.inf, 0.0)  # the next batch, which the incident shows

    def test_updates_without_a_valid_step_are_no_good_ones(
        self, training: Training, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(training.learner, "empty_updates", 0, raising=False)

        def empty_one() -> None:
            training.learner.updates += 1
            training.learner.empty_updates += 1

        for _ in range(7):
            empty_one()
            self.train(training, np.inf)
        with pytest.raises(NumericsError, match="4 updates in a row were not finite, also after 3 rollbacks"):
            self.train(training, np.inf)

    def test_a_report_without_figures_is_no_sign_of_a_good_update(
        self, training: Training, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        figures = training.learner.metrics  # which an algorithm of many small steps does not have for every report
        for number in range(1, 9):
            monkeypatch.setattr(training.learner, "metrics", figures if number % 2 else dict)
            self.train(training, np.inf)
        assert training.report().metrics["train/rollbacks"] == 3
        monkeypatch.setattr(training.learner, "metrics", figures)
        with pytest.raises(NumericsError, match="4 updates in a row were not finite, also after 3 rollbacks"):
            self.train(training, np.inf)

    def test_a_full_disk_does_not_hide_why_the_run_ends(self, training: Training) -> None:
        for _ in range(7):
            self.train(training, np.inf)
        failpoints.arm("ckpt.write:enospc")
        try:
            with pytest.raises(NumericsError, match=r"are not kept: cannot save .*No space left on device"):
                self.train(training, np.inf)
        finally:
            failpoints.arm("")


def test_weights_from_outside_take_the_place_of_its_own(training: Training, tmp_path: Path) -> None:
    training.give(0)
    training.work()
    training.give(1)
    before = training.learner.version
    path = tmp_path / "weights"
    np.array([7.0, 8.0, 9.0], np.float32).tofile(path)
    assert training.told(ReplaceWeights(0, str(path))) == []
    assert not path.exists()  # which says that it is done
    assert training.learner.flat.flat.tolist() == [7.0, 8.0, 9.0]
    version, weights = training.ring.fetch(0)
    assert version == before + 20 + 1  # what was acted with others is too old
    assert weights is not None
    assert weights.tolist() == [7.0, 8.0, 9.0]
    state = training.block.read()
    assert state is not None
    assert state.weights.tolist() == [7.0, 8.0, 9.0]
    assert (state.meta["updates"], state.meta["samples"]) == (2, 12)
    training.work()
    assert training.report().totals["discarded"] == 12


def test_a_metric_without_a_description_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch, metrics={"loss": "of a test"})
    assert "train/loss" in training.report().metrics  # and `skipped_in_a_row`, which no algorithm describes
    monkeypatch.setattr(training.learner, "metrics", lambda: {"loss": 0.5, "size": 1.0, "age": 2.0})
    with pytest.raises(UsageError, match=r"^`metrics` of the algorithm does not describe age, size, which its learner"):
        training.report()


def test_a_report_says_between_what_the_lag_was_since_the_last(training: Training) -> None:
    def reported(*lags: list[int]) -> dict[str, float]:
        training.worker._lags += [torch.tensor(steps, dtype=torch.int64) for steps in lags]
        return {name: value for name, value in training.report().metrics.items() if "policy_lag" in name}

    figures = {"train/policy_lag_mean": 2.5, "train/policy_lag_min": 1, "train/policy_lag_max": 4}
    assert reported([3, 1, 2], [4], []) == figures
    assert reported() == reported([]) == {}
    assert reported([7]) == dict.fromkeys(figures, 7)
