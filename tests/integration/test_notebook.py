"""Notebooks run in a real kernel as they stand there, and what they show grows in place."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from appo.algorithms.run.notebook import MOST_POINTS, ReturnCurve
from appo.algorithms.run.training import Report
from tests.integration.runs import ROOT
from tests.markdown import blocks
from tests.patience import HANG_SECONDS

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
PAGE = ROOT / "docs" / "notebooks.md"


class Client(NotebookClient):
    """Notes what the kernel has displayed, each time.

    Attributes:
        shown: HTML of every display, and the name under which it is displayed again.
    """

    shown: list[tuple[str, str]]

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        content = msg["content"]
        if msg["msg_type"] in ("display_data", "update_display_data"):
            self.shown.append((content["transient"]["display_id"], content["data"]["text/html"]))
        return super().process_message(msg, cell, cell_index)


def executed(notebook: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[tuple[str, str]]]:
    """The notebook with its outputs, and all that was displayed meanwhile."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(folder / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/src:{ROOT}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    client = Client(notebook, timeout=HANG_SECONDS, kernel_name="python3", resources={"metadata": {"path": folder}})
    client.shown = []
    client.execute()
    return notebook, client.shown


def texts(notebook: Any) -> list[str]:
    """What cells have printed to stdout."""
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    return [output["text"] for output in outputs if output.get("name") == "stdout"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Jupyter: of its own kinds of transport and paths
def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
    notebook, shown = executed(notebook, tmp_path, monkeypatch)
    assert len({name for name, _ in shown}) == 1  # in place: one output, displayed again and again
    shares = [float(share) for _, picture in shown for share in re.findall(r'value="([\d.]+)"', picture)]
    assert shares == sorted(shares)
    assert (shares[0] < 1.0, shares[-1]) == (True, 1.0)
    lengths = [len(re.findall(r"[\d.]+,[\d.]+", picture)) for _, picture in shown]
    assert lengths == sorted(lengths)
    assert lengths[-1] > 2
    pictures = [output for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    assert [output["data"]["text/html"] for output in pictures] == [shown[-1][1]]
    assert "corridor: every policy has learned from" in pictures[0]["data"]["text/plain"]
    (said,) = texts(notebook)
    assert float(said.removeprefix("return of one episode: ")) > 0.8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [nbformat.v4.new_code_cell(block.text) for block in blocks(PAGE) if block.language == "python"]
    assert len(cells) == 3
    cells.append(nbformat.v4.new_code_cell("print(result.exit_code, action in range(4))"))
    notebook, shown = executed(nbformat.v4.new_notebook(cells=cells), tmp_path, monkeypatch)
    assert texts(notebook) == ["0 True\n"]
    assert shown


def report(env_steps: int, *returns: float | None) -> Report:
    return Report(1.0, env_steps, env_steps, returns, ())


def test_a_curve_begins_with_the_first_episode_and_has_a_line_for_each_policy() -> None:
    curve = ReturnCurve()
    curve.add(report(0, None, None))
    assert curve.picture("a<b", report(0, None), None) == (
        '<div><b>a&lt;b</b> <progress max="1"></progress> 0 env steps, 1 s, no episode has ended</div>'
    )
    curve.add(report(100, 1.0, None))
    curve.add(report(200, 3.0, 2.0))
    picture = curve.picture("a", report(200, 3.0, 2.0), 0.25)
    assert '<progress max="1" value="0.2500"></progress> 200 env steps, 1 s, 25 %, return 3.00' in picture
    assert re.findall(r'points="([^"]*)"', picture) == ["320.0,172.0 632.0,8.0", "632.0,90.0"]


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    curve = ReturnCurve()
    for step in range(10 * MOST_POINTS + 1):
        curve.add(report(step, float(step)))
    assert MOST_POINTS // 2 <= len(curve.points) <= MOST_POINTS
    assert curve.points[0][0] == 0
    assert curve.points[-1][0] >= 10 * MOST_POINTS - 20
