"""Where things lie in a run's folder, as its files on disk say, and how they are opened: no link is followed."""

import ast
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from appo.algorithms.datasets import writer as dataset_writer
from appo.utils import checkpoint_files, logging, run_folder
from appo.utils.errors import CheckpointError, ResourceError, UsageError
from appo.utils.files import replaced_when_whole
from appo.utils.lock import RunLock
from appo.utils.metrics import MetricsLog
from appo.utils.run_folder import (
    CHECKPOINT_FOLDERS,
    CORRUPT,
    RunFolder,
    append_json_line,
    append_to_own,
    names_in_own,
    new_own,
    open_own,
    own_folder,
    read_own_mapping,
    remove_own,
    rename_own,
    replace_own,
    root_of,
    write_json_atomic,
)
from appo.utils.tensorboard.writer import EventWriter
from tests import structure
from tests.structure import name_of


def test_everything_lies_where_earlier_versions_have_left_it() -> None:
    run = RunFolder(Path("run"))
    found = (
        run.config, run.history, run.status, run.metrics, run.page, run.curve, run.lineage, run.lineage_picture,
        run.lock, run.logs, run.incidents, run.results, run.videos, run.summaries(1), run.evaluation_summaries(1),
        run.code, run.code_starts,
    )  # fmt: skip
    assert [str(path.relative_to("run")) for path in found] == [
        "config.json", "config_history.jsonl", "status.json", "metrics.jsonl", "README.md",
        "plots/learning_curve.png", "lineage.json", "lineage.png", ".lock", "logs", "incidents", "eval/results.jsonl",
        "eval/videos", ".summary/p1", "eval/.summary/p1", "code", "code/starts.jsonl",
    ]  # fmt: skip
    assert run.log("actor_0") == Path("run/logs/actor_0.log").absolute()


def test_checkpoints_lie_by_policy_and_kind() -> None:
    run = RunFolder(Path("run"))
    kinds = ("best", "best_evaluated", "milestone", "past")
    assert str(run.checkpoints(0)) == "run/checkpoint_p0"
    assert [run.checkpoints(12, kind).relative_to("run/checkpoint_p12").name for kind in kinds] == [
        "best", "best_evaluated", "milestones", "past"
    ]  # fmt: skip


def test_policies_are_those_with_a_folder_that_is_named_as_ours(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert (run.policies(), run.checkpoint_folders()) == ([], [])
    for name in ("checkpoint_p10", "checkpoint_p2", "checkpoint_p02", "checkpoint_px", "checkpoint_p", "checkpoint_p٣"):
        (run.path / name).mkdir(parents=True)
    assert run.policies() == [2, 10]
    assert len(run.checkpoint_folders()) == 6


def test_flags_that_are_missing_are_none_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.read_config() == {}
    run.config.write_text('{"gamma": 0.5}')
    assert run.read_config() == {"gamma": 0.5}
    run.config.write_text("{")
    with pytest.raises(UsageError, match=r"config\.json is damaged"):
        run.read_config()


@pytest.mark.parametrize("name", ["config", "status"])
def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path, name: str) -> None:
    run, other = RunFolder(tmp_path / "run"), tmp_path / "other"
    run.path.mkdir()
    other.write_text('{"secret": 1}')
    getattr(run, name).symlink_to(other)
    if name == "status":
        assert run.read_status() == {}
        return
    with pytest.raises(UsageError, match="cannot read"):
        run.read_config()


# Opening: no link of a run is followed, and no file with a second name is written.


FOLDERS = (
    "", "logs", "incidents", "plots", "eval", "eval/videos", "eval/.summary", "eval/.summary/p3", ".summary",
    ".summary/p0", "checkpoint_p0", "checkpoint_p12/best", "checkpoint_p1/best_evaluated", "checkpoint_p0/milestones",
    "checkpoint_p0/past", "checkpoint_p0/corrupt", "checkpoint_p0/best/corrupt",
)  # fmt: skip


