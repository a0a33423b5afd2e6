"""The entry of the probing process; torch-free itself, so that main can name it.

An environment that hangs or crashes at once, or leaves things behind, does so there and harms nothing.
"""

import contextlib
import signal
from multiprocessing.connection import Connection

from algorithms.appo.config import Config
from algorithms.runtime import prctl
from algorithms.runtime.process import failure_of
from utils import cpu


def probe_in_process(pipe: Connection, config: Config, rows: tuple[int, ...]) -> None:
    """Send a `Probe`, or a `WorkerFailed` that says why there is none."""
    prctl.die_with_parent(prctl.server_pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    cpu.limit_threads(1)
    try:
        from algorithms.appo.probe import probe

        pipe.send(probe(config, rows))
    except BaseException as error:  # whatever an environment raises, SystemExit included
        with contextlib.suppress(OSError):
            pipe.send(failure_of("probe", error))
