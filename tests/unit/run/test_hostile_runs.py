"""Runs that came from elsewhere: whatever their files say, nothing is executed, nothing outside is read or written.

Each payload is planted into a run directory, and all that reads one is let loose on it. Every reader must come to an
end with a result or with an error of ours, in one line; the one that matters must refuse with its exit code.
"""

import hashlib
import io
import json
import lzma
import marshal
import os
import pickle
import shutil
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from appo.algorithms.playing import video
from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.playing.saved_run import find_run
from appo.algorithms.run.config import Config, parse_train, resolve
from appo.algorithms.run.directory.taking import refuse_links
from appo.algorithms.run.resume import begin_from, finished_before, seed_of_resumed
from appo.algorithms.run.summary import summaries
from appo.algorithms.runtime.checkpointing import resume
from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.learner_state import ModelDescription, StateBlock
from appo.algorithms.runtime.memory.state_files import encode
from appo.envs.config import EnvConfig
from appo.envs.make import check_name, make_single
from appo.utils import checkpoint_files
from appo.utils.errors import AppoError, ResourceError, UsageError
from appo.utils.hashed_files import ManifestEntry
from appo.utils.lock import RunLock
from appo.utils.metrics import last_values, read_metrics, without_lost
from tests.patience import HANG_SECONDS
from tests.states import adam_layout, adam_state

TABLE = [("w", (2, 2)), ("b", (2,))]
SIZE, MOMENTS = 6, 3
MODEL = ModelDescription(TABLE, 0, adam_layout(SIZE, MOMENTS))
CANARY = "canary"  # what a payload would leave, were it executed
SECRET = b"what lies outside of the run"
COMMAND = f"touch {CANARY}"
FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "pickle.find_class",
    "ctypes.dlopen",
)

Files = dict[str, bytes]


class _Watch:
    """What the interpreter says of itself while a payload is read."""

    armed = False
    seen: tuple[str, ...] = ()


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _Watch.armed and event in FORBIDDEN:
        _Watch.seen += (event,)


sys.addaudithook(_audit)  # for ever: there is no way to take one back


