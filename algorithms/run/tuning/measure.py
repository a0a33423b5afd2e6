"""Processes that try environment and model before memory is reserved. Free of torch, for main.

An environment that hangs, crashes or leaves files behind harms only its process. While one process steps the
environment, another one times the network: both compete for the machine, as in training.
"""

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from appo.algorithms.run.config import Config, check
from appo.algorithms.run.defaults import completed, learned_spec
from appo.algorithms.run.placement import SHARE_OF_LAG, Sampling, most_envs, require_one_per_process, topology_of
from appo.algorithms.run.plan import Probe, RunPlan
from appo.algorithms.run.resources import free_bytes
from appo.algorithms.run.tuning.choice import NOTHING, Costs, Curve, Plan, choose, threads_to_time, usual_ratio
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.messages import WorkerFailed
from appo.algorithms.runtime.processes.inquiry import Inquiry
from appo.algorithms.runtime.processes.janitor import Janitor
from appo.algorithms.runtime.processes.process import failure_of, isolate
from appo.algorithms.runtime.processes.supervisor import WorkerError
from appo.envs.make import alone, check_name, make_first, with_company, with_precision
from appo.envs.spec import EnvSpec
from appo.utils.errors import UsageError
from appo.utils.system import machine
from appo.utils.system.memory import held_bytes
from appo.utils.system.signal_watch import SignalWatch
from appo.utils.system.usage import OtherPrograms

log = logging.getLogger(__name__)
BUDGET_SECONDS = 2.0
COMPANY_SECONDS, COMPANY_FACTOR = 10.0, 3.0
"""Limit for making a second environment: seconds, or a multiple of the time of the first one."""
SLOW_TIMES = 10.0
"""Cost of a step on each core, in units of learning from it, from which `Algorithm.preset_by_cost` decides.

With five times as much learning the learner is then busy half of the time, and two cores are a fifth slower.
"""
BUSY_SHARE = 0.15
"""Share of the cores' time taken by other programs; a third of a core on two cores."""
SLOW: Curve = ((1, BUDGET_SECONDS),)
Inquire = Callable[[Callable[..., None], tuple[object, ...]], Inquiry]
"""Makes an inquiry of a target and its arguments."""


class Measurement(NamedTuple):
    """Results of trying environment and model.

    Attributes:
        probe: description of environment and model.
        costs: measured costs; None: not measured.
        seconds: seconds that main waited.
        guessed: whether the environment was not measured, and the costs are a guess.
        alone: whether several environments in one process failed, and no flag asks for several.
        others: share of the cores' time that other programs took meanwhile.
    """

    probe: Probe
    costs: Costs | None
    seconds: float
    guessed: bool = False
    alone: bool = False
    others: float = 0.0

    @property
    def planned(self) -> Config:
        """Return the configuration to plan processes by."""
        config = self.probe.config
        if self.probe.spec.one_per_process:
            return require_one_per_process(config)
        return replace(config, sampling=replace(config.sampling, num_envs_per_worker=1)) if self.alone else config

    @property
    def lasting(self) -> Costs | None:
        """Return the costs that later starts may use; None: no such costs."""
        return None if self.guessed or self.alone or self.busy else self.costs

    @property
    def busy(self) -> bool:
        """Return whether other programs took so much of the machine that the costs may be far off."""
        return self.others >= BUSY_SHARE

    def for_slow_steps(self, undecided: Set[str], cores: int) -> "Measurement":
        """Return the measurement with flags that learn more from each step, if an unknown environment is slow.

        Args:
            undecided: flags that the kind of observation decides.
            cores: cores of the run.
        """
        # The ratio of two costs is about the same beside other programs.
        config, costs = self.probe.config, None if self.guessed or self.alone else self.costs
        known = config.by_kind.keys() & undecided
        if costs is None or not config.algorithm.needs_actors or not known:
            return self
        seconds = min(seconds / envs for envs, seconds in costs.env) / self.probe.spec.num_agents
        times = seconds / costs.learn[0][1]
        images = "encoder_mlp_layers" not in config.by_kind
        asked = config.algorithm.preset_by_cost(images=images, rollout=config.learning.rollout)
        chosen: dict[str, Any] = {name: value for name, value in asked.items() if name in known}
        learning = replace(config.learning, **chosen)
        whole = replace(config, learning=learning, by_kind={**config.by_kind, **chosen})
        if times < SLOW_TIMES * cores or not chosen or _needs_young_steps(whole, self.probe.spec.num_agents, cores):
            return self
        try:
            check(whole)
        except UsageError:  # beside flags that were given
            return self
        words = " ".join(f"{name}={value}" for name, value in chosen.items())
        log.info("a step costs %.0f times as much as learning from it, so it is learned from more: %s", times, words)
        dearer = _steps_per_sample(learning) / _steps_per_sample(config.learning)
        learn = tuple((threads, seconds * dearer) for threads, seconds in costs.learn)
        return self._replace(probe=replace(self.probe, config=whole), costs=replace(costs, learn=learn))

    def plan(self, planned: Config, cores: int) -> Plan:
        """Return the plan of a start by measured costs, under flags of sampling that may differ from the run's."""
        spec, models, config = self.probe.spec, self.probe.models, self.probe.config
        assert self.costs is not None

        def memory(sampling: Sampling) -> int:
            topology = topology_of(config, sampling, spec.num_agents)
            budget = Budget.of(config.run, config.sampling, spec.frames_per_step)
            return sum(field.nbytes for field in RunPlan(config, spec, models, topology, budget, "cpu", 0).fields())

        return choose(self.costs, planned, spec.num_agents, cores, memory, free_bytes(config.sampling.memory_limit_mb))


