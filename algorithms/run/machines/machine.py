"""An actor machine: a run without learners. Actors and policy workers use an arena of their own; slots go to the head.

The methods of `Machine` are the whole interface to the head. Arguments and results are bytes, numbers and texts.
"""

import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from appo.algorithms.run.config import Config
from appo.algorithms.run.machines.same import difference, versions
from appo.algorithms.run.main import Run
from appo.algorithms.run.placement import topology_of
from appo.algorithms.run.resources import reserve
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.machines.packing import SlotPacking
from appo.algorithms.runtime.machines.uplink import Uplink
from appo.algorithms.runtime.messages import Address
from appo.algorithms.runtime.processes.pool import Processes
from appo.algorithms.runtime.roles import LEARNER
from appo.utils.errors import AppoError, UsageError, text_of

TAKE_SECONDS = 1.0  # longest wait for a slot; then a packet without slots brings reports
STOP_SECONDS = 1.0
POLL_SECONDS = 0.1
PREFIX = "appo-machine-"
HERE = {
    "experiments_root": "",
    "experiment": "machine",
    "restart_behavior": "resume",
    "config": "",
    "init_from": "",
    "inference": "local",
    "auto_tune": False,
    "device": "cpu",
    "worker_num_splits": 1,
    "ray": "",
    "output": "",
    "track": [],
    "with_wandb": False,
    "tensorboard": False,
    "eval_every_sec": 0.0,
}
"""Flags of the run on a machine with values other than on the head."""


class Remote(Run):
    """A run whose learners are on the head."""

    def begin(self, request: Mapping[str, Any]) -> tuple[Uplink, Processes]:
        """Make environment, arena and workers; `Processes.start` starts the workers.

        Raises:
            UsageError: slots or weights have another layout than on the head.
            AppoError: the environment cannot be made.
        """
        self.config.run.folder.log("probe").parent.mkdir(parents=True)
        found = self._measure()
        spec, models, config = found.probe.spec, found.probe.models, found.probe.config
        topology = replace(
            topology_of(config, self.sampling, spec.num_agents),
            apart=(),
            further=(),
            bridged=0,
            slots_per_group=config.sampling.min_traj_buffers_per_worker,
            is_remote=True,
        )
        budget = Budget.of(config.run, config.sampling, spec.frames_per_step)
        blueprint = self.blueprint(config, spec, models, topology, budget, self.device, request["seed"])
        arena = reserve(blueprint.fields(), config.sampling.memory_limit_mb)
        packing = SlotPacking(blueprint.trajectories(arena), spec.action, compression=config.sampling.ray_compression)
        theirs, ours = request["layout"], f"{packing.layout} {models[0].num_weights}"
        if theirs != ours:
            raise UsageError(f"{config.env.env} differs from the head's: {ours} in place of {theirs}")
        workers = self._workers(blueprint, arena)
        assert isinstance(workers, Processes)
        bells = workers.supervisor.links.bells

        def wake(slot: int) -> None:
            bells[str(topology.fillers[topology.filler_of_slot(slot)])].ring()

        return Uplink(arena, packing, bells[str(Address(LEARNER.name))], wake), workers