class Explosive:
    """Unpickled, it runs a command."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (COMMAND,)


def good_files() -> Files:
    vectors = np.arange(3 * SIZE, dtype=np.float32).reshape(3, SIZE)
    meta = {
        "version": 7, "updates": 3, "adam_steps": 3.0, "learning_rate": 0.1, "generator": "AAE=", "env_steps": 100,
        "samples": 100, "discarded": 1,
        "progress": {"episodes": 2, "elapsed_seconds": 1.5, "windows": {"reward": [1.0]}},
    }  # fmt: skip
    return encode(adam_state(vectors, np.array([1.0, 2.0, 3.0]), meta), TABLE)


def plant(path: Path, files: Files, manifest: bytes | None = None) -> None:
    """A checkpoint that verifies, whatever it holds: who can write files can write their hashes."""
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    entries = {
        name: ManifestEntry(len(content), hashlib.sha256(content).hexdigest()) for name, content in files.items()
    }
    (path / checkpoint_files.MANIFEST).write_bytes(checkpoint_files._encode(entries) if manifest is None else manifest)


@dataclass(frozen=True)
class Planted:
    """A run directory beside a file that is none of its business."""

    directory: Path

    @property
    def newest(self) -> Path:
        return self.directory / "checkpoint_p0" / "ckpt_000000000100"

    @property
    def outside(self) -> Path:
        return self.directory.parents[1] / "outside"


@pytest.fixture(scope="module", autouse=True)
def _ids_are_known() -> None:
    """Libraries of environments that are installed load libraries of their own when all ids are listed first."""
    with pytest.raises(UsageError):
        check_name(EnvConfig(env="Nowhere-v0"))


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Planted]:
    monkeypatch.chdir(tmp_path)
    run = Planted(tmp_path / "train_dir" / "run")
    run.directory.mkdir(parents=True)
    run.outside.mkdir()
    (run.outside / "secret").write_bytes(SECRET)
    (run.directory / "config.json").write_text('{"env": "CartPole-v1"}')
    (run.directory / "status.json").write_text("{}")
    plant(run.newest, good_files())
    _Watch.seen, _Watch.armed = (), True
    yield run
    _Watch.armed = False
    assert _Watch.seen == ()
    assert not list(tmp_path.rglob(CANARY))
    assert (run.outside / "secret").read_bytes() == SECRET
    assert {path.name for path in run.outside.rglob("*")} <= {"secret", *NAMES_OUTSIDE}


NAMES_OUTSIDE = {"ckpt_000000000100", "model.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json"}


def blocks() -> list[StateBlock]:
    return [StateBlock(Arena.create(StateBlock.declare(0, MODEL.layout.vectors)), 0)]


def flags(**given: object) -> Config:
    return resolve({"train_dir": "train_dir", **given})[0]


def start(run: Planted) -> object:
    """What a start does before it trains."""
    config = flags(experiment="run")
    refuse_links(run.directory)
    with RunLock(run.directory / ".lock"):
        finished_before(config)
        seed_of_resumed(run.directory, 1)
        read_metrics(run.directory / "metrics.jsonl")
        return resume(run.directory, blocks(), [MODEL])


def enjoy(run: Planted) -> object:
    return find_run(EvaluationConfig(train_dir=str(run.directory.parent), experiment="run"))


def initialize(run: Planted) -> object:
    begin_from(flags(env="CartPole-v1", experiment="new", init_from="run"), blocks(), [MODEL])
    return None


def show(run: Planted) -> object:
    shown = last_values(without_lost(read_metrics(run.directory / "metrics.jsonl")))
    return shown, [json.dumps(one._asdict()) for one in summaries({p.name: p for p in run.directory.parent.iterdir()})]


def outcome(read: Callable[[Planted], object], run: Planted) -> int:
    """The exit code that a reader comes to; what it says is one line, and nothing of what lies outside."""
    try:
        result: object = read(run)
        failure = None
    except AppoError as error:
        result, failure = str(error), error
    assert SECRET.decode() not in repr(result)
    if failure is None:
        return 0
    assert len(str(failure)) < 2000
    assert failure.exit_code == 2 or (failure.__cause__ is None and not failure.traceback)  # which would be printed
    return failure.exit_code


def read_by_all(run: Planted) -> int:
    """What a start comes to; all others come to some end."""
    for read in (show, enjoy, initialize):
        assert outcome(read, run) in (0, 2, 3, 5, 6)
    return outcome(start, run)


# ---- files of weights


def zipped(name: str, content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return file.getvalue()


def by_torch(*, new: bool) -> bytes:
    file = io.BytesIO()
    torch.save({"model": Explosive()}, file, _use_new_zipfile_serialization=new)
    return file.getvalue()


def by_numpy(*, many: bool) -> bytes:
    file = io.BytesIO()
    array = np.array([Explosive()], dtype=object)
    if many:
        np.savez(file, w=array)
    else:
        np.save(file, array, allow_pickle=True)
    return file.getvalue()


def foreign_contents() -> Files:
    """What other libraries would execute, or unpack for ever."""
    zeros = bytes(1 << 22)
    pickles = {f"pickle_{protocol}": pickle.dumps(Explosive(), protocol) for protocol in range(6)}
    code = marshal.dumps(compile(f"import os; os.system({COMMAND!r})", "x", "exec"))
    return pickles | {
        "pickle_global": f"cos\nsystem\n(S'{COMMAND}'\ntR.".encode(),
        "pickle_inst": f"(S'{COMMAND}'\nios\nsystem\n.".encode(),
        "torch_zip": by_torch(new=True),
        "torch_legacy": by_torch(new=False),
        "nested_zip": zipped("a.zip", zipped("data.pkl", pickle.dumps(Explosive()))),
        "npy_of_objects": by_numpy(many=False),
        "npz_of_objects": by_numpy(many=True),
        "marshal": code,
        "pyc": bytes(16) + code,
        "python": f"import os\nos.system({COMMAND!r})\n".encode(),
        "shell": f"#!/bin/sh\n{COMMAND}\n".encode(),
        "yaml": f"!!python/object/apply:os.system ['{COMMAND}']\n".encode(),
        "elf": b"\x7fELF\x02\x01\x01" + bytes(57),
        "zip_bomb": zipped("weights", zeros),
        "zlib_bomb": zlib.compress(zeros),
        "xz_bomb": lzma.compress(zeros),
        "empty": b"",
        "seven_bytes": bytes(7),
        "zeros": bytes(64),
    }


def tensors(header: object, content: bytes = bytes(24), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", (len(text) if length is None else length) & (2**64 - 1)) + text + content


def tensor(dtype: object = "F32", shape: object = (6,), offsets: object = (0, 24)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


LYING_HEADERS: Files = {
    "length_zero": tensors(b"", length=0),
    "length_2_63": tensors({}, length=2**63),
    "length_2_64": tensors({}, length=2**64 - 1),
    "length_beyond_the_file": tensors({}, length=1000),
    "length_100_mb": tensors({}, length=100_000_001),
    "no_json": tensors(b"import os"),
    "list": tensors([]),
    "number": tensors(7),
    "not_utf8": tensors(b'{"\xff": 1}'),
    "nested": tensors(b"[" * 100_000),
    "nested_objects": tensors(b'{"a":' * 50_000),
    "nan": tensors(b'{"w": NaN}'),
    "entry_is_text": tensors({"w": "F32"}),
    "metadata_is_a_list": tensors({"__metadata__": [1], "w": tensor()}),
    "metadata_of_numbers": tensors({"__metadata__": {"a": 1}, "w": tensor()}),
    "negative_offset": tensors({"w": tensor(offsets=(-8, 16))}),
    "offset_beyond": tensors({"w": tensor(offsets=(0, 2**40), shape=(2**38,))}),
    "offsets_reversed": tensors({"w": tensor(offsets=(24, 0))}),
    "offsets_overlap": tensors({"w": tensor(), "b": tensor()}),
    "offsets_leave_a_hole": tensors({"w": tensor(offsets=(4, 24), shape=(5,))}),
    "offset_2_64": tensors({"w": tensor(offsets=(0, 2**64))}),
    "shape_overflows": tensors({"w": tensor(shape=(2**62, 2**62, 2**62))}),
    "shape_overflows_to_fit": tensors({"w": tensor(shape=(2**63, 2, 6))}),
    "shape_negative": tensors({"w": tensor(shape=(-2, -3))}),
    "shape_of_floats": tensors({"w": tensor(shape=(2.5, 2.4))}),
    "shape_is_text": tensors({"w": tensor(shape="6")}),
    "shape_of_too_many": tensors({"w": tensor(shape=[1] * 100_000 + [6])}),
    "type_unknown": tensors({"w": tensor(dtype="O")}),
    "type_is_python": tensors({"w": tensor(dtype="os.system")}),
    "type_of_a_list": tensors({"w": tensor(dtype=["F32"])}),
    "trailing_bytes": tensors({"w": tensor()}, bytes(1000)),
    "brain_floats": tensors({"w": tensor("BF16", (2, 2), (0, 8)), "b": tensor("BF16", (2,), (8, 12))}, bytes(12)),
}


def model_of(**changed: np.ndarray | None) -> bytes:
    arrays = {"w": np.ones((2, 2), np.float32), "b": np.ones(2, np.float32)} | changed
    return save({name: array for name, array in arrays.items() if array is not None})


def optimizer_of(**changed: np.ndarray | None) -> bytes:
    arrays: dict[str, np.ndarray | None] = {
        prefix + name: np.zeros(shape, np.float32) for prefix in ("exp_avg.", "exp_avg_sq.") for name, shape in TABLE
    }
    arrays |= {"statistics": np.ones(MOMENTS)} | {name.replace("__", "."): array for name, array in changed.items()}
    return save({name: array for name, array in arrays.items() if array is not None})


OTHER_MODELS: Files = {
    "one_too_few": model_of(b=None),
    "one_too_many": model_of(c=np.ones(2, np.float32)),
    "name_that_climbs": model_of(**{"../../../x": np.ones(2, np.float32)}),
    "name_with_a_command": model_of(**{f"$({COMMAND})": np.ones(2, np.float32)}),
    "another_shape": model_of(w=np.ones((2, 3), np.float32)),
    "scalar": model_of(b=np.array(1, np.float32)),
    "none": save({}),
}
BAD_WEIGHTS: Files = {
    "nan": model_of(b=np.array([1, np.nan], np.float32)),
    "infinite": model_of(w=np.full((2, 2), np.inf, np.float32)),
    "doubles": model_of(b=np.ones(2)),
    "integers": model_of(b=np.ones(2, np.int64)),
    "booleans": model_of(b=np.ones(2, np.bool_)),
}
BAD_OPTIMIZERS: Files = {
    "no_moments": optimizer_of(exp_avg__w=None),
    "no_second_moments": optimizer_of(exp_avg_sq__b=None),
    "another_shape": optimizer_of(exp_avg__w=np.zeros(4, np.float32)),
    "doubles": optimizer_of(exp_avg__w=np.zeros((2, 2))),
    "nan": optimizer_of(exp_avg__b=np.full(2, np.nan, np.float32)),
    "no_statistics": optimizer_of(statistics=None),
    "statistics_of_floats": optimizer_of(statistics=np.ones(MOMENTS, np.float32)),
    "statistics_2d": optimizer_of(statistics=np.ones((1, MOMENTS))),
    "statistics_infinite": optimizer_of(statistics=np.array([1, np.inf, 1])),
}

# ---- plain values

BAD_COUNTS = ("1", [1], {}, None, True, -1, 1.5, 2**53 + 1, 10**400, {"py/object": "os.system"})


def plain_with(**changed: object) -> bytes:
    return json.dumps({**json.loads(good_files()["state.json"]), **changed}).encode()


BAD_PLAIN: Files = {
    **{f"env_steps_{i}": plain_with(env_steps=value) for i, value in enumerate(BAD_COUNTS)},
    **{f"{name}_is_text": plain_with(**{name: "9"}) for name in ("version", "updates", "samples", "discarded")},
    **{f"{name}_is_negative": plain_with(**{name: -9}) for name in ("version", "updates", "samples", "discarded")},
    "adam_steps_is_a_list": plain_with(adam_steps=[1]),
    "learning_rate_is_nan": plain_with(learning_rate=float("nan")),
    "learning_rate_is_infinite": plain_with(learning_rate=float("inf")),
    "learning_rate_is_huge": plain_with(learning_rate=10**400),
    "learning_rate_is_beyond_float32": plain_with(learning_rate=1e300),
    "used_is_text": plain_with(used="x"),
    "used_is_negative": plain_with(used=-1),
    "generator_is_a_number": plain_with(generator=1),
    "generator_is_no_base64": plain_with(generator="$(touch canary)"),
    "too_large": plain_with(more="x" * (1 << 17)),
    "progress_is_a_list": plain_with(progress=[1]),
    "episodes_are_negative": plain_with(progress={"episodes": -1}),
    "seconds_are_text": plain_with(progress={"elapsed_seconds": "1"}),
    "seconds_are_negative": plain_with(progress={"elapsed_seconds": -1}),
    "windows_are_a_list": plain_with(progress={"windows": [1]}),
    "window_is_text": plain_with(progress={"windows": {"reward": "12"}}),
    "window_of_texts": plain_with(progress={"windows": {"reward": ["1"]}}),
    "window_of_huge_numbers": plain_with(progress={"windows": {"reward": [10**400]}}),
    "best_is_a_list": plain_with(best=[1]),
    "best_is_text": plain_with(best={"metric": "reward/mean", "value": "1"}),
    "best_by_a_list": plain_with(best={"metric": ["reward/mean"], "value": 1}),
    "adoptions_are_negative": plain_with(progress={"adoptions": -1}),
    "traits_are_text": plain_with(traits="x"),
    "traits_of_another_program": plain_with(traits={"py/object": "os.system"}),
    "traits_changed_infinitely": plain_with(traits={"changes": float("inf")}),
    "traits_of_no_names": plain_with(traits={"hyperparameters": [1]}),
    "traits_that_are_nan": plain_with(traits={"reward_shaping": {"x": float("nan")}}),
    "root_is_a_list": b"[]",
    "root_is_text": b'"{}"',
    "nested": b"[" * 100_000,
    "number_of_5000_digits": b'{"env_steps": ' + b"9" * 5000 + b"}",
    "truncated": plain_with()[:-1],
    "no_text": bytes(range(256)),
    "empty": b"",
}


def refused_contents() -> Iterator[tuple[str, str, bytes, int]]:
    """(payload, file, content, exit code of a start)."""
    for name, content in (foreign_contents() | LYING_HEADERS | BAD_WEIGHTS).items():
        yield f"model_{name}", "model.safetensors", content, 6
    for name, content in OTHER_MODELS.items():
        yield f"model_{name}", "model.safetensors", content, 2
    for name, content in (foreign_contents() | BAD_OPTIMIZERS).items():
        yield f"optimizer_{name}", "optimizer.safetensors", content, 6
    yield "optimizer_more_statistics", "optimizer.safetensors", optimizer_of(statistics=np.ones(MOMENTS + 1)), 2
    for name, content in BAD_PLAIN.items():
        yield f"state_{name}", "state.json", content, 6


CONTENTS = list(refused_contents())


@pytest.mark.parametrize(("file", "content", "exit_code"), [c[1:] for c in CONTENTS], ids=[c[0] for c in CONTENTS])
def test_what_no_state_is_made_of_is_refused(planted: Planted, file: str, content: bytes, exit_code: int) -> None:
    shutil.rmtree(planted.newest)
    plant(planted.newest, good_files() | {file: content})
    assert read_by_all(planted) == exit_code


def test_what_is_planted_can_be_gone_on_from(planted: Planted) -> None:
    assert read_by_all(planted) == 0
    assert outcome(enjoy, planted) == outcome(initialize, planted) == 0


# ---- manifests

ENTRY = {"sha256": hashlib.sha256(SECRET).hexdigest(), "size": len(SECRET)}


def manifest_of(files: object, **more: object) -> bytes:
    return (json.dumps({"files": files, "format_version": 1, **more}, indent=1, sort_keys=True) + "\n").encode()


MANIFESTS: Files = {
    "climbs": manifest_of({"../../../outside/secret": ENTRY}),
    "absolute": manifest_of({"/etc/passwd": ENTRY}),
    "command": manifest_of({f"$({COMMAND})": ENTRY}),
    "zero_byte": manifest_of({"a\0b": ENTRY}),
    "huge_size": manifest_of({"state.json": {**ENTRY, "size": 2**60}}),
    "negative_size": manifest_of({"state.json": {**ENTRY, "size": -1}}),
    "infinite_size": manifest_of({"state.json": {**ENTRY, "size": float("inf")}}),
    "size_is_text": manifest_of({"state.json": {**ENTRY, "size": "many"}}),
    "files_are_a_list": manifest_of([1]),
    "entries_are_text": manifest_of({"state.json": "x"}),
    "no_files": manifest_of({}),
    "format_of_tomorrow": manifest_of({}, format_version=99),
    "format_is_a_list": manifest_of({}, format_version=[1]),
    "root_is_a_list": b"[]",
    "nested": b"[" * 100_000,
    "pickle": pickle.dumps(Explosive()),
    "empty": b"",
    "larger_than_any": b" " * (2 << 20),
}


@pytest.mark.parametrize("manifest", list(MANIFESTS.values()), ids=list(MANIFESTS))
def test_manifests_that_are_none(planted: Planted, manifest: bytes) -> None:
    (planted.newest / checkpoint_files.MANIFEST).write_bytes(manifest)
    assert read_by_all(planted) == 6


def test_what_does_not_fit_into_memory_is_not_read(planted: Planted) -> None:
    with open(planted.newest / "model.safetensors", "r+b") as file:
        file.truncate(1 << 43)  # takes no place on disk
    entries = {path.name: ManifestEntry(path.stat().st_size, "0" * 64) for path in planted.newest.glob("*s")}
    entries["state.json"] = ManifestEntry((planted.newest / "state.json").stat().st_size, "0" * 64)
    (planted.newest / checkpoint_files.MANIFEST).write_bytes(checkpoint_files._encode(entries))
    assert read_by_all(planted) == 2  # no model of such flags has so many weights
    with pytest.raises(ResourceError, match=r"MiB, of memory .* MiB are free"):
        checkpoint_files.load(planted.newest.parent)
    assert planted.newest.exists()  # of too little memory no checkpoint is to blame


# ---- settings and reports


def test_environments_are_no_other_functions(planted: Planted) -> None:
    """The one place where a run names code: what makes an environment, and with which arguments."""
    for env, arguments in CALLS:
        config = {"env": env, "env_kwargs": arguments}
        (planted.directory / "config.json").write_text(json.dumps(config))

        def make(run: Planted) -> object:
            found = flags(experiment="run").env
            check_name(found)
            return make_single(found)

        assert outcome(make, planted) == 2, env


CALLS: tuple[tuple[str, dict[str, object]], ...] = (
    ("os:system", {"command": COMMAND}),
    ("posix:system", {"command": COMMAND}),
    ("os:popen", {"cmd": COMMAND}),
    ("os:execvp", {"file": "touch", "args": ["touch", CANARY]}),
    ("os:remove", {"path": "outside/secret"}),
    ("subprocess:Popen", {"args": COMMAND, "shell": True}),
    ("subprocess:run", {"args": COMMAND, "shell": True}),
    ("subprocess:check_output", {"args": ["touch", CANARY]}),
    ("pty:spawn", {"argv": ["touch", CANARY]}),
    ("shutil:rmtree", {"path": "outside"}),
    ("shutil:copyfile", {"src": "outside/secret", "dst": CANARY}),
    ("pathlib:Path", {}),
    ("builtins:open", {"file": CANARY, "mode": "w"}),
    ("builtins:exec", {}),
    ("builtins:eval", {}),
    ("io:open", {"file": CANARY, "mode": "w"}),
    ("timeit:timeit", {"stmt": f"__import__('os').system({COMMAND!r})"}),
    ("runpy:run_path", {"path_name": "outside/secret"}),
    ("runpy:run_module", {"mod_name": "antigravity"}),
    ("importlib:import_module", {"name": "antigravity"}),
    ("ctypes:CDLL", {"name": "outside/secret"}),
    ("pickle:load", {"file": "outside/secret"}),
    ("pickle:loads", {}),
    ("numpy:load", {"file": "outside/secret", "allow_pickle": True}),
    ("torch:load", {"f": "outside/secret", "weights_only": False}),
    ("torch.hub:load", {"repo_or_dir": ".", "model": "x", "source": "local"}),
    ("unittest.mock:Mock", {}),
    ("functools:partial", {}),
    ("types:FunctionType", {}),
    ("gymnasium.envs.registration:load_env_creator", {"name": "os:system"}),
    ("os;touch canary:system", {}),
    ("$(touch canary):system", {}),
    ("..os:system", {}),
)

SETTINGS: dict[str, tuple[bytes, int]] = {
    "pickle": (pickle.dumps(Explosive()), 2),
    "yaml_object": (f"!!python/object/apply:os.system ['{COMMAND}']".encode(), 2),
    "python": (f"__import__('os').system({COMMAND!r})".encode(), 2),
    "list": (b"[]", 2),
    "nested": (b'{"env_kwargs": ' + b'{"a":' * 100_000, 2),
    "digits": (b'{"env": "CartPole-v1", "seed": ' + b"9" * 5000 + b"}", 2),
    "huge": (b'{"env": "CartPole-v1", "seed": 1e400}', 2),
    "nan": (b'{"env": "CartPole-v1", "gamma": NaN}', 2),
    "env_is_a_list": (b'{"env": ["os:system"]}', 2),
    "kwargs_are_text": (b'{"env": "CartPole-v1", "env_kwargs": "__import__(\'os\')"}', 2),
    "unknown": (b'{"env": "CartPole-v1", "__class__": "os.system"}', 2),
    "py_reduce": (b'{"env": "CartPole-v1", "py/reduce": [{"py/function": "os.system"}, ["touch canary"]]}', 2),
    "policies": (b'{"env": "CartPole-v1", "num_policies": -1}', 2),
    "layers": (b'{"env": "CartPole-v1", "encoder_mlp_layers": ["a"]}', 2),
    "rollout": (b'{"env": "CartPole-v1", "rollout": 0}', 2),
    "no_text": (bytes(range(256)), 2),
    "large": (b'{"env": "CartPole-v1"}' + b" " * (17 << 20), 2),
    "empty": (b"", 2),
    # Where a run lies is never its own word.
    "place": (b'{"env": "CartPole-v1", "experiment": "../../outside", "train_dir": "/"}', 0),
}


@pytest.mark.parametrize(("content", "exit_code"), list(SETTINGS.values()), ids=list(SETTINGS))
def test_settings_are_read_as_values(planted: Planted, content: bytes, exit_code: int) -> None:
    (planted.directory / "config.json").write_bytes(content)
    assert read_by_all(planted) == exit_code


REPORTS: Files = {
    "pickle": pickle.dumps(Explosive()),
    "nested": b"[" * 100_000,
    "digits": b'{"policy": 0, "env_steps": ' + b"9" * 5000 + b"}",
    "root_is_a_list": b"[]",
    "no_heads": b'{"reward/mean": 1}\n{"policy": [], "env_steps": {}, "elapsed_seconds": ""}',
    "texts": b'{"policy": 0, "env_steps": "1", "elapsed_seconds": 1, "reward/mean": "$(touch canary)"}',
    "huge_numbers": b'{"policy": 0, "env_steps": 1' + b"0" * 400 + b', "elapsed_seconds": 1, "reward/mean": 1e400}',
    "wrong_kinds": json.dumps(
        {"state": ["training"], "totals": [1], "budget": "x", "seconds": "1", "return_mean": {"a": 1}, "reason": [0]}
    ).encode(),
    "huge_totals": b'{"state": "finished", "totals": {"env_steps": 1' + b"0" * 400 + b"}}",
}


@pytest.mark.parametrize("name", ["status.json", "metrics.jsonl", "config_history.jsonl"])
def test_reports_are_read_as_values(planted: Planted, name: str) -> None:
    for content in REPORTS.values():
        (planted.directory / name).write_bytes(content)
        assert outcome(show, planted) == 0
        assert outcome(start, planted) == 0


# ---- links, pipes and names

PLACES = (
    "config.json",
    "status.json",
    "metrics.jsonl",
    "config_history.jsonl",
    ".lock",
    "checkpoint_p0",
    "checkpoint_p0/best",
    "checkpoint_p0/milestones",
    "checkpoint_p0/ckpt_000000000100",
    "checkpoint_p0/ckpt_000000000100/model.safetensors",
    "checkpoint_p0/ckpt_000000000100/state.json",
    "checkpoint_p0/ckpt_000000000100/MANIFEST.json",
    "logs",
    "logs/actor_0.log",
    "eval",
    "eval/results.jsonl",
    "eval/videos/p0_1.mp4",
    ".summary/p0",
    "incidents/env_actor_0_0.json",
    "plots/learning_curve.png",
    "checkpoint_p0/best/ckpt_000000000100",
    "a/b/c/d",
)
DIRECTORIES = ("logs", "eval", ".summary/p0", "checkpoint_p0/best", "checkpoint_p0/milestones")


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("place", PLACES)
def test_links_and_pipes_are_not_followed(planted: Planted, place: str, kind: str) -> None:
    path, target = planted.directory / place, planted.outside
    if path.is_dir():
        shutil.copytree(planted.newest, target / planted.newest.name)  # one that would do
        shutil.rmtree(path)
        target = target / planted.newest.name if path == planted.newest else target
    else:
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        target = target if place in DIRECTORIES else target / "secret"
    if kind == "link":
        path.symlink_to(target)
    else:
        os.mkfifo(path)
    assert read_by_all(planted) in (2, 6)


NAMES = (
    f"a;{COMMAND}",
    f"$({COMMAND})",
    f"`{COMMAND}`",
    f"a\n{COMMAND}",
    f"a|{COMMAND}",
    f"a && {COMMAND}",
    "../outside",
    "..",
    "/etc",
    "a/../../outside",
    ".hidden",
    "-rf *",
    "a\0b",
    "\u202egnp.exe",
    "x" * 300,
    "",
)


@pytest.mark.parametrize("name", [name for name in NAMES if name])
def test_names_are_names_only(planted: Planted, name: str) -> None:
    for flag in ("experiment", "experiments_root"):
        words = ["--env=CartPole-v1", f"--{flag}={name}"]
        assert outcome(lambda run, words=words: parse_train(words), planted) == 2
    for words in (["--env=CartPole-v1", f"--init_from={name}"], [f"--env={name}"], [f"--env={name}:system"]):
        assert outcome(lambda run, words=words: check_name(parse_train(words).env), planted) == 2


@pytest.mark.parametrize("name", [name for name in NAMES if name and "/" not in name and "\0" not in name])
def test_names_of_videos_reach_no_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(video, "_ffmpeg", lambda: shutil.which("true"))
    file = video.VideoFile(Path(f"{name[:200]}.mp4"))
    file._shape = (2, 2, 3)
    process = file._start()
    process.communicate(timeout=HANG_SECONDS)
    assert file._complaints is not None
    file._complaints.close()
    assert process.args[-1] == str(file._temporary)  # type: ignore[index]
    assert file._temporary.parent == tmp_path
    assert not list(tmp_path.rglob(CANARY))


def test_a_start_refuses_second_names_of_what_it_appends_to(planted: Planted) -> None:
    for place in (".lock", "metrics.jsonl", "config_history.jsonl", "logs/main.log", "eval/results.jsonl"):
        path = planted.directory / place
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        os.link(planted.outside / "secret", path)
        with pytest.raises(UsageError, match=r"has a second name \(a hard link\)"):
            refuse_links(planted.directory)
        path.unlink()
        path.mkdir()
        if place != "logs/main.log":
            with pytest.raises(UsageError, match="is a folder, where a run has a file"):
                refuse_links(planted.directory)
        path.rmdir()
    refuse_links(planted.directory)
    os.link(planted.newest / "state.json", planted.directory / "copy")  # never written in place
    refuse_links(planted.directory)


def test_a_lock_is_taken_of_no_other_file(planted: Planted) -> None:
    (planted.directory / ".lock").symlink_to(planted.outside / "secret")
    with pytest.raises(AppoError), RunLock(planted.directory / ".lock"):
        pytest.fail("locked")


def test_there_are_enough_payloads() -> None:
    assert len(CONTENTS) + len(MANIFESTS) + len(CALLS) + len(SETTINGS) + 3 * len(REPORTS) + 2 * len(PLACES) >= 250
