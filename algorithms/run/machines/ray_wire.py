"""The wire over Ray: one Ray actor per machine, its packets, and weights through Ray's object store."""

import concurrent.futures
import itertools
import json
import logging
import os
import re
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

from appo.algorithms.run.machines.cluster import Cluster
from appo.algorithms.run.machines.machine import Machine
from appo.algorithms.runtime.machines.packets import encode_releases
from appo.algorithms.runtime.memory.ownership import LearnerLedger
from appo.algorithms.runtime.memory.weights import WeightRing, checksum
from appo.algorithms.runtime.ranks import Rank
from appo.utils.errors import UsageError
from appo.utils.logging import SHOWN
from appo.utils.values import printable

log = logging.getLogger(__name__)

TAKES = 2
"""Packets requested from a machine at a time: the second is packed while the first travels."""

WEIGHTS_SECONDS = 0.05
"""Shortest time between two versions of weights for a machine without releases."""

LOOK_SECONDS = 2.0
"""Time between two looks for joining machines."""

AGAIN_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Time until a node is used again after a failure, by the number of failures in a row without a packet."""

PREPARE_SECONDS = 60.0
"""Time for a Ray actor to start and load packages, beside the limit of the environment."""

END_SECONDS = 1.2
MISSING = " is missing"  # a package
GROUPS = {"up": 1, "down": 1}
"""Threads of the Ray actor: the first packs slots, the second takes weights and releases."""


@dataclass
class Link:
    """The connection to one machine.

    Attributes:
        number: number of the machine, a new number after every failure.
        node: Ray's id of the node.
        name: name for people.
        actor: Ray's handle of the `Machine`.
        is_ready: whether the machine acts.
        version: newest version sent.
        is_giving: whether weights or releases are on their way.
        gave: monotonic time of the last weights.
        releases: releases to be sent.
    """

    number: int
    node: str
    name: str
    actor: Any
    is_ready: bool = False
    version: int = 0
    is_giving: bool = False
    gave: float = 0.0
    releases: list[tuple[int, int]] = field(default_factory=list)


class RayWire:
    """All actor machines of a cluster, see `Wire`. The Ray actors end with the process of the bridge.

    `wake` wakes the bridge, from any thread; each machine gets `actors` and `seed` in the `request` of
    `Machine.prepare`, and the env steps in the `ledger` of the learner. `gather` prepares the machines.
    Several learners of a policy divide the cores of each machine: `rank` is the place of this learner.

    Raises:
        UsageError: no cluster answers.
    """

    def __init__(
        self,
        cluster: Cluster,
        request: Mapping[str, Any],
        modules: list[str],
        published: tuple[WeightRing, LearnerLedger],
        wake: Callable[[], None],
        rank: Rank | None,
    ) -> None:
        self.cluster, self.request, self.wake, self.rank = cluster, request, wake, rank
        self.ring, self.ledger = published
        self.links: dict[int, Link] = {}
        self._inbox: deque[tuple[int, str, concurrent.futures.Future[Any]]] = deque()
        self._numbers, self._begun = itertools.count(), False
        self._failures: dict[str, tuple[int, float]] = {}  # node -> failures, monotonic time of the next attempt
        self._look_due = time.monotonic() + LOOK_SECONDS
        self._version, self._checksum, self._weights = 0, 0, None
        self.ray = connect(cluster, modules)
        while not self.ring.published:  # the learner starts at the same time
            time.sleep(0.01)

    def begin(self) -> None:
        """Ask all machines for packets, and log their number."""
        self._begun = True
        ready = [link for link in self.links.values() if link.is_ready]
        names = ", ".join(link.name for link in ready) or "none"
        log.warning("machines that act (%d): %s", len(ready), names, extra=SHOWN)
        for link in ready:
            self._ask_first(link)

    @property
    def ready(self) -> bool:
        """Return whether something has arrived or is due."""
        now = time.monotonic()
        return bool(self._inbox) or now >= self._look_due or any(self._is_due(one, now) for one in self.links.values())

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """Yield packets, and note all further arrivals."""
        while self._inbox:
            number, kind, future = self._inbox.popleft()
            link = self.links.get(number)
            if link is None:  # lost meanwhile
                continue
            if error := future.exception():
                self._lose(link, cause_of(error))
            elif kind == "packet":
                self._failures.pop(link.node, None)
                yield number, future.result()
            elif kind == "given":
                link.is_giving = False
            else:
                self._note_ready(link, future.result())

    def name(self, machine: int) -> str:
        """Return number and address of a machine."""
        return self.links[machine].name

    def ask(self, machine: int) -> None:
        """Ask a machine for another packet."""
        if link := self.links.get(machine):
            self._listen(link, "packet", link.actor.take.options(concurrency_group="up").remote())

    def release(self, machine: int, slot: int, sequence: int) -> None:
        """Note a release; `work` sends it."""
        if link := self.links.get(machine):
            link.releases.append((slot, sequence))

    def drop(self, machine: int, why: str) -> None:
        """End a machine; the node gets another machine later."""
        if link := self.links.get(machine):
            self._lose(link, why)

    def work(self) -> None:
        """Send due weights and releases, and start machines on new nodes."""
        now = time.monotonic()
        for link in self.links.values():
            if self._is_due(link, now):
                self._give(link, now)
        if now >= self._look_due:
            self._look_due = now + LOOK_SECONDS
            for node, name, cores in self._free_nodes(now):
                self._join(node, name, cores)

    def close(self) -> Iterator[tuple[int, bytes]]:
        """End all machines; yield the last packets, as far as they arrive in time."""
        ends = {link.actor.end.remote(): link for link in self.links.values() if link.is_ready}
        if ends:
            done, _ = self.ray.wait(list(ends), num_returns=len(ends), timeout=END_SECONDS)
            for ref in done:
                try:
                    yield ends[ref].number, self.ray.get(ref)
                except Exception as error:  # died meanwhile
                    log.info("%s: %s", ends[ref].name, cause_of(error))
        for link in self.links.values():
            self.ray.kill(link.actor)
        self.links.clear()
        self.ray.shutdown()

    def gather(self, patience_seconds: float, *, must: bool) -> None:
        """Prepare all machines of the cluster at once; return when each is ready or has failed.

        Args:
            patience_seconds: time to make the environment.
            must: whether an unfit machine ends the run, at the start; later the run goes on without the machine.

        Raises:
            UsageError: a machine must be fit and lacks a package, or has another environment.
        """
        deadline = time.monotonic() + patience_seconds + PREPARE_SECONDS
        for node, name, cores in self._free_nodes(time.monotonic()):
            self._join(node, name, cores)
        waiting = dict(self.links)
        while waiting and time.monotonic() < deadline:
            while self._inbox:
                number, _, future = self._inbox.popleft()
                link, error = waiting.pop(number), future.exception()
                if error is None:
                    self._note_ready(link, future.result(), must=must)
                elif MISSING in (why := cause_of(error)) and must:
                    raise UsageError(f"machine {link.name}: {why}")
                else:  # died, which may be chance
                    self._lose(link, why)
            time.sleep(0.05)
        if waiting:
            names = ", ".join(link.name for link in waiting.values())
            log.warning("not ready, training begins without: %s", names, extra=SHOWN)

    def _free_nodes(self, now: float) -> Iterator[tuple[str, str, int]]:
        """Yield id, address and cores of the nodes without a machine, unless a failure was a moment ago."""
        used = {link.node for link in self.links.values()}
        for node, address, all_cores in nodes_of(self.ray, self.cluster):
            cores = all_cores if self.cluster.is_local else share_of_cores(node, all_cores, self.rank)
            if cores and node not in used and now >= self._failures.get(node, (0, 0.0))[1]:
                yield node, address, cores

    def _join(self, node: str, address: str, cores: int) -> None:
        number = next(self._numbers)
        options = {"num_cpus": cores, "scheduling_strategy": on_node(node), "concurrency_groups": GROUPS}
        link = Link(number, node, f"{number} ({address})", self.ray.remote(**options)(Machine).remote())
        self.links[number] = link
        own = {"actors": self.request["actors"] or cores, "seed": (self.request["seed"] + number + 1) % 2**63}
        link.version, expected, weights = self._newest()
        samples = self.ledger.noted()["samples"]
        asked = json.dumps({**self.request, **own})
        self._listen(link, "ready", link.actor.prepare.remote(asked, samples, link.version, expected, weights))

    def _note_ready(self, link: Link, answer: str, *, must: bool = False) -> None:
        error = json.loads(answer).get("error")
        if error is not None:
            text = printable(str(error))
            if must:
                raise UsageError(f"machine {link.name}: {text}")
            self._lose(link, text)
            return
        link.is_ready = True
        if self._begun:
            log.warning("machine %s joins", link.name, extra=SHOWN)
            self._ask_first(link)

    def _ask_first(self, link: Link) -> None:
        for _ in range(TAKES):
            self.ask(link.number)

    def _listen(self, link: Link, kind: str, ref: Any) -> None:
        """Put the result into the inbox when it arrives, and wake the bridge."""
        ref.future().add_done_callback(partial(self._arrive, link.number, kind))

    def _arrive(self, number: int, kind: str, future: "concurrent.futures.Future[Any]") -> None:
        self._inbox.append((number, kind, future))
        self.wake()

    def _lose(self, link: Link, why: str) -> None:
        del self.links[link.number]
        failures = self._failures.get(link.node, (0, 0.0))[0]
        delay = AGAIN_SECONDS[min(failures, len(AGAIN_SECONDS) - 1)]
        self._failures[link.node] = failures + 1, time.monotonic() + delay
        log.warning("machine %s is lost: %s", link.name, why, extra=SHOWN)
        self.ray.kill(link.actor)

    def _is_due(self, link: Link, now: float) -> bool:
        is_old = link.version < self.ring.published and now - link.gave >= WEIGHTS_SECONDS
        return link.is_ready and not link.is_giving and (bool(link.releases) or is_old)

    def _give(self, link: Link, now: float) -> None:
        """Send releases and the count of env steps, with the newest weights if new to the machine."""
        version, expected, weights = self._newest()
        new = version > link.version
        sent = (version, expected, weights) if new else (0, 0, b"")
        give = link.actor.give.options(concurrency_group="down")
        samples = self.ledger.noted()["samples"]
        self._listen(link, "given", give.remote(encode_releases(link.releases), samples, *sent))
        link.releases, link.is_giving = [], True
        if new:
            link.version, link.gave = version, now

    def _newest(self) -> tuple[int, int, Any]:
        """Return version, checksum and Ray's reference of the newest weights; each version is stored once."""
        version, vector = self.ring.fetch(self._version)
        if vector is not None:
            self._version, self._checksum, self._weights = version, checksum(vector), self.ray.put(vector.tobytes())
        return self._version, self._checksum, self._weights


