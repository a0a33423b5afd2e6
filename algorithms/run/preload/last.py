"""Preloaded by a run's fork server last, when all that its children share is there."""

import gc

from appo.utils.system.memory import release_unused

gc.collect()
gc.freeze()  # collections in the children do not touch it, so that its pages stay shared
release_unused()
