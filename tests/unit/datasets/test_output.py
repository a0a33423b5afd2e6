"""The writer beside training: what actors leave in the rings becomes whole episodes on disk, or is counted."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from appo.algorithms.datasets.assembler import EpisodeAssembler, Steps
from appo.algorithms.datasets.config import RunOutputConfig
from appo.algorithms.datasets.episodes import Episode
from appo.algorithms.datasets.output import OutputWriter, attach_ring, check_output, output_fields, writer_name
from appo.algorithms.datasets.reader import open_dataset
from appo.algorithms.datasets.writer import DatasetWriter
from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.output_ring import GroupTap, OutputRing
from appo.algorithms.runtime.memory.slots import Recorded, Trajectories, sizes_of
from appo.algorithms.runtime.messages import WRITER_ADDRESS, OutputReport, Stop, Wake
from appo.algorithms.runtime.topology import Topology
from appo.utils.errors import ResourceError, UsageError
from tests.unit.datasets.data import SPEC, assert_same, episode, steps_of, written
from tests.unit.datasets.test_episodes import held_bytes

T, R = 4, 2
TOPOLOGY = Topology("local", 1, 1, 1, 1, 1, rows=R, rollout=T, writes=True)
RECORDED = {"log_prob": Recorded(("T", "R")), "value": Recorded(("T", "R"))}
ROWS: list[list[Episode | int]] = [
    [episode(1, 5), episode(2, 1, False), episode(3, 9), 30],
    [2, episode(5, 3, False), episode(6, 12), 40],
]


@dataclass
class World:
    """A group's ring, in which a dataset is written."""

    folder: Path
    config: RunOutputConfig
    trajectories: Trajectories
    ring: OutputRing

    def tap(self, generation: int = 0) -> GroupTap:
        return GroupTap(self.ring, self.trajectories, 0, generation)

    def writer(self, *, looks: bool = True) -> OutputWriter:
        def make() -> DatasetWriter:
            return DatasetWriter(self.config, SPEC, {}, "w")

        now = 0.0  # no report is due while it works
        return OutputWriter(self.config, self.ring, make, looks=looks, now=lambda: now)

    def fill(self, tap: GroupTap, steps: Steps, number: int) -> bool:
        """Let a slot hold these steps, and hand it over."""
        t = self.trajectories
        t.obs["obs"][0] = steps.obs["obs"]
        for name in ("first", "valid", "reward", "terminated", "truncated", "action"):
            getattr(t, name)[0] = getattr(steps, name)
        t.recorded["log_prob"][0] = steps.infos["log_prob"]
        t.policy_version[0] = number
        return tap.trajectory(0, number, int(steps.valid.sum()))

    def read(self) -> list[Episode]:
        return list(open_dataset([str(self.folder)]))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return made(tmp_path / "d")


def made(folder: Path, rows: int = R, **flags: object) -> World:
    config = RunOutputConfig(output=str(folder), output_columns=("log_prob", "policy_version"), **flags)  # type: ignore[arg-type]
    sizes = sizes_of(replace(TOPOLOGY, rows=rows), SPEC, 0, T)
    fields = Trajectories.declare(sizes, SPEC, RECORDED) + output_fields(config, sizes, SPEC, RECORDED)
    arena = Arena.create(fields)
    return World(folder, config, Trajectories.attach(arena, SPEC, RECORDED), attach_ring(config, arena, SPEC, RECORDED))


def stopped(writer: OutputWriter) -> dict[str, int]:
    """Let it write the rest; what it says of it."""
    (report,) = writer.handle(Stop())
    assert isinstance(report, OutputReport)
    return report.totals