@pytest.mark.parametrize("above", ["/train_dir/run", "train_dir/run", "run", "../run", "logs/a/run", "/run"])
def test_the_layout_tells_in_which_run_a_folder_lies(above: str) -> None:
    for folder in FOLDERS:
        assert root_of(Path(above, folder)) == Path(above)


def test_every_place_of_a_run_is_known_to_lie_in_it() -> None:
    run = RunFolder(Path("/train_dir/run"))
    files = (run.config, run.history, run.status, run.metrics, run.page, run.curve, run.lineage, run.lock, run.results)
    folders = [path.parent for path in (*files, run.log("main"), run.incidents / "x.json", run.videos / "x.mp4")]
    folders += [run.summaries(7), run.evaluation_summaries(7)]
    folders += [run.checkpoints(7, kind) / inner for kind in CHECKPOINT_FOLDERS for inner in ("", CORRUPT)]
    assert {root_of(folder) for folder in folders} == {run.path}
    assert {root_of(Path(path)) for path in ("logs", "/logs", "a/log", "a/eval2")} == {
        Path("."), Path("/"), Path("a/log"), Path("a/eval2")
    }  # fmt: skip


class Outside:
    """A folder beside a run, with what must stay as it is."""

    def __init__(self, above: Path) -> None:
        self.path = above / "outside"
        self.path.mkdir()
        self.victim = self.path / "victim"
        self.victim.write_text("secret\n")
        for name in ("env_a_0.json", ".p0_1.mp4", ".tmp-x"):
            (self.path / name).write_text(name)
        for step in range(2):
            checkpoint_files.save(self.path, checkpoint_files.checkpoint_name(step), {"a": b"1"})
        self.before = self.found()

    def found(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.path)): path.read_bytes() for path in self.path.rglob("*") if path.is_file()}

    def is_untouched(self) -> bool:
        return self.found() == self.before and not any(path.is_symlink() for path in self.path.rglob("*"))


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    found = Outside(tmp_path)
    yield found
    assert found.is_untouched()


def _close(descriptor: int) -> None:
    os.close(descriptor)


CHECKPOINT = "ckpt_000000000001"

WRITERS: dict[str, Callable[[Path], object]] = {
    "append": lambda folder: _close(append_to_own(folder / "x.log")),
    "append_made": lambda folder: _close(append_to_own(folder / "x.log", make=True)),
    "new": lambda folder: _close(new_own(folder / "new")),
    "replace": lambda folder: replace_own(folder / "victim", b"mine"),
    "json": lambda folder: write_json_atomic(folder / "victim", {}),
    "line": lambda folder: append_json_line(folder / "victim", {}),
    "remove": lambda folder: remove_own(folder / "victim"),
    "rename": lambda folder: rename_own(folder / "victim", "mine"),
    "metrics": lambda folder: MetricsLog(folder / "victim"),
    "lock": lambda folder: RunLock(folder / "victim").acquire(),
    "log": lambda folder: logging._LineFile(folder / "victim"),
    "save": lambda folder: checkpoint_files.save(folder, "ckpt_000000000002", {"a": b"2"}),
    "save_again": lambda folder: checkpoint_files.save(folder, CHECKPOINT, {"a": b"2"}),
    "remove_checkpoint": lambda folder: checkpoint_files.remove(folder / CHECKPOINT),
    "prune": lambda folder: checkpoint_files.prune(folder, 1),
    "quarantine": lambda folder: checkpoint_files.quarantine(
        folder, (checkpoint_files.Damaged(folder / CHECKPOINT, "damaged"),)
    ),
}
REFUSALS = (OSError, UsageError, ResourceError, CheckpointError)


