"""PPO that writes down all that its learner is told, and a replay of that in one process, which nobody kills.

A learner depends on nothing but the state it began with and what it was told since. So the replay arrives, bit by bit,
at every state that the learner has saved, if and only if nothing of a life that was ended is left in the next one: no
part of a gradient, no moment of a statistic, no batch that counts twice.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from appo.algorithms.ppo.algorithm import PPO
from appo.algorithms.ppo.config import PPOConfig
from appo.algorithms.run.config import Config
from appo.algorithms.run.tuning.network import probe
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.devices import Device
from appo.algorithms.runtime.learning.batches import Batch
from appo.algorithms.runtime.learning.learner_worker import Learner
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.learner_state import LearnerState, Table
from appo.algorithms.runtime.memory.state_files import encode

TESTIMONY = "APPO_TEST_TESTIMONY"  # names the folder; each life of a learner has a file
Arrays = Mapping[str, Array]


class Witness:
    """A learner that writes down every state, version and batch before it heeds it."""

    def __init__(self, learner: Any, policy: int) -> None:
        self.learner, self.flat = learner, learner.flat
        self.state, self.metrics = learner.state, learner.metrics
        name = f"{time.monotonic_ns()}_p{policy}_{os.getpid()}"
        self._file = os.open(Path(os.environ[TESTIMONY], name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._say("begins", *_plain(learner.state()))

    @property
    def version(self) -> int:
        version: int = self.learner.version
        return version

    @version.setter
    def version(self, version: int) -> None:
        self._say("version", {"version": version})
        self.learner.version = version

    @property
    def updates(self) -> int:
        updates: int = self.learner.updates
        return updates

    @updates.setter
    def updates(self, updates: int) -> None:
        self._say("updates", {"updates": updates})
        self.learner.updates = updates

    def restore(self, state: LearnerState) -> None:
        self._say("restores", *_plain(state))
        self.learner.restore(state)

    def configure(self, config: PPOConfig) -> None:
        self._say("configures", asdict(config))
        self.learner.configure(config)

    def learn(self, batch: Batch, progress: float) -> Iterator[None]:
        arrays = {name: tensor.numpy() for name, tensor in batch.named().items()}
        self._say("learns", {"version": self.version, "progress": progress}, arrays)
        yield from self.learner.learn(batch, progress)

    def _say(self, word: str, plain: Mapping[str, Any], arrays: Arrays | None = None) -> None:
        shapes = {name: (array.dtype.str, array.shape) for name, array in (arrays or {}).items()}
        head = json.dumps([word, plain, shapes]).encode() + b"\n"
        os.write(self._file, head + b"".join(array.tobytes() for array in (arrays or {}).values()))


def _plain(state: LearnerState) -> tuple[dict[str, Any], Arrays]:
    return dict(state.meta), state.vectors


@dataclass(frozen=True)
class Witnessed(PPO):
    """PPO in every other respect."""

    def make_learner(self, *arguments: Any) -> Learner:
        context: Context = arguments[0]
        learner = super().make_learner(*arguments)
        return learner if context.directory is None else Witness(learner, context.policy)


ALGORITHM = f"{__name__}:{Witnessed.__name__}"


class Said(NamedTuple):
    """What a learner has written down at once."""

    word: str
    plain: dict[str, Any]
    arrays: dict[str, Array]


def read_life(path: Path) -> list[Said]:
    """Read what a learner has said until it was killed, perhaps in the middle of a word."""
    content, at, said = path.read_bytes(), 0, []
    while (end := content.find(b"\n", at)) >= 0:
        word, plain, shapes = json.loads(content[at:end])
        at, arrays = end + 1, {}
        for name, (dtype, shape) in shapes.items():
            size = np.dtype(dtype).itemsize * int(np.prod(shape))
            if at + size > len(content):
                return said
            arrays[name] = np.frombuffer(content[at : at + size], dtype).reshape(shape).copy()
            at += size
        said.append(Said(word, plain, arrays))
    return said


def read_lives(folder: Path, policy: int = 0) -> list[list[Said]]:
    """Read what the learners of a policy have said, one after the other."""
    paths = sorted(folder.glob(f"*_p{policy}_*"), key=lambda path: int(path.name.partition("_")[0]))
    return [life for life in map(read_life, paths) if life]


class Point(NamedTuple):
    """A state that was reached, and the samples behind it that no kill has undone."""

    state: LearnerState
    samples: int


class Replay:
    """Learns in this process what the learners of a policy were told.

    Args:
        flags: of the run, from its config.json.

    Attributes:
        reached: by version; of every version that was published, and of those that successors began with.
        adopted: states of other policies that were gone on from.
        whole: parts of every batch that was whole, in order.
        broken_off: parts that were in a gradient when its learner died, or was restored.
    """

    def __init__(self, flags: Mapping[str, object]) -> None:
        found = probe(Config.from_saved({**flags, "algo": "PPO"}))
        config = found.config
        context = Context(
            found.spec,
            config.learning,
            config.model_of(0),
            config.run.precision,
            "cpu",
            seeds=np.random.SeedSequence(0),
        )
        flat = config.algorithm.make_model(context)
        self.table: Table = flat.table
        self.learner = config.algorithm.make_learner(context, flat, Device())
        self.config: PPOConfig = config.learning
        self.reached: dict[int, Point] = {}
        self.adopted = 0
        self.whole: list[list[Batch]] = []
        self.broken_off: list[list[Batch]] = []
        self._parts: list[Batch] = []
        self._samples = 0

    def live(self, life: list[Said]) -> None:
        """Do what a learner did in its life, with that much as it said."""
        if not self.reached:
            self._begin(LearnerState(life[0].arrays, life[0].plain), 0)
        self.learner.configure(self.config)  # each learner compares its first step with torch, which rounds otherwise
        for said in life[1:]:
            match said.word:
                case "restores":
                    self._restore(LearnerState(said.arrays, said.plain))
                case "version":
                    self.learner.version = said.plain["version"]
                    self._arrive()
                case "updates":
                    self.learner.updates = said.plain["updates"]
                case "configures":
                    self.config = PPOConfig(**said.plain)
                    self.learner.configure(self.config)
                case "learns":
                    self._learn(said)
        self._break_off()

    def files(self, version: int) -> dict[str, bytes]:
        """Return what a checkpoint of that version holds."""
        return encode(self.reached[version].state, self.table)

    def _restore(self, state: LearnerState) -> None:
        point = self.reached.get(state.meta["version"])
        if point is not None and _same(state.vectors, point.state.vectors):
            self._begin(point.state, point.samples)
        else:  # of another policy: it has arrived when it is given a version of its own, the one it comes with is old
            self.adopted += 1
            self._break_off()
            self.learner.restore(state)

    def _begin(self, state: LearnerState, samples: int) -> None:
        self._break_off()
        self.learner.restore(state)
        self._samples = samples
        self._arrive()

    def _learn(self, said: Said) -> None:
        assert said.plain["version"] == self.learner.version
        batch = Batch.of({name: torch.from_numpy(array) for name, array in said.arrays.items()})
        self._parts.append(batch.copy())
        before = self.learner.version
        for _ in self.learner.learn(batch, said.plain["progress"]):
            pass
        if self.learner.version > before:
            self._samples += sum(int(part.valid.sum()) for part in self._parts)
            self.whole.append(self._parts)
            self._parts = []
            self._arrive()

    def _arrive(self) -> None:
        self.reached[self.learner.version] = Point(self.learner.state(), self._samples)

    def _break_off(self) -> None:
        if self._parts:
            self.broken_off.append(self._parts)
            self._parts = []


def _same(mine: Arrays, theirs: Arrays) -> bool:
    return mine.keys() == theirs.keys() and all(mine[name].tobytes() == theirs[name].tobytes() for name in mine)
