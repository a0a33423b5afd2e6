"""Runs as their folders contain them: flags, state and curve."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from appo.algorithms.run.algorithms import DEFAULT, flag_table
from appo.algorithms.run.folder import saved_flags
from appo.algorithms.run.summary import summary
from appo.algorithms.run.trust import LOOKED_AT, Reading
from appo.algorithms.runtime.monitor.curves import Point, read_curve
from appo.utils.command_line import complain
from appo.utils.errors import AppoError
from appo.utils.values import shown

LOCATION_FLAGS = ("experiment", "experiments_root", "train_dir", "restart_behavior", "config", "trust")
"""Flags that differ between any two runs."""

Read = TypeVar("Read")


class Run(NamedTuple):
    """One of the runs that are compared.

    Attributes:
        name: as it was named on the command line.
        flags: those it was last started with.
        state: finished, crashed, ...
        curve: its mean return.
        last_return: the mean over its last episodes.
    """

    name: str
    flags: Mapping[str, object]
    state: str
    curve: Sequence[Point]
    last_return: float | None = None


def read_each(directories: Mapping[str, Path], read: Callable[[str, Path], Read]) -> list[Read]:
    """Read runs by their names and folders; one that cannot be read is left out, which is said in one line.

    Raises:
        AppoError, OSError: none of them can be read; the first of these errors.
    """
    found, failed = [], dict[str, AppoError | OSError]()
    for name, directory in directories.items():
        try:
            found.append(read(name, directory))
        except (AppoError, OSError) as error:
            failed[name] = error
    if not found:
        raise next(iter(failed.values()))
    for name, why in failed.items():
        complain(f"warning: {shown(name)} is left out: {' '.join(str(why).split())}\n")
    return found


def read_run(name: str, directory: Path) -> Run:
    """Read a run from its directory."""
    said = summary(directory)
    state, last = (said.state, said.last_return) if said else ("unknown", None)
    return Run(name, flags_of_run(directory), state, read_curve(directory), last)


def flags_of_run(directory: Path) -> dict[str, object]:
    """Return the flags a run was last started with; those that its version did not know have their defaults."""
    return default_flags(directory) | saved_flags(directory)


def default_flags(directory: Path) -> dict[str, object]:
    """Return every flag of a run with its default, as JSON holds it."""
    reading = Reading.of(directory)
    # A stranger's algorithm is not imported to be compared: then its own flags have no defaults.
    table = flag_table(DEFAULT if reading.refusal(LOOKED_AT) else str(reading.content.get("algo", DEFAULT)))
    return {name: list(f.default) if isinstance(f.default, tuple) else f.default for name, f in table.flags.items()}


def differing_flags(flags: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the names of flags that differ between runs, but for those that differ between any two runs."""
    names = dict.fromkeys(name for mapping in flags for name in mapping if name not in LOCATION_FLAGS)
    missing = object()
    return [name for name in names if any(f.get(name, missing) != flags[0].get(name, missing) for f in flags)]
