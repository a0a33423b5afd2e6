"""Preloaded by a run's fork server, before it forks anything.

The server dies with main, and its children die with the server; they repeat `die_with_parent` for themselves, because
the signal is not inherited. What all children need is imported here once, so that a child starts in milliseconds.
"""

import gc
import os

import gymnasium  # noqa: F401 - imported for the children

from algorithms.appo import blueprint  # noqa: F401 - imported for the children
from algorithms.runtime import launch, prctl

prctl.die_with_parent()
launch.restore_environment()
prctl.server_pid = os.getpid()
gc.collect()
gc.freeze()  # what is shared with the children is not touched by their collections, so its pages stay shared
