"""The shape of the code: imports point down, and nothing is larger than a reader can hold."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = (
    ("utils",),
    ("envs",),
    ("algorithms.ops",),
    ("algorithms.models",),
    ("algorithms.runtime",),
    ("algorithms.appo", "algorithms.population"),
    (
        "algorithms.evaluation_config",
        "algorithms.evaluator_config",
        "algorithms.match_config",
        "algorithms.sharing_config",
        "algorithms.video",
        "algorithms.replay",
        "algorithms.tally",
    ),
    ("algorithms.evaluation", "algorithms.training", "algorithms.selftest"),
    ("algorithms.policy", "algorithms.evaluator", "algorithms.filming", "algorithms.numpy_player"),
    ("algorithms.export", "algorithms.hub", "algorithms.launch", "algorithms.match"),
    ("algorithms.cli",),
    ("train_appo", "enjoy_appo"),
)
FILES = [*ROOT.glob("*_appo.py"), *(p for top in ("algorithms", "envs", "utils") for p in ROOT.glob(f"{top}/**/*.py"))]
MAX_LINES = {ast.Module: 400, ast.ClassDef: 200, ast.FunctionDef: 60, ast.AsyncFunctionDef: 60}


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(module: str) -> int | None:
    """How high a module of ours lives; None for those of others."""
    return next((i for i, tops in enumerate(LAYERS) for top in tops if f"{module}.".startswith(f"{top}.")), None)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_files_are_found() -> None:
    assert len(FILES) > 50


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    own = len(LAYERS) if name_of(path) == "algorithms" else layer_of(name_of(path))
    assert own is not None
    for module in imports(path):
        layer = layer_of(module)
        assert layer is None or layer <= own, f"{name_of(path)} imports {module}"


@pytest.mark.parametrize("path", [p for p in FILES if name_of(p).startswith(("algorithms.ops", "utils"))], ids=name_of)
def test_the_lowest_layers_need_little(path: Path) -> None:
    """ops are functions of arrays; utils stand alone."""
    allowed = {"algorithms.ops": {"torch", "numpy"}, "utils": {"numpy", "tensorboardX"}}
    layer = "utils" if name_of(path).startswith("utils") else "algorithms.ops"
    for module in imports(path):
        top = module.split(".")[0]
        fine = top in sys.stdlib_module_names or top in allowed[layer] or module.startswith(f"{layer}.")
        assert fine, f"{name_of(path)} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_too_long(path: Path) -> None:
    """An exception shows `# noqa` and its reason in its first line."""
    text = path.read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        limit = MAX_LINES.get(type(node))
        if limit is None:
            continue
        first, last = (1, len(lines)) if isinstance(node, ast.Module) else (node.lineno, node.end_lineno or 0)
        name = getattr(node, "name", name_of(path))
        excused = bool(lines) and "# noqa" in lines[first - 1]
        assert last - first + 1 <= limit or excused, f"{name_of(path)}: {name} has {last - first + 1} lines"


def test_wall_clock_times_are_only_labels() -> None:
    """The wall clock jumps. It names moments in files; what waits, measures or decides uses the monotonic one."""
    used = {name_of(path) for path in FILES for node in ast.walk(ast.parse(path.read_text())) if is_wall_clock(node)}
    assert used == {
        "algorithms.appo.listing",  # how long ago a run's status was written
        "algorithms.appo.starting",  # the journal of starts
        "algorithms.appo.top",  # the same
        "algorithms.filming",  # compared with the times of files
        "algorithms.runtime.janitor",  # the same
        "algorithms.runtime.status",
        "utils.metrics",  # TensorBoard's events
    }


WITHOUT_END = {
    "algorithms.runtime.channels: self.pipe.recv()": "only after poll() has said that there is something",
    "algorithms.runtime.channels: clock.wait()": "an entry in the books, see utils.timing",
    "algorithms.runtime.runner: clock.wait()": "the same",
    "algorithms.evaluation: clock.wait()": "sleeps until a picture is due",
    "algorithms.replay: ours.recv()": "only after poll()",
    "algorithms.runtime.launch: self._pipe.recv()": "only after poll()",
    "algorithms.appo.probing: pipe.recv()": "only after poll()",
    "algorithms.runtime.panel: captured.get()": "no wait: the text that was drawn",
    "algorithms.runtime.checkpointing: last.result()": "only when it is done",
    "algorithms.runtime.checkpointing: self._writer.shutdown(wait=True)": "what was learned must be on disk",
    "algorithms.population.lineage: self._pending.result()": "only when it is done",
    "algorithms.population.lineage: self._writer.shutdown(wait=True)": "what was decided must be on disk",
    "algorithms.population.past: one.result()": "only when it is done",
    "algorithms.population.past: self._writer.shutdown(wait=True)": "the pool must be on disk",
    "algorithms.video: process.communicate()": "ffmpeg must end the file; Ctrl-C ends it",
    "algorithms.video: self._process.communicate()": "it has just been killed",
    "utils.lock: self.acquire()": "our own, which refuses at once",
}
"""Waits that may last for ever as far as their arguments tell, and why they do not."""


def test_what_waits_says_how_long() -> None:
    """Whoever waits for another process, thread or queue gets on with its work when that one has died."""
    found = {
        f"{name_of(path)}: {ast.unparse(node)}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if waits_for_ever(node)
    }
    assert found == set(WITHOUT_END)


def waits_for_ever(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    name, keywords = node.func.attr, {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if name == "shutdown":
        return keywords.get("wait") != "False"
    if ast.unparse(node.func).endswith("connection.wait"):
        return len(node.args) < 2 and "timeout" not in keywords
    if name == "put":
        return not keywords.keys() & {"timeout", "block"}
    waits = ("get", "wait", "acquire", "join", "result", "communicate", "recv")
    return name in waits and not node.args and "timeout" not in keywords


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("queue.get()", True),
        ("queue.get(block=True)", True),
        ("queue.get(timeout=1)", False),
        ("mapping.get(key)", False),
        ("process.join()", True),
        ("process.join(1.0)", False),
        ("queue.put(x)", True),
        ("queue.put(x, timeout=1)", False),
        ("multiprocessing.connection.wait(x)", True),
        ("multiprocessing.connection.wait(x, 1)", False),
        ("pool.shutdown()", True),
        ("pool.shutdown(wait=False)", False),
    ],
)
def test_waits_without_an_end_are_found(code: str, expected: bool) -> None:
    assert waits_for_ever(ast.parse(code, mode="eval").body) == expected


def is_wall_clock(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "time.time_ns", "datetime.now")


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("algorithms.appo.appo", ("torch",)),  # main
        ("algorithms.appo.blueprint", ("torch",)),  # actors
        ("algorithms.appo.config", ("torch", "numpy", "gymnasium")),  # --help
        ("algorithms.evaluation_config", ("torch", "numpy", "gymnasium")),
        ("algorithms.appo.listing", ("torch", "numpy", "gymnasium")),
        ("algorithms.population.picture", ("torch", "numpy", "gymnasium", "matplotlib")),
        ("algorithms", ("torch", "numpy", "gymnasium")),  # whatever can be imported from it
        ("algorithms.training", ("torch",)),
    ],
)
def test_processes_without_a_network_do_not_load_torch(module: str, forbidden: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & set({forbidden!r})))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.split() == []
