"""Prints the shape of the product: `python -m tests.structure [ROOT]`, for this checkout or another one.

Every import counts, wherever it stands in a file: late ones and those for type checkers too.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("algorithms", "envs", "utils")
PACKAGE = "appo"
ALGORITHMS = ("appo", "ppo", "apex", "sac", "pqn", "a3c", "offline")
VAGUE = frozenset(
    re.findall(
        r"\w+",
        "it its that those this these they them what which who whoever whose one such so same other others nobody"
        " somebody whatever there",
    )
)
"""Pronouns and words like them, for which a reader has to find the noun."""
LAYERS = (
    ("appo.utils",),
    ("appo.envs",),
    ("appo.algorithms.ops",),
    ("appo.algorithms.models",),
    ("appo.algorithms.runtime",),
    (
        "appo.algorithms.parts",
        "appo.algorithms.population",
        "appo.algorithms.replay",
        "appo.algorithms.datasets",
    ),
    (
        "appo.algorithms.appo",
        "appo.algorithms.ppo",
        "appo.algorithms.apex",
        "appo.algorithms.sac",
        "appo.algorithms.pqn",
        "appo.algorithms.pqn",
        "appo.algorithms.a3c",
        "appo.algorithms.offline",
    ),
    ("appo.algorithms.run",),
    ("appo.algorithms.playing",),
    ("appo.algorithms.tools",),
    ("appo.algorithms.cli",),
    ("train_appo", "enjoy_appo"),
)
"""From the lowest to the highest: a module imports from its own layer and from those below."""


def files(root: Path = ROOT) -> list[Path]:
    """Files of the product, empty ones included."""
    return [*sorted(root.glob("*_appo.py")), *(p for top in TOPS for p in sorted(root.glob(f"{top}/**/*.py")))]


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which is parsed once."""
    return ast.parse(path.read_text())