def _needs_young_steps(config: Config, num_agents: int, cores: int) -> bool:
    """Return whether so many updates in an iteration would make steps too old, or leave cores without an actor."""
    updates = config.learning.ppo_epochs * config.learning.num_batches_per_iteration
    too_old = updates > SHARE_OF_LAG * config.sampling.max_policy_lag
    return bool(too_old or most_envs(config, num_agents) < cores)


def _steps_per_sample(learning: Any) -> float:
    """Return optimizer steps per sample, with which the costs of small batches grow."""
    return float(learning.ppo_epochs) / float(learning.batch_size)


def measure_run(config: Config, ask_environment: Inquire, ask_network: Inquire, cores: int) -> Measurement:
    """Try environment and model in processes of their own; measure their costs if `cores` is not 0.

    An environment that is not measured in time counts as slow as its time limit. Without a measured model the result
    has no costs. If several environments in one process fail, each gets a process, if the flags allow.

    Raises:
        EnvironmentFailure, WorkerError: environment or model cannot be made.
        Interrupted: a signal arrived meanwhile.
    """
    timeout_seconds, plays = config.sampling.reset_timeout_seconds, config.algorithm.needs_actors
    asked = time.monotonic()
    with ask_environment(measure_environment, (config, plays and cores > 0)) as environment:
        spec = require_answer(environment.answer(timeout_seconds))
        assert isinstance(spec, EnvSpec)
        patience = max(COMPANY_SECONDS, COMPANY_FACTOR * (time.monotonic() - asked))
        before, config = config.env, completed(config, spec)
        if config.env != before:
            environment.finish()
            return measure_run(config, ask_environment, ask_network, cores)
        with ask_network(measure_network, (config, spec, cores > 0)) as network:
            models = require_answer(network.answer(timeout_seconds, "network"))
            assert isinstance(models, tuple)
            spec, is_lost = _with_company(environment, spec, config.env.env, patience)
            found, begin = Measurement(Probe(spec, models, config), None, 0.0), time.monotonic()
            if not cores:
                return found
            deadline, others = begin + BUDGET_SECONDS, OtherPrograms()
            if (training := _network_costs(network.answer_by(deadline))) is None:
                return found._replace(seconds=time.monotonic() - begin)
            stepping = SteppingCosts() if plays else SteppingCosts(NOTHING)
            if plays and not is_lost:
                stepping = _stepping_costs(environment, deadline)
            is_open = not spec.one_per_process and not (
                config.sampling.num_envs_per_worker or config.sampling.worker_num_splits
            )
            found = found._replace(
                guessed=not stepping.is_measured, alone=bool(stepping.failure and stepping.is_measured and is_open)
            )
            _log_unmeasured(stepping, found.alone, environment.log_path)
            config, costs = found.planned, Costs(stepping.curve, *training, stepping.env_bytes)
            if threads := threads_to_time(costs, config, spec.num_agents, cores):
                # Now that the environment is still: threads beside it would not be side by side.
                environment.finish()
                network.ask(threads)
                costs = _with_threads(costs, threads, network.answer_by(deadline))
            return found._replace(costs=costs, seconds=time.monotonic() - begin, others=others.share())


