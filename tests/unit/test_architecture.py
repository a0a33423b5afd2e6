"""The shape of the code: imports point down, nothing goes in circles, torch is where it belongs, files can be held."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from appo.algorithms.runtime.roles import ACTOR, LEARNER, MAIN, POLICY_WORKER
from appo.utils import run_folder
from tests import structure
from tests.patience import HANG_SECONDS
from tests.structure import ROOT, imported, name_of

FILES = structure.files()
MAX_LINES = {ast.Module: 600, ast.FunctionDef: 100, ast.AsyncFunctionDef: 100}
TORCH = (
    "appo.algorithms.models",
    "appo.algorithms.ops",
    "appo.algorithms.parts",
    "appo.algorithms.runtime.learning",
    "appo.algorithms.runtime.algorithm",  # in annotations
    "appo.algorithms.runtime.cuda",
    "appo.algorithms.runtime.devices",
    "appo.algorithms.runtime.algorithm",  # for type checkers only
    "appo.algorithms.runtime.sampling.policy",  # for type checkers only
    "appo.algorithms.runtime.sampling.policy_worker",
    "appo.algorithms.runtime.sampling.gpu_policy_worker",
    "appo.algorithms.replay.source",
    "appo.algorithms.appo.learner",
    "appo.algorithms.appo.numpy_learner",
    "appo.algorithms.ppo.learner",
    "appo.algorithms.ppo.streaming",
    "appo.algorithms.a3c.learner",
    "appo.algorithms.a3c.worker",
    "appo.algorithms.apex.learner",
    "appo.algorithms.pqn.learner",
    "appo.algorithms.apex.numpy_learner",
    "appo.algorithms.ppo.numpy_learner",
    "appo.algorithms.sac.learner",
    "appo.algorithms.sac.policy",
    "appo.algorithms.sac.quick_gradients",
    "appo.algorithms.datasets.columns",
    "appo.algorithms.offline.fitted_q",
    "appo.algorithms.offline.learner",
    "appo.algorithms.datasets.mix",
    "appo.algorithms.population.member",
    "appo.algorithms.run.workers.networks",
    "appo.algorithms.run.tuning.network",
    "appo.algorithms.playing",
    "appo.algorithms.tools.export",
    "appo.algorithms.tools.estimate",
    "appo.algorithms.tools.record",
    "appo.algorithms.tools.doctor",
)
"""Modules that may import torch: all others serve main, actors without a network, `--help`, `runs` or `top`."""


def test_files_are_found() -> None:
    assert len(FILES) > 50


def test_imports_point_down() -> None:
    assert structure.upward_imports(structure.graph()) == []


def test_no_two_files_import_each_other() -> None:
    assert structure.circles(structure.graph()) == []


def test_no_string_names_a_module_from_below() -> None:
    assert structure.upward_strings() == []


def test_layers_know_every_module() -> None:
    assert {name_of(path) for path in FILES if structure.layer_of(name_of(path)) is None} == {"appo.algorithms"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_torch_is_imported_where_it_belongs(path: Path) -> None:
    if not f"{name_of(path)}.".startswith(tuple(f"{module}." for module in TORCH)):
        assert "torch" not in {name.split(".")[0] for name in imported(structure.tree_of(path))}


@pytest.mark.parametrize(
    "path", [p for p in FILES if name_of(p).startswith(("appo.algorithms.ops", "appo.utils"))], ids=name_of
)
def test_the_lowest_layers_need_little(path: Path) -> None:
    """ops are functions of arrays; utils stand alone."""
    allowed = {"appo.algorithms.ops": {"torch", "numpy"}, "appo.utils": {"numpy", "tensorboardX", "psutil", "yaml"}}
    layer = "appo.utils" if name_of(path).startswith("appo.utils") else "appo.algorithms.ops"
    for module in imported(structure.tree_of(path)):
        top = module.split(".")[0]
        fine = top in sys.stdlib_module_names or top in allowed[layer] or module.startswith(f"{layer}.")
        assert fine, f"{name_of(path)} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_too_long(path: Path) -> None:
    """An exception shows `# noqa` and its reason in its first line."""
    text = path.read_text()
    lines = text.splitlines()
    for node in ast.walk(structure.tree_of(path)):
        limit = MAX_LINES.get(type(node))
        if limit is None:
            continue
        first, last = (1, len(lines)) if isinstance(node, ast.Module) else (node.lineno, node.end_lineno or 0)
        name = getattr(node, "name", name_of(path))
        excused = bool(lines) and "# noqa" in lines[first - 1]
        assert last - first + 1 <= limit or excused, f"{name_of(path)}: {name} has {last - first + 1} lines"


def test_folders_can_be_seen_at_once() -> None:
    folders: dict[Path, int] = {}
    for path in FILES:
        folders[path.parent] = folders.get(path.parent, 0) + 1
    assert max(folders.values()) <= 20


def test_a_heading_in_the_middle_of_a_file_is_a_file() -> None:
    assert structure.second_headings() == []


def test_no_algorithm_imports_another() -> None:
    assert structure.between_algorithms(structure.graph()) == []


def test_wall_clock_times_are_only_labels() -> None:
    """The wall clock jumps. It names moments in files; what waits, measures or decides uses the monotonic one."""
    used = {name_of(path) for path in FILES for node in ast.walk(structure.tree_of(path)) if is_wall_clock(node)}
    assert used == {
        "appo.algorithms.tools.runs",  # how long ago a run's status was written
        "appo.algorithms.runtime.processes.strays",  # how old names of games in /dev/shm are
        "appo.algorithms.run.directory.code",  # of a start, as in the journal
        "appo.algorithms.run.folder",
        "appo.algorithms.tools.top",  # the same
        "appo.algorithms.tools.evaluate",  # compared with the times of files
        "appo.algorithms.runtime.processes.janitor",  # the same
        "appo.utils.tensorboard.writer",  # TensorBoard's events
        "appo.algorithms.runtime.monitor.status",
    }


# The names of files and folders in a run's folder.


OWNER = Path(run_folder.__file__).resolve()
PLAIN_WORDS = {"best", "best_evaluated", "past", "eval", "plots"}
"""Names that are words of other things too: kinds of checkpoints, prefixes of tags, an extra."""
LAYOUT = {
    part
    for name, value in vars(run_folder).items()
    if name.isupper() and not name.startswith("_") and isinstance(value, str | dict)
    for text in (value.values() if isinstance(value, dict) else [value])
    for part in (text, text.partition("/")[0])
    if part
}


def test_the_layout_of_a_run_has_its_names() -> None:
    expected = {
        "config.json",
        "status.json",
        "metrics.jsonl",
        "checkpoint_p",
        ".summary",
        "milestones",
        "results.jsonl",
    }
    assert expected < LAYOUT
    assert PLAIN_WORDS < LAYOUT


@pytest.mark.parametrize("path", [path for path in FILES if path != OWNER], ids=name_of)
def test_only_one_file_names_what_a_run_folder_holds(path: Path) -> None:
    assert names_of_layout(structure.tree_of(path)) == []


VAGUE = ("What", "As", "Whoever", "That")
SAID = [*FILES, *sorted(ROOT.glob("benchmarks/**/*.py"))]


@pytest.mark.parametrize("path", SAID, ids=name_of)
def test_docstrings_begin_with_a_subject_or_a_verb(path: Path) -> None:
    assert vague_docstrings(structure.tree_of(path)) == []


def vague_docstrings(tree: ast.AST) -> list[str]:
    """Return docstrings that begin as a clause without a head does: with a noun or a verb they say more."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    said = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text.splitlines()[0] for text in said if text.startswith(tuple(f"{word} " for word in VAGUE))]


