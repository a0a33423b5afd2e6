"""Damages saved runs at random and lets a command of ours loose on each: `python -m tests.chaos.fuzzing FOLDER COUNT`.

Every mutation follows from the seed and its number. A command runs in a process that is forked from this one, which has
imported everything, so that thousands take minutes; it sees what a program of its own would: a folder of runs, a home,
a temporary folder. What it does is compared with the same command on the run as it was.
"""

import contextlib
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from appo.utils.hashed_files import ManifestEntry
from tests.chaos.killer import MARKER, processes_of

EXTRA_SECONDS, EXTRA_BYTES = 2.0, 100 << 20
"""What a command may take beyond the same one on the run as it was."""
LONGEST_SECONDS = 30.0
ATTEMPTS = 3  # before a time is believed that is too long: others use the machine too
GONE_SECONDS = 5.0
MODULES = (
    "torch", "gymnasium", "matplotlib.pyplot", "onnx", "vizdoom", "appo.algorithms.cli", "appo.algorithms.run.main",
    "appo.algorithms.tools.train", "appo.algorithms.tools.enjoy", "appo.algorithms.tools.evaluate",
    "appo.algorithms.tools.match",
    "appo.algorithms.tools.export", "appo.algorithms.tools.hub", "appo.algorithms.tools.comparison.plot",
    "appo.algorithms.tools.comparison.lineage",
    "appo.algorithms.tools.comparison.compare", "appo.algorithms.tools.report.report",
    "appo.algorithms.tools.top", "appo.algorithms.tools.runs", "appo.algorithms.tools.replay_incident",
    "appo.algorithms.run.workers.networks", "appo.algorithms.run.tuning.network",
    "appo.algorithms.runtime.monitor.panel",
    "appo.envs.make", "rich.console", "yaml",
)  # fmt: skip
PINNED = (
    "--inference=serial", "--num_workers=1", "--num_envs_per_worker=2", "--worker_num_splits=1", "--rollout=8",
    "--batch_size=64", "--num_batches_per_iteration=1", "--ppo_epochs=1", "--microbatch_size=0", "--stats_avg=10",
    "--encoder_mlp_layers=16", "--use_rnn=False", "--no_plot", "--no_tensorboard", "--num_policies=1",
    "--train_for_env_steps=1200", "--save_best_after=0", "--save_every_sec=100", "--env_frameskip=1", "--device=cpu",
    "--decorrelate_experience_max_seconds=0", "--train_for_seconds=1.5", "--deterministic_resume=False",
    "--sampler_only=False", "--eval_every_sec=0", "--eval_video_every_min=0", "--benchmark=False",
)  # fmt: skip
"""What training costs is the user's own choice here; all else comes from the run."""
SHORT = ("--no_render", "--max_num_episodes=1", "--max_num_frames=40", "--seed=1")
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "runs": ("runs",),
    "runs_json": ("runs", "--json"),
    "top": ("top", "run", "--once"),
    "compare": ("compare", "run", "victim"),
    "compare_json": ("compare", "run", "victim", "--json"),
    "plot": ("plot", "run", "victim", "-o", "out/plot.svg"),
    "report": ("report", "run", "victim", "-o", "out/report.html"),
    "report_one": ("report", "run", "-o", "out/report.html"),
    "lineage": ("plot", "run", "--lineage", "-o", "out/lineage.svg"),
    "enjoy": ("enjoy", "--experiment=run", *SHORT),
    "enjoy_best": ("enjoy", "--experiment=run", "--load_checkpoint_kind=best", "--json", *SHORT),
    "evaluate": ("evaluate", "run", "--episodes=2", "--max_num_frames=40"),
    "match": ("match", "run", "victim:best", "--episodes=2"),
    "export": ("export", "run", "-o", "out/policy.onnx"),
    "hub": ("hub", "run", "--output=out/bundle"),
    "replay": ("replay", "train_dir/run/incidents/env_actor_0_0.json"),
    "train": ("train", "--experiment=run", *PINNED),
    "init_from": ("train", "--env=CartPole-v1", "--experiment=new", "--init_from=run", *PINNED),
}
MADE = ("out", "train_dir/run", "train_dir/new", "home/.cache")
"""What a command may write: what the user has named, the run itself, and what libraries keep."""