def test_episodes_come_out_as_they_were_played(world: World) -> None:
    tap, writer, number = world.tap(), world.writer(), 0
    for number, steps in enumerate(steps_of(ROWS, T)):
        assert world.fill(tap, steps, number)
        assert writer.pending()
        assert list(writer.work()) == []
    writer.handle(Wake(WRITER_ADDRESS))
    totals = stopped(writer)
    played = [one for row in ROWS for one in row if isinstance(one, Episode)]
    assert totals == {"episodes": 5, "steps": 30, "parts": 1, "dropped_episodes": 0, "dropped_steps": 0}
    found = {int(one.obs["obs"][0, 0]): one for one in world.read()}
    assert set(world.read()[0].infos) == {"log_prob", "policy_version"}  # the value is none of the columns
    for one in played:
        other = found[int(one.obs["obs"][0, 0])]
        versions = other.infos.pop("policy_version")
        assert (np.diff(versions) >= 0).all()  # numbers of trajectories here
        assert versions[-1] - versions[0] <= -(-len(one) // T)
        assert_same(other, replace(one, infos={"log_prob": one.infos["log_prob"]}))


def test_a_full_ring_costs_trajectories_that_are_counted_and_holds_up_nobody(world: World) -> None:
    tap, writer, chunks = world.tap(), world.writer(), steps_of([[episode(1, 3), episode(2, 200)]] * R, T)
    places = world.ring.entry.shape[1]
    taken = [world.fill(tap, steps, number) for number, steps in enumerate(chunks[: places + 3])]
    assert taken == [True] * places + [False] * 3
    list(writer.work())
    assert world.fill(tap, chunks[-1], places + 3)  # after a gap
    totals = stopped(writer)
    steps = sum(int(one.valid.sum()) for one in chunks[: places + 3]) + int(chunks[-1].valid.sum())
    assert totals["steps"] + totals["dropped_steps"] == steps
    assert (totals["episodes"], totals["dropped_episodes"]) == (R, R)  # the second has a gap


def test_episodes_of_an_actor_that_died_have_no_end(world: World) -> None:
    chunks, writer = steps_of([[episode(1, 30)]] * R, T), world.writer()
    assert world.fill(world.tap(), chunks[0], 0)
    tap = world.tap(generation=1)
    short = steps_of([[episode(2, 2), episode(3, 4), 30]] * R, T)
    for number, steps in enumerate(short[:2]):
        world.fill(tap, steps, number + 1)
    totals = stopped(writer)
    assert sorted(int(one.obs["obs"][0, 0]) for one in world.read()) == [2] * R + [3] * R
    assert (totals["dropped_episodes"], totals["dropped_steps"]) == (R, R * T)


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("length", [1, 7])
def test_an_episode_of_which_random_steps_were_the_beginning_is_not_written(
    world: World, start: int, length: int
) -> None:
    """That of the second row; the first row begins with a whole one."""
    tap, writer = world.tap(), world.writer()
    tap.begin(start, np.array([False, True]))
    late: list[Episode | int] = [start] if start else []
    rows = [[*late, episode(number, length), episode(number + 1, 5), 30] for number in (1, 3)]
    for number, steps in enumerate(steps_of(rows, T)):
        world.fill(tap, steps, number)
        list(writer.work())
    totals = stopped(writer)
    assert sorted(int(one.obs["obs"][0, 0]) for one in world.read()) == [1, 2, 4]
    assert (totals["dropped_episodes"], totals["dropped_steps"]) == (0, length)


def test_rewards_are_those_of_the_environment(world: World) -> None:
    (steps,), tap = steps_of([[episode(3, 3), 1]] * R, T), world.tap()
    for t in range(T):
        tap.reward(t, steps.reward[t])
    world.fill(tap, replace(steps, reward=0.01 * steps.reward), 0)
    stopped(world.writer())
    for one in world.read():
        np.testing.assert_array_equal(one.reward, episode(3, 3).reward)


def test_a_successor_counts_what_the_one_before_has_lost(world: World) -> None:
    tap, chunks = world.tap(), steps_of([[episode(1, 3), episode(2, 20)]] * R, T)
    world.fill(tap, chunks[0], 0)
    first = world.writer()
    list(first.work())  # an episode of each row is in the open part; the part dies with its writer
    world.fill(tap, chunks[1], 1)
    successor = world.writer()
    totals = stopped(successor)
    assert totals["dropped_episodes"] == 2 * R  # those that had ended, and those that then began
    assert totals["dropped_steps"] == R * (3 + T)
    assert list(world.folder.glob("part-*")) == []
    check_output(world.config, SPEC, "w", ("log_prob",))
    assert list(world.folder.iterdir()) == []  # what was open is gone


def test_episodes_that_do_not_fit_into_memory_are_dropped_the_longest_first(tmp_path: Path) -> None:
    world = made(tmp_path / "d", output_memory_mb=1)
    step_bytes = 8 + 4 + 4 + 4 + 8
    most = (3 << 20) // 4 // step_bytes
    lengths = (most - 50, 60)
    tap, writer = world.tap(), world.writer()
    chunks = steps_of([[episode(1, lengths[0] + 10)], [episode(2, lengths[1]), episode(3, 10 * most)]], T)
    for number, steps in enumerate(chunks):
        world.fill(tap, steps, number)
        list(writer.work())
        held = writer.counts().held_steps
        assert held * step_bytes <= 3 << 18
    totals = stopped(writer)
    assert totals["episodes"] == 1
    assert totals["steps"] == lengths[1]
    assert totals["dropped_episodes"] == 2


def test_the_limit_of_memory_holds_for_what_waits_with_the_steps_of_other_rows(tmp_path: Path) -> None:
    """One row plays beside many that take no part: eight trajectories of all of them would be twice the limit."""
    rows = 2_000
    world = made(tmp_path / "d", rows=rows, output_memory_mb=1)
    tap, writer = world.tap(), world.writer()
    for number, steps in enumerate(steps_of([[episode(1, 60)], *[[45]] * (rows - 1)], T)):
        assert world.fill(tap, steps, number)
        list(writer.work())
        (group,) = writer._groups.values()
        assert held_bytes(group.assembler) <= 3 << 18
    assert writer.counts().dropped_episodes == 0
    assert group.assembler.open_steps[0] == 44


def test_a_disk_that_refuses_costs_the_open_part(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tap, writer = world.tap(), world.writer()
    chunks = steps_of([[episode(number, 3) for number in range(1, 9)]] * R, T)
    world.fill(tap, chunks[0], 0)
    list(writer.work())

    def full(*_: object) -> None:
        raise ResourceError("cannot write: No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(DatasetWriter, "add", full)
        world.fill(tap, chunks[1], 1)
        list(writer.work())
    world.fill(tap, chunks[2], 2)
    totals = stopped(writer)
    assert totals == {"episodes": R, "steps": 3 * R, "parts": 1, "dropped_episodes": 2 * R, "dropped_steps": 6 * R}
    assert [int(one.obs["obs"][0, 0]) for one in world.read()] == [3] * R


ERRORS = [
    ValueError("invalid literal for int()"),
    pa.ArrowInvalid("offset overflow"),
    MemoryError(),
    UsageError("--output: it holds a dataset of other spaces"),
    RuntimeError("two\nlines"),
]
BROKEN = {"add": (DatasetWriter, "add"), "open": (OutputWriter, "_open"), "together": (EpisodeAssembler, "add")}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", BROKEN)
def test_no_error_ends_the_writer(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str, error: Exception
) -> None:
    """What an error costs is counted and said in one line, and the next episodes are written."""
    tap, writer = world.tap(), world.writer()
    chunks = steps_of([[episode(number, 3) for number in range(1, 9)]] * R, T)

    def broken(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(*BROKEN[place], broken)
        world.fill(tap, chunks[0], 0)
        list(writer.work())
    (line,) = [record.getMessage() for record in caplog.records]
    assert "\n" not in line
    assert line.endswith(": episodes are dropped until it can be written again")
    assert "--output: --output" not in line
    for number in (1, 2):
        world.fill(tap, chunks[number], number)
        list(writer.work())
    totals = stopped(writer)
    assert [int(one.obs["obs"][0, 0]) for one in world.read()] == [2] * R + [3] * R
    assert (totals["episodes"], totals["steps"], totals["parts"]) == (2 * R, 6 * R, 1)
    assert totals["dropped_steps"] == 3 * R
    assert totals["dropped_episodes"] == (0 if place == "together" else R)  # they were not yet put together


def test_a_part_that_cannot_appear_is_dropped_and_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tap, writer = world.tap(), world.writer()
    (steps, *_), error = steps_of([[episode(1, 3), 1]] * R, T), pa.ArrowInvalid("no such thing")
    world.fill(tap, steps, 0)

    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(DatasetWriter, "close", broken)
    totals = stopped(writer)
    assert totals == {"episodes": 0, "steps": 0, "parts": 0, "dropped_episodes": R, "dropped_steps": 3 * R}
    assert list(world.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("names", "first"),
    [
        (("part-0 (copy)", "part-00000.bak", "part-x", "part-", "part-٣", "part-7", "part-000007", "xpart-00007"), 0),
        (("part-00007", "part-00003 (copy)"), 8),
        (("part-123456",), 123457),
    ],
)
def test_names_that_are_of_no_part_are_neither_counted_nor_read(
    tmp_path: Path, names: tuple[str, ...], first: int
) -> None:
    written(tmp_path / "other", [episode(9, 2)])
    for name in names:
        shutil.copytree(tmp_path / "other" / "part-00000", tmp_path / "d" / name)
    written(tmp_path / "d", [episode(1, 2), episode(2, 2)], output_max_file_size=1)
    assert {path.name for path in (tmp_path / "d").iterdir()} == {*names, f"part-{first:05}", f"part-{first + 1:05}"}
    shown = [int(one.obs["obs"][0, 0]) for one in open_dataset([str(tmp_path / "d")])]
    assert shown == [9] * (first > 0) + [1, 2]


def test_a_writer_that_is_told_does_not_look(world: World) -> None:
    writer = world.writer(looks=False)
    list(writer.work())
    assert not writer.pending()
    world.fill(world.tap(), steps_of(ROWS, T)[0], 0)
    assert not writer.pending()
    list(writer.handle(Wake(WRITER_ADDRESS)))
    assert writer.pending()


def test_what_cannot_be_written_is_refused_before_anything_is_played(tmp_path: Path) -> None:
    config = RunOutputConfig(output=str(tmp_path / "d"))
    with pytest.raises(UsageError, match="--output: this vector environment resets in the step that ends an episode"):
        check_output(config, replace(SPEC, same_step=True), "w", ())
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--output: cannot write"):
        check_output(RunOutputConfig(output=str(tmp_path / "file" / "d")), SPEC, "w", ())
    config = RunOutputConfig(output=str(tmp_path / "e"), output_columns=("value", "policy_version"))
    check_output(config, SPEC, "w", ("value", "final_value"))
    with pytest.raises(UsageError, match="--output_columns=value: the algorithm records policy_version alone"):
        check_output(config, SPEC, "w", ("final_value",))


def test_runs_of_the_same_name_write_under_names_of_their_own(tmp_path: Path) -> None:
    assert writer_name(tmp_path / "a" / "run") != writer_name(tmp_path / "b" / "run")
    assert writer_name(tmp_path / "a" / "run").startswith("run-")
