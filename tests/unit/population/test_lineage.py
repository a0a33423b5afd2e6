import errno
import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from appo.algorithms import cli
from appo.algorithms.population import lineage as module
from appo.algorithms.population.lineage import Event, Lineage, numbers_of, read_events
from appo.algorithms.runtime.messages import PolicyTraits
from appo.algorithms.tools.comparison import plot
from appo.algorithms.tools.comparison.lineage import describe
from appo.utils.errors import UsageError

EVENT = Event(
    "copy", 1, 0, 1, 500, 600, 1.5, {"0": 9.0, "1": None}, {"rate": 0.5, "clip": 1}, {"rate": 0.25, "clip": 1}
)
EVENTS = [
    Event("start", 0, 0, 0, 0, 0, 0.0, {}, {"rate": 1e-3}, {"rate": 1e-3}, "applied"),
    replace(EVENT, state="applied"),
    Event("mutation", 0, 0, 1, 700, 700, 2.0, {"0": 9.0}, {"r": 1e-3}, {"r": 0.02, "reward_shaping": {"a": [1, 2]}}),
    Event("none", 0, 0, 2, 900, 900, 3.0, {"0": 9.0}, {"rate": 2e-3}, {"rate": 2e-3}, "taken back"),
]  # fmt: skip


def saved(directory: Path, *events: Event) -> Path:
    written = Lineage(directory, [PolicyTraits(changes=9)] * 2)
    for event in events:
        written.add(event)
    written.close()
    (directory / "config.json").write_text("{}")
    return directory


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []
    saved(tmp_path, *EVENTS)
    assert read_events(tmp_path) == EVENTS
    assert json.loads((tmp_path / "lineage.json").read_text())["num_policies"] == 2


def test_a_disk_that_takes_nothing_costs_the_file_until_the_next_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = [True]

    def write(path: Path, content: object, **how: object) -> None:
        if full.pop():
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_text(json.dumps(content))

    monkeypatch.setattr(module, "write_json_atomic", write)
    with caplog.at_level(logging.WARNING):
        saved(tmp_path, EVENTS[0])
    assert len(caplog.messages) == 1
    assert read_events(tmp_path) == []
    full[:] = [False]
    saved(tmp_path, EVENTS[0])
    assert read_events(tmp_path) == [EVENTS[0]]


@pytest.mark.parametrize("content", ["", "[]", '{"events": 1}', '{"events": [{}]}', '{"events": [1]}', '{"events": "x'])
def test_a_damaged_file_is_set_aside_and_another_one_begun(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "lineage.json").write_text(content)
    with pytest.raises(UsageError, match=r"is damaged|must hold"):
        read_events(tmp_path)
    with caplog.at_level(logging.WARNING):
        saved(tmp_path, EVENTS[0])
    assert len(caplog.messages) == 1
    assert (tmp_path / "lineage.json.damaged").read_text() == content
    assert read_events(tmp_path) == [EVENTS[0]]


def test_an_event_with_other_values_is_damage(tmp_path: Path) -> None:
    saved(tmp_path, EVENT)
    text = (tmp_path / "lineage.json").read_text()
    event = json.loads(text)["events"][0]
    score = next(iter(event["scores"]))
    changes: list[dict[str, object]] = [
        {"policy": -1},
        {"state": "odd"},
        {"state": ["ordered"]},
        {"kind": ["copy"]},
        {"elapsed_seconds": "7"},
        {"scores": {score: [1.0]}},
    ]
    for change in changes:
        wrong = json.dumps({"num_policies": 2, "events": [event | change]})
        (tmp_path / "lineage.json").write_text(wrong)
        with pytest.raises(UsageError, match="damaged"):
            read_events(tmp_path)


def test_events_in_words() -> None:
    assert describe(EVENTS) == [
        "policy 1 at 500 env steps (None against 9): copies policy 0, rate 0.5 -> 0.25",
        "policy 0 at 700 env steps (9): mutates, r 0.001 -> 0.02, reward_shaping None -> {'a': [1, 2]}, ordered",
        "2 policies, 1 copies, 1 mutations, 1 decisions taken back by crashes",
    ]


def test_numbers_of_nested_values() -> None:
    assert numbers_of({"a": 1, "b": {"c": [2.0, 3], "d": "x"}, "e": True}) == {"a": 1, "b/c/0": 2.0, "b/c/1": 3}


def test_the_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    directory = tmp_path / "run"
    directory.mkdir()
    saved(directory, *EVENTS)
    assert cli.run("plot", ["run", "--lineage", f"--train_dir={tmp_path}"]) == 0
    assert (directory / "lineage.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines()[-1] == f"drawn: {directory / 'lineage.png'}"
    with pytest.raises(UsageError, match=r"cannot write .*x\.nonsense"):
        cli.run("plot", [str(directory), "--lineage", "-o", str(tmp_path / "x.nonsense")])


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="needs the folder of a run"):
        cli.parse("plot", ["--lineage", "-o", "x.png"])
    run = str(tmp_path)
    with pytest.raises(UsageError, match="no run nobody"):
        cli.run("plot", ["nobody", "--lineage", f"--train_dir={run}"])
    with pytest.raises(UsageError, match="--lineage draws one run, not 2"):
        cli.run("plot", [run, run, "--lineage"])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"has no lineage\.json"):
        cli.run("plot", [run, "--lineage"])
    saved(tmp_path, *EVENTS)
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs matplotlib"):
        cli.run("plot", [run, "--lineage"])
    monkeypatch.undo()
    with pytest.raises(UsageError, match="cannot write /: Is a directory"):
        cli.run("plot", [run, "--lineage", "-o", "/"])
