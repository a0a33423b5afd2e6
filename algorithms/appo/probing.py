"""The entry of the probing process; torch-free itself, so that main can name it.

An environment that hangs or crashes at once, or leaves things behind, does so there and harms nothing.
"""

import contextlib
from multiprocessing.connection import Connection
from pathlib import Path

from algorithms.appo.config import Config
from algorithms.runtime.process import failure_of, isolate
from utils import cpu


def probe_in_process(pipe: Connection, log_path: Path, config: Config, rows: tuple[int, ...]) -> None:
    """Send a `Probe`, or a `WorkerFailed` that says why there is none."""
    isolate("probe", log_path, leads_group=True)
    cpu.limit_threads(1)
    try:
        from algorithms.appo.probe import probe

        pipe.send(probe(config, rows))
    except BaseException as error:  # whatever an environment raises, SystemExit included
        with contextlib.suppress(OSError):
            pipe.send(failure_of("probe", error))