class Machine:
    """An actor machine in the process of a Ray actor: a thread supervises the workers, further threads serve the wire.

    The kernel kills processes at the end of the starting thread, so a single thread starts all processes.
    """

    def __init__(self) -> None:
        self._uplink: Uplink | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._folder: Path | None = None

    def prepare(self, request: str, samples: int, version: int, expected: int, weights: bytes) -> str:
        """Compare packages and environment with the head's, and start acting with the weights.

        Args:
            request: JSON with flags, seed, number of actors, versions and layout of the head.
            samples: agent steps that the learner has counted.
            version: version of the weights.
            expected: checksum of the weights.
            weights: [P] float32.

        Returns:
            JSON with the numbers of actors and slots, or with an error in one line.
        """
        wanted = json.loads(request)
        if why := difference(wanted["versions"], versions(wanted["versions"])):
            return json.dumps({"error": why})
        ready: Future[str] = Future()
        first = (samples, version, expected, weights)
        self._thread = threading.Thread(target=self._supervise, args=(wanted, first, ready), daemon=True)
        self._thread.start()
        return ready.result()

    def take(self) -> bytes:
        """Return a packet of slots, as soon as a slot is handed over."""
        assert self._uplink is not None
        return self._uplink.take(TAKE_SECONDS)

    def give(self, released: bytes, samples: int, version: int, expected: int, weights: bytes) -> int:
        """Take weights, releases and the count of agent steps, see `Uplink.give`; return the version."""
        assert self._uplink is not None
        self._uplink.give(released, samples, version, expected, weights)
        return version

    def end(self) -> bytes:
        """End all processes; return the last packet."""
        self._stop.set()
        if self._folder is not None:  # at once: the head waits for a second, then Ray kills the workers
            with contextlib.suppress(OSError):  # the janitor or the supervisor was faster
                gone = self._folder.rename(f"{self._folder}-ended")  # a worker that still writes cannot refill it
                shutil.rmtree(gone, ignore_errors=True)
        if self._thread is not None:
            self._thread.join(2 * STOP_SECONDS)
        return b"" if self._uplink is None else self._uplink.take(0.0)

    def _supervise(self, wanted: Mapping[str, Any], first: tuple[int, int, int, bytes], ready: "Future[str]") -> None:
        try:
            with contextlib.ExitStack() as stack:
                _remove_old_folders()
                folder = self._folder = _locked_folder()
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                _hide_main()
                run = Remote(_config_of(wanted, folder))
                run.janitor.detached = True
                stack.enter_context(run.janitor)
                run.janitor.watch(folder)
                uplink, workers = run.begin(wanted)
                uplink.give(b"", *first)
                stack.callback(workers.close)
                workers.start()
                self._uplink = uplink
                slots, topology = uplink.packing.trajectories.owner, workers.topology
                plain = {"actors": topology.num_actors, "slots": len(slots), "nbytes": uplink.packing.nbytes}
                ready.set_result(json.dumps(plain))
                while not self._stop.is_set():
                    for message in workers.poll(POLL_SECONDS):
                        uplink.reports.add(message)
                for message in workers.stop(time.monotonic() + STOP_SECONDS):
                    uplink.reports.add(message)
        except BaseException as error:  # the head logs the cause, whatever an environment raises
            text = text_of(error) if isinstance(error, AppoError) else f"{type(error).__name__}: {text_of(error)}"
            if not ready.done():
                ready.set_result(json.dumps({"error": text}))
            elif self._uplink is not None:
                self._uplink.reports.failure = text
            traceback.print_exc()  # into the log of Ray's worker


def _config_of(wanted: Mapping[str, Any], folder: Path) -> Config:
    """Return the flags of the run on the machine."""
    here = HERE | {
        "train_dir": str(folder),
        "num_workers": wanted["actors"],
        "num_envs_per_worker": wanted["envs"],
        "set_workers_cpu_affinity": wanted["pinned"] and wanted["flags"]["set_workers_cpu_affinity"],
    }
    return Config.from_flat({**wanted["flags"], **here})


def _locked_folder() -> Path:
    """Return a new folder, locked until this process ends however."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with contextlib.suppress(BlockingIOError, FileNotFoundError):  # another machine has just looked at the folder
            _lock(folder)
            if folder.exists():
                return folder


def _remove_old_folders() -> None:
    """Remove the folders of machines that were killed together with their janitors.

    A folder is old if its lock is free. A process number in the name would not do: beside Ray's many threads, numbers
    return within minutes.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = _lock(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _lock(folder: Path) -> int:
    """Lock a folder; return the descriptor that holds the lock (OSError: another process has locked or removed it)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _hide_main() -> None:
    """Keep worker processes from importing the main script of Ray's worker."""
    main: Any = sys.modules["__main__"]
    main.__spec__ = None
    if hasattr(main, "__file__"):
        del main.__file__
