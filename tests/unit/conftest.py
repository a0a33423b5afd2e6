"""What holds for tests inside one process."""

from collections.abc import Iterator

import pytest

from tests.patience import HANG_SECONDS


@pytest.fixture(autouse=True, scope="session")
def _disks_may_be_slow() -> Iterator[None]:
    """No limit of the product for a disk ends a test; a test of such a limit gives its own."""
    from appo.algorithms.runtime.disk import DiskThread  # not before the settings of the suite
    from appo.algorithms.runtime.monitor import monitor, status
    from appo.utils.tensorboard.writer import EventWriter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskThread.do, "__defaults__", (HANG_SECONDS,))
        patch.setattr(EventWriter.close, "__defaults__", (HANG_SECONDS,))
        patch.setattr(monitor, "CLOSE_SECONDS", HANG_SECONDS)
        patch.setattr(status, "DURABLE_SECONDS", HANG_SECONDS)
        yield
