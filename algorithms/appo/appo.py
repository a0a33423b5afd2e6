"""Asynchronous PPO: which memory, queues and processes exist. The wiring of a run, from top to bottom."""

import logging
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

from algorithms.appo.blueprint import Blueprint, ModelDescription, Probe
from algorithms.appo.config import Config
from algorithms.appo.placement import Sampling, choose_placement, plan_workers, rows_to_time
from algorithms.appo.probing import probe_in_process
from algorithms.appo.starting import (
    begin_from,
    changes,
    finished_before,
    journal,
    old_run_out_of_the_way,
    seed_of_resumed,
)
from algorithms.runtime import launch
from algorithms.runtime.arena import Arena
from algorithms.runtime.channels import Links
from algorithms.runtime.checkpointing import Checkpointing, resume
from algorithms.runtime.janitor import Janitor
from algorithms.runtime.messages import Address, WorkerFailed
from algorithms.runtime.monitor import Monitor
from algorithms.runtime.node import Node
from algorithms.runtime.performance import Machine
from algorithms.runtime.process import Heartbeat, ProcessPlan
from algorithms.runtime.runner import Budget, InProcess, Processes, Runner, Workers
from algorithms.runtime.signals import SignalWatch
from algorithms.runtime.state_block import StateBlock
from algorithms.runtime.status import Status
from algorithms.runtime.summaries import CustomSummaries
from algorithms.runtime.supervisor import Supervisor, WorkerError
from algorithms.runtime.topology import Topology, check_slots, slots_per_group
from envs.make import check_name
from utils import cpu
from utils.devices import choose_device
from utils.errors import Interrupted, ResourceError, StopNow, UsageError
from utils.lock import RunLock
from utils.logging import configure

log = logging.getLogger(__name__)

MEMORY_SHARE = 0.9
EXTRA_NICENESS = {"learner": 0, "policy_worker": 2, "actor": 10}


def train(config: Config, algorithm: "type[APPO] | None" = None) -> int:
    """Train with APPO, or a variant of it, until the budget is spent, a signal comes or a worker fails; the exit code.

    Raises:
        AppoError: what went wrong, with its exit code.
    """
    configure("main", None)
    check_name(config.env)
    CustomSummaries(config.logging.custom_summaries)
    directory = config.run.run_directory
    with old_run_out_of_the_way(directory, config.run.restart_behavior):
        _make_directory(directory)
        with RunLock(directory / ".lock"), SignalWatch() as signals:
            return _train(config, (algorithm or APPO)(config, signals))


def _train(config: Config, run: "APPO") -> int:
    if reason := finished_before(config):
        log.info("finished before: %s; a larger budget goes on, results are in %s", reason, run.directory)
        return 0
    try:
        reason = run.run()
    except Interrupted as interruption:
        without = "" if config.run.restart_behavior == "resume" else ", without --restart_behavior"
        log.info("%s; go on with the same command and --experiment=%s%s", interruption, config.run.experiment, without)
        return interruption.exit_code
    except StopNow:
        log.info("ended without saving")
        return Interrupted.exit_code
    log.info("finished: %s; results are in %s", reason, run.directory)
    return 0