def _with_company(environment: Inquiry, spec: EnvSpec, name: str, patience: float) -> tuple[EnvSpec, bool]:
    """Return the spec with the outcome of making a second environment, and whether the process is lost."""
    if spec.one_per_process is not None:
        return spec, False
    answer = environment.answer_by(time.monotonic() + patience)
    if isinstance(answer, EnvSpec):
        return answer, False
    late = f"it was not made in {patience:.0f} s"
    return alone(spec, name, answer.summary if isinstance(answer, WorkerFailed) else late), True


def _network_costs(answer: object) -> tuple[Curve, Curve] | None:
    """Return the costs of acting and training, if measured."""
    if isinstance(answer, tuple) and not isinstance(answer, WorkerFailed):
        return answer
    summary = getattr(answer, "summary", "the network was not measured in time")
    log.info("not auto-tuned, the sampling flags follow fixed rules: %s", summary)
    if isinstance(answer, WorkerFailed) and answer.traceback:
        log.info("%s", answer.traceback.rstrip())
    return None


class SteppingCosts(NamedTuple):
    """Costs of stepping, bytes of an environment, and the failure that ended the measurement."""

    curve: Curve = SLOW
    env_bytes: int = 0
    failure: WorkerFailed | None = None

    @property
    def is_measured(self) -> bool:
        """Return whether at least a single environment was stepped in time."""
        return self.curve is not SLOW


def _stepping_costs(environment: Inquiry, deadline: float) -> SteppingCosts:
    """Return the costs of stepping that were measured in time (WorkerError: a mistake in the environment's code)."""
    stepping = SteppingCosts()
    while (answer := environment.answer_by(deadline)) is not None:
        if isinstance(answer, WorkerFailed):
            if answer.lasting and not stepping.is_measured:  # the first step of training would fail in the same way
                require_answer(answer)
            return stepping._replace(failure=answer)
        assert isinstance(answer, tuple)
        stepping = SteppingCosts(*answer)
    return stepping


def _log_unmeasured(stepping: SteppingCosts, alone: bool, log_path: Path) -> None:
    """Log the costs that were not measured, and the consequence for the run."""
    slow = f"counted as taking {BUDGET_SECONDS:g} s a step"
    if stepping.failure is None:
        if not stepping.is_measured:
            log.info("the environment was not measured in time: %s", slow)
        return
    what = f"stepping the environment has failed, {slow}"
    if stepping.is_measured:
        what = f"several environments in one process have failed{', so each actor gets one' * alone}"
    failure = stepping.failure
    trace = f"\n{failure.traceback.rstrip()}" if failure.traceback else ""
    log.warning("%s: %s (see %s)%s", what, failure.summary, log_path, trace)


def _with_threads(costs: Costs, threads: int, ratio: object) -> Costs:
    """Return the costs with the costs of that many learner threads; a network too slow to time counts as large."""
    if isinstance(ratio, WorkerFailed):
        return costs
    share = ratio if isinstance(ratio, float) else usual_ratio(threads)
    (_, seconds), *_ = costs.learn
    return replace(costs, learn=(*costs.learn, (threads, seconds * share)))