class Tree:
    """The folder in which commands run: `train_dir` with a run and a victim, files outside, a home."""

    def __init__(self, path: Path) -> None:
        self.path, self.base = path, path / "base"
        self.run, self.victim = path / "train_dir" / "run", path / "train_dir" / "victim"
        self.outside = path / "outside"

    def make(self) -> None:
        """Train the run that is to be damaged, and put everything else beside it."""
        for name in ("home", "tmp", "out", "outside/folder"):
            (self.path / name).mkdir(parents=True)
        for name in ("secret", "folder/secret", "folder/.tmp-x", "folder/.p0_1.mp4", "folder/env_actor_0_9.json"):
            (self.outside / name).write_text("what lies outside of the run\n")
        small = [word for word in PINNED if not word.startswith("--train_for_env_steps")]
        train = ("train", "--env=CartPole-v1", "--experiment=run", *small, "--train_for_env_steps=1000", "--seed=1")
        for words in (
            (*train, "--tensorboard=True", "--train_for_seconds=30", "--experiment_summaries_interval=0.1"),
            ("evaluate", "run", "--episodes=2", "--max_num_frames=40"),
        ):
            done = execute(self, words, LONGEST_SECONDS)
            assert done.exit_code == 0, done.stderr
        self._complete()
        shutil.copytree(self.run, self.base)
        shutil.copytree(self.run, self.victim)
        shutil.copytree(self.run / "checkpoint_p0", self.outside / "checkpoint_p0")

    def _complete(self) -> None:
        """What this run has not written by itself: an incident, a lineage, a log, a milestone, a video."""
        incident = {
            "flags": {"env": "CartPole-v1", "env_kwargs": {}}, "index": 0, "error": "ValueError", "message": "broken",
            "place": "step", "seed": 7, "random_state": None, "actions": [[0], [1], [0]], "num_steps": 3, "seeds": [],
            "traceback": "", "ended_process": False,
        }  # fmt: skip
        event = {
            "kind": "copy", "policy": 0, "source": 1, "change": 1, "env_steps": 500, "source_env_steps": 400,
            "scores": {"0": 1.0, "1": 2.0}, "before": {"gamma": 0.9}, "after": {"gamma": 0.95}, "state": "applied",
            "elapsed_seconds": 1.0,
        }  # fmt: skip
        (self.run / "incidents").mkdir(exist_ok=True)
        (self.run / "incidents" / "env_actor_0_0.json").write_text(json.dumps(incident))
        lineage = importlib.import_module("appo.algorithms.population.lineage")
        known = {name: event[name] for name in event if name in lineage.Event.__dataclass_fields__}
        (self.run / "lineage.json").write_text(json.dumps({"num_policies": 2, "events": [known]}))
        (self.run / "logs" / "actor_0.log").write_text("a line\n")
        (self.run / "eval" / "videos").mkdir(exist_ok=True)
        (self.run / "eval" / "videos" / "p0_000000000001.mp4").write_bytes(b"no video")
        (checkpoint,) = sorted((self.run / "checkpoint_p0").glob("ckpt_*"))[-1:]
        shutil.copytree(checkpoint, self.run / "checkpoint_p0" / "milestones" / checkpoint.name)

    def restore(self) -> None:
        """Begin anew with the run as it was, and nothing that a command has made."""
        for name in MADE:
            remove(self.path / name)
        (self.path / "out").mkdir()
        shutil.copytree(self.base, self.run)

    def snapshot(self) -> dict[str, tuple[object, ...]]:
        """Return all that no command may change: kind, size, and content or target, by path."""
        made = {str(self.path / name) for name in MADE}
        found: dict[str, tuple[object, ...]] = {}
        waiting = [str(self.path)]
        while waiting:
            for entry in os.scandir(waiting.pop()):
                if entry.path in made:
                    continue
                status = entry.stat(follow_symlinks=False)
                what: object = None
                if stat.S_ISDIR(status.st_mode):
                    waiting.append(entry.path)
                elif stat.S_ISLNK(status.st_mode):
                    what = os.readlink(entry.path)
                elif stat.S_ISREG(status.st_mode):
                    what = (status.st_size, status.st_mtime_ns, status.st_ino)
                found[entry.path] = (stat.S_IFMT(status.st_mode), what)
        return found


def remove(path: Path) -> None:
    """Remove whatever is there."""
    if path.is_symlink() or path.is_file() or (path.exists() and not path.is_dir()):
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


# Commands, each in a process that is forked.


