"""`--output`: the worker that writes played episodes into a dataset, from rings that actors fill."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from appo.algorithms.datasets.assembler import EpisodeAssembler, Steps
from appo.algorithms.datasets.config import COLUMNS, POLICY_VERSION, RunOutputConfig
from appo.algorithms.datasets.episodes import Episode
from appo.algorithms.datasets.writer import DatasetWriter, open_folder, require_pyarrow
from appo.algorithms.runtime.memory.arena import Arena, Field
from appo.algorithms.runtime.memory.output_ring import OutputRing, SlotEntry
from appo.algorithms.runtime.memory.slots import Recorded
from appo.algorithms.runtime.messages import Message, OutputReport, Stop, Wake
from appo.envs.spec import EnvSpec
from appo.utils.errors import ResourceError, UsageError, text_of
from appo.utils.timing import COPYING, FRAMEWORK, clock

log = logging.getLogger(__name__)

REPORT_SECONDS = 1.0
SAY_SECONDS = 60.0
RING_SHARE = 4
"""Divisor of `--output_memory_mb` for the share of trajectories that wait for writing."""


class Counts(NamedTuple):
    """Counts of the writer in the arena for a successor, who loses open and held episodes.

    Attributes:
        episodes, steps, parts: complete.
        dropped_episodes: dropped episodes; dropped steps are the rest of all steps taken from the rings.
        open_episodes, open_steps: in the open part.
        held_episodes, held_steps: of episodes without an end, in memory.
    """

    episodes: int = 0
    steps: int = 0
    parts: int = 0
    dropped_episodes: int = 0
    open_episodes: int = 0
    open_steps: int = 0
    held_episodes: int = 0
    held_steps: int = 0


def columns_of(config: RunOutputConfig, recorded: Mapping[str, Recorded]) -> dict[str, Recorded]:
    """Return the recorded fields of slots that are written."""
    return {name: one for name, one in recorded.items() if name in COLUMNS and name in config.output_columns}


def output_fields(
    config: RunOutputConfig, sizes: dict[str, int], spec: EnvSpec, recorded: Mapping[str, Recorded]
) -> list[Field]:
    """Declare the rings between actors and writer."""
    most_bytes = (config.output_memory_mb << 20) // RING_SHARE // max(1, sizes["G"])
    return OutputRing.plan(sizes, spec, columns_of(config, recorded), most_bytes)


def attach_ring(config: RunOutputConfig, arena: Arena, spec: EnvSpec, recorded: Mapping[str, Recorded]) -> OutputRing:
    """Return the rings in the arena."""
    return OutputRing.attach(arena, spec, columns_of(config, recorded))


def check_output(config: RunOutputConfig, spec: EnvSpec, name: str, recorded: Iterable[str]) -> None:
    """Refuse impossible output before any play; remove leftovers of a previous start.

    Args:
        config: flags.
        spec: spec of the environment.
        name: name of the writer.
        recorded: fields that the algorithm records besides the version.

    Raises:
        UsageError: pyarrow is missing, the folder cannot be written or contains a dataset of other spaces, or
            trajectories lack the last observations of episodes, or a column of `--output_columns`.
    """
    there = [column for column in COLUMNS if column in (*recorded, POLICY_VERSION)]
    if config.output_columns != COLUMNS and (lacking := {*config.output_columns} - {*there}):
        raise UsageError(f"--output_columns={min(lacking)}: the algorithm records {', '.join(there)} alone")
    if find_spec("pyarrow") is None:
        require_pyarrow("output")
    if spec.same_step:
        raise UsageError(
            "--output: this vector environment resets in the step that ends an episode, so that no trajectory has the"
            " last observation; take --env_vectorization=python"
        )
    open_folder(Path(config.output).absolute(), name, spec)


def writer_name(run: Path) -> str:
    """Return a writer name unique to the run."""
    return f"{run.name}-{zlib.crc32(str(run.absolute()).encode()):08x}"


class OutputWriter:
    """Takes trajectories from the rings, assembles episodes and writes them; no process waits for the writer.

    Episodes that cannot be written, for example on a full disk, are dropped and counted, because training must go on;
    the next episode is tried again.

    Args:
        config: flags.
        ring: rings that actors fill.
        make: makes the dataset writer after the first complete episode.
        looks: whether entries come without a message, because actors are other processes.
        now: monotonic seconds.
    """

    def __init__(
        self,
        config: RunOutputConfig,
        ring: OutputRing,
        make: Callable[[], DatasetWriter],
        *,
        looks: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.ring, self.looks, self.now = config, ring, looks, now
        self._make = make
        self._writer: DatasetWriter | None = None
        self._groups: dict[int, _Group] = {}
        self._most_bytes = (config.output_memory_mb << 20) * (RING_SHARE - 1) // RING_SHARE
        before = Counts(*ring.counts[: len(Counts._fields)].tolist())
        self._before = before._replace(
            dropped_episodes=before.dropped_episodes + before.open_episodes + before.held_episodes
        )
        self._dropped_episodes = 0  # beside those of the groups
        self._is_woken, self._reported, self._said = True, now(), -SAY_SECONDS
        self._note()

    def handle(self, message: Message) -> Iterator[Message]:
        """Check the rings; at the stop, write the rest and drop open episodes."""
        if isinstance(message, Wake):
            self._is_woken = True
        elif isinstance(message, Stop):
            while self._take():
                pass
            for group in self._groups.values():
                group.assembler.close()
            if self._writer is not None:
                self._try(self._writer.close)
            self._note()
            yield self._report()

    def pending(self) -> bool:
        """Return whether a trajectory waits."""
        return self._is_woken or (self.looks and bool(self.ring.waiting().any()))

    def work(self) -> Iterator[Message]:
        """Take one trajectory."""
        clock.enter(COPYING)
        self._is_woken = self._take()
        clock.enter(FRAMEWORK)
        if self.now() - self._reported >= REPORT_SECONDS:
            yield self._report()

    def _take(self) -> bool:
        """Take the oldest trajectory of the fullest ring; return whether one waited."""
        waiting = self.ring.waiting()
        index = int(waiting.argmax())
        if not waiting[index]:
            return False
        place, entry = self.ring.oldest(index)
        group = self._group(index, entry)
        try:
            for episode in group.assembler.add(self._steps(index, place)):
                self._write(episode)
            self._keep_within_memory()
        except Exception as error:  # the memory is short, for example
            group.assembler.close()
            self._say_dropped(error)
        self.ring.take(index)
        self._note()
        return True

    def _group(self, index: int, entry: SlotEntry) -> _Group:
        """Return the state of a group, with the episodes around missing trajectories dropped."""
        known = self._groups.get(index)
        if known is None:
            known = self._groups[index] = _Group(EpisodeAssembler(self.ring.valid.shape[3]), entry)
        elif (known.entry.generation, known.entry.number + 1) != (entry.generation, entry.number):
            known.assembler.close()
        known.entry = entry
        return known

    def _steps(self, group: int, place: int) -> Steps:
        r = self.ring
        infos = {name: array[group, place] for name, array in r.recorded.items()}
        if POLICY_VERSION in self.config.output_columns:
            infos[POLICY_VERSION] = r.policy_version[group, place]
        names = ("first", "valid", "reward", "terminated", "truncated", "action")
        of_steps = {name: getattr(r, name)[group, place] for name in names}
        return Steps({key: array[group, place] for key, array in r.obs.items()}, **of_steps, infos=infos)

    def _write(self, episode: Episode) -> None:
        if self._writer is None:
            self._try(self._open)
        writer = self._writer
        if writer is None or not self._try(lambda: writer.add(episode)):
            self._dropped_episodes += 1
        elif writer.is_full:
            self._try(writer.close)
            self._note()

    def _open(self) -> None:
        self._writer = self._make()

    def _try(self, action: Callable[[], None]) -> bool:
        """Perform an action on the disk; return whether it succeeded. After a failure the open part is dropped."""
        try:
            action()
        except Exception as error:  # of the disk, of the folder's content, of Arrow
            if self._writer is not None:
                self._dropped_episodes += self._writer.abandon()
            self._say_dropped(error)
            return False
        return True

    def _say_dropped(self, error: Exception) -> None:
        known = isinstance(error, ResourceError | UsageError)
        what = str(error) if known else f"{type(error).__name__}: {text_of(error)[:200]}"
        self._say(f"{what.removeprefix('--output: ')}: episodes are dropped until it can be written again")

    def _keep_within_memory(self) -> None:
        """Drop the longest open episodes until all fit into memory."""
        assemblers = [group.assembler for group in self._groups.values()]
        while sum(one.held_bytes for one in assemblers) > self._most_bytes:
            longest = max(assemblers, key=lambda one: max(one.open_steps))
            longest.break_off(longest.open_steps.index(max(longest.open_steps)))
            self._say("episodes that have no end yet do not fit into --output_memory_mb: the longest are dropped")

    def _say(self, line: str) -> None:
        if self.now() - self._said >= SAY_SECONDS:
            self._said = self.now()
            log.warning("--output: %s", line)

    def counts(self) -> Counts:
        """Return the counts of all taken steps, of predecessors too."""
        before, writer, groups = self._before, self._writer, self._groups.values()
        open_episodes, open_steps = writer.open_counts if writer is not None else (0, 0)
        written = (writer.episodes, writer.steps, writer.parts) if writer is not None else (0, 0, 0)
        return Counts(
            episodes=before.episodes + written[0] - open_episodes,
            steps=before.steps + written[1] - open_steps,
            parts=before.parts + written[2],
            dropped_episodes=before.dropped_episodes
            + self._dropped_episodes
            + sum(group.assembler.dropped_episodes for group in groups),
            open_episodes=open_episodes,
            open_steps=open_steps,
            held_episodes=sum(sum(map(bool, group.assembler.open_steps)) for group in groups),
            held_steps=sum(sum(group.assembler.open_steps) for group in groups),
        )

    def _note(self) -> None:
        self.ring.counts[: len(Counts._fields)] = self.counts()

    def _report(self) -> OutputReport:
        self._reported = self.now()
        found, ring = self.counts(), self.ring
        played = int(ring.taken[:, 1].sum()) + int(ring.left_out[:, 1].sum())
        return OutputReport(
            {
                "episodes": found.episodes + found.open_episodes,
                "steps": found.steps + found.open_steps,
                "parts": found.parts,
                "dropped_episodes": found.dropped_episodes,
                "dropped_steps": played - found.steps - found.open_steps - found.held_steps,
            }
        )


@dataclass
class _Group:
    assembler: EpisodeAssembler
    entry: SlotEntry
