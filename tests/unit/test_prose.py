"""Words: few pronouns for which a reader has to find the noun, no clause as a subject, a noun for every argument."""

import re
from pathlib import Path

import pytest

from tests import structure
from tests.structure import ROOT, docstrings, vague_per_hundred, words

GENERATED = {"flags.md", "metrics.md", "performance.md", "results.md"}
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(path for path in sorted(ROOT.glob("docs/*.md")) if path.name not in GENERATED),
    *sorted(ROOT.glob("algorithms/**/README.md")),
]
BESIDE_CODE_LIMIT, PAGE_LIMIT, PUBLIC_LIMIT, PRIVATE_LIMIT = 6.0, 5.0, 8.0, 9.0
"""Vague pronouns in a hundred words."""

CLAUSE = re.compile(r"(?:^|[.;:] )(?:What|Whoever|Whatever|Who) [^.?]*(?:\.|$)", re.MULTILINE)
NO_NOUN = re.compile(r"^\s+\w+: (?:of|that|which|whose|for|in|to|from|with) ", re.MULTILINE)
SPEECH = re.compile(r"\b(?:whoever|tells|hears|owes|heeds)\b")


def prose(path: Path) -> str:
    """Return the text of a page without code."""
    return re.sub(r"`[^`\n]*`", "code", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_their_subjects(page: Path) -> None:
    assert vague_per_hundred([page.read_text()]) <= (
        PAGE_LIMIT if page.parent in (ROOT, ROOT / "docs") else BESIDE_CODE_LIMIT
    )
    assert CLAUSE.findall(prose(page)) == []
    assert SPEECH.findall(prose(page)) == []


@pytest.mark.parametrize(("public", "limit"), [(True, PUBLIC_LIMIT), (False, PRIVATE_LIMIT)])
def test_docstrings_name_their_subjects(public: bool, limit: float) -> None:
    assert vague_per_hundred([t for path in structure.files() for t in docstrings(path, public=public)]) <= limit


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("It resets that of the others.", 3),
        ("The actor resets `it` and [the others](what.md).", 1),
        ("```\nit\n```\nThe learner copies weights.", 0),
    ],
)
def test_vague_pronouns_are_counted(text: str, count: int) -> None:
    assert round(vague_per_hundred([text]) * len(words(text)) / 100) == count
