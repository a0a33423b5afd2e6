"""What the documentation says is there: links, flags, figures, commands, messages."""

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from appo.algorithms import cli
from appo.algorithms.run.algorithms import ALGORITHMS, chosen_algorithm, find_algorithm, flag_table
from appo.algorithms.run.config import FLAGS, Config, check, parse_train_flags
from appo.algorithms.runtime.callbacks import EVENTS
from appo.algorithms.tools.train import asked_format
from appo.utils import timing
from docs import pictures, reference
from docs.tags import PHASES, SECTIONS, meaning
from tests.markdown import BESIDE_CODE, PAGES, ROOT, anchors, blocks, commands, embedded, links, prose
from tests.structure import tree_of

SOURCES = [path for top in ("algorithms", "envs", "utils") for path in sorted((ROOT / top).rglob("*.py"))]
BLOCKS = [block for page in PAGES for block in blocks(page)]


def read_words(command: str, argv: Sequence[str]) -> None:
    """Read and check a command line as a start does, without looking for a saved run."""
    if command == "train":
        given = parse_train_flags(asked_format(argv)[1])
        plain = {name: list(v) if isinstance(v, tuple) else v for name, v in given.items()}
        check(Config.from_flat({**plain, "algo": chosen_algorithm(given)}))
    else:
        cli.parse(command, argv)


@pytest.mark.parametrize("path", reference.pages(), ids=lambda path: path.name)
def test_generated_pages_are_what_the_code_says(path: Path) -> None:
    assert path.read_text() == reference.pages()[path], "run `python -m docs.reference`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"https?://|mailto:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


USERS_OWN = {"my_program.py", "env.py", "utils.py", "tb.py"}
"""Files that pages name and that are the reader's, or another project's."""


@pytest.mark.parametrize(
    "page", [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", *BESIDE_CODE], ids=lambda page: page.name
)
def test_files_that_pages_name_exist(page: Path) -> None:
    words = " ".join(re.findall(r"`([^`\n]+)`", page.read_text()))
    named = {path for path in re.findall(r"(?<![\w.{}<>*/-])[\w/]+\.py\b", words) if path not in USERS_OWN}
    bases = [ROOT, ROOT / "algorithms", ROOT / "tests", page.parent]
    assert {path for path in named if not any((base / path).is_file() for base in bases)} == set()


def test_every_picture_is_there_is_small_and_is_shown() -> None:
    shown = {path: words for page in PAGES for path, words in embedded(page).items()}
    assert {path for path in shown if not path.is_file()} == set()
    assert all(shown.values()), "a picture without words for those who cannot see it"
    made = {pictures.PICTURES / name for _, names in pictures.SCENES.values() for name in names}
    assert set(pictures.PICTURES.iterdir()) == made
    assert made - shown.keys() == set(), "no page shows it"
    largest = {".svg": 80 << 10, ".png": 120 << 10}
    assert {path.name for path in made if path.stat().st_size > largest[path.suffix]} == set()


def test_the_index_has_every_page() -> None:
    listed = {link.partition("#")[0] for link in links(ROOT / "docs/index.md")}
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}


def run_command(words: Sequence[str]) -> str | None:
    """Read a command as its program would; says what kind it is, None for one that is none of these."""
    program, *rest = words
    if program in ("appo", ".venv/bin/appo"):
        read_words(rest[0], rest[1:])
    elif program == "python" and rest[0] == "-m":
        place = ROOT / rest[1].replace(".", "/")
        assert rest[1] == "pytest" or place.with_suffix(".py").exists() or (place / "__main__.py").exists(), words
    elif program == "python":
        read_words(rest[0].removesuffix("_appo.py"), rest[1:])
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif program == "pip":
        extras = re.findall(r'"([\w-]+)": ', (ROOT / "setup.py").read_text())
        assert {name for found in re.findall(r"appo\[([\w,-]+)\]", " ".join(rest)) for name in found.split(",")} <= {
            *extras
        }
    elif program not in ("git", "cd", "source"):
        return program if (ROOT / program).is_file() else None
    return program


def test_every_command_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block whose first word is a program is one of commands: each is read by the program's own parser."""
    monkeypatch.chdir(tmp_path)
    kinds = []
    for block in (one for one in BLOCKS if not one.language and is_shell(one.text)):
        for words in commands(block):
            kind = run_command(words)
            assert kind is not None, f"{block.page}: {words}"
            kinds.append(kind)
    assert kinds.count("appo") > 30
    assert kinds.count("python") > 5


def is_shell(text: str) -> bool:
    first = text.split(maxsplit=1)[0]
    return first in ("appo", ".venv/bin/appo", "python", "make", "pip", "git", "cd", "source")


