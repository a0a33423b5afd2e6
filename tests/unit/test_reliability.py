"""docs/reliability.md speaks of 80 faults, and of tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
ROWS = re.findall(r"^\| (\d+) \|(.*)$", PAGE, re.MULTILINE)


@cache
def names_in(path: str) -> set[str]:
    """Tests and classes of tests in a file under tests/."""
    body = ast.parse((ROOT / "tests" / path).read_text()).body
    return {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def test_every_fault_has_a_test_or_a_reason_why_not() -> None:
    assert [int(number) for number, _ in ROWS] == list(range(1, 81))
    for number, row in ROWS:
        *_, shown_by, after = row.split("|")
        assert after == "", number
        assert "::test_" in shown_by or "::Test" in shown_by or "no test" in shown_by, number


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 100
    assert [f"{path}::{name}" for path, name in named if name not in names_in(path)] == []
    files = re.findall(r"`(tests/[\w/]+\.py)`", PAGE)
    assert [path for path in files if not (ROOT / path).exists()] == []
