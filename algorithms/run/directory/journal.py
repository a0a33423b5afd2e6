"""The journal of a run: the flags of every start, the time of the first and the number of starts."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from appo.algorithms.run.folder import MARK, MEASURED
from appo.utils.errors import ResourceError
from appo.utils.metrics import BLOCK_BYTES, LONGEST_LINE, READ_BYTES
from appo.utils.run_folder import RunFolder, append_json_line, open_own, write_json_atomic
from appo.utils.values import is_number

log = logging.getLogger(__name__)


def journal(
    directory: Path,
    flags: Mapping[str, object],
    changed: Sequence[str],
    env_steps: Sequence[int],
    measured: Mapping[str, object] | None = None,
) -> None:
    """Store the flags of a start, and the changed flags with the env steps of each policy; store measured costs.

    `flags` may contain their `MARK`, which the history omits. A full disk does not stop a run that resumes.

    Raises:
        ResourceError: the disk refuses the configuration, and no earlier start has stored any.
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
    """Return the time of a run's first start (seconds since 1970), an identity among runs of the name; 0: unknown."""
    try:
        with open_own(RunFolder(directory).history) as history:
            begun = json.loads(history.readline(LONGEST_LINE))["time"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return 0.0
    return float(begun) if is_number(begun) else 0.0


def count_starts(directory: Path) -> int:
    """Return the number of recorded starts, in the part of the file that is read; 0 for an unreadable file."""
    try:
        with open_own(RunFolder(directory).history) as history:
            blocks = iter(lambda: history.read(min(BLOCK_BYTES, max(0, READ_BYTES - history.tell()))), b"")
            return sum(block.count(b"\n") for block in blocks)
    except OSError:
        return 0
