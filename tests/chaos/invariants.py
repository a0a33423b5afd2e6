"""The invariants of a run whose processes died, checked by the files that it has left behind."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from appo.utils import checkpoint_files
from appo.utils.errors import CheckpointError

COUNTERS = ("env_steps", "samples", "discarded", "perf/version", "perf/restarts")
LASTING = ("env_steps", "samples", "perf/episodes", "perf/version", "elapsed_seconds")  # from one start to the next
_SAVED = re.compile(r"^saved (.+/ckpt_(\d{12,}))$", re.MULTILINE)


def read_saves(log: str) -> list[tuple[Path, int]]:
    """Return every checkpoint that a run has said to be saved, with its env steps."""
    return [(Path(path), int(steps)) for path, steps in _SAVED.findall(log)]


def lost_checkpoints(paths: Iterable[Path]) -> list[str]:
    """Return the errors of checkpoints that do not verify. Nothing may have been pruned meanwhile."""
    wrong = []
    for path in paths:
        try:
            checkpoint_files.verify(path)
        except CheckpointError as error:
            wrong.append(str(error))
    return wrong


def find_falling(records: Sequence[Mapping[str, Any]], names: Iterable[str] = COUNTERS) -> list[str]:
    """Find numbers that become smaller from one record of a policy to the next."""
    wrong = []
    for name in names:
        series = [record[name] for record in records if record.get(name) is not None]
        wrong += [f"{name} fell from {a} to {b}" for a, b in pairwise(series) if b < a]
    return wrong


def tolerance(kills: int) -> int:
    """Return by how many trajectories the counts may be wrong.

    A process can be killed between two stores, of which the later one counts what the earlier one did. That is a matter
    of microseconds, and rare; whoever loses a trajectory with every kill is found all the same.
    """
    return 3 + kills // 25


def find_unaccounted(before: Mapping[str, int], totals: Mapping[str, int], slack: int = 0) -> list[str]:
    """Find steps and trajectories of one start that are neither trained on, discarded nor on their way.

    Args:
        before: env steps, samples and discarded steps with which the start began.
        totals: of its end, as status.json has them, of environments without frame skip.
        slack: trajectories that may be wanting or too many, see `tolerance`.
    """
    since = {name: totals[name] - before.get(name, 0) for name in ("env_steps", "samples", "discarded")}
    if "actors_collected" not in totals:  # a run without actors: what is read is trained on, and nothing is handed over
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
