"""Training from a Python program: no command line, and the caller's process is restored afterwards."""

import contextlib
import inspect
import json
import logging
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import threadpoolctl

from appo.algorithms.run.algorithms import flag_table
from appo.algorithms.run.config import FLAGS_BY_PART, Config, algorithm_of, resolve, typed
from appo.algorithms.run.machines.head import kind_of
from appo.algorithms.run.main import Run
from appo.algorithms.run.observers import trust_words
from appo.algorithms.run.program import check_program, given_again, refuse_imported_script
from appo.algorithms.run.resume import finished_before
from appo.algorithms.runtime.callbacks import OF_ACTORS, Callbacks, check_methods
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.learner_state import NETWORKS, all_weights, vector_of
from appo.algorithms.runtime.messages import ReplaceWeights
from appo.algorithms.runtime.monitor.monitor import Monitor
from appo.algorithms.runtime.processes import fork_server
from appo.algorithms.runtime.processes.beside import answer_of
from appo.algorithms.runtime.processes.janitor import Janitor
from appo.algorithms.runtime.runner import Runner, Turns
from appo.envs import given
from appo.envs.make import is_factory
from appo.utils.errors import AppoError, Interrupted, NotSaved, ResourceError, StopNow, Terminated, UsageError
from appo.utils.flags import flattened
from appo.utils.logging import kept_warnings
from appo.utils.run_folder import RunFolder
from appo.utils.system import machine
from appo.utils.values import nearest, shown

log = logging.getLogger(__name__)
SAVE_SECONDS = 60.0
OURS = (*machine.THREAD_VARIABLES, "THP_MEM_ALLOC_ENABLE")
"""Environment variables that a run sets in this process."""


class Report(NamedTuple):
    """Progress of a run.

    Attributes:
        seconds: time since the start.
        env_steps, samples: totals that all policies together have learned from.
        episode_returns: mean return over the last episodes of every policy; None before the first episode has ended.
        figures: metrics of every policy since the last record, named as in metrics.jsonl (reward/mean,
            train/policy_loss, ...), before callbacks change them and without figures of the machine.
    """

    seconds: float
    env_steps: int
    samples: int
    episode_returns: tuple[float | None, ...]
    figures: tuple[dict[str, float], ...]

    @property
    def episode_return(self) -> float | None:
        """Return the mean return of the best policy; None before the first episode has ended."""
        return max((value for value in self.episode_returns if value is not None), default=None)


class Result(NamedTuple):
    """Outcome of a start.

    Attributes:
        reason: reason of the end, as in the log.
        exit_code: exit code of the equal command: 0, or 130 after `Training.stop`; 74 if `NotSaved` was raised.
        directory: directory of the run.
        report: last report; without figures if nothing was left to do.
    """

    reason: str
    exit_code: int
    directory: Path
    report: Report


def train(config: Config | Mapping[str, object] | None = None, /, **flags: Any) -> Result:
    """Train until the budget of the flags is spent, and save; `Training` documents the arguments.

    Raises:
        AppoError: as `Training`; progress until the error is saved.
        KeyboardInterrupt: Ctrl-C, after saving.
    """
    with Training(config, **flags) as run:
        for _ in run:
            pass
    return run.result