@pytest.mark.parametrize(
    ("text", "vague"),
    [("What a run holds.", True), ("As the one above.", True), ("Whatever.", False), ("Return what it holds.", False)],
)
def test_vague_docstrings_are_found(text: str, vague: bool) -> None:
    assert vague_docstrings(ast.parse(f'def f():\n    """{text}"""\n')) == [text] * vague


def names_of_layout(tree: ast.AST) -> list[str]:
    """Return the strings that name a part of a run's folder; docstrings and texts, which contain a blank, do not."""
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = {}
    for node, in_path in strings(tree):
        if id(node) not in bare and " " not in node.value:
            names = LAYOUT if in_path else LAYOUT - PLAIN_WORDS
            if node.value.startswith(tuple(names)) or run_folder.CHECKPOINTS in node.value:
                found[id(node)] = f"{node.lineno}: {node.value}"
    return list(found.values())


def strings(tree: ast.AST) -> Iterator[tuple[ast.Constant, bool]]:
    """Yield every string, and again as one in a path where it is joined by a slash or an argument of what joins."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node, False
        in_path: list[ast.expr] = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            in_path = [node.right]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("Path", ".joinpath", "glob")):
            in_path = node.args
        for part in in_path:
            yield from ((n, True) for n in ast.walk(part) if isinstance(n, ast.Constant) and isinstance(n.value, str))


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('directory / "config.json"', True),
        ('NAME = "status.json"', True),
        ('f"checkpoint_p{policy}"', True),
        ('pattern = r"a|checkpoint_p\\d"', True),
        ('directory / "best"', True),
        ('parent / ("best" if best else "")', True),
        ('Path(directory, "eval")', True),
        ('directory.glob("plots/*.png")', True),
        ('load(kind="best")', False),
        ('f"eval/{tag}"', False),
        ('flag("written to metrics.jsonl and eval/")', False),
        ('"config.json"', False),  # a docstring
    ],
)
def test_names_of_a_run_folder_are_found(code: str, found: bool) -> None:
    assert bool(names_of_layout(ast.parse(code))) == found


WITHOUT_END = {
    "appo.algorithms.runtime.processes.channels: self.pipe.recv()": "only after poll() has returned True",
    "appo.algorithms.runtime.processes.channels: clock.wait()": "an entry in the books, see utils.timing",
    "appo.algorithms.runtime.processes.pool: clock.wait()": "the same",
    "appo.algorithms.tools.replay_incident: ours.recv()": "only after poll()",
    "appo.algorithms.runtime.processes.inquiry: self._pipe.recv()": "only after poll()",
    "appo.algorithms.run.tuning.measure: pipe.recv()": "only after poll()",
    "appo.algorithms.runtime.monitor.tracker_process: waiting.get()": "the end of main ends the records",
    "appo.algorithms.runtime.monitor.panel: captured.get()": "no wait: the text that was drawn",
    "appo.algorithms.runtime.checkpointing: last.result()": "only when it is done",
    "appo.algorithms.runtime.learning.read_batches: reading.result()": "in a thread of its own; files have no deadline",
    "appo.algorithms.population.lineage: self._pending.result()": "only when it is done",
    "appo.algorithms.population.past_versions: one.result()": "only when it is done",
    "appo.algorithms.playing.video: process.communicate()": "ffmpeg must end the file; Ctrl-C ends it",
    "appo.algorithms.playing.video: self._process.communicate()": "it has just been killed",
    "appo.algorithms.runtime.disk: self._queue.put(run)": "a queue without a bound takes all",
    "appo.algorithms.runtime.disk: self._queue.put(None)": "the same",
    "appo.algorithms.runtime.disk: actions.get()": "of a daemon thread, which waits for something to do",
    "appo.algorithms.run.machines.ray_wire: self.ray.put(vector.tobytes())": "into the store of Ray, which evicts",
    "appo.algorithms.run.machines.ray_wire: future.result()": "only when it is done",
    "appo.algorithms.run.machines.ray_wire: self.ray.shutdown()": "the supervisor kills a bridge that is late",
    "appo.algorithms.run.machines.examine: ray.shutdown()": "of a command, which Ctrl-C ends",
    "appo.algorithms.run.machines.local_nodes: cluster.shutdown()": "the head kills the process that is late",
    "appo.algorithms.run.machines.machine: ready.result()": "the thread sets it however it ends",
    "appo.utils.lock: self.acquire()": "our own, which refuses at once",
}
"""Waits that may last for ever as far as their arguments tell, and why they do not."""


def test_what_waits_says_how_long() -> None:
    """Whoever waits for another process, thread or queue gets on with its work when that one has died."""
    found = {
        f"{name_of(path)}: {ast.unparse(node)}"
        for path in FILES
        for node in ast.walk(structure.tree_of(path))
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


@pytest.mark.parametrize("path", [p for p in FILES if name_of(p) != "appo.algorithms.runtime.roles"], ids=name_of)
def test_roles_are_named_in_their_table_alone(path: Path) -> None:
    assert named_roles(structure.tree_of(path)) == []


def named_roles(tree: ast.AST) -> list[str]:
    """Strings that are the name of a role, or its beginning of the name of a worker, and the lines they stand in."""
    roles = [role.name for role in (MAIN, ACTOR, POLICY_WORKER, LEARNER)]  # an algorithm names its own
    names = {*roles, *(f"{name}_" for name in roles)}
    return [
        f"line {node.lineno}: {node.value}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
    ]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("worker.role == 'actor'", ["line 1: actor"]),
        ("f'learner_{index}'", ["line 1: learner_"]),
        ("{'policy_worker': 2, 'main': 1}", ["line 1: policy_worker", "line 1: main"]),
        ("worker.role == ACTOR.name", []),
        ("'actor_max_growth_mb'", []),
    ],
)
def test_names_of_roles_are_found(code: str, expected: list[str]) -> None:
    assert named_roles(ast.parse(code)) == expected


def is_wall_clock(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "time.time_ns", "datetime.now")


TRACKERS = ("wandb", "trackio", "mlflow")


WITHOUT = {
    "appo.algorithms.offline.config": ("torch", "numpy", "gymnasium"),
    "appo.algorithms.appo.config": ("torch", "numpy", "gymnasium"),  # --help
    "appo.algorithms.playing.config": ("torch", "numpy", "gymnasium"),
    "appo.algorithms.run.summary": ("torch", "numpy", "gymnasium"),
    "appo.algorithms.tools.comparison.lineage": ("torch", "numpy", "gymnasium", "matplotlib"),
    "algorithms": ("torch", "numpy", "gymnasium"),  # whatever can be imported from it
    "appo.algorithms.datasets.reader": ("torch", "pyarrow", "h5py"),
    "appo.algorithms.run.main": ("torch", *TRACKERS),  # main
    "appo.algorithms.run.plan": ("torch", *TRACKERS),  # actors
    "appo.algorithms.runtime.monitor.tracking": ("torch", *TRACKERS),
    "appo.algorithms.appo.algorithm": ("torch",),
    "appo.algorithms.run.training": ("torch",),
}
"""Modules of processes without a network, with packages that are not loaded: those that load the least are first."""
IMPORT_IN_TURN = """
import importlib, json, sys
modules, packages = json.loads(sys.argv[1])
first, found = {}, {}
for module in modules:
    importlib.import_module(module)
    for package in set(packages) & set(sys.modules):
        first.setdefault(package, module)
    found[module] = dict(first)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, dict[str, str]]:
    """Packages in memory after the import of each module of `WITHOUT`, in order and in one process: package -> module.

    The module is the first after whose import the package was there.
    """
    words = json.dumps([[*WITHOUT], sorted({package for forbidden in WITHOUT.values() for package in forbidden})])
    command = [sys.executable, "-c", IMPORT_IN_TURN, words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("module", WITHOUT)
def test_processes_without_a_network_do_not_load_torch(module: str, loaded: dict[str, dict[str, str]]) -> None:
    assert {package: by for package, by in loaded[module].items() if package in WITHOUT[module]} == {}
