"""Last module that a run's fork server loads."""

import gc

from appo.utils.system.memory import release_unused

gc.collect()
gc.freeze()  # collections in the children do not touch it, so that its pages stay shared
release_unused()
