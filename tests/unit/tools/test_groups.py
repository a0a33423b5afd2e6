"""Groups of runs as words: which runs they are, and how every command takes them."""

import json
from pathlib import Path
from typing import Any

import pytest

from appo.algorithms import cli
from appo.algorithms.run.folder import find_run, find_runs, newest_run
from appo.algorithms.tools.comparison.saved_runs import read_run, settings_of
from appo.utils.errors import UsageError
from appo.utils.values import nearest
from tests.unit.run.test_summary import reports, write_run

SIZES, SEEDS = (64, 256), (1, 2, 3)
RETURNS = {(64, 1): 10.0, (64, 2): 20.0, (64, 3): 30.0, (256, 1): 40.0, (256, 2): 44.0}  # the sixth has crashed early
NETS = [f"nets/hidden_size-{size}_seed-{seed}" for size in (256, 64) for seed in SEEDS]


def write_one(path: Path, last: float | None, *, state: str = "finished", **flags: Any) -> Path:
    metrics = [] if last is None else reports(last / 2, last)
    config = {"env": "CartPole-v1", "algo": "APPO", "gamma": 0.99, "train_dir": "./train_dir", **flags}
    status = {"state": state, "totals": {"env_steps": 200}}
    return write_run(path, config=config, status=status, metrics=metrics)


@pytest.fixture(autouse=True)
def train_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run; a sweep of six with its logs, old ones among them; a group in a group; what a start has set aside."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "train_dir"
    write_one(folder / "alone", 5.0, seed=1)
    for size in SIZES:
        for seed in SEEDS:
            name, last = f"hidden_size-{size}_seed-{seed}", RETURNS.get((size, seed))
            state = "training" if last is None else "finished"
            write_one(folder / "nets" / name, last, state=state, hidden_size=size, seed=seed, experiment=name)
            (folder / "nets" / f"{name}.log").write_text("as launch once wrote it\n")
    (folder / "nets" / "logs").mkdir()
    (folder / "nets" / "logs" / "x.log").touch()
    for inner in ("x", "y"):
        write_one(folder / "outer" / inner / "one", 7.0, seed=1, gamma=0.9)
    write_one(folder / "outer" / "x" / "one.bak1", 1.0, seed=1)
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nets"], NETS),
        (["train_dir/nets"], [f"train_dir/{name}" for name in NETS]),
        (["train_dir/nets/"], [f"train_dir/{name}" for name in NETS]),
        (["nets/hidden_size-64_seed-2"], ["nets/hidden_size-64_seed-2"]),
        (["outer"], ["outer/x/one", "outer/y/one"]),
        (["outer/y"], ["outer/y/one"]),
        (["alone", "outer"], ["alone", "outer/x/one", "outer/y/one"]),
        (["outer/x/one", "outer", "./train_dir/outer/y/one"], ["outer/x/one", "outer/y/one"]),
        (["outer/x/one.bak1"], ["outer/x/one.bak1"]),
        (["."], ["./alone", *(f"./{name}" for name in NETS), "./outer/x/one", "./outer/y/one"]),
    ],
)
def test_words_and_their_runs(train_dir: Path, words: list[str], expected: list[str]) -> None:
    found = find_runs(words, Path("train_dir"))
    assert [name.removeprefix("./") for name in found] == [name.removeprefix("./") for name in expected]
    for name, path in found.items():
        inside = name.removeprefix("./").removeprefix("train_dir/")
        assert path == train_dir.resolve() / inside


def test_all_that_a_shell_takes_for_a_star_is_the_group(train_dir: Path) -> None:
    words = sorted(str(path) for path in Path("train_dir/nets").iterdir())
    assert len(words) == 13
    assert list(find_runs(words, Path("train_dir"))) == [f"train_dir/{name}" for name in NETS]
    with pytest.raises(UsageError, match="there is no run in train_dir/nets/logs"):
        find_runs(["train_dir/nets/logs"], Path("train_dir"))


