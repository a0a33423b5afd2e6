"""What strangers may have written is read through few doors: files, names in folders, and what environments say.

A run, a dataset and an environment may come from anybody. A module that opens a file by its path follows links and
waits on pipes, one that takes a number from a name or a value from an `info` believes it. So each does so in a module
of this table, or not at all.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import structure
from tests.structure import name_of

FILE, JSON, NAMES, NUMBER, INFO = "opens a file", "parses", "lists names", "a number from a name", "reads an info"

READERS = {"read_text": FILE, "read_bytes": FILE, "glob": NAMES, "rglob": NAMES, "iterdir": NAMES}
"""Methods of paths."""
FUNCTIONS = {
    "open": FILE, "io.open": FILE, "os.open": FILE, "np.load": FILE, "np.memmap": FILE,
    "np.fromfile": FILE, "np.loadtxt": FILE, "np.genfromtxt": FILE, "h5py.File": FILE, "pa.memory_map": FILE,
    "pa.OSFile": FILE, "pa.ipc.open_file": FILE, "pyarrow.memory_map": FILE, "pyarrow.OSFile": FILE,
    "pyarrow.ipc.open_file": FILE, "safetensors.safe_open": FILE, "safe_open": FILE, "load_file": FILE,
    "torch.load": FILE, "tomllib.load": FILE, "shutil.copyfile": FILE, "shutil.copy": FILE, "shutil.copytree": FILE,
    "json.load": JSON, "json.loads": JSON, "yaml.load": JSON, "yaml.safe_load": JSON, "pickle.load": JSON,
    "pickle.loads": JSON, "os.listdir": NAMES, "os.scandir": NAMES, "os.walk": NAMES, "os.fwalk": NAMES,
    "glob.glob": NAMES, "glob.iglob": NAMES,
}  # fmt: skip
INFOS = {"info", "infos", "final_info", "final_infos"}
"""Names of what an environment says beside its observation."""


def calls(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield kind and text of everything that reads what a stranger may have written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (kind := _kind(node)):
            yield kind, ast.unparse(node)
        elif isinstance(node, ast.Subscript) and _is_info(node.value) and isinstance(node.ctx, ast.Load):
            yield INFO, ast.unparse(node)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            yield from ((INFO, ast.unparse(node)) for one in node.comparators[:1] if _is_info(one))


def _kind(node: ast.Call) -> str:
    name = ast.unparse(node.func)
    if name in FUNCTIONS and not any(keyword.arg == "dir_fd" for keyword in node.keywords):
        return FUNCTIONS[name]
    if name in ("int", "float") and any(_is_name(inner) for argument in node.args for inner in ast.walk(argument)):
        return NUMBER
    if isinstance(node.func, ast.Attribute):
        if node.func.attr in ("get", "pop", "items") and _is_info(node.func.value):
            return INFO
        if node.func.attr == "open" and name not in ("os.open", "webbrowser.open"):
            return FILE
        return READERS.get(node.func.attr, "")
    return ""


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("name", "stem", "suffix")


def _is_info(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id in INFOS) or (isinstance(node, ast.Attribute) and node.attr in INFOS)


PROC, OURS, USERS = "/proc, /dev and the like", "a file of the installation", "a file that the user names"
DOORS: dict[str, tuple[set[str], str]] = {
    # Folders of runs, and files that the user names.
    "appo.utils.run_folder": ({FILE, NAMES}, "the door of runs: folder by folder, no link, bounded"),
    "appo.utils.directories": ({FILE}, "folders, to put their names on disk"),
    "appo.utils.files": ({FILE, JSON}, "the door of settings: no pipe, no alias, bounded"),
    "appo.utils.checkpoint_files": ({JSON, NAMES}, "names that match as a whole, in a folder that is open"),
    "appo.utils.metrics": ({JSON}, "lines of a file that `open_own` opened, bounded"),
    "appo.utils.lock": ({JSON}, "the lock, bounded"),
    "appo.utils.tensorboard.event_files": ({NAMES}, "in a folder that is open"),
    "appo.algorithms.run.folder": ({JSON, NAMES}, "finds runs; a bounded line of a file that `open_own` opened"),
    "appo.algorithms.run.directory.taking": ({NAMES}, "looks whether there is something"),
    "appo.algorithms.run.trust": ({FILE}, "the key of the user"),
    "appo.algorithms.run.directory.code": (
        {FILE, JSON, NAMES},
        "the user's code, bounded; in a run whether there is something",
    ),
    "appo.algorithms.run.summary": (
        {FILE, NAMES},
        "whether the lock is held, no link; what is read of a name is verified",
    ),
    "appo.algorithms.run.program": ({FILE}, "the program that called us"),
    "appo.algorithms.run.directory.page": ({FILE}, "a picture in a temporary folder of our own"),
    "appo.algorithms.runtime.learning.rollback": ({NAMES}, "old incidents, removed as they are"),
    "appo.algorithms.runtime.learning.learner_worker": ({FILE}, "weights in the temporary folder, named by main"),
    "appo.algorithms.runtime.memory.learner_state": ({JSON}, "the shared memory of the run"),
    "appo.algorithms.runtime.memory.state_files": ({JSON}, "the door of checkpoints: bounded headers, each checked"),
    "appo.algorithms.runtime.monitor.upkeep": ({NAMES}, "sizes of logs"),
    "appo.algorithms.tools.evaluate": (
        {NAMES, NUMBER},
        "whether there is something; the name of a verified checkpoint",
    ),
    "appo.algorithms.tools.hub": ({FILE, NAMES}, "a folder that it has made itself; a video that the user names"),
    "appo.algorithms.tools.report.report": ({FILE}, OURS),
    "appo.envs.incidents": ({NAMES}, "in a folder that is open"),
    # Datasets.
    "appo.algorithms.datasets.door": ({FILE, NAMES}, "the door of datasets: folder by folder, no link"),
    "appo.algorithms.datasets.stored": ({INFO}, "properties of a JPEG"),
    "appo.algorithms.datasets.reader": ({NAMES}, "patterns of folders of the user"),
    "appo.algorithms.datasets.assembler": ({INFO}, "columns of infos as actors record them"),
    "appo.algorithms.datasets.arrow_source": ({FILE}, "a file that the door has opened"),
    "appo.algorithms.datasets.hdf5_source": ({FILE}, "a file that the door has opened"),
    "appo.algorithms.datasets.writer": ({INFO}, "columns of infos that are written"),
    "appo.algorithms.datasets.episodes": ({INFO}, "the door of episodes: sizes, and columns of infos"),
    "appo.algorithms.datasets.space_json": ({JSON}, "the door of spaces: sizes"),
    "appo.algorithms.datasets.columns": ({INFO}, "columns of infos that `episodes` has checked"),
    "appo.algorithms.tools.estimate": ({INFO}, "columns of infos that `episodes` has checked"),
    # What environments say beside observations.
    "appo.envs.infos": ({INFO}, "the door of infos: each value checked by its name"),
    "appo.envs.masks": ({INFO}, "the door of masks"),
    "appo.envs.conversion": ({INFO}, "what infos of a vector say of one row"),
    "appo.envs.vectors.autoreset": ({INFO}, "final observations and infos of a vector that resets in the same step"),
    "appo.envs.loop.python_loop": ({INFO}, "one environment or several in a loop"),
    "appo.envs.vectors.gym_vector": ({INFO}, "environments that are a vector"),
    "appo.envs.agents.multi_agent": ({INFO}, "several agents"),
    "appo.envs.agents.pettingzoo": ({INFO}, "several agents"),
    "appo.envs.families.envpool.pool": ({INFO}, "a family that is a vector"),
    # Words of other ranks and machines of the run, see docs/security.md.
    "appo.algorithms.run.ranks.meeting": ({JSON, NAMES}, "words of rank 0, and GPUs in /dev"),
    "appo.algorithms.runtime.learning.rank_group": ({JSON}, "words of other ranks"),
    # Our own texts and pipes, and what the kernel says.
    "appo.utils.values": ({FILE, JSON}, f"words of the command line, and {OURS}"),
    "appo.utils.command_line": ({FILE}, PROC),
    "appo.utils.system.limits": ({NAMES}, PROC),
    "appo.utils.system.memory": ({NAMES}, PROC),
    "appo.utils.system.cgroups": ({FILE}, PROC),
    "appo.algorithms.population.lineage": ({JSON}, "a copy of what it has made"),
    "appo.algorithms.run.training": ({JSON}, "lines of a process of our own"),
    "appo.algorithms.runtime.monitor.terminal": ({FILE}, PROC),
    "appo.algorithms.runtime.monitor.tracker_process": ({FILE, JSON}, "lines of main"),
    "appo.algorithms.runtime.processes.prctl": ({FILE}, PROC),
    "appo.algorithms.runtime.processes.strays": ({FILE, NAMES, NUMBER}, PROC),
    "appo.algorithms.runtime.machines.packets": ({JSON}, "the door of packets: sizes, and each value checked"),
    "appo.algorithms.run.machines.same": ({FILE, NAMES}, "the source of appo itself, for a hash"),
    "appo.algorithms.run.machines.machine": (
        {FILE, JSON, NAMES},
        "a request of the head, which could run any code here; temporary folders by name, to lock",
    ),
    "appo.algorithms.run.machines.ray_wire": ({JSON}, "the answer of a machine, of which a text is shown"),
    "appo.envs.loop.reward_shaping": ({JSON}, "a copy of what it has made"),
}
"""Module -> what it may read by itself, and why nothing of a stranger's is believed there."""


