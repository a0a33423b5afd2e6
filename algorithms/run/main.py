"""One run, from its flags to its end: memory, queues and processes. Start reading here."""

import logging
import math
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from appo.algorithms.datasets.output import check_output, writer_name
from appo.algorithms.population.exploit_explore import ExploitExplore, initial_traits
from appo.algorithms.run.algorithms import better_algorithm
from appo.algorithms.run.config import Config
from appo.algorithms.run.defaults import told
from appo.algorithms.run.directory.code import CodeWatch, code_places
from appo.algorithms.run.directory.page import leave_page
from appo.algorithms.run.directory.taking import lock_run_folder, remove_old
from appo.algorithms.run.effects import features_of, without_effect
from appo.algorithms.run.first_batch import FirstBatch, budget_of, log_refill
from appo.algorithms.run.folder import count_starts
from appo.algorithms.run.machines.forecast import GIGABIT, LOOPBACK, Sums, learners_text
from appo.algorithms.run.observers import (
    check_observers,
    evaluate_beside,
    make_monitor,
    say_output,
    start_tracking,
    with_saves_to_evaluate,
)
from appo.algorithms.run.placement import (
    Sampling,
    choose_placement,
    cores_of,
    goes_on,
    gpus_of,
    plan_workers,
    topology_of,
)
from appo.algorithms.run.policies import log_comparison, make_controller, make_self_play, shaping_of
from appo.algorithms.run.preload import preloaded
from appo.algorithms.run.ranks.meeting import announce, choose_gpu, follow, print_into, share_of
from appo.algorithms.run.resources import check_descriptors, check_machine, memory_plan, reserve
from appo.algorithms.run.resume import ResumeSegments, fill, finished_before, measured_before, seed_of_resumed
from appo.algorithms.run.schedules import log_schedules
from appo.algorithms.run.tuning.choice import is_open, report
from appo.algorithms.run.tuning.measure import Measurement, measure_run
from appo.algorithms.run.workers.blueprint import Blueprint
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.callbacks import Callbacks, find_callbacks
from appo.algorithms.runtime.checkpointing import Checkpointing
from appo.algorithms.runtime.custom_summaries import CustomSummaries
from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.heartbeat import Heartbeat
from appo.algorithms.runtime.memory.learner_state import StateBlock
from appo.algorithms.runtime.messages import Address
from appo.algorithms.runtime.monitor.performance import Machine
from appo.algorithms.runtime.monitor.status import Status
from appo.algorithms.runtime.monitor.upkeep import Upkeep
from appo.algorithms.runtime.processes import fork_server, inquiry, prctl
from appo.algorithms.runtime.processes.channels import Links
from appo.algorithms.runtime.processes.crash_recorder import CrashRecorder
from appo.algorithms.runtime.processes.janitor import Janitor
from appo.algorithms.runtime.processes.node import Node
from appo.algorithms.runtime.processes.pool import InProcess, Processes, Workers
from appo.algorithms.runtime.processes.process import ProcessPlan
from appo.algorithms.runtime.processes.progress import Progress
from appo.algorithms.runtime.processes.restarts import Limits
from appo.algorithms.runtime.processes.stalls import PATIENCE_SECONDS, StallWatch
from appo.algorithms.runtime.processes.supervisor import Supervisor
from appo.algorithms.runtime.ranks import Rank
from appo.algorithms.runtime.roles import ACTOR, MAIN
from appo.algorithms.runtime.runner import Runner, Turns, run_to_end
from appo.algorithms.runtime.topology import Topology
from appo.envs.make import check_name
from appo.envs.masks import masks_said
from appo.envs.spec import EnvSpec
from appo.utils.errors import AppoError, DirectoryInUse, Interrupted, NothingTrained, StopNow, UsageError
from appo.utils.logging import configure
from appo.utils.system.limits import raise_limit
from appo.utils.system.machine import allocator_settings, available_cores, core_time, limit_threads, processor_name
from appo.utils.system.signal_watch import SignalWatch
from appo.utils.user_modules import find_function

log = logging.getLogger(__name__)


def train(config: Config, kind: "type[Run] | None" = None, rank: Rank | None = None) -> int:
    """Train until the budget is spent, a signal arrives or a worker fails; return the exit code.

    `kind` is the class of a variant of the run; `rank` is None for a single learner.

    Raises:
        AppoError: a failure, with its exit code.
    """
    level, stderr = config.logging.log_level.upper(), None
    configure(MAIN.name, None, level, as_json=config.logging.log_format == "json")
    if rank is not None:
        share_of(config, rank)
        choose_gpu(rank)
    if rank is not None and rank.number:
        config, reason = follow(config, rank)
        if reason:
            return 0
        stderr = print_into(config.run.folder.log(MAIN.name))
        configure(MAIN.name, config.run.folder.log(MAIN.name), level)
    try:
        with (kind or Run)(config, rank=rank) as run:
            return run.train()
    except AppoError as error:
        if stderr is not None:
            os.write(stderr, f"error: rank {rank.number if rank else 0} (pid {os.getpid()}): {error}\n".encode())
        raise