def test_what_holds_no_run_is_left_out_where_others_do(train_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (train_dir / "curve.png").touch()
    one = write_one(train_dir / "logs" / "seed-1", 3.0)
    words = ["train_dir/curve.png", "train_dir/empty", "train_dir/logs", "train_dir/nets/logs", "alone"]
    assert list(find_runs(words, Path("train_dir"))) == ["train_dir/logs/seed-1", "alone"]
    assert capsys.readouterr().err == "warning: no run in train_dir/curve.png\nwarning: no run in train_dir/empty\n"
    assert list(find_runs(["logs"], Path("train_dir")).values()) == [one.resolve()]
    for words in (["empty"], ["train_dir/curve.png", "empty"]):
        with pytest.raises(UsageError, match=f"there is no run in {' '.join(words)}"):
            find_runs(words, Path("train_dir"))


def test_a_link_leads_to_a_run_and_no_circle_is_followed(train_dir: Path) -> None:
    group = train_dir / "linked"
    group.mkdir()
    (group / "run").symlink_to(train_dir / "alone")
    (group / "round").symlink_to(group)
    assert list(find_runs(["linked"], Path("train_dir"))) == ["linked/run"]
    assert list(find_runs(["linked", "alone"], Path("train_dir"))) == ["linked/run"]  # it is the same one


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("netz", "there is no run netz, neither in train_dir nor as a path; did you mean nets?"),
        ("empty", "there is no run in empty"),
        ("", "there is no run '', neither in train_dir nor as a path"),
        ("outer", "outer is a group of 2 runs, and one run is needed: outer/x/one, outer/y/one"),
        ("train_dir/nets/logs", "there is no run in train_dir/nets/logs"),
    ],
)
def test_one_run_is_needed(train_dir: Path, word: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_run(word, Path("train_dir"))
    assert str(caught.value) == message
    assert find_run("outer/x", Path("train_dir")).name == "one"  # a group of one


@pytest.mark.parametrize(
    "argv",
    [
        ("enjoy", "--experiment=outer"),
        ("export", "outer"),
        ("hub", "outer", "--dry_run"),
        ("record", "outer", "-o", "d"),
        ("estimate", "outer", "--dataset=d"),
        ("match", "outer", "alone"),
        ("match", "outer:best", "alone"),
        ("plot", "outer", "--lineage"),
    ],
)
def test_commands_of_one_run_list_those_of_a_group(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command(lambda: cli.run(argv[0], argv[1:])) == 2
    expected = "error: outer is a group of 2 runs, and one run is needed: outer/x/one, outer/y/one\n"
    assert capsys.readouterr().err == expected


def test_the_newest_run_may_be_in_a_group(train_dir: Path) -> None:
    assert newest_run(Path("train_dir"), "").name == "one"


@pytest.mark.parametrize(("word", "known"), [("nets", ["nets"]), ("--x", ["--x"])])
def test_no_word_is_suggested_for_itself(word: str, known: list[str]) -> None:
    assert nearest(word, known) == ""
    assert nearest(word, [*known, word + "s"]) == f"; did you mean {word}s?"


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert cli.run(argv[0], argv[1:]) == 0
    return capsys.readouterr().out.splitlines()


def test_runs_lists_groups_and_the_runs_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split() for line in said(capsys, "runs")]
    assert [line[0] for line in lines if line] == ["run", "alone", "group", "nets", "outer"]
    assert lines[-3][:8] == ["group", "runs", "done", "running", "interrupted", "failed", "best", "return"]
    assert lines[-2][:7] == ["nets", "6", "5", "0", "0", "1", "44.00"]
    assert lines[-1][:7] == ["outer", "2", "2", "0", "0", "0", "7.00"]
    assert sorted(line.split()[0] for line in said(capsys, "runs", "nets")) == sorted([*NETS, "run"])
    found = json.loads(said(capsys, "runs", "--json")[0])
    assert sorted(run["name"] for run in found) == sorted(["alone", *NETS, "outer/x/one", "outer/y/one"])


TABLE = [
    "runs that differ in their seed only as one, by the mean of their last returns with its 95 % interval",
    "hidden_size  runs           last return",
    "        256     3  42.00 [16.59, 67.41]",
    "         64     3  20.00 [-4.84, 44.84]",
]
"""By hand: 42 +- 12.706 * 2 and 20 +- 4.303 * 10 / sqrt(3), Student's t for 1 and 2 degrees of freedom."""


def test_a_sweep_ends_with_its_settings_sorted_and_seeds_pooled(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "compare", "nets")[-4:] == TABLE
    page = Path("report.html")
    assert said(capsys, "report", "nets") == [f"6 runs, {page.stat().st_size / 1024:.0f} KiB: report.html"]
    for cell in ("<h2>Settings</h2>", ">42.00 [16.59, 67.41]</td>", ">20.00 [-4.84, 44.84]</td>"):
        assert cell in page.read_text()
    assert not any(line.startswith("runs that differ") for line in said(capsys, "compare", "alone", "outer/x"))
    found = json.loads(said(capsys, "compare", "nets", "--json")[0])
    assert [(one["flags"], one["runs"], one["returns"]) for one in found["settings"]] == [
        ({"hidden_size": 256}, 3, [40.0, 44.0]),
        ({"hidden_size": 64}, 3, [10.0, 20.0, 30.0]),
    ]


def test_settings_without_a_return_come_last_and_one_return_has_no_interval() -> None:
    runs = [read_run(name, path) for name, path in find_runs(["nets"], Path("train_dir")).items()]
    chosen = [runs[2], runs[5]]  # one without a return, one with
    assert [(one.flags, one.text) for one in settings_of(chosen)] == [
        ({"hidden_size": 64}, "30.00"),
        ({"hidden_size": 256}, "-"),
    ]


def test_plot_and_top_take_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "plot", "nets", "-o", "n.png")[-1] == "5 of 6 runs drawn: n.png"
    lines = said(capsys, "top", "nets", "outer")
    assert [line.split(" · ")[0] for line in lines if line.startswith("╭")] == [
        *(f"╭─ {Path(name).name}" for name in NETS),
        "╭─ one",
        "╭─ one",
    ]
    assert sum(line.startswith("finished; ended") for line in lines) == 7
    assert sum(line.startswith("crashed: ") for line in lines) == 1