class Ended(NamedTuple):
    """How a command ended; `programs` are those that it has started, `largest_bytes` its memory at most."""

    exit_code: int
    seconds: float
    largest_bytes: int
    stdout: str
    stderr: str
    programs: frozenset[str]


OF_GLFW = "get_version(library_handle)"
"""In what dm_control's window library starts when it is imported, to look for its own libraries."""

PROGRAM_EVENTS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.spawn", "pty.spawn", "os.startfile")


def execute(tree: Tree, words: tuple[str, ...], longest_seconds: float) -> Ended:
    """Carry out `appo WORDS` in a process of its own."""
    paths = [tree.path.parent / f"{tree.path.name}.{name}" for name in ("stdout", "stderr", "programs")]
    begin = time.monotonic()
    pid = os.fork()
    if not pid:
        _carry_out(tree, words, paths)
    descriptor = os.pidfd_open(pid)
    try:
        poller = importlib.import_module("select").poll()
        poller.register(descriptor)
        if not poller.poll(1000 * longest_seconds):
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(descriptor)
    _, status, usage = os.wait4(pid, 0)
    seconds = time.monotonic() - begin
    stdout, stderr, programs = (path.read_text(errors="replace") for path in paths)
    code = os.waitstatus_to_exitcode(status)
    return Ended(code, seconds, usage.ru_maxrss << 10, stdout, stderr, frozenset(programs.splitlines()))


def _carry_out(tree: Tree, words: tuple[str, ...], paths: list[Path]) -> None:
    """In the child: never returns."""
    code = 70
    try:
        programs = paths[2].open("w", buffering=1)
        for number, path in ((1, paths[0]), (2, paths[1])):
            target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(target, number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        os.chdir(tree.path)
        sys.argv = ["appo", *words]

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            if event in PROGRAM_EVENTS:
                name = arguments[0].decode() if isinstance(arguments[0], bytes) else str(arguments[0])
                ours = name == sys.executable and event == "subprocess.Popen"
                if not (ours and OF_GLFW in str(arguments[1])):
                    programs.write(f"{name}{' ' + _own_program(arguments[1]) if ours else ''}\n")

        sys.addaudithook(audit)
        cli = importlib.import_module("appo.algorithms.cli")
        code = cli.run_command(lambda: cli.run(words[0], words[1:]))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 70
    except BaseException:
        importlib.import_module("traceback").print_exc()
        code = 71
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _own_program(words: Any) -> str:
    """What our interpreter is to run, without what differs each time."""
    return " ".join(str(word) for word in words[1:4])[:200]


# Mutations.

WORDS: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**30, 0.5, -1e-9, 1e308, 1e-320, "", "a", "None", [], {},
    [[]], [None], {"": {}}, "x" * 300, "x" * 100_000, "\x1b[2J\x1b]0;PWN\x07", "\u202egnp.exe", "\u009b31m", "\x00",
    "../../outside", "/etc/passwd", "os:system", "subprocess:Popen", "train_dir.run.evil:Env", "$(touch outside/pwned)",
    "`touch outside/pwned`", "VizdoomBasic-v1", "CartPole-v1", "Pendulum-v1", "ALE/Pong-v5", "serial", "central",
    [200_000, 200_000], [1] * 50_000, {"path": "outside/secret"}, {"vizdoom_path": "/usr/bin/perl"}, "nan", "\ud800",
    {"command": "touch outside/pwned"}, 63, 10**6, 10**9,
)  # fmt: skip
FLAGS = (
    "env", "env_kwargs", "encoder_custom", "callbacks", "custom_summaries", "policy_mapping", "init_from", "algo",
    "hidden_size", "rnn_num_layers", "encoder_mlp_layers", "env_framestack", "env_frameskip", "num_policies", "use_rnn",
    "per_policy", "eval_env_kwargs", "train_dir", "experiment", "config", "with_wandb", "trust", "mark", "measured",
    "normalize_images", "encoder_type", "device", "precision", "horizon", "res_w", "seed", "stats_avg", "self_play",
    "with_pbt", "log_format", "lockstep", "save_best_metric", "reward_clip", "memory_limit_mb", "learner_threads",
)  # fmt: skip
FILE_NAMES = (
    "ckpt_999999999999", "ckpt_000000000000", "ckpt_-1", "ckpt_\x1b[2J", "checkpoint_p1", "checkpoint_p99999999999999",
    ".tmp-ckpt_000000000001-1", "x\ny", "\u202e", "-rf", "evil.py", "__init__.py", "sitecustomize.py", "config.json",
    "status.json", "metrics.jsonl", "x" * 250, "best", "eval", "logs", "corrupt", ".lock",
)  # fmt: skip