@cache
def calls_of(path: Path) -> tuple[tuple[str, str], ...]:
    """Return the `calls` of a file."""
    return tuple(calls(structure.tree_of(path)))


def strays(module: str, found: Iterable[tuple[str, str]]) -> list[str]:
    """List what a module reads by itself, of its `calls`, that the table does not let it read."""
    allowed = DOORS.get(module, (set(), ""))[0]
    return [f"{module} {kind}: {text}" for kind, text in found if kind not in allowed]


def test_what_strangers_may_have_written_is_read_through_the_doors_alone() -> None:
    """Use `open_own`, `names_in_own`, `read_own_mapping`, `listed`, `read_mapping`, or the readers of datasets."""
    assert [text for path in structure.files() for text in strays(name_of(path), calls_of(path))] == []


def test_every_door_is_as_wide_as_its_module_needs() -> None:
    used = {name_of(path): {kind for kind, _ in calls_of(path)} for path in structure.files()}
    assert {name: kinds for name, (kinds, _) in DOORS.items()} == {name: used.get(name, set()) for name in DOORS}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("open(path)", FILE),
        ("open(path, 'rb').read()", FILE),
        ("io.open(path)", FILE),
        ("Path(folder, 'config.json').open()", FILE),
        ("os.open(path, os.O_RDONLY)", FILE),
        ("path.read_text(encoding='utf-8')", FILE),
        ("(folder / 'x').read_bytes()", FILE),
        ("np.load(path)", FILE),
        ("np.memmap(path, np.uint8)", FILE),
        ("h5py.File(path, 'r')", FILE),
        ("pa.memory_map(str(path))", FILE),
        ("torch.load(path)", FILE),
        ("json.load(file)", JSON),
        ("json.loads(text)", JSON),
        ("yaml.safe_load(text)", JSON),
        ("folder.glob('part-*')", NAMES),
        ("sorted(folder.rglob('*'))", NAMES),
        ("[one for one in folder.iterdir()]", NAMES),
        ("os.listdir(folder)", NAMES),
        ("os.scandir(folder)", NAMES),
        ("int(path.name[5:])", NUMBER),
        ("max(int(path.stem.split('_')[1]) for path in paths)", NUMBER),
        ("float(entry.name)", NUMBER),
        ("info['num_frames']", INFO),
        ("said.infos[agent]", INFO),
        ("info.get('true_reward', 0.0)", INFO),
        ("'action_mask' in infos", INFO),
    ],
)
def test_a_module_that_reads_by_itself_is_found(code: str, kind: str) -> None:
    (found,) = strays("appo.algorithms.new_module", calls(ast.parse(code)))
    assert found.startswith(f"appo.algorithms.new_module {kind}: ")


@pytest.mark.parametrize(
    "code",
    [
        "open_own(path)",
        "os.open(name, flags, dir_fd=folder)",
        "webbrowser.open(address)",
        "names_in_own(folder)",
        "json.dumps(x)",
        "int(match[1])",
        "info = {}",
        "info['x'] = 1",
        "x.name",
    ],
)
def test_what_goes_through_a_door_is_not(code: str) -> None:
    assert strays("appo.algorithms.new_module", calls(ast.parse(code))) == []


def test_a_door_is_open_for_what_the_table_says() -> None:
    tree = ast.parse("path.read_text()\njson.loads(text)")
    assert strays("appo.utils.metrics", calls(tree)) == ["appo.utils.metrics opens a file: path.read_text()"]
