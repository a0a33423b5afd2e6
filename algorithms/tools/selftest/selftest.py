"""`appo selftest` trains a toy, kills its processes, and checks on this machine what docs/reliability.md promises."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from uuid import uuid4

from appo.algorithms.runtime.processes.prctl import bound_to_us
from appo.algorithms.tools.flags import SelftestConfig
from appo.algorithms.tools.selftest.invariants import (
    LASTING,
    find_falling,
    find_unaccounted,
    lost_checkpoints,
    read_saves,
    tolerance,
)
from appo.algorithms.tools.selftest.killer import MARKER, POLL_SECONDS, Killer, KillerError, kill, processes_of
from appo.utils.command_line import own_command, say
from appo.utils.metrics import read_metrics, without_lost
from appo.utils.run_folder import RunFolder

FLAGS = (
    "--env=toy/Corridor-v0",
    "--inference=central",
    "--device=cpu",
    "--num_workers=2",
    "--num_envs_per_worker=4",
    "--worker_num_splits=1",
    "--rollout=8",
    "--batch_size=64",
    "--num_batches_per_iteration=1",
    "--ppo_epochs=1",
    "--use_rnn=False",
    "--encoder_mlp_layers=32",
    "--learning_rate=0.002",
    "--save_every_sec=1",
    "--keep_checkpoints=1000000",
    "--save_best_after=-1",
    "--experiment_summaries_interval=0.2",
    "--report_interval_seconds=1",
)
GOAL = 0.9  # chance has about 0.6, the best policy 1
LIMIT_SECONDS = 60.0
GONE_SECONDS = 5.0
SHARED_MEMORY = "/dev/shm"  # noqa: S108 (where others leave theirs, not we ours)


class Outcome(NamedTuple):
    """The result of checking a promise."""

    promise: str
    wrong: Sequence[str]  # nothing, if it was kept
    seen: str

    def line(self) -> str:
        """Return one line of the table."""
        verdict = "fail" if self.wrong else "pass"
        return f"{verdict}  {self.promise:44}  {'; '.join(self.wrong) or self.seen}"


class Run:
    """A run in `folder/run`, in a process of its own; it leaves none behind."""

    def __init__(self, folder: Path, config: SelftestConfig) -> None:
        self.directory, self.marker = folder / "run", uuid4().hex
        self.records_before = len(read_metrics(RunFolder(self.directory).metrics))
        self._log_path = folder / f"output_{self.marker}.txt"
        limits = (f"--seed={config.seed}", f"--train_for_seconds={LIMIT_SECONDS * (5 + config.kills)}")
        words = ("train", *FLAGS, *limits, f"--train_dir={folder}", "--experiment=run")
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603 (our own program)
                own_command(words),
                env=os.environ | {MARKER: self.marker},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=bound_to_us(),  # noqa: PLW1509 (it calls the system alone)
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        deadline = time.monotonic() + GONE_SECONDS
        while (pids := processes_of(self.marker)) and time.monotonic() < deadline:
            for pid in pids:
                kill(pid)
            time.sleep(POLL_SECONDS)
        self.process.poll()

    @property
    def log(self) -> str:
        """Return the text that the run has printed."""
        return self._log_path.read_text(errors="replace")

    def saves(self) -> int:
        """Return the checkpoints that the run has said to be saved."""
        return len(read_saves(self.log))

    def records(self) -> list[dict[str, Any]]:
        """Return the records that this start has written to metrics.jsonl."""
        return read_metrics(RunFolder(self.directory).metrics)[self.records_before :]

    def best_return(self) -> float:
        """Return the highest mean return that was reported."""
        return max((record.get("reward/mean") or 0.0 for record in self.records()), default=0.0)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Poll a condition while the run lives.

        Raises:
            KillerError: it ended, or the condition did not come true.
        """
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                last = " | ".join(self.log.splitlines()[-2:])
                raise KillerError(f"no {what}; exit code {self.process.returncode}: {last}")
            time.sleep(POLL_SECONDS)

    def seconds_until_gone(self) -> float:
        """Return the seconds until no process of the run is left.

        Raises:
            KillerError: some stay.
        """
        began = time.monotonic()
        while pids := processes_of(self.marker):
            if time.monotonic() - began > GONE_SECONDS:
                raise KillerError(f"{len(pids)} processes are left after {GONE_SECONDS:g} s")
            self.process.poll()
            time.sleep(0.001)
        return time.monotonic() - began


