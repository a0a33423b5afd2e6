"""The invariants of a run whose processes died, checked on the files of the run."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from appo.utils import checkpoint_files
from appo.utils.errors import CheckpointError

COUNTERS = ("env_steps", "samples", "discarded", "perf/version", "perf/restarts")
LASTING = ("env_steps", "samples", "perf/episodes", "perf/version", "elapsed_seconds")  # never decrease between starts
_SAVED = re.compile(r"^saved (.+/ckpt_(\d{12,}))$", re.MULTILINE)


def read_saves(log: str) -> list[tuple[Path, int]]:
    """Return every checkpoint reported as saved, with the env steps."""
    return [(Path(path), int(steps)) for path, steps in _SAVED.findall(log)]


def lost_checkpoints(paths: Iterable[Path]) -> list[str]:
    """Return the errors of checkpoints that do not verify; requires a run that prunes no checkpoints."""
    wrong = []
    for path in paths:
        try:
            checkpoint_files.verify(path)
        except CheckpointError as error:
            wrong.append(str(error))
    return wrong


def find_falling(records: Sequence[Mapping[str, Any]], names: Iterable[str] = COUNTERS) -> list[str]:
    """Return counters that decrease from one record of a policy to the next."""
    wrong = []
    for name in names:
        series = [record[name] for record in records if record.get(name) is not None]
        wrong += [f"{name} fell from {a} to {b}" for a, b in pairwise(series) if b < a]
    return wrong


def tolerance(kills: int) -> int:
    """Return the number of trajectories by which counts may be wrong.

    A process can be killed in the microseconds between an action and the count of the action. A run that loses a
    trajectory with every kill is still found.
    """
    return 3 + kills // 25


def find_unaccounted(before: Mapping[str, int], totals: Mapping[str, int], slack: int = 0) -> list[str]:
    """Return accounts of one start with missing steps: neither trained on, discarded nor in flight.

    Args:
        before: env steps, samples and discarded steps at the start.
        totals: totals of status.json at the end, of environments without frame skip.
        slack: trajectories that may be missing or too many, see `tolerance`.
    """
    since = {name: totals[name] - before.get(name, 0) for name in ("env_steps", "samples", "discarded")}
    if "actors_collected" not in totals:  # without actors, steps are read and trained on
        totals = {"actors_collected": since["samples"], "actors_trajectories": 0, "actors_sent": 0, **totals}
    steps = slack * -(-totals["actors_collected"] // max(1, totals["actors_trajectories"]))
    accounts = {
        "env steps, samples": (since["env_steps"], since["samples"], 0),
        "samples + discarded + in flight, collected": (
            since["samples"] + since["discarded"] + totals["in_flight"],
            totals["actors_collected"],
            steps,
        ),
        "trajectories received, sent": (totals["trajectories"], totals["actors_sent"], slack),
        "trajectories released + held, received": (totals["released"] + totals["held"], totals["trajectories"], slack),
    }
    return [f"{name}: {a}, {b}" for name, (a, b, allowed) in accounts.items() if abs(a - b) > allowed]
