"""The processes that try the environment and the model before memory is reserved; torch-free, so that main can use it.

An environment that hangs or crashes at once, or leaves things behind, does so there and harms nothing. While one
process steps it, another one times the network, so both compete for the machine as they will in training.
"""

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from algorithms.appo.blueprint import ModelDescription, Probe
from algorithms.appo.config import Config
from algorithms.appo.kinds import completed
from algorithms.appo.tuning import Costs, threads_to_time, usual_ratio
from algorithms.runtime.janitor import Janitor
from algorithms.runtime.launch import Inquiry
from algorithms.runtime.messages import WorkerFailed
from algorithms.runtime.process import failure_of, isolate
from algorithms.runtime.signals import SignalWatch
from algorithms.runtime.supervisor import WorkerError
from envs.make import check_name
from envs.spec import EnvSpec
from utils import cpu
from utils.memory import held_bytes

log = logging.getLogger(__name__)

BUDGET_SECONDS = 2.0

Inquire = Callable[[Callable[..., None], tuple[object, ...]], Inquiry]
"""Makes an inquiry of a target and its arguments."""


class Found(NamedTuple):
    """What was found out, what was measured, and how long main waited for that."""

    probe: Probe
    costs: Costs | None
    seconds: float


def find_out(config: Config, ask_environment: Inquire, ask_network: Inquire, cores: int) -> Found:
    """Try the environment and the model in processes of their own; measure what they cost on cores, if there are any.

    An environment that is not measured in time counts as being as slow as the time it had; there are no costs if the
    model is not.

    Raises:
        EnvironmentFailure, WorkerError: they cannot be made.
        Interrupted: a signal came meanwhile.
    """
    timeout_seconds = config.sampling.reset_timeout_seconds
    with ask_environment(try_environment, (config, cores > 0)) as environment:
        spec = checked(environment.answer(timeout_seconds))
        assert isinstance(spec, EnvSpec)
        config = completed(config, spec)
        with ask_network(try_model, (config, spec, cores > 0)) as network:
            model = checked(network.answer(timeout_seconds, "network"))
            assert isinstance(model, ModelDescription)
            found, begin = Probe(spec, model, config), time.monotonic()
            if not cores:
                return Found(found, None, 0.0)
            deadline = begin + BUDGET_SECONDS
            costs = _costs(network.answer_by(deadline), environment, deadline)
            if costs and (threads := threads_to_time(costs, config, spec.num_agents, cores)):
                network.ask(threads)  # now that the environment is still: threads beside it would not be side by side
                costs = _with_threads(costs, threads, network.answer_by(deadline))
    return Found(found, costs, time.monotonic() - begin)


def _costs(of_network: object, environment: Inquiry, deadline: float) -> Costs | None:
    """What both have measured; None without the network."""
    if not isinstance(of_network, tuple) or isinstance(of_network, WorkerFailed):
        summary = getattr(of_network, "summary", "the network was not measured in time")
        log.info("not auto-tuned, the sampling flags follow fixed rules: %s", summary)
        return None
    acting, training = of_network
    of_environment = environment.answer_by(deadline)
    if isinstance(of_environment, tuple) and not isinstance(of_environment, WorkerFailed):
        stepping, env_bytes = of_environment
    else:
        stepping, env_bytes = ((1, BUDGET_SECONDS),), 0
    return Costs(stepping, acting, training, env_bytes)


def _with_threads(costs: Costs, threads: int, ratio: object) -> Costs:
    """The costs with those of that many threads of the learner; a network that takes too long to time them is large."""
    if isinstance(ratio, WorkerFailed):
        return costs
    share = ratio if isinstance(ratio, float) else usual_ratio(threads)
    (_, seconds), *_ = costs.learn
    return replace(costs, learn=(*costs.learn, (threads, seconds * share)))


def decided(config: Config) -> Config:
    """The configuration with what the kind of observation decides; the environment is made for that if need be.

    Raises:
        UsageError, EnvironmentFailure, WorkerError: it cannot be made, or flags contradict each other then.
        Interrupted: a signal came meanwhile.
    """
    if not config.undecided:
        return config
    check_name(config.env)
    with tempfile.TemporaryDirectory(prefix="appo-probe-") as folder, SignalWatch() as signals, Janitor() as janitor:
        inquiry = Inquiry(
            try_environment,
            (config, False),
            log_path=Path(folder, "probe.log"),
            method="spawn",
            signals=signals,
            janitor=janitor,
        )
        with inquiry:
            spec = checked(inquiry.answer(config.sampling.reset_timeout_seconds))
    assert isinstance(spec, EnvSpec)
    return completed(config, spec)


def checked(answer: object) -> object:
    """What an inquiry has told, if it is no failure; `WorkerError` if it is."""
    if isinstance(answer, WorkerFailed):
        raise WorkerError(answer.summary, answer.exit_code, answer.traceback)
    return answer


def try_environment(pipe: Connection, log_path: Path, config: Config, measure: bool) -> None:
    """Send its `EnvSpec`, and then what `stepping_costs` finds; a `WorkerFailed` in place of either."""
    _enter("probe", log_path)
    try:
        from algorithms.appo.rehearsal import Making, stepping_costs
        from envs.env_set import OnFailure
        from envs.make import make_group

        begin, bytes_before = time.perf_counter(), held_bytes()
        envs = make_group(config.env, 1, on_failure=OnFailure(config.env.max_env_rebuilds))
        making = Making(time.perf_counter() - begin, bytes_before)
        pipe.send(envs.spec)
        if measure:
            pipe.send(stepping_costs(config, envs, making))
        envs.close()
    except BaseException as error:  # whatever an environment raises, SystemExit included
        _fail(pipe, error)


def try_model(pipe: Connection, log_path: Path, config: Config, spec: EnvSpec, measure: bool) -> None:
    """Send its `ModelDescription`, what `NetworkProbe.costs` finds, and what threads are worth if it is asked for that.

    A `WorkerFailed` comes in place of any of them.
    """
    _enter("model_probe", log_path)
    try:
        from algorithms.appo.probe import NetworkProbe

        network = NetworkProbe(config, spec)
        pipe.send(network.description)
        if measure:
            pipe.send(network.costs())
            if pipe.poll(2 * BUDGET_SECONDS):
                pipe.send(network.threads_ratio(pipe.recv()))
    except BaseException as error:
        _fail(pipe, error)


def try_examining(pipe: Connection, log_path: Path, config: Config) -> None:
    """Send an `Exam` of the environment, or a `WorkerFailed`."""
    _enter("probe", log_path)
    try:
        from algorithms.appo.examining import examine

        pipe.send(examine(config.env))
    except BaseException as error:
        _fail(pipe, error)


def try_nothing(pipe: Connection, log_path: Path) -> None:
    """Say that the process has started."""
    _enter("probe", log_path)
    pipe.send(True)


def _enter(name: str, log_path: Path) -> None:
    isolate(name, log_path, leads_group=True)
    cpu.allocator_settings()
    cpu.limit_threads(1)


def _fail(pipe: Connection, error: BaseException) -> None:
    with contextlib.suppress(OSError):
        pipe.send(failure_of("probe", error))