@pytest.mark.parametrize("place", ["", "logs", "eval/videos", ".summary/p0", "checkpoint_p0/best"])
@pytest.mark.parametrize("name", list(WRITERS))
def test_nothing_is_written_or_removed_behind_a_link(tmp_path: Path, outside: Outside, name: str, place: str) -> None:
    """Whichever folder on the way is one: the run itself, one in it, or the last."""
    for depth in range(1 + len(Path(place).parts)):
        folder = tmp_path / f"train_dir_{depth}" / "run" / place
        linked = [folder, *folder.parents][depth]
        linked.parent.mkdir(parents=True)
        real = tmp_path / f"elsewhere_{depth}"
        linked.symlink_to(real if depth else outside.path)
        if depth:
            (real / folder.relative_to(linked)).parent.mkdir(parents=True)
            (real / folder.relative_to(linked)).symlink_to(outside.path)
        with pytest.raises(REFUSALS, match="is a link"):
            WRITERS[name](folder)
        assert outside.is_untouched()


@pytest.mark.parametrize("name", ["append", "json", "line", "lock", "log", "metrics", "new", "remove", "replace"])
def test_no_file_is_written_through_its_link(tmp_path: Path, outside: Outside, name: str) -> None:
    """What is replaced or removed is the link itself, what is written in place is refused."""
    folder = tmp_path / "run" / "logs"
    folder.mkdir(parents=True)
    for file in ("victim", "new", "x.log"):
        (folder / file).symlink_to(outside.victim)
    if name in ("json", "remove", "replace"):
        WRITERS[name](folder)
        assert not (folder / "victim").is_symlink()
        return
    with pytest.raises(REFUSALS, match="File exists" if name == "new" else "is a link"):
        WRITERS[name](folder)


@pytest.mark.parametrize("name", ["append", "line", "lock", "log", "metrics"])
def test_no_file_with_a_second_name_is_written_in_place(tmp_path: Path, outside: Outside, name: str) -> None:
    for file in ("victim", "x.log"):
        os.link(outside.victim, tmp_path / file)
    with pytest.raises(REFUSALS, match=r"has [23] names, and the others may not be of this run"):
        WRITERS[name](tmp_path)


@pytest.mark.parametrize("name", ["append", "line", "lock", "log", "metrics"])
def test_no_pipe_or_folder_is_taken_for_a_file(tmp_path: Path, name: str) -> None:
    for file in ("victim", "x.log"):
        os.mkfifo(tmp_path / file)
    with pytest.raises(REFUSALS, match="is no plain file"):
        WRITERS[name](tmp_path)
    for file in ("victim", "x.log"):
        (tmp_path / file).unlink()
        (tmp_path / file).mkdir()
    with pytest.raises(REFUSALS, match="Is a directory"):
        WRITERS[name](tmp_path)


def test_a_link_under_a_temporary_name_is_replaced_and_not_written(tmp_path: Path, outside: Outside) -> None:
    (tmp_path / f".config.json-{os.getpid()}").symlink_to(outside.victim)
    write_json_atomic(tmp_path / "config.json", {"a": 1})
    assert read_own_mapping(tmp_path / "config.json") == {"a": 1}
    assert not (tmp_path / "config.json").is_symlink()


def test_names_of_files_that_the_user_has_named_cannot_be_met_by_a_link(tmp_path: Path) -> None:
    names = set()
    for _ in range(3):
        with replaced_when_whole(tmp_path / "plot.png") as temporary:
            temporary.touch()
            names.add(temporary.name)
    assert len(names) == 3


def test_a_checkpoint_that_is_a_link_is_replaced_and_its_target_stays(tmp_path: Path, outside: Outside) -> None:
    parent = tmp_path / "checkpoint_p0"
    parent.mkdir()
    (parent / CHECKPOINT).symlink_to(outside.path / CHECKPOINT)
    checkpoint_files.save(parent, CHECKPOINT, {"a": b"2"})
    assert checkpoint_files.read(parent / CHECKPOINT, "a", 1) == b"2"
    assert os.listdir(parent) == [CHECKPOINT]


def test_links_under_names_of_leftovers_are_removed_themselves(tmp_path: Path, outside: Outside) -> None:
    parent = tmp_path / "checkpoint_p0"
    parent.mkdir()
    (parent / ".tmp-a").symlink_to(outside.path)
    (parent / ".tmp-b").mkdir()
    (parent / ".tmp-b" / "link").symlink_to(outside.path)
    (parent / CHECKPOINT).symlink_to(outside.path / CHECKPOINT)
    checkpoint_files.clean_temporaries(parent)
    assert os.listdir(parent) == [CHECKPOINT]
    checkpoint_files.remove(parent / CHECKPOINT)
    assert os.listdir(parent) == []


