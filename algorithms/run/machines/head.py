"""The head of a run with several machines: a run whose bridge brings trajectories of the machines of a Ray cluster."""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from appo.algorithms.run.config import Config
from appo.algorithms.run.machines.cluster import Cluster, check_machines, cluster_of
from appo.algorithms.run.machines.forecast import GIGABIT, Forecast, sample_bytes
from appo.algorithms.run.machines.ray_wire import RayWire
from appo.algorithms.run.machines.same import packages, user_modules, versions
from appo.algorithms.run.main import Run
from appo.algorithms.run.placement import Sampling
from appo.algorithms.run.plan import seed_of
from appo.algorithms.run.tuning.measure import Measurement
from appo.algorithms.run.workers.blueprint import Blueprint
from appo.algorithms.runtime.machines.bridge import BridgePlan, BridgeWorker
from appo.algorithms.runtime.machines.packing import SlotPacking
from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.ownership import LearnerLedger
from appo.algorithms.runtime.memory.weights import WeightRing
from appo.algorithms.runtime.messages import Address, Worker
from appo.algorithms.runtime.processes.pool import Workers
from appo.algorithms.runtime.processes.process import ProcessPlan
from appo.algorithms.runtime.roles import BRIDGE
from appo.algorithms.runtime.runner import Runner
from appo.utils.metrics import short_number

log = logging.getLogger(__name__)


def kind_of(config: Config) -> type[Run]:
    """Return the class of the run for the flags."""
    return HeadRun if config.sampling.ray else Run


@dataclass(frozen=True)
class HeadBlueprint(Blueprint):
    """A plan with a bridge."""

    cluster: Cluster | None = None

    def make_further(self, plan: ProcessPlan, address: Address, others: Mapping[Address, Worker]) -> Worker:
        """Make the bridge, or a worker of the algorithm."""
        if address.role == BRIDGE.name:
            return self.connect(plan, address)
        return super().make_further(plan, address, others)

    def connect(self, plan: ProcessPlan, address: Address) -> BridgeWorker:
        """Make the bridge; all machines of the cluster are ready then.

        Raises:
            UsageError: no cluster answers, or a machine lacks a package or has another environment.
        """
        t, config, seeds = self.topology, self.config, self.seeds(BRIDGE.name, plan.generation)
        assert self.cluster is not None
        assert plan.links is not None
        packing = SlotPacking(
            self.trajectories(plan.arena), self.spec.action, compression=config.sampling.ray_compression
        )
        ring, groups = WeightRing(plan.arena, 0), t.groups_of(address.index)
        request = {
            "flags": config.to_flat(),
            "seed": seed_of(seeds),
            "actors": config.sampling.num_workers,
            "envs": t.rows // self.spec.num_agents,
            "pinned": not self.cluster.is_local,
            "versions": versions(packages(config)),
            "layout": f"{packing.layout} {self.models[0].num_weights}",
        }
        wake, limit = plan.links.bells[plan.name].ring, config.sampling.reset_timeout_seconds
        published = ring, LearnerLedger(packing.trajectories, 0)
        wire = RayWire(self.cluster, request, user_modules(config), published, wake, self.rank)
        wire.gather(limit, must=plan.generation == 0)
        slots = range(t.slots_of(groups.start).start, t.slots_of(groups.stop - 1).stop)
        draw = seed_of(seeds.spawn(1)[0])
        return BridgeWorker(
            BridgePlan(address, groups, slots, t.num_takers, draw, plan.generation), packing, wire, ring
        )


class HeadRun(Run):
    """A run on the head of a cluster."""

    blueprint = HeadBlueprint

    def _check_names(self) -> None:
        check_machines(self.config)
        super()._check_names()

    def _sampling(self, found: Measurement) -> Sampling:
        self.costs = found.costs
        return super()._sampling(found)

    def _start(self, stack: ExitStack) -> Runner:
        self.cluster = stack.enter_context(cluster_of(self.config.sampling.ray, self.janitor, self.signals))
        return super()._start(stack)

    def _workers(self, blueprint: Blueprint, arena: Arena) -> Workers:
        assert isinstance(blueprint, HeadBlueprint)
        nbytes = sample_bytes(blueprint.fields(), blueprint.topology)
        wire = GIGABIT / nbytes
        text = f"1 Gbit/s carries {short_number(wire)} samples/s"
        if self.costs is not None:
            agents = blueprint.spec.num_agents
            text = Forecast.of(self.costs, self.sampling, self.config, agents, self.cores, wire).line()
        log.info("--ray: %.0f bytes a sample: %s", nbytes, text)
        return super()._workers(replace(blueprint, cluster=self.cluster), arena)
