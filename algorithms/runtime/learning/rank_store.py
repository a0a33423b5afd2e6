"""The store that the launcher of several ranks keeps, and the address by which ranks find each other."""

import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from appo.algorithms.runtime.learning.batches import GroupBroken
from appo.algorithms.runtime.ranks import Rank
from appo.utils.errors import UsageError

FIND_SECONDS = 60.0
"""Time in which the store must answer: machines of a cluster start at different times."""
WAIT = timedelta(seconds=30)


def serve() -> Any:
    """Return a store for ranks on this machine, at a free port that other machines cannot reach."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, None, True, WAIT, wait_for_workers=False, master_listen_fd=listener.detach())


def client_of(rank: Rank, name: str) -> Any:
    """Return a client of the launcher's store, with entries of this name (UsageError: the store cannot be reached)."""
    deadline = time.monotonic() + FIND_SECONDS
    while True:  # torch prints pages about a failure
        try:
            socket.create_connection((rank.host, rank.port), timeout=5.0).close()
            store = TCPStore(rank.host, rank.port, None, False, WAIT, wait_for_workers=False)
            return PrefixStore(f"appo/{name}/{rank.start}", store)
        except OSError as error:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"rank {rank.number}: nothing answers at MASTER_ADDR={rank.host} MASTER_PORT={rank.port}: {error}"
                ) from None
            time.sleep(0.2)


def device_to(rank: Rank) -> Any:
    """Return gloo's device: the interface of GLOO_SOCKET_IFNAME, else the interface that leads to the store.

    Gloo's own choice is the address of the host's name, which may be 127.0.1.1.

    Raises:
        UsageError: the machine has no such interface.
    """
    try:
        if name := os.environ.get("GLOO_SOCKET_IFNAME"):
            return dist.ProcessGroupGloo.create_device(interface=name)
        with socket.create_connection((rank.host, rank.port), timeout=5.0) as connection:
            return dist.ProcessGroupGloo.create_device(hostname=connection.getsockname()[0])
    except RuntimeError as error:
        known = ", ".join(name for _, name in socket.if_nameindex())
        text = str(error).split("]")[-1].strip().split("\n")[0]
        raise UsageError(f"rank {rank.number}: GLOO_SOCKET_IFNAME={name}: {text}; there are {known}") from None
    except OSError as error:
        raise GroupBroken(f"the store at {rank.host}:{rank.port} cannot be reached: {error}") from None