def test_events_behind_a_link_are_lost_and_counted(tmp_path: Path, outside: Outside) -> None:
    run = RunFolder(tmp_path / "run")
    run.summaries(0).parent.mkdir(parents=True)
    run.summaries(0).symlink_to(outside.path)
    writer = EventWriter(run.summaries(0))
    writer.add(1, {"a": 1.0})
    assert writer.close()
    assert (writer.written, writer.dropped) == (0, 1)


def test_above_the_run_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "train_dir").symlink_to(tmp_path / "disk")
    run = RunFolder(tmp_path / "train_dir" / "run")
    with closing(MetricsLog(run.metrics)) if run.path.exists() else own_folder(run.logs, make=True):
        pass
    with closing(MetricsLog(run.metrics)) as log:
        assert log.append({"a": 1})
    checkpoint_files.save(run.checkpoints(0, "best"), CHECKPOINT, {"a": b"1"})
    assert sorted(str(path.relative_to(tmp_path / "disk")) for path in (tmp_path / "disk").rglob("*")) == [
        "run", "run/checkpoint_p0", "run/checkpoint_p0/best", f"run/checkpoint_p0/best/{CHECKPOINT}",
        f"run/checkpoint_p0/best/{CHECKPOINT}/MANIFEST.json", f"run/checkpoint_p0/best/{CHECKPOINT}/a", "run/logs",
        "run/metrics.jsonl",
    ]  # fmt: skip


def test_a_run_that_is_a_link_is_read_and_not_written(tmp_path: Path, outside: Outside) -> None:
    (tmp_path / "run").symlink_to(outside.path)
    with open_own(tmp_path / "run" / "victim") as file:
        assert file.read() == b"secret\n"
    assert names_in_own(tmp_path / "run") == []
    with pytest.raises(OSError, match="run is a link, and no link is followed here"):
        append_to_own(tmp_path / "run" / "victim")


def test_descriptors_are_closed_whatever_happens(tmp_path: Path, outside: Outside) -> None:
    (tmp_path / "run" / "eval").mkdir(parents=True)
    (tmp_path / "run" / "eval" / "videos").symlink_to(outside.path)
    (tmp_path / "run" / "eval" / "results.jsonl").symlink_to(outside.victim)
    before = len(os.listdir("/proc/self/fd"))
    for write in WRITERS.values():
        with pytest.raises(REFUSALS):
            write(tmp_path / "run" / "eval" / "videos")
    with pytest.raises(OSError, match="is a link"):
        append_json_line(tmp_path / "run" / "eval" / "results.jsonl", {})
    replace_own(tmp_path / "run" / "eval" / "new", b"", make=True)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b" " * 301, "is damaged: it is larger than 0 MiB"),
        (b"[]", "must hold a mapping"),
        (b"\xff", "is damaged: 'utf-8' codec"),
        (b"{", "is damaged: Expecting"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "is damaged: it is nested deeper than 100 levels"),
    ],
)
def test_what_is_no_mapping_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UsageError, match=reason):
        read_own_mapping(tmp_path / "x.json", 300)


# That nobody opens them otherwise: every call in our code that writes or removes something by its path.


