"""Training as a process of its own, all processes of which can be found, killed and counted."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from appo.utils.metrics import read_metrics
from tests.chaos.invariants import read_saves
from tests.chaos.killer import MARKER, Killer, KillerError, kill, processes_of, role_of
from tests.patience import patient

ROOT = Path(__file__).resolve().parents[2]
TRAIN = (sys.executable, str(ROOT / "train_appo.py"))
HOSTILE = "tests.chaos.hostile_env:Hostile"
RAISED = "tests.chaos.hostile_env.HostileError: out of cheese"
START_SECONDS = 300.0  # ends a start that hangs; promises have limits of their own
POLL_SECONDS = 0.005

SMALL = (
    "--num_workers=2",
    "--num_envs_per_worker=2",
    "--rollout=8",
    "--batch_size=64",
    "--num_batches_per_iteration=1",
    "--ppo_epochs=1",
    "--use_rnn=False",
    "--encoder_mlp_layers=16",
    "--report_interval_seconds=0.2",
    "--experiment_summaries_interval=0.2",
    "--seed=1",
    "--no_plot",
)
"""A run that starts fast and reports often."""


class Ended(NamedTuple):
    """How a run ended; `seconds` is how long it took from the call that waited for it."""

    exit_code: int
    seconds: float
    stdout: str
    stderr: str


class TrainingRun:
    """A run in `folder/train_dir/run`; a context manager that leaves nothing behind.

    Args:
        folder: for the run directory and the output.
        flags: beside `small`.
        failpoints: value of APPO_FAILPOINTS.
        program: first words of the command line, in place of train_appo.py.
        cwd: working folder of the run.
        piped: whether stdout is a pipe, `process.stdout`, and not a file.
        small: the flags that make it small.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        env: str = "CartPole-v1",
        failpoints: str = "",
        program: Sequence[str] = TRAIN,
        cwd: Path = ROOT,
        piped: bool = False,
        small: tuple[str, ...] = SMALL,
    ):
        self.directory = folder / "train_dir" / "run"
        self.marker = uuid4().hex
        self.temporary = Path(tempfile.mkdtemp(prefix="appo"))  # short: names of sockets have at most 107 bytes
        self.paths = {name: folder / f"{name}_{self.marker}" for name in ("stdout", "stderr")}
        where = [f"--env={env}", f"--train_dir={folder / 'train_dir'}", "--experiment=run"]
        command = [*program, *where, *small, *flags]
        environment = os.environ | {
            MARKER: self.marker,
            "APPO_FAILPOINTS": failpoints,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.temporary),
        }
        with self.paths["stdout"].open("wb") as out, self.paths["stderr"].open("wb") as err:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else out,
                stderr=err,
                start_new_session=True,  # signals to its process group are what a terminal sends
            )

    def __enter__(self) -> "TrainingRun":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in processes_of(self.marker):
            kill(pid)
        shutil.rmtree(self.temporary, ignore_errors=True)

    @property
    def stdout(self) -> str:
        return self.paths["stdout"].read_text()

    @property
    def stderr(self) -> str:
        return self.paths["stderr"].read_text()

    def env_steps(self) -> int:
        """The number last written to metrics.jsonl."""
        return max([record["env_steps"] for record in read_metrics(self.directory / "metrics.jsonl")], default=0)

    def seconds_of_training(self) -> float:
        """How long metrics.jsonl has been reporting env steps."""
        records = read_metrics(self.directory / "metrics.jsonl")
        times = [record["elapsed_seconds"] for record in records if record["env_steps"]]
        return times[-1] - times[0] if times else 0.0

    def wait_for_env_steps(self, count: int = 1) -> None:
        self.wait_until(lambda: self.env_steps() >= count, f"{count} env steps")

    def wait_until(self, condition: Callable[[], object], what: str, seconds: float = START_SECONDS) -> None:
        """Poll a condition while the run lives."""
        begin = time.monotonic()
        while not condition():
            if self.process.poll() is not None or time.monotonic() - begin > patient(seconds):
                raise AssertionError(f"no {what}; exit code {self.process.poll()}\n{self.stdout}\n{self.stderr}")
            time.sleep(POLL_SECONDS)

    def pid_of(self, role: str) -> int:
        """The process of a role: main, fork_server, tracker, janitor, or the name of a worker."""
        found = [pid for pid, name in self.roles().items() if name == role]
        assert len(found) == 1, (role, self.roles())
        return found[0]

    def roles(self) -> dict[int, str]:
        """All processes of the run with their roles."""
        return {pid: "main" if pid == self.process.pid else _role_of(pid) for pid in processes_of(self.marker)}

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Signal the process group of main, as a terminal does."""
        os.killpg(self.process.pid, number)

    def wait(self, seconds: float = START_SECONDS) -> Ended:
        """Wait for the end of main."""
        begin = time.monotonic()
        while (exit_code := self.process.poll()) is None:
            assert time.monotonic() - begin < patient(seconds), f"no end\n{self.stdout}\n{self.stderr}"
            time.sleep(POLL_SECONDS)
        return Ended(exit_code, time.monotonic() - begin, self.stdout, self.stderr)

    def seconds_until_gone(self, limit: float) -> float:
        """Wait until no process of the run is left."""
        begin = time.monotonic()
        while left := self.alive():
            assert time.monotonic() - begin < patient(limit), f"left after {limit} s: {left}"
            time.sleep(POLL_SECONDS)
        return time.monotonic() - begin

    def left_behind(self) -> list[str]:
        """Names in /tmp that multiprocessing makes for its sockets."""
        return [name for name in os.listdir(self.temporary) if name.startswith("pymp-")]

    def alive(self) -> dict[int, str]:
        self.process.poll()
        return self.roles()


def _role_of(pid: int) -> str:
    """As the run knows it, and `sleep` for what hostile environments have started."""
    try:
        started_by_env = b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "ended"
    return "sleep" if started_by_env else role_of(pid)


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def checkpoint_steps(directory: Path) -> list[int]:
    """Env steps of the checkpoints of policy 0."""
    names = [path.name for path in (directory / "checkpoint_p0").glob("ckpt_*")]
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"ckpt_(\d{12})", name)))


def storm(run: TrainingRun, kills: int, only: tuple[str, ...] = ("",)) -> Killer:
    """Kill so many processes of a run that has saved, in bursts, from which it recovers."""
    run.wait_until(lambda: read_saves(run.stdout), "checkpoint")
    killer = Killer(run.marker, run.process.pid, lambda: len(read_saves(run.stdout)), seed=1, only=only)
    try:
        killer.kill_burst(kills)
    except KillerError as error:
        raise AssertionError(f"{error}\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}") from None
    return killer


def outlive(
    run: TrainingRun, gate: Path, kills: int, gone_seconds: float, only: tuple[str, ...] = ("",), copies: int = 0
) -> tuple[Ended, Killer]:
    """Kill so many processes of a run, let it come to its goal by making `gate`, and see that nothing is left of it.

    Before it may, policies have copied others so many times.
    """
    killer = storm(run, kills, only)
    run.wait_until(lambda: run.stdout.count(": copies policy ") >= copies, f"{copies} copies of policies")
    gate.touch()
    ended = run.wait(START_SECONDS)
    run.seconds_until_gone(gone_seconds)
    assert run.left_behind() == []
    assert ended.exit_code == 0, ended.stderr
    return ended, killer
