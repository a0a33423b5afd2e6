"""The journal of a run: the flags of every start, the time of the first one and the number of starts."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from appo.algorithms.run.folder import MARK, MEASURED
from appo.utils.errors import ResourceError
from appo.utils.metrics import BLOCK_BYTES, LONGEST_LINE, READ_BYTES
from appo.utils.run_folder import (
    RunFolder,
    append_json_line,
    open_own,
    write_json_atomic,
)
from appo.utils.values import is_number

log = logging.getLogger(__name__)


def journal(
    directory: Path,
    flags: Mapping[str, object],
    changed: Sequence[str],
    env_steps: Sequence[int],
    measured: Mapping[str, object] | None = None,
) -> None:
    """Store the flags of a start, and what has changed, at which env steps of each policy; and what was measured.

    Flags may come with their `MARK`, which is of no use in the history. A run that goes on does so though the disk is
    full, as what it has learned is worth more than a note of its flags.

    Raises:
        ResourceError: the disk does not take it, and no earlier start has stored any.
    """
    run = RunFolder(directory)
    own = {name: value for name, value in flags.items() if name != MARK}
    start = {"time": time.time(), "env_steps": env_steps, "changed": changed, "flags": own}
    try:
        write_json_atomic(run.config, {**flags, **({MEASURED: measured} if measured else {})})
        append_json_line(run.history, start)
    except OSError as error:
        lost = f"cannot write the configuration to {directory}: {error.strerror}"
        if not run.config.exists():
            raise ResourceError(lost) from None
        log.warning("%s; training goes on, and the flags of this start are not written down", lost)
    if changed:
        log.info("changed: %s", ", ".join(changed))


def begun_at(directory: Path) -> float:
    """Return when a run began (seconds since 1970), which tells it from others of its name; 0 if that is not known."""
    try:
        with open_own(RunFolder(directory).history) as history:
            begun = json.loads(history.readline(LONGEST_LINE))["time"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return 0.0
    return float(begun) if is_number(begun) else 0.0


def count_starts(directory: Path) -> int:
    """Return how many starts of a run are written down, in as much as is read of a file; 0 if that cannot be read."""
    try:
        with open_own(RunFolder(directory).history) as history:
            blocks = iter(lambda: history.read(min(BLOCK_BYTES, max(0, READ_BYTES - history.tell()))), b"")
            return sum(block.count(b"\n") for block in blocks)
    except OSError:
        return 0
