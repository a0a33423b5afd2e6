"""Faults on demand: named places in the code where a test can kill, stop or delay the process.

`APPO_FAILPOINTS="ckpt.rename:kill9@2,learner.publish:sleep=0.5,actor.step:raise@3%w1"` arms three faults. An item is
`place:action`, then optionally `@n` (only on the n-th passage of the process) and `%wI` (only in worker I).
Actions: `kill9`, `exit=N`, `raise`, `sleep=SECONDS`, `enospc`.
"""

import errno
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from appo.utils.errors import UsageError

VARIABLE = "APPO_FAILPOINTS"

_ITEM = re.compile(
    r"(?P<place>[a-z0-9_]+(\.[a-z0-9_]+)*):(?P<action>[a-z0-9]+)(=(?P<value>[0-9.]+))?"
    r"(@(?P<passage>[0-9]+))?(%w(?P<worker>[0-9]+))?"
)


class FailpointError(RuntimeError):
    """Fault of the action `raise`."""


@dataclass
class _Trigger:
    fire: Callable[[str], None]
    passage: int | None
    worker: int | None
    passages: int = 0


class _Armed:
    """Failpoints of this process; parsed once, at the latest at the first passage."""

    triggers: dict[str, list[_Trigger]] | None = None
    worker: int | None = None


_active = bool(os.environ.get(VARIABLE))


def failpoint(place: str) -> None:
    """Trigger the faults that `APPO_FAILPOINTS` plants at a place; takes well under 100 ns if the variable is unset."""
    if not _active:
        return
    if _Armed.triggers is None:
        arm()
    mine = [t for t in (_Armed.triggers or {}).get(place, ()) if t.worker in (None, _Armed.worker)]
    for trigger in mine:
        trigger.passages += 1
    for trigger in mine:
        if trigger.passage in (None, trigger.passages):
            trigger.fire(place)


def arm(specification: str | None = None, worker: int | None = None) -> None:
    """Arm the failpoints of this process and count passages from zero.

    Args:
        specification: text in the form of the environment variable; None reads the variable.
        worker: number that `%wI` compares with; None matches no `%wI`.

    Raises:
        UsageError: the specification is malformed.
    """
    global _active  # noqa: PLW0603 - a module global is the cheapest switch, and the switch is on hot paths
    text = os.environ.get(VARIABLE, "") if specification is None else specification
    _Armed.triggers, _Armed.worker = parse(text), worker
    _active = bool(_Armed.triggers)


def parse(specification: str) -> dict[str, list[_Trigger]]:
    """Return the triggers of every place in the text (UsageError: an item is malformed, or the action is unknown)."""
    triggers: dict[str, list[_Trigger]] = {}
    for item in filter(None, (part.strip() for part in specification.split(","))):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise UsageError(f"{VARIABLE}: {item!r} is not place:action[=value][@passage][%wWORKER]")
        passage, worker = (int(text) if text else None for text in (match["passage"], match["worker"]))
        if passage == 0:
            raise UsageError(f"{VARIABLE}: {item!r}: passages count from 1")
        fire = _action(item, match["action"], match["value"])
        triggers.setdefault(match["place"], []).append(_Trigger(fire, passage, worker))
    return triggers


def _action(item: str, action: str, value: str | None) -> Callable[[str], None]:
    plain = {"kill9": lambda place: os.kill(os.getpid(), signal.SIGKILL), "raise": _raise, "enospc": _enospc}
    if action in plain and value is None:
        return plain[action]
    if action not in ("exit", "sleep") or value is None:
        raise UsageError(f"{VARIABLE}: {item!r}: actions are kill9, exit=N, raise, sleep=SECONDS and enospc")
    try:
        number = int(value) if action == "exit" else float(value)
    except ValueError:
        raise UsageError(f"{VARIABLE}: {item!r}: {value!r} is not a number that {action} takes") from None
    return lambda place: os._exit(int(number)) if action == "exit" else time.sleep(number)


def _raise(place: str) -> None:
    raise FailpointError(f"failpoint {place}")


def _enospc(place: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)
