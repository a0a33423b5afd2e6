"""A run that writes a dataset outlives its writer, and what is killed costs the open part at most."""

import signal
from pathlib import Path

import numpy as np
import pytest

from appo.algorithms.datasets.reader import open_dataset
from appo.algorithms.runtime.processes.restarts import MAX_FAULTS
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


NAMES = ("part-0 (copy)", "part-00000.bak", "part-00000~", "part-", "part-٣", "part--1", "part-1e3", "part-00000 ")
"""Names that a user, a file manager or an editor gives to copies of parts."""


@pytest.mark.parametrize("placement", ["serial", pytest.param("local", marks=pytest.mark.slow)])
def test_names_in_the_folder_of_a_dataset_do_not_end_training(tmp_path: Path, placement: str) -> None:
    folder = tmp_path / "set"
    for name in NAMES:
        (folder / name / "data").mkdir(parents=True)
    (folder / "part-00002").write_text("a file")
    flags = (f"--inference={placement}", f"--output={folder}", "--output_max_file_size=20000")
    with TrainingRun(tmp_path, *flags, "--train_for_env_steps=1500") as run:
        ended = run.wait()
        assert (ended.exit_code, "Traceback" in ended.stderr) == (0, False)
    totals = check_invariants(run)  # with a checkpoint
    dataset = open_dataset([str(folder)])
    assert totals["output_steps"] == dataset.steps > 0
    assert totals["actors_collected"] == totals["output_steps"] + totals["output_dropped_steps"]
    parts = sorted(path.name for path in folder.iterdir() if path.name not in NAMES)
    assert parts == [f"part-{number:05}" for number in range(2, 3 + totals["output_parts"])]


@pytest.mark.slow
def test_a_writer_that_fails_again_and_again_does_not_end_training(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    with TrainingRun(tmp_path, "--inference=local", f"--output={folder}") as run:
        run.wait_until(lambda: run.env_steps() > 0, "env steps")
        for number in range(MAX_FAULTS):
            run.wait_until(lambda: "writer" in run.roles().values(), "writer")
            kill(run.pid_of("writer"), signal.SIGSEGV)
            run.wait_until(lambda: restarts(run) + (number == MAX_FAULTS - 1) > number, "restart of the writer")  # noqa: B023
        steps = run.env_steps()
        run.wait_until(lambda: run.env_steps() > steps, "env steps without a writer")
        run.interrupt()
        assert run.wait().exit_code == 130
    check_invariants(run)