# One bad run of several.


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (("plot", "outer", "alone", "-o", "n.png"), "2 of 3 runs drawn: n.png"),
        (("report", "outer", "alone"), "2 runs, "),
        (("compare", "outer", "alone"), "outer/y/one     alone"),
        (("top", "outer", "alone"), "╭─ alone "),
        (("runs", "outer", "alone"), "damaged"),
    ],
)
@pytest.mark.parametrize("content", ["{", "[]", '{"gamma": ' + "[" * 5000])
def test_one_bad_run_is_named_and_the_others_are_shown(
    train_dir: Path, argv: tuple[str, ...], shown: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = train_dir / "outer/x/one/config.json"
    bad.write_text(content)
    assert cli.run_command(lambda: cli.run(argv[0], argv[1:])) == 0
    printed = capsys.readouterr()
    assert shown in printed.out
    if argv[0] != "runs":
        assert printed.err.startswith("warning: outer/x/one is left out: ")
        assert str(bad.resolve()) in printed.err
        assert printed.err.count("\n") == 1
        (train_dir / "outer/y/one/config.json").write_text(content)
        with pytest.raises(UsageError, match=r"config\.json"):  # where all are bad the first one is the error
            cli.run(argv[0], ["outer"])


@pytest.mark.parametrize("content", ["{", "[]", '{"events": 1}', '{"events": [{"kind": "copy"}]}'])
@pytest.mark.parametrize("words", [("alone",), ("alone", "outer")])
def test_a_bad_lineage_costs_the_lineage(
    train_dir: Path, words: tuple[str, ...], content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (train_dir / "alone/lineage.json").write_text(content)
    assert cli.run("report", words) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{1 if len(words) == 1 else 3} run")
    assert printed.err.startswith("warning: the lineage of alone is left out: ")
    assert printed.err.count("\n") == 1
    assert "alone" in Path("report.html").read_text()