ELSEWHERE = {
    "appo.algorithms.datasets.door: folder.mkdir(parents=True, exist_ok=True)": "above a dataset that the user names",
    "appo.algorithms.playing.video: path.parent.mkdir(parents=True, exist_ok=True)": "of a video that the user names",
    "appo.algorithms.playing.video: self._temporary.unlink(missing_ok=True)": "a name that nobody can guess",
    "appo.algorithms.playing.video: os.replace(self._temporary, self.path)": "replaces a link itself",
    "appo.algorithms.tools.comparison.plot: path.parent.mkdir(parents=True, exist_ok=True)": "named by the user",
    "appo.algorithms.tools.report.report: path.parent.mkdir(parents=True, exist_ok=True)": "named by the user",
    "appo.algorithms.tools.report.report: temporary.write_bytes(content)": "named by the user",
    "appo.algorithms.tools.launch: config.folder.mkdir(parents=True, exist_ok=True)": "above all runs",
    "appo.algorithms.tools.tune.tune: shutil.rmtree(self.folder / name, ignore_errors=True)": "does not follow links",
    "appo.algorithms.tools.hub: folder.mkdir(parents=True)": "must be new",
    "appo.algorithms.tools.hub: shutil.copyfile(config.video, folder / f'replay{Path(config.video).suffix.lower()}')":
        "into a new folder",
    "appo.algorithms.tools.hub: Path(config.train_dir).mkdir(parents=True, exist_ok=True)": "above all runs",
    "appo.algorithms.tools.hub: target.parent.mkdir(parents=True, exist_ok=True)": "in a new folder",
    "appo.algorithms.tools.hub: target.open('xb')": "in a new folder",
    "appo.algorithms.tools.doctor: shutil.rmtree(folder, ignore_errors=True)": "in a temporary folder of its own",
    "appo.algorithms.run.directory.taking: os.rename(directory, aside)": "the folder of a run, which is no link",
    "appo.algorithms.run.directory.taking: os.rename(aside, directory)": "the same, back",
    "appo.algorithms.run.directory.taking: os.mkdir(directory)": "a new folder, or an error",
    "appo.algorithms.run.directory.taking: os.rmdir(folder)": "a folder above that of the run, if it is empty",
    "appo.algorithms.run.directory.taking: shutil.rmtree(directory, ignore_errors=True)": "does not follow links",
    "appo.algorithms.run.directory.taking: shutil.rmtree(aside, ignore_errors=True)": "does not follow links",
    "appo.algorithms.run.trust: path.parent.mkdir(mode=448, parents=True, exist_ok=True)": "of the user's key",
    "appo.algorithms.run.trust: os.link(temporary, path)": "the user's key",
    "appo.algorithms.run.trust: temporary.unlink()": "the user's key",
    "appo.algorithms.run.trust: os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW"
    " | os.O_CLOEXEC, 384)": "the user's key",
    "appo.algorithms.runtime.processes.fork_server: directory.mkdir(mode=448, exist_ok=True)": "temporary",
    "appo.algorithms.runtime.processes.janitor: shutil.rmtree(directory, ignore_errors=True)": "temporary",
    "appo.algorithms.runtime.processes.strays: os.unlink(SHARED_MEMORY + name)": "shared memory",
    "appo.envs.families.vizdoom.observations: Path(scratch.name, '_vizdoom').mkdir()": "temporary",
    "appo.algorithms.runtime.processes.janitor: os.unlink(path)": "shared memory",
    "appo.algorithms.runtime.processes.prctl: path.write_text(str(min(1000, int(path.read_text()) + score)))": "/proc",
    "appo.algorithms.run.training: path.unlink(missing_ok=True)": "temporary",
    "appo.algorithms.runtime.learning.learner_worker: Path(path).unlink()": "temporary, named by main",
    "appo.algorithms.run.machines.cluster: token.write_text(secrets.token_hex(32))": "in a new folder",
    "appo.algorithms.run.machines.cluster: shutil.rmtree(folder, ignore_errors=True)": "temporary",
    "appo.algorithms.run.machines.machine: self.config.run.folder.log('probe').parent.mkdir(parents=True)": "temporary",
    "appo.algorithms.run.machines.machine: self._folder.rename(f'{self._folder}-ended')": "temporary",
    "appo.algorithms.run.machines.machine: shutil.rmtree(gone, ignore_errors=True)": "temporary",
    "appo.algorithms.run.machines.machine: shutil.rmtree(folder, ignore_errors=True)": "temporary",
    "appo.utils.files: temporary.unlink()": "a name that nobody can guess, beside a file that the user names",
    "appo.utils.files: os.replace(temporary, path)": "replaces a link itself",
    "appo.utils.directories: path.mkdir(exist_ok=True)": "above the folder of a run",
    "appo.utils.command_line: os.open(os.devnull, os.O_WRONLY)": "no file",
    "appo.utils.command_line: os.open(os.devnull, os.O_RDWR)": "no file",
}  # fmt: skip
"""Calls that write, make, rename or remove by a path, and why that is nothing in the folder of a run."""

