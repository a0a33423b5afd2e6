"""Plain values of a saved state (state.json), checked when read: a resumed run uses them unchanged."""

import base64
import json
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from appo.algorithms.runtime.messages import KEY, PolicyTraits
from appo.utils.errors import CheckpointError, UsageError
from appo.utils.run_folder import parse_mapping
from appo.utils.values import is_number, is_plain

COUNTERS = ("version", "updates", "env_steps", "samples", "discarded")
LARGEST_PLAIN, MOST_CONTAINERS = 32 << 20, 100_000
"""Most bytes, and most lists and mappings, of a state.json: windows of statistics may contain many episodes."""

MAX_BYTES = (1 << 16) - 8
"""Most bytes of a learner's own values, as JSON."""

GENERATORS = ("generator", "device_generator")
"""Names of the states of a learner's generators, on the host and on a device."""

LARGEST_FLOAT = 3e38
"""Bound of numbers that a learner keeps in float32."""

OF_MAIN = ("progress", "best")
"""Values of main beside the values of the learner: statistics of the policy, and the metric of a best checkpoint."""


def read_plain(text: bytes, numbers: Iterable[str] = ()) -> dict[str, Any]:
    """Return the checked values of a state.json (CheckpointError: no JSON, or a value of the wrong kind)."""
    if text.count(b"[") + text.count(b"{") > MOST_CONTAINERS:  # 25 times as much memory
        raise CheckpointError("state.json holds more than any state does")
    try:
        plain = parse_mapping(text, "state.json", LARGEST_PLAIN)
    except UsageError as error:
        raise CheckpointError(str(error)) from None
    _check_learner(plain, numbers)
    _check_progress(plain.get("progress", {}))
    best = plain.get("best", {"metric": "", "value": 0})
    if not isinstance(best, dict) or not isinstance(best.get("metric"), str) or not is_number(best.get("value")):
        raise _wrong("best")
    return plain


def _check_learner(plain: dict[str, Any], numbers: Iterable[str]) -> None:
    wrong = [name for name in COUNTERS if not _is_count(plain.get(name))]
    wrong += [name for name in numbers if not is_number(x := plain.get(name)) or abs(x) > LARGEST_FLOAT]
    wrong += [] if _is_count(plain.get("used", 0)) else ["used"]
    if wrong:
        raise _wrong(wrong[0])
    for name in GENERATORS:
        if not _is_base64(plain.get(name, "")):
            raise _wrong(name)
    _check_traits(plain.get(KEY, {}))
    if len(json.dumps({name: value for name, value in plain.items() if name not in OF_MAIN})) > MAX_BYTES:
        raise CheckpointError(f"state.json holds more than {MAX_BYTES} bytes of a learner's values")


def _check_traits(traits: object) -> None:
    """Check names, kinds and sizes; the run checks the values later."""
    if not isinstance(traits, dict) or not traits.keys() <= {one.name for one in fields(PolicyTraits)}:
        raise _wrong(KEY)
    mappings = [traits.get(name, {}) for name in ("hyperparameters", "reward_shaping")]
    counts = [traits.get(name, 0) for name in ("changes", "adoptions", "decided_env_steps")]
    if not all(isinstance(one, dict) and is_plain(one) for one in mappings) or not all(map(_is_count, counts)):
        raise _wrong(KEY)


def _check_progress(progress: object) -> None:
    counts = ("episodes", "adoptions")
    if not isinstance(progress, dict) or not all(_is_count(progress.get(name, 0)) for name in counts):
        raise _wrong("progress")
    seconds, windows = progress.get("elapsed_seconds", 0), progress.get("windows", {})
    if not is_number(seconds) or seconds < 0 or not isinstance(windows, dict):
        raise _wrong("progress")
    for window in windows.values():
        if not isinstance(window, list) or not all(isinstance(x, float) or is_number(x) for x in window):
            raise _wrong("progress")  # a return can be NaN


def _wrong(name: str) -> CheckpointError:
    return CheckpointError(f"{name} in state.json is missing or is not what it must be")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53


def _is_base64(value: object) -> bool:
    try:
        return isinstance(value, str) and base64.b64decode(value, validate=True) is not None
    except ValueError:
        return False
