"""The findings of `appo doctor --ray`: machines, bandwidth to the head, slots, and a forecast of speed."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from appo.algorithms.run.config import Config
from appo.algorithms.run.machines.cluster import check_machines, cluster_of
from appo.algorithms.run.machines.forecast import Forecast, Sums, learners_text, sample_bytes
from appo.algorithms.run.machines.ray_wire import cause_of, connect, nodes_of, on_node
from appo.algorithms.run.machines.same import difference, packages, versions
from appo.algorithms.run.placement import plan_workers, topology_of
from appo.algorithms.run.plan import RunPlan
from appo.algorithms.run.ranks.meeting import share_of
from appo.algorithms.run.tuning.measure import Measurement
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.processes.janitor import Janitor
from appo.algorithms.runtime.ranks import Rank
from appo.utils.errors import UsageError
from appo.utils.metrics import short_number
from appo.utils.system.signal_watch import SignalWatch

PAYLOAD_BYTES = 32 << 20
ANSWER_SECONDS = 60.0


def examine(
    config: Config, found: Measurement, cores: int, janitor: Janitor, signals: SignalWatch
) -> Iterator[tuple[str, Literal["ok", "bad"], str]]:
    """Yield a name, a state and a text per finding, by the measurements on the head with its number of cores.

    Raises:
        UsageError: flags contradict `--ray`, or no cluster answers.
    """
    check_machines(config)
    speeds: list[float] = []
    wanted = versions(packages(config))
    with cluster_of(config.sampling.ray, janitor, signals) as cluster:
        ray = connect(cluster, [])
        try:
            nodes = list(nodes_of(ray, cluster))
            for node, name, num_cores in nodes:
                try:
                    if why := difference(wanted, _caller(ray, node, versions)(list(wanted))):
                        raise UsageError(why)
                    latency, speed = _speed(ray, node)
                except Exception as error:  # whatever is not in order there; the other machines may be
                    late = f"no answer in {ANSWER_SECONDS:g} s"
                    yield "machine", "bad", f"{name}: {late if isinstance(error, TimeoutError) else cause_of(error)}"
                    continue
                speeds.append(speed)
                rate = f"{speed / 1e6:.0f} MB/s, {1e3 * latency:.1f} ms there and back"
                yield "machine", "ok", f"{name}: {num_cores} cores, {rate}"
        finally:
            ray.shutdown()
    if not nodes:
        yield "machine", "ok", "no other machine has joined the cluster"
    if not speeds:
        return
    spec, models, config = found.probe.spec, found.probe.models, found.probe.config
    plan = plan_workers(found.planned, cores, "local", spec.num_agents)
    topology = topology_of(config, plan, spec.num_agents)
    budget = Budget.of(config.run, config.sampling, spec.frames_per_step)
    nbytes = sample_bytes(RunPlan(config, spec, models, topology, budget, "cpu", 0).fields(), topology)
    weights = 4 * models[0].num_weights
    of_slot = topology.rows * topology.rollout
    size = short_number(nbytes * of_slot)
    yield "slots", "ok", f"{size} bytes for {of_slot} samples, weights {short_number(weights)} bytes"
    if found.costs is not None:
        wire = min(speeds) / nbytes
        yield "forecast", "ok", Forecast.of(found.costs, plan, config, spec.num_agents, cores, wire).line()
    with contextlib.suppress(UsageError):  # not every batch has equal shares
        sums, share = Sums(2, models[0].num_gradients, min(speeds)), share_of(config, Rank(0, 2))
        yield "learners", "ok", learners_text(found.costs, plan, share, spec.num_agents, cores, sums)


def _speed(ray: Any, node: str) -> tuple[float, float]:
    """Return the seconds of an empty call to a node, and the bytes per second from the node."""
    call, seconds = _caller(ray, node, payload), []
    for nbytes in (0, 0, PAYLOAD_BYTES, PAYLOAD_BYTES):  # the first call loads this module
        begin = time.perf_counter()
        assert len(call(nbytes)) == nbytes
        seconds.append(time.perf_counter() - begin)
    return seconds[1], PAYLOAD_BYTES / min(seconds[2:])


def _caller(ray: Any, node: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the function on a node, and waits for the result."""
    remote = ray.remote(num_cpus=0, scheduling_strategy=on_node(node))(function)
    return lambda *arguments: ray.get(remote.remote(*arguments), timeout=ANSWER_SECONDS)


def payload(nbytes: int) -> bytes:
    """Return a number of zero bytes."""
    return bytes(nbytes)