class Mutation:
    """One change of a saved run, drawn at random.

    Attributes:
        text: what was done.
    """

    def __init__(self, tree: Tree, draw: random.Random) -> None:
        self.tree, self.draw, self.text = tree, draw, ""
        self._huge: list[Path] = []  # in the end, as others read and copy
        kinds: tuple[tuple[Callable[[], str], int], ...] = (
            (self._value, 45), (self._bytes, 12), (self._size, 8), (self._kind, 14), (self._link, 14), (self._name, 12),
            (self._folder, 6),
        )  # fmt: skip
        changes, weights = zip(*kinds, strict=True)
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            (change,) = draw.choices(changes, weights)
            # What was changed before does not allow it.
            with contextlib.suppress(OSError, ValueError, IndexError, RecursionError):
                self.text += f"{change()}; "
        for path in self._huge:
            if path.is_file() and not path.is_symlink():
                os.truncate(path, 6 << 30)

    def _pick(self, *, folders: bool = False) -> Path:
        """One of the files, each kind of which is as likely; or of the folders."""
        found = sorted(p for p in self.tree.run.rglob("*") if not p.is_symlink() and p.is_dir() == folders)
        names = sorted({path.name for path in found})
        name = self.draw.choice(names or [""])
        return self.draw.choice([path for path in found if path.name == name] or [self.tree.run])

    def _told(self, path: Path, what: str) -> str:
        return f"{what} {path.relative_to(self.tree.path)}"

    def _value(self) -> str:
        """Change something in a file of JSON, which stays one."""
        files = [
            path
            for path in sorted(self.tree.run.rglob("*"))
            if path.suffix in (".json", ".jsonl") and path.is_file() and not path.is_symlink()
        ]
        config = [self.tree.run / "config.json"] * (len(files) // 2)
        path = self.draw.choice([*files, *(one for one in config if one.is_file())])
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        number = self.draw.randrange(len(lines))
        content = json.loads(lines[number])
        what = self._change(content, path)
        lines[number] = json.dumps(content)
        if path.suffix == ".jsonl" and not self.draw.randrange(3):
            lines += [lines[number]] * self.draw.choice((1, 1000, 100_000))
        path.write_text("\n".join(lines) + "\n")
        self._verify(path)
        return self._told(path, what)

    def _change(self, content: Any, path: Path) -> str:
        """Change a value somewhere in nested ones; what was done."""
        places: list[tuple[Any, Any]] = []
        waiting = [content]
        while waiting:
            one = waiting.pop()
            entries = list(one.items()) if isinstance(one, dict) else list(enumerate(one))
            places += [(one, key) for key, _ in entries]
            waiting += [value for _, value in entries if isinstance(value, dict | list)]
        value = self.draw.choice(WORDS)
        if isinstance(content, dict) and (not places or not self.draw.randrange(3)):
            name = self.draw.choice(FLAGS if path.name == "config.json" else (*FLAGS, *map(str, content)))
            content[name] = value
            return f"{name}={str(value)[:40]!r} in"
        holder, key = self.draw.choice(places)
        action = self.draw.randrange(4)
        if action == 0:
            del holder[key]
            return f"no {key!r} in"
        if action == 1:
            nested: Any = value
            for _ in range(self.draw.choice((1, 10, 900))):
                nested = [nested]
            holder[key] = nested
            return f"nested {key!r} in"
        if action == 2 and isinstance(holder, dict):
            holder[self.draw.choice((f"{key}\x1b[31m", f"{key} ", str(key).upper(), ""))] = holder.pop(key)
            return f"renamed {key!r} in"
        holder[key] = value
        return f"{key!r}={str(value)[:40]!r} in"

    def _bytes(self) -> str:
        """Change bytes of a file."""
        path = self._pick()
        content = bytearray(path.read_bytes())
        action = self.draw.choice(("flipped", "cut", "noise", "emptied", "doubled"))
        if action == "flipped" and content:
            for _ in range(self.draw.choice((1, 8, 100))):
                content[self.draw.randrange(len(content))] ^= 1 << self.draw.randrange(8)
        elif action == "cut":
            del content[self.draw.randrange(len(content) + 1) :]
        elif action == "noise":
            content = bytearray(self.draw.randbytes(len(content)))
        elif action == "emptied":
            content.clear()
        else:
            content *= 2
        path.write_bytes(content)
        self._verify(path)
        return self._told(path, action)

    def _size(self) -> str:
        """Make a file huge: sparse, or of a line of brackets, or of very many lines."""
        path = self._pick()
        action = self.draw.choice(("6 GB of", "brackets in", "lines in", "a long line in"))
        if action == "6 GB of":
            self._huge.append(path)
            return self._told(path, action)
        texts = {"brackets in": "[" * 3_000_000, "lines in": "{}\n" * 5_000_000, "a long line in": "x" * 20_000_000}
        with path.open("a") as file:
            file.write(texts[action])
        self._verify(path)
        return self._told(path, action)

    def _kind(self) -> str:
        """Put something of another kind in the place of a file or folder."""
        path = self._pick(folders=not self.draw.randrange(3))
        action = self.draw.choice(("pipe", "folder", "socket", "file", "nothing"))
        remove(path)
        if action == "pipe":
            os.mkfifo(path)
        elif action == "folder":
            path.mkdir()
        elif action == "file":
            path.write_text("{}")
        elif action == "socket":
            with socket.socket(socket.AF_UNIX) as server, _in_folder(path.parent):
                server.bind(path.name)
        return self._told(path, f"{action} for")

    def _link(self) -> str:
        """Put a link in the place of a file or folder, or a second name of somebody else's file."""
        folders = bool(self.draw.randrange(2))
        path = self._pick(folders=folders)
        victim = self.tree.victim / path.relative_to(self.tree.run)
        if folders:
            places = (self.tree.outside / "folder", victim, self.tree.outside / "checkpoint_p0", Path("/"), path.parent)
        else:
            places = (self.tree.outside / "secret", victim, self.tree.outside / "new", Path("/dev/zero"), path)
        target = self.draw.choice(places)
        is_hard = not folders and target.is_file() and not self.draw.randrange(3)
        remove(path)
        if is_hard:
            os.link(target, path)
        else:
            path.symlink_to(os.path.relpath(target, path.parent) if self.draw.randrange(2) else target)
        return self._told(path, f"{'hard ' if is_hard else ''}link to {target} for")

    def _name(self) -> str:
        """Rename something, or add a copy of it or a link under a strange name."""
        path = self._pick(folders=bool(self.draw.randrange(2)))
        new = self._pick(folders=True) / self.draw.choice(FILE_NAMES)
        action = self.draw.choice(("renamed", "copied", "linked"))
        if new.exists() or new.is_symlink() or path in (new, *new.parents):
            raise ValueError("there is something of that name, or it would be inside itself")
        if action == "renamed":
            path.rename(new)
        elif action == "copied":
            shutil.copytree(path, new, symlinks=True) if path.is_dir() else shutil.copyfile(path, new)
        else:
            new.symlink_to(self.draw.choice((self.tree.outside / "folder", self.tree.outside / "secret")))
        return self._told(path, f"{action} as {str(new.relative_to(self.tree.path))!r}")

    def _folder(self) -> str:
        """Change the folder of the run itself: a link to another run or place, or a file."""
        action = self.draw.choice(("victim", "outside", "file", "without a config", "closed"))
        if action == "without a config":
            (self.tree.run / "config.json").unlink()
        elif action == "closed":
            self._pick(folders=True).chmod(0)
        else:
            remove(self.tree.run)
            if action == "file":
                self.tree.run.write_text("{}")
            else:
                self.tree.run.symlink_to(self.tree.victim if action == "victim" else self.tree.outside)
        return f"the run is {action}"

    def _verify(self, path: Path) -> None:
        """Let a checkpoint verify again, half of the times: who can write files can write their hashes."""
        manifest = path.parent / "MANIFEST.json"
        if path.name == manifest.name or not manifest.is_file() or self.draw.randrange(2):
            return
        files = {one.name: one.read_bytes() for one in path.parent.iterdir() if one.is_file() and one != manifest}
        entries = {
            name: ManifestEntry(len(content), hashlib.sha256(content).hexdigest()) for name, content in files.items()
        }
        manifest.write_bytes(importlib.import_module("appo.utils.checkpoint_files")._encode(entries))


@contextlib.contextmanager
def _in_folder(path: Path) -> Iterator[None]:
    """Be there meanwhile: names of sockets have at most 107 bytes."""
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


# The whole of it.


def problems_of(
    tree: Tree, words: tuple[str, ...], usual: Ended, own: frozenset[str], before: dict[str, tuple[object, ...]]
) -> tuple[list[str], Ended]:
    """Carry out a command on a damaged run; what is wrong with what it did."""
    done = execute(tree, words, usual.seconds + LONGEST_SECONDS)
    found = []
    if done.exit_code not in (0, 1, 2, 3, 4, 5, 6, 7, 75):
        found.append(f"exit code {done.exit_code}")
    if "Traceback (most recent call last)" in done.stderr + done.stdout:
        found.append("a traceback")
    if done.exit_code and not (done.stderr + done.stdout).strip():
        found.append(f"exit code {done.exit_code} without a word")
    if any(not (c == "\n" or c.isprintable()) for c in done.stdout + done.stderr):
        found.append("an escape on the terminal")
    if programs := done.programs - own:
        found.append(f"programs {sorted(programs)}")
    after = tree.snapshot()
    changed = sorted(path for path in {**before, **after} if before.get(path) != after.get(path))
    if changed:
        found.append(f"changed outside: {changed[:3]}")
    if done.largest_bytes > usual.largest_bytes + EXTRA_BYTES:
        found.append(f"{(done.largest_bytes - usual.largest_bytes) >> 20} MiB more than usual")
    return found, done


def leftovers(marker: str) -> list[int]:
    """Processes that were started here and still live after a while."""
    deadline = time.monotonic() + GONE_SECONDS
    while (pids := [pid for pid in processes_of(marker) if pid != os.getpid()]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return pids


class Fuzz:
    """Mutations of one run, the commands in turn."""

    def __init__(self, path: Path, seed: int) -> None:
        self.tree, self.seed = Tree(path), seed
        self.tree.make()
        self.usual: dict[str, Ended] = {}
        for name, words in COMMANDS.items():
            self.tree.restore()
            self.usual[name] = done = execute(self.tree, words, LONGEST_SECONDS)
            expected = {"match": 2, "replay": 1}.get(name, 0)  # one agent has no rival; CartPole does not fail
            assert done.exit_code == expected, f"{name}: {done}"
        self.own = frozenset(program for done in self.usual.values() for program in done.programs)

    def attempt(self, number: int) -> tuple[str, Ended]:
        """Carry out a command on the run with a mutation; a line about what is wrong with what it did, or nothing."""
        name = list(COMMANDS)[number % len(COMMANDS)]
        for left in reversed(range(ATTEMPTS)):
            self.tree.restore()
            mutation = Mutation(self.tree, random.Random(f"{self.seed}/{number}"))
            before = self.tree.snapshot()
            found, done = problems_of(self.tree, COMMANDS[name], self.usual[name], self.own, before)
            extra = done.seconds - self.usual[name].seconds
            if found or extra <= EXTRA_SECONDS:
                break
            if not left:
                found.append(f"{extra:.1f} s more than usual")
                break
            self.tree.restore()  # perhaps the machine has become slower
            again = execute(self.tree, COMMANDS[name], LONGEST_SECONDS)
            self.usual[name] = max(self.usual[name], again, key=lambda usual: usual.seconds)
        for pid in (pids := leftovers(os.environ[MARKER])):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        found += [f"processes {pids}"] if pids else []
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        line = f"{number} {name}: {'; '.join(found)} | {mutation.text}| {done.exit_code} {last}"
        return line if found else "", done


def main() -> int:
    """Fuzz as the command line says: FOLDER COUNT [SEED [NUMBER]]."""
    path, count = Path(sys.argv[1]).absolute(), int(sys.argv[2])
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    only = int(sys.argv[4]) if len(sys.argv) > 4 else None
    path.mkdir(parents=True)
    os.environ |= {
        "XDG_CONFIG_HOME": str(path / "home"), "HOME": str(path / "home"), "TMPDIR": str(path / "tmp"),
        "MPLCONFIGDIR": str(path.parent / f"{path.name}.matplotlib"), "NO_COLOR": "1",
    }  # fmt: skip
    importlib.import_module("tempfile").tempdir = str(path / "tmp")
    for name in MODULES:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    begin, wrong = time.monotonic(), 0
    trial = Fuzz(path, seed)
    for number in range(count) if only is None else [only]:
        line, done = trial.attempt(number)
        wrong += bool(line)
        if line or only is not None:
            print(line, *([done] if only is not None else []), flush=True)
    print(f"{count} mutations, {wrong} with something wrong, {time.monotonic() - begin:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
