"""`appo report` as a person sees it: opened in Chromium, which draws, hovers, and is offered what a stranger wrote."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from appo.algorithms import cli
from tests.integration.browser import CHROMIUM, WHY_NOT, Browser
from tests.unit.run.test_summary import flags, reports, write_run
from tests.unit.tools.test_report import MP4, hostile
from tests.unit.tools.test_top import STATUS

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)]

BLUE, ORANGE = (0, 114, 178), (213, 94, 0)  # of the first two curves
BLUE_ON_DARK, DARK = (74, 168, 232), (20, 23, 28)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page of two runs is, a straight line up and one down, and that of a stranger's run."""
    path = tmp_path_factory.mktemp("report")
    up = [float(x) for x in range(101)]
    for name, rate, values in (("up", 1e-3, up), ("down", 1e-4, up[::-1])):
        write_run(path / name, config=flags(learning_rate=rate), status=STATUS, metrics=reports(*values))
    (path / "up/eval/videos").mkdir(parents=True)
    (path / "up/eval/videos/p0_000000000100.mp4").write_bytes(MP4)
    hostile(path, "stranger")
    for words in (("up", "down", "-o", str(path / "page.html")), ("stranger", "up", "-o", str(path / "hostile.html"))):
        assert cli.run("report", [*words, f"--train_dir={path}"]) == 0
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


def number_of(picture: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]", colour: tuple[int, int, int]) -> int:
    """How many pixels have exactly this colour."""
    return int(np.all(picture == np.array(colour, np.uint8), axis=-1).sum())


def chart(browser: Browser) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of the large chart."""
    found = browser.evaluate(
        "(r => [r.left, r.top, r.right, r.bottom])(document.querySelector('.chart.large').getBoundingClientRect())"
    )
    return found[0], found[1], found[2], found[3]


def tip(browser: Browser) -> str:
    found: str = browser.evaluate("document.querySelector('.chart.large .tip').innerText")
    return " ".join(found.split())


def test_curves_are_in_the_picture_where_they_belong(browser: Browser, folder: Path) -> None:
    browser.open(folder / "page.html")
    left, top, right, bottom = map(round, chart(browser))
    drawn = browser.picture()[top:bottom, left:right]
    height, width = drawn.shape[:2]
    assert width > 800
    for colour, rises in ((BLUE, True), (ORANGE, False)):
        rows, columns = np.nonzero(np.all(drawn == np.array(colour, np.uint8), axis=-1))
        assert len(rows) > 300, "a line of two pixels across all of the chart"
        assert (np.ptp(columns) > 0.9 * (width - 66), np.ptp(rows) > 0.7 * height) == (True, True)
        slope = np.polyfit(columns, -rows, 1)[0]
        assert (slope > 0) == rises


def test_the_pointer_is_told_what_curves_are_there(browser: Browser, folder: Path) -> None:
    browser.open(folder / "page.html")
    left, top, right, bottom = chart(browser)
    assert browser.evaluate("document.querySelector('.chart.large .tip').hidden") is True
    before = browser.picture()
    browser.move(left + 52 + 0.75 * (right - left - 66), (top + bottom) / 2)  # three quarters of 100 to 10,100
    browser.wait_for("!document.querySelector('.chart.large .tip').hidden")
    assert tip(browser) == "at 7600 env steps up 75 down 25"
    assert np.any(browser.picture() != before)
    browser.move(left + 52 + 0.25 * (right - left - 66), top + 40)
    browser.wait_for("document.querySelector('.chart.large .tip').innerText.includes('2600')")
    assert tip(browser) == "at 2600 env steps down 75 up 25"
    browser.move(left, bottom + 400)
    browser.wait_for("document.querySelector('.chart.large .tip').hidden")
    rows = slice(round(top), round(bottom))
    differs = np.abs(browser.picture()[rows].astype(int) - before[rows])
    assert differs.max() < 64, "edges of lines are smoothed anew, and that is all"


def test_buttons_change_the_axis_and_hide_curves(browser: Browser, folder: Path) -> None:
    browser.open(folder / "page.html")
    browser.click("[data-axis=hours]")
    left, top, right, _ = chart(browser)
    browser.move(left + 52 + 0.5 * (right - left - 66), top + 40)
    browser.wait_for("!document.querySelector('.chart.large .tip').hidden")
    assert tip(browser).startswith("after 50 s ")
    browser.click("[data-group='0']")
    box = [round(value) for value in chart(browser)]
    drawn = browser.picture()[box[1] : box[3], box[0] : box[2]]
    assert (number_of(drawn, BLUE), number_of(drawn, ORANGE) > 300) == (0, True)


def test_it_is_dark_where_the_reader_wants_it_dark_and_fits_a_phone(browser: Browser, folder: Path) -> None:
    browser.open(folder / "page.html", scheme="dark")
    picture = browser.picture()
    assert tuple(picture[2, 2]) == DARK
    assert number_of(picture, BLUE_ON_DARK) > 300
    browser.open(folder / "page.html", width=360, height=700)
    assert browser.evaluate("document.documentElement.scrollWidth") == 360


def test_nothing_is_fetched_and_no_error_is_told(browser: Browser, folder: Path) -> None:
    browser.events.clear()
    browser.open(folder / "page.html")
    urls = [p["request"]["url"] for name, p in browser.events if name == "Network.requestWillBeSent"]
    assert urls[0].endswith("/page.html")
    assert {url.partition(":")[0] for url in urls[1:]} <= {"data"}
    assert [p for name, p in browser.events if name in ("Runtime.exceptionThrown", "Log.entryAdded")] == []


def test_no_script_of_a_stranger_runs_and_none_could(browser: Browser, folder: Path) -> None:
    browser.events.clear()
    browser.open(folder / "hostile.html")
    assert browser.evaluate("document.title") == "stranger, up"
    assert browser.evaluate("document.scripts.length") == 2
    assert browser.evaluate("document.querySelectorAll('img, [onerror], iframe, #x').length") == 0
    left, top, right, bottom = chart(browser)
    browser.move((left + right) / 2, (top + bottom) / 2)  # names are shown as text there, too
    assert browser.evaluate("document.querySelectorAll('.tip img, .tip script').length") == 0
    assert not [p for name, p in browser.events if name in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening")]
    # Were something not escaped, the policy of the page would still hold it back.
    for attack in ("s.textContent = 'document.title = `owned`'", "s.src = 'https://example.com/x.js'"):
        browser.evaluate(
            f"(() => {{ const s = document.createElement('script'); {attack}; document.body.append(s); }})()"
        )
    refused = browser.evaluate("fetch('https://example.com').then(() => 'sent', () => 'refused')", wait=True)
    assert (refused, browser.evaluate("document.title")) == ("refused", "stranger, up")
    said = [p["entry"]["text"] for name, p in browser.events if name == "Log.entryAdded"]
    for what in ("Executing inline script", "Loading the script", "Connecting to"):
        assert any(text.startswith(what) and "Content Security Policy" in text for text in said), what
