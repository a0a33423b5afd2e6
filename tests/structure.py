"""Prints the shape of the product: `python -m tests.structure [ROOT]`, for this checkout or another one.

Every import counts, wherever it stands in a file: late ones and those for type checkers too.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("algorithms", "envs", "utils")
PACKAGE = "appo"
SMALL_LINES = 80
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
    trees = {name_of(path, root): ast.parse(path.read_text()) for path in files(root)}

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
        for node in ast.walk(ast.parse(path.read_text())):
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
        for node in ast.walk(ast.parse(path.read_text()))
    )


def main() -> None:
    """Print the figures of the checkout that the first word names."""
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    edges = graph(root)
    lengths = {path: len(path.read_text().splitlines()) for path in files(root) if path.parent != root}
    folders = Counter(path.parent.relative_to(root) for path in lengths)
    small = sorted(str(path.relative_to(root)) for path, lines in lengths.items() if 0 < lines < SMALL_LINES)
    lists = {
        "circles": [" ".join(group) for group in circles(edges)],
        "upward imports": upward_imports(edges),
        "upward strings": upward_strings(root),
        f"files under {SMALL_LINES} lines": small,
        "files per folder": [f"{folder}: {count}" for folder, count in folders.most_common(5)],
    }
    for title, lines in lists.items():
        print(f"{title}: {len(lines)}", *(f"    {line}" for line in lines), sep="\n")
    print(f"files: {len(lengths)}, lines: {sum(lengths.values())}, statements: {statements(root)}")


if __name__ == "__main__":
    main()