def resolve_defaults(config: Config) -> Config:
    """Decide the flags that depend on the kind of observation; make the environment if necessary (see `made_once`)."""
    return completed(config, made_once(config)) if config.undecided else config


def made_once(config: Config) -> EnvSpec:
    """Make the environment in a process of its own; return its spaces.

    Raises:
        UsageError, EnvironmentFailure, WorkerError: the environment cannot be made, or flags contradict each other.
        Interrupted: a signal arrived meanwhile.
    """
    if config.env.env:
        check_name(config.env)
    with (
        tempfile.TemporaryDirectory(prefix="appo-probe-") as folder,
        SignalWatch() as signals,
        Janitor() as janitor,
        Inquiry(
            measure_environment,
            (config, False),
            log_path=Path(folder, "probe.log"),
            method="spawn",
            signals=signals,
            janitor=janitor,
        ) as inquiry,
    ):
        spec = require_answer(inquiry.answer(config.sampling.reset_timeout_seconds))
    assert isinstance(spec, EnvSpec)
    return spec


def require_answer(answer: object) -> object:
    """Return the answer of an inquiry; raise `WorkerError` for a failure."""
    if isinstance(answer, WorkerFailed):
        raise WorkerError(answer.summary, answer.exit_code, answer.traceback)
    return answer


def measure_environment(pipe: Connection, log_path: Path, config: Config, measure: bool) -> None:
    """Send the environment's `EnvSpec`, then its `stepping_costs`; a `WorkerFailed` takes a missing result's place."""
    enter("probe", log_path)
    with send_failures(pipe):
        from appo.algorithms.run.tuning.environment import stepping_costs
        from appo.envs.loop.env_set import OnFailure

        config.run.keep_code_out()
        begin, bytes_before = time.perf_counter(), held_bytes()
        if not config.env.env:
            pipe.send(learned_spec(config, None))
            return
        with contextlib.ExitStack() as made, send_failures(pipe):  # first, as what is broken may take long to close
            on_failure = OnFailure(config.env.max_env_rebuilds)
            envs = make_first(config.env.as_trained, config.sampling.given_group_size, on_failure=on_failure)
            made.callback(envs.close)
            seconds = time.perf_counter() - begin
            envs.spec = with_precision(envs)
            if config.sampling.shares_process:
                envs.spec = replace(envs.spec, one_per_process=None)
            spec = learned_spec(config, envs.spec)
            pipe.send(spec)
            if spec.one_per_process is None:  # a second one may end this process, or never return
                envs.spec = with_company(config.env.as_trained, spec)
                pipe.send(envs.spec)
            if measure:
                for costs in stepping_costs(config, envs, seconds, bytes_before, made):
                    pipe.send(costs)
                pipe.send(None)


def measure_network(pipe: Connection, log_path: Path, config: Config, spec: EnvSpec, measure: bool) -> None:
    """Send descriptions of the models, costs by `NetworkTimer`, and the ratio of threads if asked.

    A `WorkerFailed` takes the place of a missing result.
    """
    enter("model_probe", log_path)
    with send_failures(pipe):
        from appo.algorithms.run.tuning.network import NetworkTimer

        config.run.keep_code_out()
        network = NetworkTimer(config, spec)
        pipe.send(network.descriptions)
        if measure:
            pipe.send(network.costs())
            if pipe.poll(2 * BUDGET_SECONDS):
                pipe.send(network.threads_ratio(pipe.recv()))


def enter(name: str, log_path: Path) -> None:
    """Isolate a process that tries, measures or trains beside main, with one numeric thread."""
    isolate(name, log_path, leads_group=True)
    machine.allocator_settings()
    machine.limit_threads(1)


@contextlib.contextmanager
def send_failures(pipe: Connection) -> Iterator[None]:
    """Send any error raised while entered; environments may raise everything, even SystemExit."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send(failure_of("probe", error))
