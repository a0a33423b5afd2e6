"""A run that writes a dataset outlives its writer, and what is killed costs the open part at most."""

from pathlib import Path

import numpy as np
import pytest

from algorithms.offline.reader import open_dataset
from tests.chaos.runs import TrainingRun, kill
from tests.chaos.test_restarts import check_invariants, restarts

KILLS = 3


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["local", "central"])
def test_killing_the_writer_costs_the_open_part_at_most(tmp_path: Path, placement: str) -> None:
    folder = tmp_path / "set"
    flags = (f"--inference={placement}", f"--output={folder}", "--output_max_file_size=20000")
    with TrainingRun(tmp_path, *flags) as run:
        for number in range(KILLS):
            run.wait_until(lambda: len(list(folder.glob("part-*"))) > 2 * number, "parts")  # noqa: B023 (called at once)
            before = restarts(run)
            kill(run.pid_of("writer"))
            run.wait_until(lambda: restarts(run) > before, "restart of the writer")  # noqa: B023 (called at once)
        parts = len(list(folder.glob("part-*")))
        run.wait_until(lambda: len(list(folder.glob("part-*"))) > parts, "parts of its successor")
        run.interrupt()
        assert run.wait().exit_code == 130
    totals = check_invariants(run)
    dataset = open_dataset([str(folder)])
    assert not list(folder.glob(".*"))  # nothing half written is left
    assert totals["actors_collected"] == totals["output_steps"] + totals["output_dropped_steps"]
    # A part that has just appeared when its writer dies can count as dropped.
    assert totals["output_steps"] <= dataset.steps <= totals["actors_collected"]
    for episode in dataset:
        ends = (np.abs(episode.obs["obs"][:, 0]) > 2.4) | (np.abs(episode.obs["obs"][:, 2]) > np.radians(12))
        assert not ends[:-1].any()
        assert bool(ends[-1]) == episode.terminated