WRITING_CALLS = {
    "os": {"replace", "rename", "renames", "unlink", "remove", "removedirs", "mkdir", "makedirs", "rmdir", "link",
           "symlink", "truncate", "mkfifo", "mknod", "chmod", "chown", "utime"},
    "shutil": {"rmtree", "copy", "copy2", "copyfile", "copytree", "move"},
}  # fmt: skip
WRITING_METHODS = {
    "write_text", "write_bytes", "touch", "mkdir", "rmdir", "unlink", "rename", "symlink_to", "hardlink_to", "chmod",
}  # fmt: skip
WRITING_NAMES = {"open", "replace", *WRITING_METHODS, *WRITING_CALLS["os"], *WRITING_CALLS["shutil"]}
WITH_FOLDER = {"dir_fd", "src_dir_fd"}


def writes_by_path(node: ast.AST) -> bool:
    """Say whether a call writes, makes, renames or removes what a path names, and not a name in an open folder."""
    if not isinstance(node, ast.Call) or WITH_FOLDER & {keyword.arg for keyword in node.keywords}:
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id == "open" and any(_is_writing_mode(word) for word in _words(node))
    if not isinstance(node.func, ast.Attribute) or node.func.attr not in WRITING_NAMES:
        return False
    owner, name = ast.unparse(node.func.value), node.func.attr
    if owner == "os" and name == "open":
        return any(re.search("O_(WRONLY|RDWR|CREAT|APPEND|TRUNC)", word) for word in _words(node))
    if owner in WRITING_CALLS:
        return name in WRITING_CALLS[owner]
    if name == "replace":  # of a path; that of a text has two arguments, that of a data class none without a name
        return len(node.args) == 1 and not node.keywords
    return name in WRITING_METHODS or (name == "open" and any(_is_writing_mode(word) for word in _words(node)))


def _words(node: ast.Call) -> list[str]:
    return [ast.unparse(argument) for argument in (*node.args, *(keyword.value for keyword in node.keywords))]


def _is_writing_mode(word: str) -> bool:
    return bool(re.fullmatch(r"'[rbt]*[wax+][wax+bt]*'", word))


def test_files_of_a_run_are_opened_in_one_place() -> None:
    found = {
        f"{name_of(path)}: {ast.unparse(node)}"
        for path in structure.files()
        if path not in (Path(run_folder.__file__), Path(dataset_writer.__file__))  # datasets lie where the user says
        for node in ast.walk(structure.tree_of(path))
        if writes_by_path(node)
    }
    assert found == set(ELSEWHERE)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("open(path)", False),
        ("open(path, 'rb')", False),
        ("open(path, 'w')", True),
        ("open(path, mode='r+b')", True),
        ("path.open('ab')", True),
        ("path.open()", False),
        ("os.open(path, os.O_RDONLY)", False),
        ("os.open(path, os.O_RDWR | os.O_CREAT)", True),
        ("os.open(name, os.O_WRONLY, dir_fd=folder)", False),
        ("path.write_text('x')", True),
        ("path.unlink(missing_ok=True)", True),
        ("os.unlink(name, dir_fd=folder)", False),
        ("os.unlink(path)", True),
        ("shutil.rmtree(path)", True),
        ("text.replace('a', 'b')", False),
        ("path.replace(other)", True),
        ("replace(config, seed=1)", False),
    ],
)
def test_calls_that_write_are_found(code: str, expected: bool) -> None:
    assert writes_by_path(ast.parse(code, mode="eval").body) == expected
