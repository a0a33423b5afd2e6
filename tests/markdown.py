"""The pages of the documentation, taken apart."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BESIDE_CODE = sorted((ROOT / "algorithms").rglob("README.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *BESIDE_CODE,
]
FENCE = "```"


class Block(NamedTuple):
    """A block of code: `language` is that of its fence, "" for an indented one; `note` the comment before it."""

    page: str
    language: str
    text: str
    note: str

    @property
    def file(self) -> str | None:
        """The file that a block of Python is, by its first line."""
        found = re.match(r"# ([\w/]+\.py)\n", self.text)
        return found[1] if found else None


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    found: list[Block] = []
    lines = page.read_text().splitlines()
    i, note = 0, ""
    while i < len(lines):
        line = lines[i]
        fenced = line.startswith(FENCE)
        if fenced:
            end = lines.index(FENCE, i + 1)
            found.append(Block(page.name, line[3:], "\n".join(lines[i + 1 : end]) + "\n", note))
        elif line.startswith("    ") and not lines[i - 1].strip():
            end = next((j for j in range(i, len(lines)) if lines[j].strip() and not lines[j].startswith("    ")), None)
            end = len(lines) if end is None else end
            found.append(Block(page.name, "", "\n".join(one[4:] for one in lines[i:end]).rstrip() + "\n", note))
            end -= 1
        else:
            comment = re.fullmatch(r"<!-- (.*) -->", line)
            note, end = comment[1] if comment else note if not line else "", i
        i = end + 1
        note = "" if fenced else note
    return found


def commands(block: Block) -> Iterator[list[str]]:
    """The words of every command of a block of shell."""
    for line in block.text.replace("\\\n", " ").splitlines():
        for part in line.split(" && "):
            words = shlex.split(part, comments=True)
            if words:
                yield words[: words.index(">")] if ">" in words else words


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return "\n".join(line for line in text.splitlines() if not line.startswith("    "))


def anchors(page: Path) -> set[str]:
    """What links may point to, as GitHub names headings."""
    heads = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def links(page: Path) -> list[str]:
    """All that a page links to, without code."""
    text = re.sub(r"`[^`\n]*`", "code", prose(page))
    return re.findall(r"\]\(([^)\s]+)\)", text)


def embedded(page: Path) -> dict[Path, str]:
    """The files that a page shows, and the words for those who cannot see them."""
    found = re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", prose(page))
    return {(page.parent / link).resolve(): words for words, link in found}