class APPO:
    """One run.

    Args:
        config: all flags.
        signals: what a person or the system asks meanwhile; entered by the caller.

    Attributes:
        blueprint: what workers are built from; a variant of the algorithm has its own.
    """

    blueprint: type[Blueprint] = Blueprint

    def __init__(self, config: Config, signals: SignalWatch) -> None:
        self.config, self.signals = config, signals
        self.directory = config.run.run_directory
        self.cores = cpu.available_cores()
        self.device = choose_device(config.run.device)
        self.status = Status(self.directory)
        self.janitor = Janitor()

    def run(self) -> str:
        """Why the run ended."""
        self.status.write("starting")
        try:
            with self.janitor:
                reason = self._run()
        except BaseException as error:
            state = "interrupted" if isinstance(error, Interrupted | StopNow) else "failed"
            self.status.write(state, str(error))
            raise
        self.status.write("finished", reason)
        return reason

    def _run(self) -> str:
        seed = self.config.run.seed if self.config.run.seed is not None else secrets.randbits(32)
        if self.config.sampling.inference != "serial":
            # On the CPU every process is forked from a server that has torch; on CUDA only actors that act are.
            with_torch = self.device == "cpu" or self.config.sampling.inference == "local"
            launch.start_fork_server(self.janitor, with_torch=with_torch)
        found = self._probe()
        self.signals.check()
        placement = choose_placement(self.config, self.cores, self.device, found.forward_seconds)
        sampling = plan_workers(self.config, self.cores, placement)
        budget = Budget.of(self.config.run, self.config.sampling, found.spec.frames_per_step)
        topology = self._topology(sampling, found)
        blueprint = self.blueprint(self.config, found.spec, found.model, topology, budget, self.device, seed)
        arena = self._arena(blueprint)
        blocks = [StateBlock(arena, policy) for policy in range(topology.num_policies)]
        resumed = self._resume(blocks, found.model, seed)
        if any(resumed):
            blueprint = replace(blueprint, seed=seed_of_resumed(self.directory, seed))

        machine = Machine(self.cores, gpu=self.device == "cuda")
        monitor = Monitor(self.directory, topology.num_policies, self.config.logging, resumed, budget.limits(), machine)
        self.status.monitor, self.status.budget = monitor, budget.plain()
        checkpointing = Checkpointing(self.directory, self.config.run, blocks, found.model.table, monitor)
        workers = self._serial(blueprint, arena) if placement == "serial" else self._processes(blueprint, arena)
        log.info("%s", _describe(sampling, topology, arena, self.directory, self.device))
        return Runner(workers, monitor, checkpointing, budget, self.signals, self.status).run()

    def _resume(self, blocks: list[StateBlock], model: ModelDescription, seed: int) -> list[dict[str, Any]]:
        """Fill the blocks with what this start begins with, and write its flags down, as it can begin.

        An adaptive learning rate is part of the state; one that the flags change takes its place.

        Returns:
            The plain state of each policy's checkpoint; {} where there is none.
        """
        changed = changes(self.config)
        rate_changed = any(change.startswith("learning_rate ") for change in changed)
        plain = {"learning_rate": self.config.learning.learning_rate} if rate_changed else {}
        resumed = resume(self.directory, blocks, model.table, plain)
        begin_from(self.config, blocks, model)
        journal(self.config, seed, changed, [int(state.get("env_steps", 0)) for state in resumed])
        return resumed

    def _probe(self) -> Probe:
        """The environment's spaces and the model's size, found out in a process of its own."""
        measure = self.config.sampling.inference == "auto" and self.device == "cpu" and self.cores > 1
        rows = rows_to_time(self.config, self.cores) if measure else ()
        if self.config.sampling.inference == "serial":
            from algorithms.appo.probe import probe

            cpu.allocator_settings()
            cpu.limit_threads(self.config.sampling.learner_main_loop_num_cores)
            return probe(self.config, rows)
        answer = launch.ask_process(
            probe_in_process,
            (self.config, rows),
            log_path=self._log_path("probe"),
            timeout_seconds=self.config.sampling.reset_timeout_seconds,
            signals=self.signals,
            janitor=self.janitor,
        )
        if isinstance(answer, WorkerFailed):
            raise WorkerError(answer.summary, answer.exit_code, answer.traceback)
        assert isinstance(answer, Probe)
        return answer

    def _topology(self, sampling: Sampling, found: Probe) -> Topology:
        c = self.config
        columns = c.learning.num_batches_per_iteration * c.learning.batch_size // c.learning.rollout
        rows = sampling.num_envs_per_worker // sampling.num_splits * found.spec.num_agents
        groups = sampling.num_workers * sampling.num_splits
        accumulate = c.sampling.num_minibatches_to_accumulate
        waiting = 1 if accumulate < 0 else -(-accumulate // c.learning.num_batches_per_iteration)
        slots = slots_per_group(
            minimum=c.sampling.min_traj_buffers_per_worker,
            waiting_batches=waiting,
            batch_columns=columns * c.sampling.num_policies,
            rows=rows,
            groups=groups,
        )
        check_slots(slots=slots, rows=rows, groups=groups, batch_columns=columns)
        return Topology(
            placement=sampling.placement,
            num_actors=sampling.num_workers,
            groups_per_actor=sampling.num_splits,
            slots_per_group=slots,
            num_policies=c.sampling.num_policies,
            policy_workers_per_policy=c.sampling.policy_workers_per_policy,
            rows=rows,
            rollout=c.learning.rollout,
        )

    def _arena(self, blueprint: Blueprint) -> Arena:
        fields = blueprint.fields()
        needed, available = sum(f.nbytes for f in fields), cpu.available_memory_bytes()
        if needed > MEMORY_SHARE * available:
            raise ResourceError(
                f"the run needs {needed / 2**20:.0f} MiB of shared memory, {available / 2**20:.0f} MiB are free: lower "
                "--num_workers, --num_envs_per_worker or --min_traj_buffers_per_worker"
            )
        return Arena.create(fields)

    def _serial(self, blueprint: Blueprint, arena: Arena) -> Workers:
        """All workers in this process."""
        plan = self._plan(blueprint, arena, None, "main", 0)

        def build(outbox: launch.Outbox) -> Node:
            return Node(blueprint(plan, Heartbeat(arena, 0)), blueprint.topology.address_of, outbox)

        return InProcess(build)

    def _processes(self, blueprint: Blueprint, arena: Arena) -> Workers:
        """Every worker in the process that the topology gives it."""
        links = Links(blueprint.topology)
        supervisor = Supervisor(links.bells, self.janitor, self.config.sampling.reset_timeout_seconds)

        def start() -> None:
            for row, name in enumerate(blueprint.topology.processes()):
                self.signals.check()
                plan = self._plan(blueprint, arena, links, name, row)
                # CUDA wants a process that shares nothing with a parent; everything else forks in milliseconds.
                by_spawn = any(w.role != "actor" for w in plan.workers) and not launch.can_fork(self.device)
                with launch.signals_blocked():
                    supervisor.start(launch.context("spawn" if by_spawn else "forkserver"), plan, blueprint)

        return Processes(supervisor, blueprint.topology, start, self.signals)

    def _plan(self, blueprint: Blueprint, arena: Arena, links: Links | None, name: str, row: int) -> ProcessPlan:
        workers = blueprint.topology.processes()[name]
        s, role = self.config.sampling, workers[0].role
        is_actor = role == "actor"
        gpus = ",".join(map(str, s.actor_worker_gpus)) if is_actor and len(workers) == 1 else None
        single = self.config.env.force_envs_single_thread
        return ProcessPlan(
            name=name,
            row=row,
            workers=workers,
            links=links.of(name, workers) if links else None,
            arena=arena,
            log_path=self._log_path(name),
            niceness=s.default_niceness + EXTRA_NICENESS[role],
            cores=self._cores_of(workers[0], blueprint.topology),
            threads=s.learner_main_loop_num_cores if role == "learner" else 1 if single else self.cores,
            visible_gpus=gpus,
        )

    def _log_path(self, name: str) -> Path:
        return (self.directory / "logs" / f"{name}.log").absolute()

    def _cores_of(self, worker: Address, topology: Topology) -> frozenset[int]:
        """Actors are pinned where there are whole cores to pin them to; learners and policy workers never."""
        allowed = cpu.allowed_cores()
        if worker.role != "actor" or not self.config.sampling.set_workers_cpu_affinity or self.cores < len(allowed):
            return frozenset()
        return cpu.affinity_plan(topology.num_actors, allowed)[worker.index]


def _make_directory(directory: Path) -> None:
    try:
        (directory / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write the run to {directory}: {error.strerror}") from None


def _describe(sampling: Sampling, topology: Topology, arena: Arena, directory: Path, device: str) -> str:
    return (
        f"{directory}: {sampling.placement} inference on {device}, {sampling.num_workers} actors x "
        f"{sampling.num_envs_per_worker} envs in {sampling.num_splits} groups, {topology.slots_per_group} slots each, "
        f"{arena.nbytes / 2**20:.0f} MiB shared"
    )
