"""A toy keeps every promise of docs/reliability.md while processes are killed: `APPO_KILLS=200` kills more of them."""

import os
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.promises import check_promises, train_toy

KILLS = int(os.environ.get("APPO_KILLS", "20"))


@pytest.mark.slow
@pytest.mark.timeout(300 + 12 * KILLS)
def test_a_toy_keeps_all_promises(tmp_path: Path) -> None:
    check_promises(partial(train_toy, tmp_path, seconds=60.0 * (5 + KILLS)), KILLS)