class Training:
    """A run that trains while the caller iterates over reports.

        with Training(env="CartPole-v1", train_for_env_steps=100_000) as run:
            for report in run:
                print(report.env_steps, report.episode_return)

    Workers run in processes of their own. Between two reports they continue until their pipes to the caller are full.
    Worker processes import the caller's script, so the script must train under `if __name__ == "__main__":`. Leaving
    the block stops the run and saves. The same `experiment` resumes the run. `env` may be a class of environments or a
    function that makes an environment, defined anywhere; a run whose environment cannot be imported needs `env` again
    to resume.

    Args:
        config: flags by name, flags by part and name as in a configuration file, or a `Config`.
        report_seconds: minimum seconds between two reports.
        report_env_steps: minimum env steps between two reports.
        kind: class of the run, for variants; None: as the flags ask.
        callbacks: names of classes, as in the flag; or objects, which are called in this process.
        flags: flags as keywords; keywords overrule `config`.

    Attributes:
        config: all flags, resolved as on the command line. Flags that depend on the kind of observation are filled in
            once the environment is known.
        directory: directory of the run. The number of an unnamed run may change when the block is entered.

    Raises:
        UsageError: a name or value is wrong; one line, with the nearest name.
    """

    def __init__(
        self,
        config: Config | Mapping[str, object] | None = None,
        /,
        *,
        report_seconds: float = 1.0,
        report_env_steps: int = 0,
        kind: type[Run] | None = None,
        callbacks: str | Callbacks | Sequence[str | Callbacks] = (),
        **flags: object,
    ) -> None:
        asked: Any = callbacks
        told: list[Any] = [asked] if isinstance(asked, str) or not isinstance(asked, Iterable) else list(asked)
        if wrong := [one for one in told if not isinstance(one, str | Callbacks)]:
            raise UsageError(f"callbacks are names or objects derived from appo.Callbacks, got {shown(str(wrong[0]))}")
        for one in (one for one in told if isinstance(one, Callbacks)):
            check_methods(type(one), type(one).__name__)
            if lost := [name for name in OF_ACTORS if getattr(type(one), name) is not getattr(Callbacks, name)]:
                log.warning(
                    "%s is an object of main: no actor calls its %s; name the class", type(one).__name__, lost[0]
                )
        if names := ",".join(one for one in told if isinstance(one, str)):
            flags["callbacks"] = names
        asked_for = resolve(_convert_flags(config, flags))[0]
        if isinstance(config, Config):  # of whose flags most were chosen by nobody
            asked_for = replace(asked_for, given=config.given | flags.keys())
        self._run = (kind or kind_of(asked_for))(asked_for, [one for one in told if isinstance(one, Callbacks)])
        if (learners := asked_for.run.num_learners) > 1:
            raise UsageError(f"num_learners={learners} is for the command appo train, which starts a process for each")
        check_program(self._run.config, has_workers=self._run.placement != "serial")
        self.report_seconds, self.report_env_steps = report_seconds, report_env_steps
        self._open = contextlib.ExitStack()
        self._turns: Turns | None = None
        self._entered = self._stopped = False
        self._result: Result | None = None

    def __enter__(self) -> Self:
        if self._entered:
            raise UsageError("this run was entered before: make another Training, which goes on with it")
        self._entered = True
        refuse_imported_script(has_workers=self._run.placement != "serial")
        with contextlib.ExitStack() as stack:
            stack.enter_context(_restore_caller())
            stack.enter_context(kept_warnings())
            stack.enter_context(self._run)
            if given.is_given(self.config.env.env):
                log.warning("%s", given_again(self.config))
            if reason := finished_before(self.config):
                self._end(f"finished before: {reason}", 0)
            else:
                self._turns = self._run.turns()
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._open:
            if self._turns is None:
                return
            if isinstance(error, StopNow):  # a second Ctrl-C, in the caller's own code
                self._turns.close()
                raise KeyboardInterrupt("ended without saving") from None
            if self._runner is None and not self._run.signals.request:  # never iterated over: there is nothing to save
                self._turns.close()
                self._end("ended before it began", Interrupted.exit_code)
                return
            self.stop()
            for _ in self:
                pass

    def __iter__(self) -> Iterator[Report]:
        """Train; yield a report every `report_seconds`, and a last one at the end of the run."""
        if not self._entered:
            raise UsageError("enter the run first: with Training(...) as run")
        due, reported = time.monotonic() + self.report_seconds, 0
        while self._advance():
            now = time.monotonic()
            if self._runner is not None and now >= due and self._env_steps - reported >= self.report_env_steps:
                due, reported = now + self.report_seconds, self._env_steps
                yield self.report()
        if self._runner is not None:
            yield self.result.report

    @property
    def config(self) -> Config:
        """Return the configuration of the run."""
        return self._run.config

    @property
    def directory(self) -> Path:
        """Return the directory of the run."""
        return self._run.directory

    @property
    def result(self) -> Result:
        """Return the outcome of the run (UsageError: the run has not ended)."""
        if self._result is None:
            raise UsageError("the run has not ended: its result is there after the last report")
        return self._result

    def stop(self) -> None:
        """End the run like a spent budget: the next step of the iteration stops the workers and saves."""
        if self._run.signals.request is None:
            self._stopped = True
            self._run.signals.request = Interrupted("stopped by the program")

    def save(self) -> None:
        """Save all policies; return when the checkpoints are on disk. Training continues, and its end saves anyway.

        Raises:
            UsageError: the run has not begun, or saves only at its barriers (--deterministic_resume).
            ResourceError: saving took more than a minute, as on a full disk; the log has the reason.
        """
        if self._result is not None:
            return
        if self._turns is None or self._runner is None:
            raise UsageError("only a run that is being iterated over can be saved")
        if self.config.run.deterministic_resume:
            raise UsageError("with deterministic_resume only the ends of legs are saved")
        checkpointing = self._runner.checkpointing
        checkpointing.ask()
        deadline = time.monotonic() + SAVE_SECONDS
        while self._advance() and checkpointing.busy:
            if time.monotonic() > deadline:
                raise ResourceError(f"not saved within {SAVE_SECONDS:g} seconds")

    def weights(self, policy: int = 0) -> dict[str, Array]:
        """Copy weights and normalization of a policy, at most a second old; for `Policy.set_weights`.

        Weights of networks that the learner has beside the acting network are named `networks.NAME.WEIGHT`.

        Raises:
            UsageError: the run has not begun, or the policy does not exist.
        """
        if self._runner is None or not 0 <= policy < len(self._runner.checkpointing.blocks):
            raise UsageError(f"there are no weights of policy {policy}")
        block = self._runner.checkpointing.blocks[policy]
        if (state := block.read()) is None:
            self.save()
            state = block.read()
        assert state is not None
        views = all_weights(state, self._runner.checkpointing.tables[policy])
        return {name: view.copy() for name, view in views.items()}

    @property
    def share(self) -> float | None:
        """Return the spent share of the budget; None for an endless budget, or before the run begins."""
        return None if self._runner is None else self._runner.monitor.overview(time.monotonic()).share

    def report(self) -> Report:
        """Return the progress of the run now (UsageError: the run has not begun)."""
        monitor, now = self._monitor(), time.monotonic()
        policies = monitor.policies
        return Report(
            seconds=now - monitor.started,
            env_steps=self._env_steps,
            samples=sum(p.totals["samples"] for p in policies),
            episode_returns=tuple(p.episode_return.mean if p.episode_return.count else None for p in policies),
            figures=tuple(monitor.record(policy, now) for policy in range(len(policies))),
        )

    def set_weights(self, weights: Mapping[str, Any], policy: int = 0) -> None:
        """Continue training a policy with these weights, in the form that `weights` returns; the optimizer stays.

        Without a weight named `networks.*` the networks beside the acting network stay too. On return the weights are
        published and saved. Samples of older weights count as too old. Normalization of observations and returns
        follows the run's own statistics again from the next update on.

        Raises:
            UsageError: as `save`; or a name or shape does not fit the model, or a name is missing.
            ResourceError: as `save`; or the learner ended before it took the weights over.
        """
        if self._runner is None or not 0 <= policy < len(self._runner.checkpointing.tables):
            raise UsageError(f"there is no policy {policy} whose weights can be set")
        table = self._runner.checkpointing.tables[policy]
        if any(name.startswith(NETWORKS) for name in weights):
            table = [(name, array.shape) for name, array in self.weights(policy).items()]
        vector = vector_of(weights, table)
        if self._result is not None or self.config.run.deterministic_resume:
            raise UsageError("weights can only be set while a run trains, and not with deterministic_resume")
        self._require_pause()
        with tempfile.NamedTemporaryFile(prefix="appo-weights-", delete=False) as file:
            file.write(vector.tobytes())
        path = Path(file.name)
        try:
            self._runner.workers.send(ReplaceWeights(policy, file.name))
            self.save()  # the learner is asked for its state behind it
            if path.exists():
                raise ResourceError("the weights were not taken over: set them again")
        finally:
            path.unlink(missing_ok=True)

    def evaluate(self, **flags: object) -> list[dict[str, Any]]:
        """Play every policy in its present state, by `appo evaluate` in a process beside training, which continues.

        Args:
            flags: flags of the command: episodes, seed, env_kwargs, ...

        Returns:
            A mapping per policy and mode: policy, env_steps, mode, episodes, mean, std, low, high, seconds.

        Raises:
            UsageError: as `save`; or the command failed, with its message.
        """
        self.save()
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in flags.items()}
        words = (f"--{name}={text}" for name, text in texts.items())
        lines = self._beside("evaluate", str(self.directory.absolute()), *words, "--json").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def export(self, path: str | Path, policy: int = 0) -> Path:
        """Write a policy in its present state to an ONNX file, by `appo export` in a process beside training.

        Raises:
            UsageError: as `save`; or the command failed, with its message.
        """
        self.save()
        file = Path(path).absolute()
        self._beside("export", str(self.directory.absolute()), f"--output={file}", f"--policy_index={policy}")
        return file

    def collect_metrics(self, workers: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
        """Return counters of this start and shares of time by phase, for each worker process.

        Args:
            workers: names of processes, such as actor_0; None: all processes that have reported.

        Raises:
            UsageError: the run has not begun, or a named worker has not reported.
        """
        monitor = self._monitor()
        found: dict[str, dict[str, float]] = {name: dict(counts) for name, counts in monitor.workers.items()}
        for name, times in monitor.times.items():
            window = times.window()
            shares = {f"time/{phase}": spent / (window.length or 1.0) for phase, spent in window.seconds.items()}
            found[name] = found.get(name, {}) | shares
        for name in workers or ():
            if name not in found:
                raise UsageError(f"no worker {shown(name)} has reported{nearest(name, found)}")
        return found if workers is None else {name: found[name] for name in workers}

    def _beside(self, *words: str) -> str:
        with Janitor() as janitor:  # that of the run ends with it, which may be meanwhile
            return answer_of((*words, *trust_words()), janitor, self._advance)

    def _monitor(self) -> Monitor:
        if self._runner is None:
            raise UsageError("the run has not begun: iterate over it")
        return self._runner.monitor

    @property
    def _env_steps(self) -> int:
        """Return the env steps that all policies together have learned from."""
        return 0 if self._runner is None else sum(p.totals["env_steps"] for p in self._runner.monitor.policies)

    @property
    def _runner(self) -> Runner | None:
        return self._run.runner

    def _advance(self) -> bool:
        """Take a turn; return False after the last one."""
        if self._turns is None:
            return False
        self._require_pause()
        try:
            next(self._turns)
        except StopIteration as end:
            self._end(str(end.value), 0)
            self._raise(self._run.signals.request)  # which came too late to end training
        except Interrupted as interruption:
            self._end(str(interruption), interruption.exit_code)
            self._raise(interruption)
        except StopNow:
            self._turns = None
            raise KeyboardInterrupt("ended without saving") from None
        except BaseException as error:
            self._turns = None
            if isinstance(error, AppoError) and error.traceback:
                error.add_note(error.traceback.rstrip())  # of a process of ours, which Python knows nothing of
            raise
        return self._turns is not None

    def _require_pause(self) -> None:
        """Refuse what a callback or another thread asks during a step of the run (UsageError)."""
        if self._turns is not None and inspect.getgeneratorstate(self._turns) == inspect.GEN_RUNNING:
            raise UsageError("a step of the run is under way: save, evaluate and set weights between two reports")

    def _raise(self, interruption: Interrupted | None) -> None:
        """Raise what the caller has to see of the request for an end; nothing for an end by `stop`."""
        if isinstance(interruption, NotSaved):
            raise interruption
        if interruption is not None and not self._stopped:
            if isinstance(interruption, Terminated):
                raise interruption
            raise KeyboardInterrupt(str(interruption)) from None

    def _end(self, reason: str, exit_code: int) -> None:
        self._turns = None
        if self._runner is not None:
            report = self.report()
        else:
            status = RunFolder(self.directory).read_status()
            totals, means = status.get("totals", {}), tuple(status.get("return_mean", ()))
            report = Report(
                seconds=float(status.get("seconds", 0.0)),
                env_steps=totals.get("env_steps", 0),
                samples=totals.get("samples", 0),
                episode_returns=means,
                figures=(),
            )
        self._result = Result(reason, exit_code, self.directory, report)


def _convert_flags(config: Config | Mapping[str, object] | None, flags: Mapping[str, object]) -> dict[str, object]:
    """Convert the flags of the caller, whose terminal gets no panel unless a `Config` asks for one."""
    if isinstance(config, Config):
        left_out = config.undecided | ({"experiment"} if config.unnamed else frozenset())
        whole = {name: value for name, value in config.to_flat().items() if name not in left_out}
    else:
        whole = {"log_format": "plain", **flattened(config or {}, FLAGS_BY_PART, "config")}
    keywords = flattened(flags, FLAGS_BY_PART, "flags")
    for values in (whole, keywords):
        if "env" in values:
            values["env"] = given.name_of(values["env"], is_factory)
    table = flag_table(algorithm_of({**whole, **keywords}))
    return {**typed(whole, "config", table), **typed(keywords, "flags", table)}


@contextlib.contextmanager
def _restore_caller() -> Iterator[None]:
    """Restore threads, environment variables, limits and torch's random numbers at the exit."""
    environ = {name: os.environ[name] for name in OURS if name in os.environ}
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    torch = sys.modules.get("torch")
    fork_server.renew(dict(os.environ))
    threads, random = (torch.get_num_threads(), torch.get_rng_state()) if torch else (None, None)
    try:
        with threadpoolctl.threadpool_limits(limits=None):
            yield
    finally:
        fork_server.stop_fork_server_of_thread()
        for name in OURS:
            os.environ.pop(name, None)
        os.environ |= environ
        with contextlib.suppress(ValueError, OSError):  # so many files are open now
            resource.setrlimit(resource.RLIMIT_NOFILE, files)
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(threads or int(os.environ.get("OMP_NUM_THREADS") or machine.available_cores()))
            if random is not None:
                torch.set_rng_state(random)
