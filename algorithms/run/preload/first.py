"""Preloaded by a run's fork server first.

The server dies with main, and its children die with the server; they repeat `die_with_parent` for themselves, because
the signal is not inherited. It takes in what actors leave behind, see `strays`.
What all children need is imported here once, so that a child starts in milliseconds.
"""

import os
import warnings

from appo.algorithms.runtime.processes import prctl

prctl.die_with_parent(int(os.environ["APPO_MAIN_PID"]))  # before the imports that take long
prctl.server_pid = os.getpid()
prctl.adopt_orphans()
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")  # an orphan's

import gymnasium  # noqa: E402, F401 - imported for the children
import psutil  # noqa: E402, F401 - imported for the children

from appo.algorithms.run.workers import blueprint  # noqa: E402, F401 - what a child unpickles first
from appo.algorithms.runtime.processes import fork_server  # noqa: E402

fork_server.restore_environment()