class Run:
    """One run. Entering checks all names in the flags and locks the run's folder.

    Args:
        config: all flags.
        callbacks: objects that receive reports in this process, besides callbacks named by flags.
        rank: place among several learners of the policy; None: a single learner.

    Attributes:
        config: all flags. Flags that depend on the kind of observation are filled in once the environment is known;
            of several learners, from then on with the share of this rank in every batch.
        blueprint: class of the plan that builds workers; variants of an algorithm replace the class.
        signals: requests by a person or the system.
        runner: main loop; None before the workers are planned.
        begun: whether all workers have been ready.

    Raises:
        AppoError: on entering: a name does not exist, or another process trains in the folder.
    """

    blueprint: type[Blueprint] = Blueprint

    def __init__(self, config: Config, callbacks: Sequence[Callbacks] = (), rank: Rank | None = None) -> None:
        self.config, self.callbacks, self.signals, self.rank = config, callbacks, SignalWatch(), rank
        self.directory, self.cores = config.run.run_directory, available_cores()
        if rank is not None:
            self.cores = max(1, self.cores // rank.local_size)
        self.machine = {"cores": self.cores, "processor": processor_name()}
        self._place()
        self.sampling = plan_workers(config, self.cores, self.placement)
        self.janitor = Janitor()
        self.runner: Runner | None = None
        self.begun = False
        self._first_batch: FirstBatch | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            check_machine(self.config, self.sampling)
            self._check_names()
            behavior, unnamed = self.config.run.restart_behavior, self.config.unnamed
            lock = stack.enter_context(
                lock_run_folder(self.directory, behavior, unnamed=unnamed, begun=lambda: self.begun)
            )
            if (directory := lock.path.parent) != self.directory:
                self.config = replace(self.config, run=replace(self.config.run, experiment=directory.name))
                self.directory = directory
            self.status = Status(self.directory)
            self.status.machine = self.machine
            self.upkeep = Upkeep(self.config.run.folder, lock, self.config.logging.max_log_mb << 20)
            stack.enter_context(self.signals)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.__exit__(*exception)

    def train(self) -> int:
        """Train to the end, as the command line does; return the exit code."""
        reason = None if self._is_further else finished_before(self.config)
        if self.rank is not None and not self._is_further:
            self.config = announce(self.config, self.rank, reason)
        if reason:
            log.info("finished before: %s; a larger budget goes on, results are in %s", reason, self.directory)
            return 0
        self.janitor.owns_main = True  # all that this process starts is the run's
        try:
            reason = run_to_end(self.turns())
        except Interrupted as interruption:
            run = self.config.run
            if self.begun:
                without = "" if run.restart_behavior == "resume" else ", without --restart_behavior"
                log.info("%s; go on with the same command and --experiment=%s%s", interruption, run.experiment, without)
            else:
                log.info("%s before training began", interruption)
            return interruption.exit_code
        except StopNow:
            log.info("ended without saving")
            return Interrupted.exit_code
        log.info("finished: %s; results are in %s", reason, self.directory)
        return 0

    def turns(self) -> Turns:
        """Train, and yield after every look at the workers; return the reason of the end. Closed early, save nothing.

        Raises:
            Interrupted: a signal ended the run, which is saved; `NotSaved`: saving failed.
            AppoError: the start or a worker failed.
        """
        self.status.write("starting")
        raise_limit()
        try:
            with self.janitor, self.upkeep:
                with ExitStack() as stack:
                    runner = self._start(stack)
                    while (reason := runner.turn()) is None:
                        if self._first_batch:
                            self._first_batch.tick(runner.monitor)
                        yield
                if self._first_batch:
                    self._first_batch.check(runner.monitor, reason)
        except BaseException as error:
            state = "interrupted" if isinstance(error, Interrupted | StopNow | GeneratorExit) else "failed"
            if not isinstance(error, DirectoryInUse):  # then the folder is another run's
                self.status.write(state, str(error))
            if isinstance(error, NothingTrained) or (self.begun and isinstance(error, Interrupted)):
                self._leave_page(with_curve=False)
            raise
        self.status.write("finished", reason)
        self._leave_page(with_curve=True)
        return reason

    def _leave_page(self, *, with_curve: bool) -> None:
        """Write README.md of the run that has ended; a rank whose folder belongs to rank 0 writes none."""
        if not self._is_further:
            leave_page(self.config, with_curve=with_curve)

    def _start(self, stack: ExitStack) -> Runner:
        """Start the run, which the stack ends, from its flags to running workers: read from top to bottom."""
        seed = self.config.run.seed if self.config.run.seed is not None else secrets.randbits(32)

        # What the environment and the model are like, found out in a process of its own, and what they cost.
        code = CodeWatch(code_places(self.config))
        whole, found = self._shared(self._measure())
        self.signals.check()
        spec, models, undecided = found.probe.spec, found.probe.models, self.config.undecided
        self.config = config = found.probe.config
        self._place()
        for line in filter(None, (_advice(config), told(config, undecided, spec), spec.agents, masks_said(spec))):
            log.info("%s", line)
        self._refuse_unfit(spec)
        budget = budget_of(whole, spec.frames_per_step)

        # How many workers there are and where, and the memory that they share.
        self.sampling = sampling = self._sampling(found)
        for note in spec.notes:
            log.warning("%s", note)
        topology = topology_of(config, sampling, spec.num_agents)
        remembers = any(model.rnn_state_size for model in models)
        for line in without_effect(config, features_of(config, spec, sampling.placement, remembers=remembers)):
            log.warning("%s", line)
        blueprint = self.blueprint(config, spec, models, topology, budget, self.device, seed)
        blueprint = replace(blueprint, directory=self.directory.absolute(), rank=self.rank)
        arena = reserve(blueprint.fields(), config.sampling.memory_limit_mb)

        # What this start goes on from; a refusal comes before its flags are saved.
        of_earlier = config.algorithm.resumes(config.learning, self.directory, topology)
        blocks = [StateBlock(arena, policy) for policy in range(topology.num_policies)]
        measured = {"machine": self.machine, "costs": costs.plain()} if (costs := found.lasting) else None
        resumed = fill(blocks, whole, models, seed, measured)
        code.keep(self.directory)
        exploit_explore = ExploitExplore.of(config, shaping_of(config, spec), seed)
        traits = initial_traits(config, exploit_explore, resumed)
        budget = budget.after(resumed)
        blueprint = replace(blueprint, traits=tuple(traits), budget=budget, starts=count_starts(self.directory))
        log_schedules(config.learning, budget, resumed)
        segments = ResumeSegments.of(blueprint, arena, blocks[0], lambda of_segment: self._workers(of_segment, arena))
        if any(resumed) and not segments:
            blueprint = replace(blueprint, seed=seed_of_resumed(self.directory, seed))
            if of_earlier:
                log_refill(of_earlier, config, budget.env_steps, resumed, spec.frames_per_step)

        # What listens to the workers, and the workers.
        kind = config.algorithm
        machine = Machine(
            core_time() / (self.rank.local_size if self.rank else 1),
            self.device == "cuda",
            config.takes_turns,
            kind.needs_actors,
            kind.replays,
        )
        monitor = make_monitor(config, self.callbacks, resumed, budget, machine)
        start_tracking(monitor, whole, seed, self.janitor)
        self.status.counters, self.status.budget = monitor.status, budget.plain()
        monitor.disk = self.status.disk
        tables = [model.table for model in models]
        checkpointing = Checkpointing(
            self.directory, with_saves_to_evaluate(config), [] if self._is_further else blocks, tables, monitor
        )
        workers = segments.begin() if segments else self._workers(blueprint, arena)
        log.info("%s", _describe(sampling, topology, arena, self.directory, self.device))
        if kind.synchronous and (why := goes_on(sampling, config, spec.num_agents)):
            log.info("%s, what it trains on may be an iteration old", why)
        self.runner = runner = Runner(
            workers, monitor, checkpointing, self._limits(budget), self.signals, self.status, segments
        )
        runner.has_lost_files = self.upkeep.belongings.newly_lost
        runner.population = make_self_play(config, topology, arena, models[0], monitor, resumed[0]) or make_controller(
            config, exploit_explore, monitor, traits, topology.num_actors
        )
        self._first_batch = FirstBatch.of(config, topology, resumed)
        stack.callback(say_output, monitor, config)
        stack.callback(log_comparison, monitor, config)
        if evaluator := stack.enter_context(evaluate_beside(config, self.janitor)):
            monitor.beside["evaluator"] = evaluator
        stack.enter_context(runner)
        workers.start()
        self.begun = True
        remove_old(self.directory)  # the run that this one is to take the place of
        monitor.started = time.monotonic()
        return runner

    @property
    def _is_further(self) -> bool:
        """Return whether the run is a rank other than 0, whose folder and end belong to rank 0."""
        return self.rank is not None and self.rank.number > 0

    def _limits(self, budget: Budget) -> Budget:
        """Return the budget at which this start ends; rank 0 decides the end of the others."""
        return Budget(2**62) if self._is_further else budget

    def _place(self) -> None:
        """Choose device and placement, at first and once an environment without a preset has shown its images."""
        self.device = self.config.device
        self.placement = choose_placement(self.config, self.cores, self.device)
        self.tunes = is_open(self.config, self.device, self.cores)

    def _check_names(self) -> None:
        """Find everything that the flags name, before anything is opened (UsageError)."""
        config = self.config
        if config.env.env:
            check_name(config.env)
        CustomSummaries(config.logging.custom_summaries)
        for name in config.logging.callbacks:
            find_callbacks(name)
        if config.population.policy_mapping:
            find_function("policy_mapping", config.population.policy_mapping)
        check_observers(config)

    def _refuse_unfit(self, spec: EnvSpec) -> None:
        """Refuse what an environment cannot give (UsageError)."""
        config = self.config
        if config.output.output:
            check_output(config.output, spec, writer_name(self.directory), config.algorithm.recorded(spec))
        if config.whole_episodes and spec.same_step:
            raise UsageError("--batch_mode=complete_episodes: this vector begins the next episode in the same step")

    def _start_fork_server(self) -> bool:
        """Start the fork server unless it runs; return whether the server is still loading."""
        # On the CPU every process is forked from a server that has torch; on CUDA only actors that act are.
        with_torch = self.device == "cpu" or self.config.sampling.inference == "local"
        return fork_server.start_fork_server(self.janitor, preloaded(with_torch=with_torch), with_torch=with_torch)

    def _measure(self) -> Measurement:
        """Describe environment and model, and measure their costs unless an earlier start has done so."""
        costs = measured_before(self.config, self.machine)  # kept for later starts, if this one does not need it
        if self.janitor.owns_main:  # what environments leave behind goes with the run
            prctl.adopt_orphans()
        if self.placement == "serial":
            from appo.algorithms.run.tuning.network import probe

            _prepare_serial(self.config.sampling.learner_main_loop_num_cores or 1)
            actors = [Address(ACTOR.name, actor) for actor in range(self.sampling.num_workers)]
            if gpus := gpus_of(actors, self.config.sampling):
                self._open.enter_context(_showing(gpus))
            return Measurement(probe(self.config), costs, 0.0)
        # What is spawned need not wait for a server that is still loading torch.
        first: fork_server.StartMethod = "spawn" if self._start_fork_server() else "forkserver"
        cores = self.cores if self.tunes and costs is None else 0
        ask = partial(
            inquiry.Inquiry, log_path=self.config.run.folder.log("probe"), signals=self.signals, janitor=self.janitor
        )
        found = measure_run(self.config, partial(ask, method=first), partial(ask, method="forkserver"), cores)
        if self.janitor.owns_main:  # from here on environments are in other processes
            prctl.adopt_orphans(yes=False)
        found = found._replace(costs=costs or found.costs)
        if self.rank is not None or self.config.sampling.ray:  # ranks need equal flags; the cores are elsewhere, too
            return found
        return found.for_slow_steps(self.config.undecided, self.cores)

    def _shared(self, found: Measurement) -> tuple[Config, Measurement]:
        """Return all flags, and the measurement with the share of this rank in every batch."""
        whole = found.probe.config
        return whole, found._replace(probe=replace(found.probe, config=share_of(whole, self.rank)))

    def _sampling(self, found: Measurement) -> Sampling:
        """Return the sampling flags, and log the limit of several learners."""
        plan, rank, probe = self._chosen(found), self.rank, found.probe
        if rank is not None and not self._is_further:
            sums = Sums(rank.size, probe.models[0].num_gradients, LOOPBACK if rank.size == rank.local_size else GIGABIT)
            log.info("%s", learners_text(found.costs, plan, probe.config, probe.spec.num_agents, self.cores, sums))
        return plan

    def _chosen(self, found: Measurement) -> Sampling:
        """Return the best plan by measured costs, or the rules without costs."""
        num_agents = found.probe.spec.num_agents
        if not self.tunes or found.costs is None:
            return plan_workers(found.planned, self.cores, self.placement, num_agents)
        plan = found.plan(found.planned, self.cores)
        when = f"in {found.seconds:.1f} s" if found.seconds else "by what an earlier start has measured"
        log.info("auto-tuned %s: %s", when, report(found.costs, plan, num_agents))
        if found.busy:
            log.warning(
                "tuned while other programs took %.0f%% of the cores: nothing is kept for the next start",
                100 * found.others,
            )
        return plan.sampling

    def _workers(self, blueprint: Blueprint, arena: Arena) -> Workers:
        """Make every worker in the process that the topology assigns."""
        topology, sampling = blueprint.topology, self.config.sampling
        if self.sampling.placement == "serial":
            _prepare_serial(self.sampling.learner_threads)
            alone, addresses = self._plan(blueprint, arena, None, MAIN.name, 0), topology.address_book()
            return InProcess(lambda outbox: Node(blueprint(alone, Heartbeat(arena, 0)), addresses.address_of, outbox))
        check_descriptors(topology)
        links, names = Links(topology), list(topology.processes())
        progress = Progress(topology, arena, blueprint.trajectories(arena))

        def start(name: str, generation: int) -> None:
            plan = replace(self._plan(blueprint, arena, links, name, names.index(name)), generation=generation)
            # CUDA wants a process that shares nothing with a parent; everything else forks in milliseconds.
            devices = {blueprint.device_of(w.facts) for w in plan.workers if w.facts.has_network}
            bells = len(plan.links.bells) if plan.links else 0
            by_spawn = not all(fork_server.can_fork(device, bells) for device in devices)
            self._start_fork_server()  # again, if it has died
            with fork_server.signals_blocked(), fork_server.server_must_answer():
                supervisor.start(fork_server.context("spawn" if by_spawn else "forkserver"), plan, blueprint)

        limits = Limits.of_flags(sampling, in_segments=blueprint.in_segments)
        recorder = CrashRecorder(topology, arena, self.config.run.incidents, asdict(self.config.env))
        supervisor = Supervisor(links, self.janitor, limits, start, progress.of, recorder)
        count = progress.collected if sampling.sampler_only or topology.is_remote else progress.trained
        patience = PATIENCE_SECONDS + sampling.decorrelate_experience_max_seconds
        stalls = StallWatch(progress, count, math.inf if topology.is_remote else patience)  # the head may pause
        return Processes(supervisor, topology, stalls, start, self.signals, sampling.max_parallel_starts)

    def _plan(self, blueprint: Blueprint, arena: Arena, links: Links | None, name: str, row: int) -> ProcessPlan:
        workers = blueprint.topology.processes()[name]
        s, role = self.config.sampling, workers[0].facts
        single = self.config.env.force_envs_single_thread or self.config.repeatable
        return ProcessPlan(
            name=name,
            row=row,
            workers=workers,
            links=links.of(name, workers) if links else None,
            arena=arena,
            log_path=self.config.run.folder.log(name),
            niceness=s.default_niceness + role.extra_niceness,
            cores=cores_of(workers[0], blueprint.topology, s, self.cores),
            threads=self.sampling.learner_threads if role.trains else 1 if single else self.cores,
            visible_gpus=gpus_of(workers, s),
            log_level=self.config.logging.log_level.upper(),
        )


def _prepare_serial(threads: int) -> None:
    """Set memory allocator and threads in main, as worker processes do on entry."""
    allocator_settings()
    limit_threads(threads)


@contextmanager
def _showing(gpus: str) -> Iterator[None]:
    """Show only these GPUs to this process while entered. A process that has used a GPU before is not affected."""
    name = "CUDA_VISIBLE_DEVICES"
    before, os.environ[name] = os.environ.get(name), gpus
    try:
        yield
    finally:
        del os.environ[name]
        os.environ |= {} if before is None else {name: before}


def _advice(config: Config) -> str:
    """Return a line that names a better algorithm for the environment of a new run; empty without any."""
    if config.run.folder.config.exists():
        return ""
    return better_algorithm(config.run.algo, config.env.env, config.run.preset, config.env.env_kwargs)


def _describe(sampling: Sampling, topology: Topology, arena: Arena, directory: Path, device: str) -> str:
    if not topology.num_actors:
        threads = f"{sampling.learner_threads} thread{'s' * (sampling.learner_threads > 1)}"
        return f"{directory}: no actors, learning on {device} with {threads}, {memory_plan(arena.fields)}"
    num_agents = topology.rows * sampling.num_splits // sampling.num_envs_per_worker
    agents = f" of {num_agents} agents" * (num_agents > 1)
    return (
        f"{directory}: {sampling.placement} inference on {device}, {sampling.num_workers} actors x "
        f"{sampling.num_envs_per_worker} envs{agents} in {sampling.num_splits} groups, "
        f"{topology.slots_per_group} slots each, {memory_plan(arena.fields)}"
    )
