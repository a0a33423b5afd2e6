"""`appo report` but for what a browser makes of it: what is read and how much, and what strangers write into it."""

import base64
import hashlib
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from appo.algorithms import cli
from appo.algorithms.runtime.monitor.curves import Point
from appo.algorithms.tools.report import contents
from appo.algorithms.tools.report.contents import Films, curves, thinned
from appo.utils.errors import UsageError
from appo.utils.run_folder import MIB, RunFolder
from tests.unit.run.test_summary import NOW, flags, reports, write_run
from tests.unit.tools.test_top import STATUS

MP4 = b"\0\0\0\x18ftypmp42" + bytes(100)
EVENT = {
    "kind": "copy", "policy": 0, "source": 1, "change": 1, "env_steps": 500, "source_env_steps": 400,
    "scores": {"0": 1.0, "1": 2.0}, "before": {"gamma": 0.9}, "after": {"gamma": 0.95}, "state": "applied",
    "elapsed_seconds": 1.0,
}  # fmt: skip


class Page(HTMLParser):
    """The elements of a page, with their attributes and what stands in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._tag = tag

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        self.inside.get(self._tag, self.words).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.inside["script"][0])
        return found


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for number, rate in enumerate((1e-4, 1e-4, 1e-3)):
        write_run(
            tmp_path / "train_dir" / f"r{number}",
            config=flags(seed=number, learning_rate=rate),
            status=STATUS | {"state": "finished", "machine": {"processor": "Z80", "cores": 2}},
            metrics=reports(1.0, 2.0 + number, 4.0),
        )
    return tmp_path


def written(*argv: str) -> Page:
    assert cli.run("report", argv) == 0
    return Page(Path("report.html").read_text())


def test_a_page_says_what_runs_are_how_they_differ_and_what_they_wait_for(runs: Path, capsys) -> None:
    page = written("r0", "r1", "train_dir/r2", "-o", "report.html")
    size = Path("report.html").stat().st_size
    assert capsys.readouterr().out == f"3 runs, {size / 1024:.0f} KiB: report.html\n"
    assert 20 < size / 1024 < 60
    day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(NOW))
    for number, rate in enumerate((1e-4, 1e-4, 1e-3)):
        assert f"r{number}: seed {number}, last active {day}" in page.text
        assert f"--learning_rate={rate}" in page.text  # the preset has another value than the default
    table = "seed 0 1 2 learning_rate 0.0001 0.0001 0.001"
    for said in ("r0, r1, r2", "APPO on CartPole-v1", "Flags that differ flag r0 r1 r2", table, "Z80, 2 cores",
                 "all 2 cores are full, 61% of it environment", "finished"):  # fmt: skip
        assert said in page.text
    assert [(one["name"], one["group"]) for one in page.data["series"]] == [("r0", 0), ("r1", 0), ("r2", 1)]
    assert page.data["series"][2]["figures"] == {
        "reward/mean": [[100, 200, 300], [0, 0.000277778, 0.000555556], [1, 4, 4]]
    }
    (band,) = page.data["bands"]
    assert (band["group"], band["env_steps"]["low"][-1], band["env_steps"]["x"][-1]) == (0, 4, 300)
    assert band["env_steps"]["middle"][99] == pytest.approx(2.5, abs=0.02)  # of 2 and 3


def test_of_one_run_every_policy_has_a_curve_and_its_flags_are_compared_with_defaults(runs: Path) -> None:
    records = [*reports(1.0, 9.0), *reports(5.0, 6.0, policy=1)]
    (runs / "train_dir/r0/metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = written("r0")
    assert [(one["name"], one["colour"]) for one in page.data["series"]] == [("policy 0", 0), ("policy 1", 1)]
    assert "Flags that are not as by default flag value default" in page.text
    assert "train_for_env_steps 1000 10000000000" in page.text
    assert written("r0", "r1").data["series"][0]["figures"]["reward/mean"][2] == [1, 9]  # of the one that ends best


def test_a_policy_that_does_not_learn_comes_last(runs: Path) -> None:
    records = [*reports(1.0, 2.0), *({**one, "env_steps": 0} for one in reports(9.0, 9.0, policy=1))]
    (runs / "train_dir/r0/metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert written("r0", "r1").data["series"][0]["figures"]["reward/mean"][2] == [1, 2]


def test_a_lineage_is_drawn_and_said(runs: Path) -> None:
    events = [EVENT, EVENT | {"kind": "mutation", "policy": 1}, EVENT | {"env_steps": 10**40}]
    (runs / "train_dir/r0/lineage.json").write_text(json.dumps({"events": events}))
    page = written("r0")
    assert "policy 0 at 500 env steps (1 against 2): copies policy 1, gamma 0.9 -> 0.95" in page.text
    shapes = [(tag, words.get("class")) for tag, words in page.elements if tag in ("circle", "path")]
    assert shapes == [("path", "copy c1"), ("circle", "event c1"), ("circle", "event c1")]  # 10**40 tells nothing


def test_a_page_holds_its_own_script_and_style_and_forbids_all_others(runs: Path) -> None:
    page = written("r0")
    (policy,) = (w["content"] for t, w in page.elements if w.get("http-equiv") == "Content-Security-Policy")
    hashes = {
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in ("".join(page.inside["script"][1:]), "".join(page.inside["style"]))
    }
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert {rules.pop("script-src"), rules.pop("style-src")} == hashes
    assert rules == {
        "default-src": "'none'", "img-src": "data:", "media-src": "data:", "base-uri": "'none'", "form-action": "'none'"
    }  # fmt: skip
    text = Path("report.html").read_text()
    assert not re.search(r"""(?:src|href)=["'](?!data:)|https?://(?!www\.w3\.org/2000/svg)|@import|url\(""", text)


HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&\x1b[2J\u202egnp"


def hostile(train_dir: Path, name: str = "x</script><img onerror=y>") -> None:
    """A run that says in every place what a browser must not believe."""
    status = STATUS | {
        "state": HOSTILE, "reason": HOSTILE, "warnings": [HOSTILE, "x" * 5000], "machine": {"processor": HOSTILE},
        "performance": STATUS["performance"] | {"bottleneck": HOSTILE},
    }  # fmt: skip
    settings = flags(env=HOSTILE, algo=HOSTILE, init_from=HOSTILE, rnn_type=HOSTILE) | {HOSTILE: HOSTILE}
    metrics = [record | {"stats/</script><b>/mean": 1.0, "stats/<b id=x>/mean": 2.0} for record in reports(1.0, 2.0)]
    # A slash cannot stand in the name of a folder.
    directory = write_run(train_dir / name.replace("/", ""), config=settings, status=status, metrics=metrics)
    events = [EVENT | {"before": {HOSTILE: 1}, "after": {HOSTILE: HOSTILE}}]
    (directory / "lineage.json").write_text(json.dumps({"events": events}))


@pytest.mark.parametrize("others", [(), ("r1",)])
def test_nothing_that_a_stranger_writes_becomes_an_element(runs: Path, others: tuple[str, ...]) -> None:
    hostile(runs / "train_dir")
    page = written("x<script><img onerror=y>", *others)
    kinds = [tag for tag, _ in page.elements]
    assert (kinds.count("script"), kinds.count("img"), kinds.count("b")) == (2, 0, 1 + len(others))  # 1: the limit
    assert not [words for _, words in page.elements if any(name.startswith("on") for name in words)]
    assert "<script>document.title='owned'" in page.text
    names = {tag for one in page.data["series"] for tag in one["figures"]}
    assert names == {"reward/mean", "stats/<b id=x>/mean"}
    content = Path("report.html").read_text()
    assert all(c == "\n" or c.isprintable() for c in content)
    assert "x" * 301 not in content


def test_curves_are_thinned_and_without_what_was_lost(runs: Path) -> None:
    folder = RunFolder(runs / "train_dir" / "r0")
    again = [*reports(1.0, 2.0, 3.0)[1:], *reports(7.0)]  # a resumed start has gone back
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in again))
    assert curves(folder) == {0: {"reward/mean": [Point(100, 0, 7.0)]}}
    many = [*reports(*map(float, range(2000))), *(r for p in range(1, 20) for r in reports(1.0 - p, policy=p))]
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in many))
    found = curves(folder)
    assert list(found) == [0, *range(1, 8)]  # the best ones
    assert [found[0]["reward/mean"][i].value for i in (0, 1, -1)] == [0, 4, 1999]
    assert len(found[0]["reward/mean"]) == contents.MOST_POINTS
    assert len(thinned([Point(i, i, i) for i in range(999)], "len/mean")) == contents.MOST_POINTS_OF_SMALL


def test_videos_are_the_first_and_the_last_of_each_policy_that_fit(runs: Path) -> None:
    folder = RunFolder(runs / "train_dir" / "r0")
    folder.videos.mkdir(parents=True)
    for name in ("p0_000000000100", "p0_000000000200", "p0_000000000300", "p1_000000000300"):
        (folder.videos / f"{name}.mp4").write_bytes(MP4)
    (folder.videos / "p2_000000000300.mp4").write_text("<html>no video</html>")
    (runs / "secret").write_bytes(MP4)
    (folder.videos / "p3_000000000300.mp4").symlink_to(runs / "secret")
    films = Films(MIB)
    assert [(v.policy, v.env_steps) for v in films.of(folder)] == [(0, 100), (0, 300), (1, 300)]
    assert films.left_out == 2
    films = Films(2 * len(MP4))  # the last ones come first
    assert [(v.policy, v.env_steps) for v in films.of(folder)] == [(0, 300), (1, 300)]
    page = written("r0")
    sources = [words["src"] for tag, words in page.elements if tag == "video"]
    assert sources == [f"data:video/mp4;base64,{base64.b64encode(MP4).decode()}"] * 3
    assert "policy 0 after 100 env steps" in page.text
    assert "video" not in {tag for tag, _ in written("r0", "--video_mb=0").elements}


def test_a_run_that_has_written_next_to_nothing_has_a_page(runs: Path) -> None:
    write_run(runs / "train_dir" / "young", config={"env": "CartPole-v1"})
    page = written("young")
    assert "No figures have been written yet." in page.text
    assert written("young", "r0").data["series"][0]["figures"] == {}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "appo report needs the folder of a run, or several: appo runs lists them"),
        (["r5"], "no run r5, neither in train_dir nor as a path"),
        (["r0", "-o", "x.pdf"], "--output=x.pdf: the page is HTML, and its name ends in .html"),
        (["r0", "-o", "/proc/x.html"], "cannot write /proc/x.html: "),
        (["r0", "-o", "train_dir/r0/config.json/x.html"], "config.json/x.html: Not a directory"),
        (["r0", "--video_mb=-1"], "--video_mb must be at least 0"),
        (["r0", "--x=days"], "--x=days is not one of env_steps, hours"),
    ],
)
def test_what_is_wrong_is_one_line(runs: Path, argv: list[str], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        cli.run("report", argv)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path("report.html").exists()
