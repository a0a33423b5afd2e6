import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def workers_sigint() -> Iterator[None]:
    """A worker's way to take a Ctrl-C: no KeyboardInterrupt comes from the interpreter itself."""
    previous = signal.signal(signal.SIGINT, lambda number, frame: None)
    yield
    signal.signal(signal.SIGINT, previous)
