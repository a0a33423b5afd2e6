from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from appo.algorithms import cli
from appo.algorithms.runtime.monitor.curves import Point
from appo.algorithms.tools.comparison import plot
from appo.algorithms.tools.comparison.plot import band_of, group_runs, interquartile_mean, save_figure
from appo.algorithms.tools.comparison.saved_runs import ComparedRun
from appo.utils.errors import UsageError
from tests.unit.run.test_summary import reports, write_run

PNG = b"\x89PNG\r\n\x1a\n"


def line(start: int, end: int, value: float) -> list[Point]:
    return [Point(float(x), x / 100, value) for x in range(start, end + 1, 10)]


def curve(name: str, **flags: Any) -> ComparedRun:
    return ComparedRun(name, {"env": "CartPole-v1", "seed": 1, "experiment": name, "learning_rate": 1e-4} | flags, [])


def test_runs_that_differ_in_their_seed_only_are_a_group() -> None:
    runs = [curve("a"), curve("b", seed=2), curve("c", learning_rate=1e-3), curve("d", seed=3, stats_avg=10)]
    groups = group_runs(runs)
    assert {label: [run.name for run in group] for label, group in groups.items()} == {
        "learning_rate=0.0001: mean and range of 3 runs": ["a", "b", "d"],
        "learning_rate=0.001": ["c"],
    }


def test_a_group_is_named_by_what_it_is_if_there_is_nothing_to_tell_it_from() -> None:
    assert list(group_runs([curve("a")])) == ["a"]
    assert list(group_runs([curve(str(n), seed=n) for n in range(4)])) == ["IQM and middle half of 4 runs"]
    many = [curve("a"), curve("b", gamma=1, rollout=2, batch_size=3, learning_rate=4, ppo_epochs=5)]
    assert list(group_runs(many)) == [
        "learning_rate=0.0001 gamma=none + 3 more",
        "learning_rate=4 gamma=1 + 3 more",
    ]


def test_groups_of_the_same_name_are_all_drawn() -> None:
    other = curve("a", learning_rate=2, gamma=2)
    groups = group_runs([other, *(curve("a", learning_rate=1, gamma=1, rollout=n) for n in range(4))])
    assert list(groups) == [
        "learning_rate=2 gamma=2 + 1 more",
        "learning_rate=1 gamma=1 + 1 more",
        "learning_rate=1 gamma=1 + 1 more (a)",
        "learning_rate=1 gamma=1 + 1 more (a, 2)",
        "learning_rate=1 gamma=1 + 1 more (a, 3)",
    ]
    assert [group[0].flags.get("rollout") for group in groups.values()] == [None, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([5.0], 5.0), ([1.0, 2.0, 3.0, 100.0], 2.5), ([0.0, 1.0, 2.0, 3.0, 100.0], 2.0), ([1.0, 2.0, 6.0], 2.5)],
)
def test_the_interquartile_mean_is_that_of_the_middle_half(values: list[float], expected: float) -> None:
    """Of five, the middle half is 2.5 values wide: the third, and three quarters of each of its neighbours."""
    assert interquartile_mean(np.array(values)[:, None]) == pytest.approx([expected])


def test_a_band_lies_where_all_of_its_curves_are() -> None:
    band = band_of([line(0, 100, 1.0), line(50, 200, 3.0)], "env_steps")
    assert band is not None
    assert (band.x[0], band.x[-1]) == (50, 100)
    assert {(m, low, high) for m, low, high in zip(band.middle, band.low, band.high, strict=True)} == {(2.0, 1.0, 3.0)}
    assert band_of([line(0, 40, 1.0), line(50, 200, 3.0)], "hours") is None
    four = band_of([line(0, 100, value) for value in (0.0, 1.0, 2.0, 99.0)], "hours")
    assert four is not None
    assert (four.x[-1], four.middle[0], four.low[0], four.high[0]) == (1.0, 1.5, 0.75, 26.25)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        config = {"env": "CartPole-v1", "seed": number, "experiment": f"r{number}"}
        write_run(tmp_path / "train_dir" / f"r{number}", config=config, metrics=reports(1.0, 2.0 + number, 4.0))
    write_run(tmp_path / "train_dir" / "young", config={"env": "CartPole-v1"}, metrics=reports(None, 1.0))
    return tmp_path


@pytest.mark.parametrize("axis", ["env_steps", "hours"])
def test_a_picture_of_runs(runs: Path, capsys, axis: str) -> None:
    assert cli.run("plot", ["r0", "r1", "train_dir/r2", "young", "-o", "new/x.png", f"--x={axis}"]) == 0
    assert (runs / "new" / "x.png").read_bytes().startswith(PNG)
    assert [path.name for path in (runs / "new").iterdir()] == ["x.png"]
    assert capsys.readouterr().out == ("young has reported too few returns for a curve\n3 of 4 runs drawn: new/x.png\n")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "appo plot needs the folder of a run, or several: appo runs lists them"),
        (["r5"], "no run r5, neither in train_dir nor as a path"),
        (["young"], "there is nothing to draw"),
        (["r0", "-o", "x.docx"], "cannot write x.docx: Format 'docx' is not supported"),
        (["r0", "-o", "/proc/x.png"], "cannot write /proc/x.png: "),
        (["r0", "-o", "/"], "cannot write /: Is a directory"),
        (["r0", "-o", "train_dir/r0/config.json/x.png"], "config.json/x.png: Not a directory"),
        (["r0", "-o", f"{'x' * 252}.png"], f"cannot write {'x' * 77}...: File name too long"),
        (["r0", "--x=days"], "--x=days is not one of env_steps, hours"),
        (["r0", "--lineage", "--x=hours"], "--lineage draws over env steps, not --x=hours"),
    ],
)
def test_what_is_wrong_is_one_line(runs: Path, argv: list[str], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        cli.run("plot", argv)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_format_whose_program_is_missing_is_one_line(tmp_path: Path) -> None:
    figure = Mock(savefig=Mock(side_effect=RuntimeError("xelatex not found")))
    with pytest.raises(UsageError, match=r"^cannot write .*x\.pgf: xelatex not found$"):
        save_figure(figure, tmp_path / "x.pgf")


def test_a_name_that_begins_with_an_underscore_has_a_legend(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plot, "save_figure", lambda figure, path: drawn.append(figure))
    plot.draw({"_x": [ComparedRun("_x", {}, line(0, 100, 1.0))]}, "env_steps", Path("x.png"))
    assert [text.get_text().strip() for text in drawn[0].legends[0].get_texts()] == ["_x"]


def test_without_matplotlib_it_says_what_to_install(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"drawing needs matplotlib: pip install \"appo\[plots\]\""):
        cli.run("plot", ["r0"])
    assert not list(runs.glob("*.png"))
