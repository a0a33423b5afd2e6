"""First module that a run's fork server loads.

The server dies with main, and its children die with the server. Children call `die_with_parent` again, because the
signal is not inherited. The server adopts orphans of actors, see `strays`. The imports below are shared by all
children, so a child starts in milliseconds.
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