def test_every_block_of_python_compiles_and_no_other_block_hides_code() -> None:
    compiled = 0
    for block in BLOCKS:
        assert block.language in ("", "python"), f"{block.page}: {block.language}"
        if block.language or re.match(r"(from|import|def|class) ", block.text):
            compile(block.text, block.page, "exec")
            runs = block.file or block.page in ("python_api.md", "notebooks.md") or not block.language
            assert runs or block.note.startswith("compiled only: "), f"{block.page}: nothing runs {block.text}"
            compiled += 1
        elif not is_shell(block.text):
            assert not re.search(r"^(appo|python|make|pip) ", block.text, re.MULTILINE), f"{block.page}: {block.text}"
    assert compiled > 10


@cache
def said() -> tuple[str, ...]:
    """All constant text of the code; a NUL stands for what is filled in."""
    return tuple(text for path in SOURCES for text in texts(path))


def texts(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[-.\d]*[sdg]", "\0", node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)


def test_every_message_of_troubleshooting_is_one_of_ours() -> None:
    rows = re.findall(r"^\| (.*?) \| ", prose(ROOT / "docs/troubleshooting.md"), re.MULTILINE)
    messages = [message for row in rows if row.startswith("`") for message in re.findall(r"`([^`]+)`", row)]
    messages += re.findall(r"^\| `([^`]+)`.*? \| ", prose(ROOT / "docs/tuning_speed.md"), re.MULTILINE)
    assert len(messages) > 45
    everything = "\n".join(said())
    for message in messages:
        for part in re.split(r"\.\.\.|\bN\b|\bthe [a-z ]+ is full\b|\bfull\b|[,:;] ", message):
            fragment = part.strip(" ,:;()%`")
            assert fragment in everything, f"{message!r}: {fragment!r} is said nowhere"


def test_every_figure_is_described() -> None:
    literal = r"(?:train|perf|pbt|reward|len)/[a-z_]+(?:/[a-z_]+)?"
    written = {tag for text in said() for tag in re.findall(rf"^{literal}$", text)}
    written |= {f"train/{name}" for algo in ALGORITHMS for name in find_algorithm(algo).metrics}
    assert len(written) > 30
    assert {tag for tag in written if meaning(tag) is None} == set()
    assert tuple(sorted(PHASES)) == tuple(sorted(timing.PHASES))
    assert meaning("perf/actor/waiting_for_slots") == SECTIONS["Speed"]["perf/<role>/<phase>"]
    assert meaning("perf/nobody/env") is meaning("custom/x") is None


def test_flags_of_sample_factory_are_here_or_said_to_be_gone() -> None:
    page = (ROOT / "docs/from_sample_factory.md").read_text()
    parts = {title: text for title, _, text in (part.partition("\n") for part in page.split("\n## ")[1:])}
    ours = {*FLAGS, *(name for flags in reference.flags_of_tools().values() for name in flags)}

    def flags(text: str) -> set[str]:
        return set(re.findall(r"`--(?:no_)?(\w+)", text))

    assert flags(parts["Flags with the same name, meaning and default"]) - ours == set()
    rows = [row.split(" | ") for row in parts["Flags with the same name and something that differs"].splitlines()[3:]]
    assert set().union(*(flags(row[0]) for row in rows if len(row) == 3)) - ours == set()
    rows = [row.split(" | ") for row in parts["Flags with another name"].splitlines()[3:]]
    for there, here in (row for row in rows if len(row) == 2):
        assert flags(here) <= ours, here
        assert not re.search(r"`--\w+", there) or not flags(there) & set(FLAGS) - {"run"}, there
    rows = [row.split(" | ") for row in parts["Flags that are gone"].splitlines()[3:]]
    assert set().union(*(flags(row[0]) for row in rows if len(row) == 2)) & ours == set()


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_the_page_of_flags_has_every_flag_of_every_algorithm(algo: str) -> None:
    page = (ROOT / "docs/flags.md").read_text()
    _, _, learning = page.partition(f"### Learning with `--algo={algo}`\n")
    own = set(re.findall(r"^\| `--(\w+)`", learning.partition("\n#")[0], re.MULTILINE))
    assert own == flag_table(algo).by_part["learning"].keys()
    assert flag_table(algo).flags.keys() <= set(re.findall(r"`--(\w+)`", page))


def test_the_page_of_callbacks_has_every_method() -> None:
    assert set(re.findall(r"^\| `(\w+)\(", (ROOT / "docs/callbacks.md").read_text(), re.MULTILINE)) == set(EVENTS)