def name_of(path: Path, root: Path = ROOT) -> str:
    """Return the dotted name of the module that a file holds; folders of the checkout are packages of `appo`."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join([PACKAGE, *parts] if parts[0] in TOPS else parts).removesuffix(".__init__")


def layer_of(module: str) -> int | None:
    """Return the index of a module in `LAYERS`; None for those of others."""
    return next((i for i, tops in enumerate(LAYERS) for top in tops if f"{module}.".startswith(f"{top}.")), None)


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports anywhere in it, the imported object included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Every module of the product with the modules of the product that it imports."""
    trees = {name_of(path, root): tree_of(path) for path in files(root)}

    def module_of(name: str) -> str:
        return name if name in trees else name.rpartition(".")[0]

    return {
        module: {target for name in imported(tree) if (target := module_of(name)) in trees and target != module}
        for module, tree in trees.items()
    }


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other by imports."""
    reached = {module: _reachable(module, edges) for module in edges}
    groups = {frozenset({m, *(o for o in reached[m] if m in reached[o])}) for m in edges if m in reached[m]}
    return sorted(sorted(group) for group in groups)


def _reachable(module: str, edges: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [module]
    while waiting:
        for target in edges[waiting.pop()] - found:
            found.add(target)
            waiting.append(target)
    return found


def upward_imports(edges: Mapping[str, set[str]]) -> list[str]:
    """Imports from a layer below to one above it, as `module -> module`; the package itself stands above all."""

    def height(module: str) -> int:
        layer = layer_of(module)
        return len(LAYERS) if layer is None else layer

    return [f"{m} -> {t}" for m, targets in sorted(edges.items()) for t in sorted(targets) if height(t) > height(m)]


def upward_strings(root: Path = ROOT) -> list[str]:
    """Dotted names of our modules in the strings of files below `run`, where an import would be an upward one."""
    found = []
    for path in files(root):
        own = layer_of(name_of(path, root))
        for node in ast.walk(tree_of(path)):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value.startswith("appo.algorithms.")
            ):
                target = layer_of(node.value)
                if own is not None and own < LAYERS.index(("appo.algorithms.run",)):
                    found.append(f"{name_of(path, root)}:{node.lineno}: {node.value} (layer {target} from {own})")
    return found


def statements(root: Path = ROOT) -> int:
    """Number of statements of the product; docstrings are none."""
    return sum(
        isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for path in files(root)
        if path.parent != root
        for node in ast.walk(tree_of(path))
    )


def second_headings(root: Path = ROOT) -> list[str]:
    """Comments alone between blank lines, at the left margin of a module: each begins another subject."""
    found = []
    for path in files(root):
        lines = ["", *path.read_text().splitlines(), ""]
        for number, (before, line, after) in enumerate(zip(lines, lines[1:], lines[2:], strict=False), start=1):
            if line.startswith("# ") and not before and not after:
                found.append(f"{path.relative_to(root)}:{number}: {line}")
    return found


def between_algorithms(edges: Mapping[str, set[str]]) -> list[str]:
    """Imports from one algorithm's folder to another's, as `module -> module`."""

    def algorithm_of(module: str) -> str | None:
        return next((a for a in ALGORITHMS if f"{module}.".startswith(f"{PACKAGE}.algorithms.{a}.")), None)

    own = ((m, t) for m, targets in edges.items() for t in targets if algorithm_of(m) and algorithm_of(t))
    return sorted(f"{m} -> {t}" for m, t in own if algorithm_of(m) != algorithm_of(t))


def lines_of_algorithms(root: Path = ROOT) -> dict[str, int]:
    """Number of lines in the folder of each algorithm."""
    return {
        name: sum(len(path.read_text().splitlines()) for path in root.glob(f"algorithms/{name}/**/*.py"))
        for name in ALGORITHMS
    }


def repeated_classes(root: Path = ROOT) -> list[str]:
    """Names that two or more classes of the product have."""
    trees = (tree_of(path) for path in files(root))
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return sorted(name for name, count in names.items() if count > 1)


# Prose, in English words: code, addresses and targets of links do not count.


def words(text: str) -> list[str]:
    """Return the words of a page or docstring, a piece of code counted as one."""
    text = re.sub(r"^```.*?^```", " ", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", " code ", text)
    text = re.sub(r"<[^>\n]*>", " ", re.sub(r"\]\([^)]*\)", "]", text))
    return re.findall(r"[a-z]+(?:['\u2019][a-z]+)?", text.lower())


def vague_per_hundred(texts: list[str]) -> float:
    """Return how many of a hundred words are `VAGUE`; 0 for no words."""
    found = [word for text in texts for word in words(text)]
    return 100.0 * sum(word in VAGUE for word in found) / max(1, len(found))


def docstrings(path: Path, *, public: bool | None = None) -> list[str]:
    """Return the docstrings of a file and the texts below its constants and fields.

    Args:
        path: the file.
        public: True: of names without a leading underscore alone; False: of the others alone; None: all.
    """
    return [text for text, is_public in _texts(tree_of(path)) if public in (None, is_public)]


def _texts(node: ast.AST, is_public: bool = True) -> Iterator[tuple[str, bool]]:
    """Yield each docstring below a node with whether all names that lead to it are public."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        is_public &= not node.name.startswith("_") or node.name.endswith("__")
    for child in ast.iter_child_nodes(node):
        value = child.value if isinstance(child, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value, is_public
        yield from _texts(child, is_public)


def main() -> None:
    """Print the figures of the checkout that the first word names."""
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    edges = graph(root)
    lengths = {path: len(path.read_text().splitlines()) for path in files(root) if path.parent != root}
    folders = Counter(path.parent.relative_to(root) for path in lengths)
    lists = {
        "circles": [" ".join(group) for group in circles(edges)],
        "upward imports": upward_imports(edges),
        "upward strings": upward_strings(root),
        "second headings": second_headings(root),
        "imports between algorithms": between_algorithms(edges),
        "lines of algorithms": [f"{name}: {lines}" for name, lines in lines_of_algorithms(root).items()],
        "class names used twice or more": [", ".join(repeated_classes(root))],
        "files per folder": [f"{folder}: {count}" for folder, count in folders.most_common(5)],
    }
    for title, lines in lists.items():
        print(f"{title}: {len(lines)}", *(f"    {line}" for line in lines), sep="\n")
    for public, title in ((True, "public docstrings"), (False, "other docstrings")):
        texts = [text for path in lengths for text in docstrings(path, public=public)]
        count = sum(len(words(text)) for text in texts)
        print(f"vague pronouns per 100 words, {title}: {vague_per_hundred(texts):.1f} of {count} words")
    pages = [*sorted(root.glob("*.md")), *sorted(root.glob("docs/*.md")), *sorted(root.glob("algorithms/**/README.md"))]
    for path in pages:
        print(f"    {path.relative_to(root)}: {vague_per_hundred([path.read_text()]):.1f}")
    print(f"files: {len(lengths)}, lines: {sum(lengths.values())}, statements: {statements(root)}")


if __name__ == "__main__":
    main()