def selftest(config: SelftestConfig) -> int:
    """Print a line for every promise as soon as it is known whether it was kept; return 0 if all were, else 1.

    What a run has left behind that broke one stays, and is named.
    """
    folder = Path(tempfile.mkdtemp(prefix="appo-selftest-"))
    failed = False
    try:
        for outcome in check_promises(folder, config):
            say(outcome.line())
            failed = failed or bool(outcome.wrong)
    except KillerError as error:
        failed = True
        say(Outcome("the run goes on", [str(error)], "").line())
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    say(f"failed; the run and its output are in {folder}" if failed else "all promises were kept")
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


def check_promises(folder: Path, config: SelftestConfig) -> Iterator[Outcome]:
    """Kill main; resume; kill all other processes, again and again; end with Ctrl-C; look at what is left.

    Raises:
        KillerError: there is nothing more to look at.
    """
    with Run(folder, config) as first:
        names = set(os.listdir(SHARED_MEMORY))
        first.wait_until(lambda: first.saves() >= 2, "checkpoint")
        kill(first.process.pid)
        yield Outcome("main killed: all its processes go too", [], f"after {first.seconds_until_gone():.2f} s")
        left = sorted(drop_mapped(set(os.listdir(SHARED_MEMORY)) - names))
        yield Outcome("main killed: no shared memory stays", left, f"no name is left in {SHARED_MEMORY}")
        promised = read_saves(first.log)
    with Run(folder, config) as second:
        second.wait_until(lambda: second.saves() >= 1, "checkpoint of the resumed run")
        begun = int(second.records()[0]["env_steps"])
        wrong = [f"from {begun} env steps, {promised[-1][1]} were saved"] if begun < promised[-1][1] else []
        yield Outcome("started again: it goes on where it was saved", wrong, f"at env step {begun}")
        yield from kill_in_bursts(second, config)
        second.wait_until(lambda: second.best_return() >= GOAL, f"mean return of {GOAL}")
        yield Outcome("it learns all the same", [], f"mean return {second.best_return():.2f} of at most 1")
        kill(second.process.pid, signal.SIGINT)
        yield check_ctrl_c(second)
    yield from check_invariants(folder / "run", second, [*promised, *read_saves(second.log)], config.kills)


def kill_in_bursts(run: Run, config: SelftestConfig) -> Iterator[Outcome]:
    """Kill processes of the run at random; the run goes on and saves."""
    killer = Killer(run.marker, run.process.pid, run.saves, config.seed)
    killer.kill_burst(config.kills)
    counts = ", ".join(f"{role} {killer.kills.count(role)}" for role in sorted(set(killer.kills)))
    yield Outcome(f"{config.kills} kills: who dies is replaced", [], counts)
    seconds = killer.longest_recovery_seconds
    yield Outcome("training goes on and is saved", [], f"within {seconds:.1f} s after every gust of kills")


def check_ctrl_c(run: Run) -> Outcome:
    """Check how the run takes Ctrl-C."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.process.wait(LIMIT_SECONDS)
    code = run.process.returncode
    wrong = [] if code == 130 else [f"exit code {code}"]
    seen = f"no process is left {run.seconds_until_gone():.2f} s later"
    return Outcome("Ctrl-C: it saves and ends with exit code 130", wrong, seen)


def check_invariants(directory: Path, last: Run, promised: Sequence[tuple[Path, int]], kills: int) -> Iterator[Outcome]:
    """Check the files that the whole run has left behind."""
    folder, wrong = RunFolder(directory), lost_checkpoints(path for path, _ in promised)
    yield Outcome("every checkpoint said to be saved is good", wrong, f"{len(promised)} of {len(promised)}")
    records = last.records()
    everything = without_lost(read_metrics(folder.metrics))
    wrong = [*find_falling(records), *find_falling(everything, LASTING)]
    yield Outcome("no counter and no version falls", wrong, f"in {len(records)} records")
    totals: Mapping[str, int] = folder.read_status()["totals"]
    wrong = find_unaccounted(records[0], totals, tolerance(kills))
    seen = f"{totals['samples']} trained on, {totals['discarded']} discarded, {totals['restarts']} restarts"
    yield Outcome("every step is accounted for", wrong, seen)


def drop_mapped(names: set[str]) -> set[str]:
    """Return the names in shared memory that no process maps: mapped ones will be removed by their processes."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            names = names - {line.rpartition("/")[2] for line in maps.read_text(errors="replace").splitlines()}
    return names
