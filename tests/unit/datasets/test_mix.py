"""Mixed input: what --input says, batches of several sources by their shares, single steps with the rewards of n."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from appo.algorithms.apex.algorithm import APEX
from appo.algorithms.apex.config import ApexConfig
from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.appo.config import APPOConfig
from appo.algorithms.datasets.columns import Needs, ShuffledReader, columns_of, transitions_of, without_values
from appo.algorithms.datasets.config import InputConfig, Mix, mix_of
from appo.algorithms.datasets.mix import MixedBatches, joined, mixed_in, reader_of, shares_of, turns_of, units_before
from appo.algorithms.datasets.reader import open_dataset
from appo.algorithms.models.config import ModelConfig
from appo.algorithms.offline.config import CloningConfig
from appo.algorithms.replay.algorithm import read_transitions
from appo.algorithms.replay.config import ReplayConfig
from appo.algorithms.replay.storage import replay_fields
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.config import SamplingConfig
from appo.algorithms.runtime.devices import Device
from appo.algorithms.runtime.learning.batches import Batch, BatchCounts, BatchSource, Entered, Feedback
from appo.algorithms.runtime.memory.learner_state import StateBlock
from appo.algorithms.runtime.memory.ownership import LearnerLedger
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.sac.config import SACConfig
from appo.utils.errors import UsageError
from tests.unit.datasets.data import LENGTHS, SPEC, episodes, written
from tests.unit.runtime.worlds import TOPOLOGY, world_of

STEPS = sum(LENGTHS)


@pytest.mark.parametrize(
    ("words", "mix"),
    [
        ((), Mix(1.0, ())),
        (("sampler",), Mix(1.0, ())),
        (("sampler:1",), Mix(1.0, ())),
        (("a", "b/*"), Mix(0.0, ((("a", "b/*"), 1.0),))),
        (("m.x:f",), Mix(0.0, ((("m.x:f",), 1.0),))),
        (("sampler:0.25", "m.x:f:0.75"), Mix(0.25, ((("m.x:f",), 0.75),))),
        (("{sampler:0.5,", "a:0.3", "'b':0.2}"), None),
        (("{sampler:0.5", "a:0.3", "b:0.2}"), Mix(0.5, ((("a",), 0.3), (("b",), 0.2)))),
        (("a:0.5", "b:0.5"), Mix(0.0, ((("a",), 0.5), (("b",), 0.5)))),
    ],
)
def test_words_say_where_steps_come_from(words: Sequence[str], mix: Mix | None) -> None:
    if mix is None:
        with pytest.raises(UsageError):
            mix_of(words)
    else:
        assert mix_of(words) == mix


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("sampler", "a"), "say what share of a batch comes from where"),
        (("sampler:0.5", "a"), "every source needs a share, or none of them"),
        (("sampler:0.5", "a:0.6"), "must be above 0 and add up to 1, not to 1.1"),
        (("sampler:1.5", "a:-0.5"), "must be above 0 and add up to 1"),
        (("a:0.5", "a:0.5"), "stands there twice"),
        (("sampler:0.5",), "must be above 0 and add up to 1, not to 0.5"),
        (("sampler:nan", "a:0.5"), "must be above 0 and add up to 1, not to nan"),
        (("sampler:0.5", "a:nan"), "must be above 0 and add up to 1, not to nan"),
        (("pkg:nan",), "must be above 0 and add up to 1, not to nan"),
        (("pkg:inf",), "must be above 0 and add up to 1, not to inf"),
    ],
)
def test_shares_that_are_none_are_refused(words: Sequence[str], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        mix_of(words)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (lambda: CloningConfig(input=("sampler:0.5", "a:0.5")), "datasets alone are cloned"),
        (lambda: APPOConfig(input=("a",)), "APPO learns from what it plays too"),
        (lambda: APPOConfig(input=("sampler:0.5", "a:0.5"), with_vtrace=False), "not --with_vtrace=False"),
        (lambda: APPOConfig(input=("sampler:0.5", "a:0.5"), batch_size=32), "a batch of one trajectory"),
        (lambda: ApexConfig(input=("a",), batch_replay=True), "in single steps with --algo=APEX"),
        (lambda: ApexConfig(input=("sampler:0.5", "a:0.5"), batch_size=1, rollout=1, n_steps=1), "a batch of one step"),
    ],
)
def test_what_an_algorithm_cannot_mix_is_refused(config: Any, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        config().check()


HALF, QUARTER = ("sampler:0.5", "a:0.5"), ("sampler:0.25", "a:0.5", "b:0.25")


@pytest.mark.parametrize(
    ("config", "uses", "updates", "waiting", "per_version"),
    [
        (SACConfig(updates_per_step=1.0), 256.0, 1.0, 1, 1),
        (SACConfig(updates_per_step=1.0, input=HALF), 128.0, 1.0, 1, 1),
        (SACConfig(updates_per_step=0.25, input=QUARTER, max_weight_sync_delay=40), 16.0, 0.25, 4, 10),
        (SACConfig(updates_per_step=1 / 512, input=HALF), 0.25, 1 / 512, 256, 1),
        (SACConfig(updates_per_step=0.0, input=HALF, max_weight_sync_delay=1024), 0.0, 0.0, 256, 4),
        (ApexConfig(replay_ratio=8.0), 8.0, 8 / 512, 2, 6),
        (ApexConfig(replay_ratio=8.0, input=HALF), 8.0, 8 / 256, 1, 12),
        (ApexConfig(replay_ratio=1.0, input=QUARTER), 1.0, 1 / 128, 4, 3),
    ],
)
def test_updates_per_step_count_batches_whatever_their_share_of_datasets(
    config: ReplayConfig, uses: float, updates: float, waiting: int, per_version: int
) -> None:
    assert (config.uses_per_step, config.updates_per_step) == (uses, updates)
    assert (config.waiting_columns, config.updates_per_version) == (waiting, per_version)
    assert config.ppo_epochs == (updates * config.batch_size or 1.0)
    assert config.one_update(64).updates_per_step == 1 / 64


def test_shares_leave_nothing_over() -> None:
    assert shares_of(10, [0.5, 0.26, 0.24]) == [5, 3, 2]
    assert shares_of(1, [0.5, 0.5]) == [1, 0]
    assert shares_of(16, [1.0]) == [16]
    for units in range(40):
        assert sum(shares_of(units, [0.1, 0.2, 0.7])) == units


def test_batches_of_several_datasets_have_their_shares(tmp_path: Path) -> None:
    written(tmp_path / "a", episodes(LENGTHS))
    written(tmp_path / "b", [replace(one, reward=one.reward + 1000) for one in episodes(LENGTHS)])
    flags = InputConfig(input=(f"{tmp_path / 'a'}:0.25", f"{tmp_path / 'b'}:0.75"))
    read = reader_of(flags, SPEC, 1, columns_of(1, 1, 0))
    counts, samples = np.zeros(2, np.int64), 0
    for _ in range(30):
        batch = read(samples, 8)
        samples += int(batch.valid.sum())
        of_b = int((batch.reward >= 1000).sum())
        assert of_b == 6
        counts += (8 - of_b, of_b)
    again = read(0, 8)
    torch.testing.assert_close(again.reward, read(0, 8).reward)
    assert samples == 240
    assert counts.tolist() == [60, 180]


def test_many_small_shares_hold_over_batches_that_have_no_unit_for_each(tmp_path: Path) -> None:
    """Nine of a tenth and two of a twentieth; no step comes twice before all of its dataset have been read."""
    shares = [0.1] * 9 + [0.05, 0.05]
    for i in range(len(shares)):
        written(tmp_path / f"d{i}", [replace(one, reward=one.reward + 1000 * i) for one in episodes((9,) * 4)])
    flags = InputConfig(input=tuple(f"{tmp_path / f'd{i}'}:{share}" for i, share in enumerate(shares)))
    read = reader_of(flags, SPEC, 1, columns_of(1, 1, 0))
    seen = [float(one) for samples in range(0, 360, 2) for one in read(samples, 2).reward[0]]
    counts = np.bincount([int(one) // 1000 for one in seen], minlength=len(shares))
    assert counts.tolist() == [36] * 9 + [18, 18]
    assert len(set(seen)) == len(seen)


def test_datasets_of_short_and_long_episodes_are_read_on_where_they_were_left(tmp_path: Path) -> None:
    """Columns of one step and of eight: without their densities a quarter of the one would come twice."""
    written(tmp_path / "long", episodes((159,) * 20))
    written(tmp_path / "short", [replace(one, reward=one.reward + 100_000) for one in episodes((1,) * 640)])
    flags = InputConfig(input=tuple(f"{tmp_path / name}:0.5" for name in ("long", "short")))
    read, samples, seen = reader_of(flags, SPEC, 8, columns_of(8, 1, 0)), 0, list[tuple[bool, float, float]]()
    while samples < 1800:
        batch = read(samples, 16)
        of_short, (number, t) = batch.reward[batch.valid] >= 100_000, batch.obs["obs"][:-1][batch.valid].T
        seen += zip(of_short.tolist(), number.tolist(), t.tolist(), strict=True)
        samples += int(batch.valid.sum())
    assert len(set(seen)) >= 0.98 * len(seen)
    assert 0.32 < sum(of_short for of_short, _, _ in seen) / len(seen) < 0.35  # half of the columns, of 4 steps each


def test_single_steps_are_read_on_where_they_were_left(tmp_path: Path) -> None:
    """Shares are of steps, however long columns are that actors hand over."""
    written(tmp_path / "a", episodes((50,) * 40))
    flags = ApexConfig(input=("sampler:0.75", f"{tmp_path / 'a'}:0.25"), batch_size=64, rollout=16, n_steps=1)
    context, trajectories = context_of(flags), world_of(SPEC, rows=1, rollout=16).trajectories
    read = read_transitions(context, trajectories)
    source, sizes, asked = Played(read(0, 64)), list[int](), list[tuple[int, int]]()

    def noting(samples: int, units: int) -> Batch:
        asked.append((samples, units))
        return read(samples, units)

    def resize(units: int) -> None:
        sizes.append(units)
        source.resize(units)

    mixed = mixed_in(cast(BatchSource, source), noting, context, trajectories, units=16, resize=resize)
    for update in range(5):
        note(trajectories, used=64 * update, samples=7)
        batch = mixed.take()
        assert batch is not None
        assert batch.reward.shape == (1, 64)
    assert asked == [(0, 16), (16, 16), (32, 16), (48, 16), (64, 16)]
    small = replace(flags, input=("sampler:0.95", f"{tmp_path / 'a'}:0.05"))
    mixed_in(cast(BatchSource, source), noting, context_of(small), trajectories, units=16, resize=resize)
    assert sizes == [48, 61]


def test_turns_are_taken_as_often_as_shares_say_in_every_part_of_the_period() -> None:
    for shares in ([0.5, 0.3, 0.2], [0.97, 0.01, 0.02], [1 / 3] * 3, [1e-7, 1 - 1e-7]):
        turns = turns_of(shares)
        for begin, end in ((0, 100), (1234, 2234), (0, len(turns))):
            counts = np.bincount(turns[begin:end], minlength=len(shares))
            assert np.abs(counts - (end - begin) * np.array(shares)).max() <= 2
        assert np.bincount(turns).min() >= 1
        number = 3 * len(turns) + 17
        assert units_before(turns, number, len(shares)).sum() == number


def test_datasets_that_do_not_fit_the_environment_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "a")
    other = replace(SPEC, action_mask=0, observations={"other": SPEC.observations["obs"]})
    with pytest.raises(UsageError, match="shows or takes something else than the environment"):
        reader_of(InputConfig(input=(f"{tmp_path / 'a'}:0.5", "sampler:0.5")), other, 1, columns_of(1, 1, 0))


def test_datasets_of_another_frame_skip_are_refused_if_they_say_so(tmp_path: Path) -> None:
    written(tmp_path / "a")
    flags = InputConfig(input=(f"{tmp_path / 'a'}:0.5", "sampler:0.5"))
    other = replace(SPEC, frames_per_step=2)
    with pytest.raises(UsageError, match=r"^--input: a step of .*a is 4 frames and not 2, as of the environment$"):
        reader_of(flags, other, 1, columns_of(1, 1, 0))
    written(tmp_path / "b")
    for path in (tmp_path / "b").glob("*/data/metadata.json"):
        about = json.loads(path.read_text())
        del about["frames_per_step"]
        path.write_text(json.dumps(about))
    silent = InputConfig(input=(f"{tmp_path / 'b'}:0.5", "sampler:0.5"))
    assert reader_of(silent, other, 1, columns_of(1, 1, 0))(0, 3).num_frames.tolist() == [[2, 2, 2]]


def test_a_column_that_is_learned_from_must_be_there(tmp_path: Path) -> None:
    written(tmp_path / "a")
    dataset = open_dataset([str(tmp_path / "a")])
    reader = ShuffledReader(dataset, 0, 4, without_values(columns_of(4, 1, 0)), Needs(("logits", "log_prob")))
    batch = reader.read(0, 3)
    assert batch.recorded["logits"].shape == (4, 3, 3)
    assert batch.recorded["final_value"].shape == (0, 3)
    assert torch.equal(batch.recorded["value"], torch.zeros(4, 3))
    t = batch.obs["obs"][:-1, :, 1]
    assert torch.equal(batch.recorded["log_prob"][batch.valid], -t[batch.valid])
    assert not batch.recorded["log_prob"][~batch.valid].any()
    with pytest.raises(UsageError, match="an episode lacks the column value"):
        ShuffledReader(dataset, 0, 4, columns_of(4, 1, 0), Needs(("value",))).read(0, 1)


@pytest.mark.parametrize("sampler", [True, False])
def test_rewards_of_single_steps_are_scaled_as_those_that_are_played(tmp_path: Path, sampler: bool) -> None:
    """Each before they are summed, whether or not a sampler plays beside them."""
    written(tmp_path / "a", episodes((8,) * 6))
    words = (f"{tmp_path / 'a'}:0.5", "sampler:0.5") if sampler else (str(tmp_path / "a"),)
    flags = ApexConfig(input=words, n_steps=2, gamma=1.0)
    batch = read_transitions(context_of(flags), world_of(SPEC, rows=1, rollout=4).trajectories)(0, 48)
    number, t = batch.obs["obs"][0].T
    now, then = ((0.5 * (10 * number + step)).clip(max=2) for step in (t, t + 1))
    torch.testing.assert_close(batch.reward[0], now + (t < 7) * then)


def test_steps_that_are_read_follow_the_flags_that_a_learner_has_copied(tmp_path: Path) -> None:
    """As the replay beside them does: both halves of a batch have one discount and one n."""
    written(tmp_path / "a", episodes((8,) * 6))
    words = (f"{tmp_path / 'a'}:0.5", "sampler:0.5")
    flags = ApexConfig(input=words, n_steps=1, gamma=0.5, rollout=4, batch_size=96, replay_capacity=200)
    fields = (
        *replay_fields(APEX().plan(flags), SPEC, replace(TOPOLOGY, rows=1, rollout=4)),
        *StateBlock.declare(0, {}),
    )
    world = world_of(SPEC, rows=1, rollout=4, more=fields, recorded=APEX().recorded(SPEC))
    context = replace(context_of(flags), arena=world.arena, seeds=np.random.SeedSequence(0))
    mixed = APEX().make_source(context, world.trajectories, SamplingConfig(), cast(Device, None))
    assert isinstance(mixed, MixedBatches)
    assert mixed.read(0, 48).recorded["discount"].unique().tolist() == [0.0, 0.5]
    assert list(mixed.trained([{"flags": replace(flags, n_steps=2, gamma=0.25)}])) == []
    batch = mixed.read(0, 48)
    number, t = batch.obs["obs"][0].T
    now, then = ((0.5 * (10 * number + step)).clip(max=2) for step in (t, t + 1))
    torch.testing.assert_close(batch.reward[0], now + 0.25 * (t < 7) * then)
    assert batch.recorded["discount"].unique().tolist() == [0.0, 0.0625, 0.25]


def test_rewards_of_columns_are_scaled_as_those_that_are_played_beside_them(tmp_path: Path) -> None:
    written(tmp_path / "a", episodes((8,) * 6))
    words = (f"{tmp_path / 'a'}:0.5", "sampler:0.5")
    flags = APPOConfig(input=words, rollout=4, batch_size=16, recurrence=4)
    trajectories = world_of(SPEC, rows=1, rollout=4).trajectories
    mixed = APPO().make_source(context_of(flags), trajectories, SamplingConfig(), cast(Device, None))
    assert isinstance(mixed, MixedBatches)
    batch = mixed.read(0, 13)
    assert int(batch.valid.sum()) > 40
    number, t = batch.obs["obs"][:-1].unbind(2)
    expected = (0.5 * (10 * number + t)).clip(max=2)
    torch.testing.assert_close(batch.reward[batch.valid], expected[batch.valid])


@pytest.mark.parametrize("n_steps", [1, 3, 50])
@pytest.mark.parametrize("window", [0, 6])
def test_single_steps_have_the_rewards_of_n(tmp_path: Path, n_steps: int, window: int) -> None:
    """Every step once per epoch, with what a slow loop over its episode says."""
    content, gamma = episodes(LENGTHS), 0.9
    written(tmp_path / "a", content)
    reader = ShuffledReader(open_dataset([str(tmp_path / "a")]), window, 1, transitions_of(n_steps, gamma, 0))
    batch = joined([reader.read(samples, 3) for samples in range(0, STEPS, 3)])
    assert batch.valid.all()
    found = {}
    for i in range(STEPS):
        number, t = (int(x) for x in batch.obs["obs"][0, i])
        later = int(batch.obs["obs"][1, i, 1])
        assert int(batch.obs["obs"][1, i, 0]) == number
        names = ("discount", "weight")
        found[number, t] = (later, batch.reward[0, i], *(batch.recorded[name][0, i] for name in names))
        assert int(batch.action[0, i, 0]) == (number + t) % 3
    assert len(found) == STEPS
    for number, one in enumerate(content):
        for t in range(len(one)):
            m = min(n_steps, len(one) - t)
            total = sum(gamma**k * float(one.reward[t + k]) for k in range(m))
            discount = 0.0 if one.terminated and t + m == len(one) else gamma**m
            assert found[number, t] == pytest.approx((t + m, total, discount, 1.0), rel=1e-6)


def context_of(flags: Any) -> Context:
    return Context(SPEC, flags, ModelConfig(), "fp32", "cpu", reward_scale=0.5, reward_clip=2.0)


class Played:
    """A source that gives batches of zeros, and remembers what it is told."""

    hold, staged_samples, waiting = False, 3, 1

    def __init__(self, batch: Batch) -> None:
        self.batch, self.columns, self.told = batch, 0, list[Feedback]()

    def counts(self) -> BatchCounts:
        return BatchCounts(1, 2, 3, 4, 5)

    def add(self, message: object) -> None:
        raise AssertionError

    def fill(self, version: int) -> Iterator[Any]:
        return iter(())

    def take(self) -> Batch | None:
        return self.batch.columns(slice(0, self.columns)) if self.columns else None

    def entered(self) -> Entered:
        return Entered(7, 8)

    def trained(self, feedback: Sequence[Feedback] = ()) -> Iterator[Any]:
        self.told += feedback
        return iter(())

    def resize(self, columns: int) -> None:
        self.columns = columns

    def weights_replaced(self) -> None:
        self.columns = 0

    def metrics(self) -> dict[str, float]:
        return {"own": 1.0}


def note(trajectories: Trajectories, **counts: int) -> None:
    """Note counts as the learner does."""
    LearnerLedger(trajectories, 0).note(dict.fromkeys(LearnerLedger.NAMES, 0) | counts)


@pytest.mark.parametrize(("length", "valid"), [(1, 8), (1, 3), (159, 4), (9, 8)])
def test_columns_of_datasets_are_read_once_per_epoch_beside_any_played_ones(
    tmp_path: Path, length: int, valid: int
) -> None:
    """Half and half of columns of eight rows, of which episodes of one step fill four, and what is played so many."""
    content = episodes((length,) * (96 if length < 100 else 12))
    written(tmp_path / "a", content)
    flags = APPOConfig(input=("sampler:0.5", f"{tmp_path / 'a'}:0.5"), rollout=8, batch_size=64, recurrence=8)
    trajectories = world_of(SPEC, rows=1, rollout=8).trajectories
    mixed = APPO().make_source(context_of(flags), trajectories, SamplingConfig(), cast(Device, None))
    assert isinstance(mixed, MixedBatches)
    played = mixed.read(0, 4)
    played.valid[:] = torch.arange(8)[:, None] < valid
    played.policy_version[:] = 0
    mixed.source = cast(BatchSource, Played(played))
    mixed.source.resize(4)
    used, samples, seen = 0, 0, list[tuple[float, float]]()
    steps = sum(map(len, content))
    while len(seen) < 2 * steps:
        note(trajectories, used=used, samples=samples)
        batch = mixed.take()
        assert batch is not None
        read = batch.columns(slice(4, 8))
        seen += [(float(number), float(t)) for number, t in read.obs["obs"][:-1][read.valid]]
        used, samples = used + int(batch.valid.sum()), samples + 4 * valid
    for epoch in range(2):
        assert len(set(seen[epoch * steps : (epoch + 1) * steps])) == steps


def test_steps_that_are_read_have_the_mean_weight_of_those_that_are_drawn(tmp_path: Path) -> None:
    """Weights are relative to the largest of the batch: with weight 1 datasets would dominate the loss."""
    written(tmp_path / "zero", episodes((9,) * 8))
    plain = ShuffledReader(open_dataset([str(tmp_path / "zero")]), 0, 2, columns_of(2, 1, 0)).read(0, 8)
    played, read = (
        replace(plain, recorded={**plain.recorded, "weight": torch.full((2, 8), weight)}) for weight in (0.25, 1.0)
    )
    source = Played(played)
    mixed = MixedBatches(
        cast(BatchSource, source),
        lambda samples, units: read.columns(slice(0, units)),
        Mix(0.5, ((("a",), 0.5),)),
        8,
        lambda share: 0,
        units=1,
        resize=source.resize,
    )
    batch = mixed.take()
    assert batch is not None
    assert batch.recorded["weight"].unique().tolist() == [0.25]


def test_a_batch_is_what_was_played_and_what_is_read_behind_it(tmp_path: Path) -> None:
    written(tmp_path / "a", [replace(one, reward=one.reward + 1000) for one in episodes(LENGTHS)])
    written(tmp_path / "zero", [replace(one, reward=0 * one.reward) for one in episodes((9,) * 8)])
    gather = columns_of(2, 1, 0)
    zero = ShuffledReader(open_dataset([str(tmp_path / "zero")]), 0, 2, gather).read(0, 8)
    flags = InputConfig(input=("sampler:0.75", f"{tmp_path / 'a'}:0.25"))
    source, used, asked = Played(zero), 0, list[tuple[int, int]]()
    inner = reader_of(flags, SPEC, 2, gather)

    def read(samples: int, units: int) -> Batch:
        asked.append((samples, units))
        return inner(samples, units)

    mixed = MixedBatches(
        cast(BatchSource, source),
        read,
        Mix(0.75, ((("a",), 0.25),)),
        8,
        lambda share: int(used * share),
        units=1,
        resize=source.resize,
    )
    assert source.columns == 6
    list(mixed.fill(11))
    used = 40
    batch = mixed.take()
    assert batch is not None
    assert asked == [(10, 2)]  # a quarter of the steps used so far was read
    assert batch.reward.shape == (2, 8)
    assert not batch.reward[:, :6].any()
    assert (batch.reward[:, 6:][batch.valid[:, 6:]] >= 1000).all()
    assert (batch.policy_version[:, 6:] == 11).all()
    assert batch.recorded["is_read"].tolist() == 2 * [6 * [False] + 2 * [True]]
    list(mixed.trained([{"priority": np.arange(16).reshape(2, 8), "flags": 1}]))
    np.testing.assert_array_equal(source.told[0]["priority"], np.arange(16).reshape(2, 8)[:, :6])
    assert source.told[0]["flags"] == 1
    read_steps = int(batch.valid[:, 6:].sum())
    assert mixed.metrics() == {"own": 1.0, "input/share": read_steps / int(batch.valid.sum())}
    assert mixed.metrics() == {"own": 1.0}
    assert (mixed.counts(), mixed.entered()) == (source.counts(), Entered(7, 8))
    assert (mixed.staged_samples, mixed.waiting, mixed.hold) == (3, 1, False)

    mixed.resize(3)  # a column is more than a quarter of three: so much more is read
    used = 60
    assert mixed.take() is not None
    assert asked[-1] == (20, 1)
    mixed.metrics()
    mixed.resize(1)  # nothing can be read beside a single column
    assert source.columns == 1
    alone = mixed.take()
    assert alone is not None
    assert alone.reward.shape == (2, 1)
    mixed.weights_replaced()
    assert mixed.take() is None