def nodes_of(ray: Any, cluster: Cluster) -> Iterator[tuple[str, str, int]]:
    """Yield id, address and cores of the living nodes for machines: all nodes but the head's, unless all are local."""
    here = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        cores = int(node["Resources"].get("CPU", 0))
        if node["Alive"] and cores > 0 and (cluster.is_local or node["NodeID"] != here):
            yield node["NodeID"], node["NodeManagerAddress"], cores


def share_of_cores(node: str, cores: int, rank: Rank | None) -> int:
    """Return the cores of a node (hexadecimal id) for a rank; the shares of all ranks add up to `cores`.

    The id decides which ranks get one core more, so that nodes with fewer cores than ranks serve different ranks.
    """
    if rank is None:
        return cores
    return (cores + (rank.number + int(node, 16)) % rank.size) // rank.size


def on_node(node: str) -> Any:
    """Return Ray's option for a task or an actor on a node."""
    return import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy(node, soft=False)


def connect(cluster: Cluster, modules: list[str]) -> Any:
    """Connect the process to the cluster; return the module `ray` (UsageError: no cluster answers)."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if cluster.token_path:
        os.environ["RAY_AUTH_TOKEN_PATH"] = cluster.token_path
    import ray  # only here: the local path never loads Ray

    try:
        ray.init(
            address=cluster.address,
            log_to_driver=False,
            configure_logging=False,
            runtime_env={"py_modules": modules} if modules else None,
        )
    except ConnectionError as error:
        hint = "start one by `ray start --head`, or try --ray=local:2"  # Ray names a flag that appo lacks
        why = f"no cluster answers: {hint}" if cluster.address == "auto" else cause_of(error)
        raise UsageError(f"--ray={cluster.address}: {why}") from None
    except Exception as error:  # RuntimeError, ValueError and Ray's own
        raise UsageError(f"--ray={cluster.address}: {cause_of(error)}") from None
    return ray


def cause_of(error: BaseException) -> str:
    """Return a line about an error of Ray, whose texts contain tracebacks."""
    text = str(error)
    if missing := re.search(r"No module named '([\w.]+)'", text):
        return f"{missing[1].partition('.')[0]}{MISSING}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return textwrap.shorten(printable(lines[0] if lines else type(error).__name__), 300, placeholder=" ...")
