"""Deadlines of tests on a machine whose cores other programs want too."""

import os

HANG_SECONDS = 600
"""Ends a test that hangs; no test measures this time."""


def patient(seconds: float) -> float:
    """Return a deadline that is as much longer as the cores are overloaded now: by processes waiting for each core."""
    return seconds * max(1.0, 2.0 * os.getloadavg()[0] / (os.cpu_count() or 1))
