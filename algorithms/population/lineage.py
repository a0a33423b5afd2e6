"""The file `lineage.json` of a run: all decisions about policies, each written before its order is sent."""

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from appo.algorithms.runtime.disk import DiskThread
from appo.algorithms.runtime.messages import PolicyTraits
from appo.utils.errors import UsageError
from appo.utils.run_folder import LINEAGE_FILE, RunFolder, read_own_mapping, rename_own, write_json_atomic
from appo.utils.values import is_number

log = logging.getLogger(__name__)

State = Literal["ordered", "applied", "taken back"]


@dataclass(frozen=True)
class Event:
    """A decision about a policy.

    Attributes:
        kind: copy, mutation, start (first values), or none (unchanged).
        policy: number of the policy.
        source: policy whose weights and hyperparameters were copied; otherwise the policy itself.
        change: number of the decision about this policy.
        env_steps, source_env_steps: env steps of both at the decision; of an applied copy, those of the copied weights.
        elapsed_seconds: time in the run.
        scores: objective of every learning policy; None: not finite.
        before, after: hyperparameters, and coefficients of rewards as `reward_shaping`.
        state: ordered; applied by the learner; taken back by a crash.
    """

    kind: str
    policy: int
    source: int
    change: int
    env_steps: int
    source_env_steps: int
    elapsed_seconds: float
    scores: Mapping[str, float | None]
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    state: State = "ordered"


class Lineage:
    """All decisions in all starts of a run. A thread replaces the file as a whole, so a slow disk stalls nothing."""

    def __init__(self, directory: Path, traits: Sequence[PolicyTraits]) -> None:
        self._path = RunFolder(directory).lineage
        self._num_policies = len(traits)
        self.events = [_settle(event, traits) for event in _earlier_events(directory)]
        self._writer = DiskThread("lineage")
        self._pending: Future[None] | None = None

    def add(self, event: Event) -> None:
        """Write an event; `written` becomes true afterwards."""
        self.events.append(event)
        self._write()

    def applied(self, policy: int, change: int, taken_env_steps: int | None) -> None:
        """Note that a learner has carried out an order; a copy took the source's state of `taken_env_steps`."""
        for i, event in enumerate(self.events):
            if (event.policy, event.change, event.state) == (policy, change, "ordered"):
                taken = event.source_env_steps if taken_env_steps is None else taken_env_steps
                self.events[i] = replace(event, state="applied", source_env_steps=taken)
                self._write()

    @property
    def written(self) -> bool:
        """Return whether the file has all events, or could not be written."""
        if self._pending is not None and self._pending.done():
            self._pending.result()  # whatever is no error of the disk is a bug, and must not pass unnoticed in a thread
            self._pending = None
        return self._pending is None

    def close(self) -> None:
        """Wait until the file has all events."""
        self._writer.finish(f"writing {LINEAGE_FILE}")

    def _write(self) -> None:
        content = {"num_policies": self._num_policies, "events": [asdict(event) for event in self.events]}
        self._pending = self._writer.submit(partial(_write, self._path, content))


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Write the file. After a failure of the disk, the next event writes the file again."""
    try:
        write_json_atomic(path, content, indent=None)
    except OSError as error:
        log.warning("cannot write %s: %s", path, error.strerror)


def _settle(event: Event, traits: Sequence[PolicyTraits]) -> Event:
    if event.state == "taken back" or event.policy >= len(traits):
        return event
    return replace(event, state="applied" if event.change <= traits[event.policy].changes else "taken back")


def _earlier_events(directory: Path) -> list[Event]:
    """Return the events of earlier starts. A damaged file is set aside; the run does not need it."""
    try:
        return read_events(directory)
    except UsageError as error:
        log.warning("%s; it is %s.damaged now, and another one is begun", error, LINEAGE_FILE)
        rename_own(RunFolder(directory).lineage, f"{LINEAGE_FILE}.damaged")
        return []


def read_events(directory: Path) -> list[Event]:
    """Return the events of a run; none without a lineage (UsageError: the file is damaged)."""
    path = RunFolder(directory).lineage
    if not path.exists():
        return []
    found = read_own_mapping(path).get("events")
    try:
        if not isinstance(found, list):
            raise TypeError("it holds no events")
        events = [Event(**one) for one in found]
        for event in events:
            _check(event)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    return events


def _check(event: Event) -> None:
    """Refuse an event in another form (TypeError)."""
    counts = (event.policy, event.source, event.change, event.env_steps, event.source_env_steps)
    mappings = (event.scores, event.before, event.after)
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise TypeError("a number is missing")
    if not all(isinstance(mapping, dict) for mapping in mappings) or event.state not in get_args(State):
        raise TypeError("an event is not what it must be")
    numbers = (event.elapsed_seconds, *(score for score in event.scores.values() if score is not None))
    if not isinstance(event.kind, str) or not all(map(is_number, numbers)):
        raise TypeError("a word or a number of an event is something else")


def plain_values(traits: PolicyTraits) -> dict[str, Any]:
    """Return hyperparameters and coefficients of rewards in the form of events."""
    shaping = {"reward_shaping": dict(traits.reward_shaping)} if traits.reward_shaping else {}
    return json.loads(json.dumps({**traits.hyperparameters, **shaping}))  # type: ignore[no-any-return]


def numbers_of(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers in nested values, with names joined by slashes."""
    found: dict[str, float] = {}
    for name, value in values.items():
        inner = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
        if isinstance(inner, Mapping):
            found |= numbers_of({str(key): one for key, one in inner.items()}, f"{prefix}{name}/")
        elif is_number(inner):
            found[f"{prefix}{name}"] = inner
    return found
