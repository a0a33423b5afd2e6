"""What environments print and report has no end; logs, figures and main's memory have one."""

import json
from pathlib import Path

import pytest

from appo.utils.metrics import read_metrics
from benchmarks.promises import chatter
from tests.chaos.runs import TrainingRun

pytestmark = pytest.mark.slow  # processes, seconds each

CHATTERBOX = "tests.chaos.hostile_env:Chatterbox"
MIB = 1 << 20
END_SECONDS = 60.0


def test_what_is_printed_at_once_is_cut_and_names_are_bounded_with_one_line_each(tmp_path: Path) -> None:
    flags = (
        "--inference=local",
        "--train_for_env_steps=1000",
        "--max_log_mb=1",
        "--max_stats_names=10",
        "--num_policies=2",
    )
    kwargs = (f"burst={20 * MIB}", "bytes_per_second=1000", "names=7", "length=10")
    with TrainingRun(tmp_path, *flags, "--env_kwargs", *kwargs, env=CHATTERBOX) as run:
        ended = run.wait(END_SECONDS)
    assert ended.exit_code == 0, ended.stderr
    said = ended.stderr.splitlines()
    assert len(said) == 2, said
    assert [sum(flag in line for line in said) for flag in ("--max_log_mb", "--max_stats_names")] == [1, 1]
    for path in (run.directory / "logs").iterdir():
        assert path.stat().st_size <= MIB
    assert "step 1 " in (run.directory / "logs" / "actor_0.log").read_text()[:2000]
    records = read_metrics(run.directory / "metrics.jsonl")
    names = {name.split("/", 1)[1].rsplit("/", 1)[0] for record in records for name in record if name[:6] == "stats/"}
    assert len(names) == 10
    assert "known" in names
    last = [record for record in records if record["policy"] == 0][-1]
    assert last["stats/known/mean"] == 1.0
    status = json.loads((run.directory / "status.json").read_text())
    for policy, record in enumerate(status["policies"]):
        assert {name.split("/", 1)[1].rsplit("/", 1)[0] for name in record if name[:6] == "stats/"} <= names, policy


@pytest.mark.slow
def test_a_run_that_prints_a_megabyte_a_second_and_invents_names_stays_within_its_bounds() -> None:
    looks, said = chatter.watch(45.0, (), 4, 4)
    for figure in chatter.figures(looks, 4, 4):
        assert figure.kept, figure.line()
    assert looks[-1].largest_log > 1.0  # it was cut, and goes on
    assert said.count("--max_log_mb") == said.count("--max_stats_names") == 1


@pytest.mark.slow
def test_a_gigabyte_printed_at_once_is_cut_while_the_run_goes_on(tmp_path: Path) -> None:
    flags = ("--inference=local", "--train_for_env_steps=1000000", "--train_for_seconds=20", "--max_log_mb=8")
    kwargs = (f"burst={1 << 30}", "bytes_per_second=1000")
    with TrainingRun(
        tmp_path, *flags, "--num_workers=1", "--num_envs_per_worker=1", "--env_kwargs", *kwargs, env=CHATTERBOX
    ) as run:
        log = run.directory / "logs" / "actor_0.log"
        run.wait_until(lambda: log.exists() and log.stat().st_size > 100 * MIB, "a gigabyte in the log")
        run.wait_until(lambda: log.stat().st_size <= 8 * MIB, "a log that is cut")
        ended = run.wait(END_SECONDS)
    assert ended.exit_code == 0, ended.stderr
    assert json.loads((run.directory / "status.json").read_text())["restarts"] == 0
