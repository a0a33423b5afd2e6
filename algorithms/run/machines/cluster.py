"""The cluster of `--ray`: an existing cluster, or nodes on the head, started and ended by the run."""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from appo.algorithms.run.config import Config
from appo.algorithms.runtime.processes.janitor import Janitor, kill_group
from appo.envs.given import is_given
from appo.utils.errors import PACKAGE, ResourceError, UsageError
from appo.utils.system.machine import available_cores
from appo.utils.system.signal_watch import SignalWatch

LOCAL = "local:"
START_SECONDS = 300.0
END_SECONDS = 10.0
POLL_SECONDS = 0.1


class Cluster(NamedTuple):
    """A Ray cluster.

    Attributes:
        address: address of the cluster, or `auto`.
        token_path: file of the token; empty: Ray's own sources.
        is_local: whether all nodes are on the head; then all nodes take part.
    """

    address: str
    token_path: str = ""
    is_local: bool = False


def check_machines(config: Config) -> None:
    """Refuse flags without a use for trajectories of machines, and missing packages (UsageError)."""
    sampling, algo, given = config.sampling, f"--algo={config.run.algo}", config.sampling.ray
    refused = {
        f"{algo} plays no environment": not config.algorithm.needs_actors,
        f"{algo} differentiates beside its actors": config.algorithm.whole_rollouts,
        "machines are for one policy": not config.alone,
        f"{'--lockstep' if sampling.lockstep else algo} lets actors wait while the learner trains": config.takes_turns,
        "--deterministic_resume repeats nothing that other machines do": config.run.deterministic_resume,
        "--inference=serial has no process for the bridge": sampling.inference == "serial",
        "--sampler_only sends nothing to a learner": sampling.sampler_only,
        "--output writes what actors of this machine play": bool(config.output.output),
        f"env={config.env.env} is in this program alone: put it into a module": is_given(config.env.env),
    }
    for why, holds in refused.items():
        if holds:
            raise UsageError(f"--ray={given}: {why}")
    if sampling.ray_compression == "lz4" and find_spec("lz4") is None:
        raise UsageError('--ray_compression=lz4 needs the package lz4: pip install "appo[lz4]"')
    if f"{given}:".startswith(LOCAL) and not (given[len(LOCAL) :].isdecimal() and 1 <= int(given[len(LOCAL) :]) <= 64):
        raise UsageError(f"--ray={given}: local:N needs a number of nodes from 1 to 64")
    if find_spec("ray") is None:
        raise UsageError('--ray needs the package ray: pip install "appo[ray]"')


@contextlib.contextmanager
def cluster_of(given: str, janitor: Janitor, signals: SignalWatch) -> Iterator[Cluster]:
    """Return the cluster; start and, at the exit, end its nodes for `local:N`.

    Raises:
        ResourceError: the nodes do not start.
        Interrupted: a signal arrived meanwhile.
    """
    if not given.startswith(LOCAL):
        yield Cluster(given)
        return
    # In /tmp, as the path of a socket may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="appo-ray-", dir="/tmp"))
    janitor.watch(folder)
    token = folder / "token"  # in a folder that only this user can read
    token.write_text(secrets.token_hex(32))
    number = int(given[len(LOCAL) :])
    cores = max(1, available_cores() // number)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])),
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "TMPDIR": str(folder),
        "RAY_kill_child_processes_on_worker_exit": "false",  # the janitor of a killed machine cleans up
        "RAY_worker_niceness": "0",  # 15 would starve machines beside the learner
        "RAY_worker_register_timeout_seconds": "300",  # after 60 Ray starts anew, for ever on a busy machine
    }
    command = [sys.executable, "-m", "appo.algorithms.run.machines.local_nodes", str(number), str(cores)]
    errors, pipe = tempfile.TemporaryFile(), subprocess.PIPE  # noqa: SIM115 (as long as the nodes)
    nodes = subprocess.Popen(  # noqa: S603 (our own module)
        command, stdin=pipe, stdout=pipe, stderr=errors, env=environment, process_group=0
    )
    janitor.watch(nodes.pid)
    assert nodes.stdin is not None
    assert nodes.stdout is not None
    try:
        deadline = time.monotonic() + START_SECONDS
        while not wait([nodes.stdout.fileno()], POLL_SECONDS) and time.monotonic() < deadline:
            signals.check()
        os.set_blocking(nodes.stdout.fileno(), False)
        address = (nodes.stdout.readline() or b"").decode().strip()
        if not address:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").splitlines() or ["no message"]
            is_late = time.monotonic() >= deadline
            raise ResourceError(
                f"Ray's nodes do not start: {f'no answer in {START_SECONDS:g} s' if is_late else lines[-1]}"
            )
        yield Cluster(address, str(token), is_local=True)
    finally:
        nodes.stdin.close()  # ends the nodes
        nodes.stdout.close()
        errors.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            nodes.wait(END_SECONDS)
        kill_group(nodes.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            nodes.wait(END_SECONDS)
        janitor.forget(nodes.pid)
        shutil.rmtree(folder, ignore_errors=True)
