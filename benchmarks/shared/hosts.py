"""Hosts on one machine: network namespaces joined by a switch at a rate, or by a process that delays packets.

Needs root and iproute2. The kernel limits the rate of each host's interface by the queueing discipline tbf.

    python -m benchmarks.shared.hosts SECONDS NAMESPACE...    the switch with a delay, until stdin ends; each byte of
                                                              stdin cuts or connects the host of this number
"""

import ctypes
import fcntl
import heapq
import os
import secrets
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from typing import Self, cast

from appo.algorithms.runtime.processes.prctl import bound_to_us
from benchmarks.shared.measuring import ROOT
from tests.chaos.killer import kill

NETWORK, PORT = "10.77.0", "eth0"
TUNSETIFF, TUN, CLONE_NEWNET = 0x400454CA, 0x1001, 0x40000000  # TUN without a header before each packet
LARGEST = 65535
SETUP_SECONDS = 20.0


def are_possible() -> bool:
    """Return whether the process may make network namespaces."""
    return os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc")))


class Hosts:
    """Hosts with the addresses 10.77.0.1, 10.77.0.2, ...; exiting kills all processes of the hosts.

    Args:
        number: number of hosts.
        rate: rate of each interface, in words of tc.
        delay_seconds: delay of each packet; 0: a bridge of the kernel joins the hosts.
    """

    def __init__(self, number: int, rate: str, delay_seconds: float = 0.0) -> None:
        mark = secrets.token_hex(2)
        self.names = [f"appo{mark}-{host}" for host in range(number)]
        self.rate, self.delay_seconds, self.switch = rate, delay_seconds, f"appo{mark}-sw"
        self._stack = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name in (*self.names, self.switch):
                _ip("netns", "add", name)
                stack.callback(_ip, "netns", "del", name)
            stack.callback(lambda: [self.kill(host) for host in range(len(self.names))])
            if self.delay_seconds:
                self._delay(stack)
            else:
                self._bridge()
            for host, name in enumerate(self.names):
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", PORT)
                _ip("-n", name, "link", "set", PORT, "up")
                shape = ["tc", "-n", name, "qdisc", "add", "dev", PORT, "root", "tbf", "rate", self.rate]
                subprocess.run([*shape, "burst", "256kb", "latency", "50ms"], check=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def address(self, host: int) -> str:
        return f"{NETWORK}.{host + 1}"

    def within(self, host: int) -> list[str]:
        """Return the words before a command of a host."""
        return ["ip", "netns", "exec", self.names[host]]

    def kill(self, host: int) -> None:
        """Kill all processes of a host."""
        done = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=True)
        for pid in done.stdout.split():
            kill(int(pid))

    def cut(self, host: int, *, off: bool) -> None:
        """Cut a host from the switch without a notice to anybody, or connect the host again."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(bytes([host]))
            self._process.stdin.flush()
            return
        _ip("-n", self.switch, "link", "set", f"p{host}", *(["nomaster"] if off else ["master", "br0"]))

    def received(self, host: int) -> int:
        """Return the bytes that have arrived at a host."""
        words = [*self.within(host), "cat", f"/sys/class/net/{PORT}/statistics/rx_bytes"]
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    def _bridge(self) -> None:
        _ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "br0", "up")
        for host, name in enumerate(self.names):
            peer = ["type", "veth", "peer", "name", PORT, "netns", name]
            _ip("-n", self.switch, "link", "add", f"p{host}", *peer)
            _ip("-n", self.switch, "link", "set", f"p{host}", "master", "br0", "up")

    def _delay(self, stack: ExitStack) -> None:
        words = [sys.executable, "-m", "benchmarks.shared.hosts", str(self.delay_seconds), *self.names]
        pipe = subprocess.PIPE
        switch = stack.enter_context(
            subprocess.Popen(words, stdin=pipe, stdout=pipe, cwd=ROOT, preexec_fn=bound_to_us())  # noqa: PLW1509 (it calls the system alone)
        )
        assert switch.stdin is not None
        stack.callback(switch.stdin.close)
        assert switch.stdout is not None
        assert switch.stdout.readline(), "the switch does not start"
        self._process = switch


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=SETUP_SECONDS)


def open_interface(namespace: str) -> int:
    """Return a descriptor of a new interface in a namespace, for whole packets of IP."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/self/ns/net").open() as here, Path("/run/netns", namespace).open() as there:
        if libc.setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), namespace)
        try:
            descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", PORT.encode(), TUN))
        finally:
            libc.setns(here.fileno(), CLONE_NEWNET)
    return descriptor


def forward(ports: Sequence[int], delay_seconds: float, cuts: int) -> None:
    """Send packets to the hosts of their addresses after a delay, until a descriptor ends.

    Args:
        ports: descriptors of the hosts' interfaces, in order of the addresses.
        delay_seconds: delay of each packet.
        cuts: descriptor with a byte for each cut and connection: the number of the host.
    """
    waiting: list[tuple[float, int, int, bytes]] = []
    numbers, network = count(), bytes(map(int, NETWORK.split(".")))
    off: set[int] = set()
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready = cast(list[int], wait([*ports, cuts], patience))  # select takes no descriptor above 1,023
        if cuts in ready:
            changed = os.read(cuts, LARGEST)
            if not changed:
                return
            for host in changed:
                off ^= {host}
            ready.remove(cuts)
        now = time.monotonic()
        for port in ready:
            with suppress(BlockingIOError):
                while packet := os.read(port, LARGEST):
                    host = packet[19] - 1  # of the address of the destination, in IPv4
                    is_ours = packet[0] >> 4 == 4 and packet[16:19] == network and 0 <= host < len(ports)
                    if is_ours and not off & {host, packet[15] - 1}:  # byte 15 ends the address of the source
                        heapq.heappush(waiting, (now + delay_seconds, next(numbers), host, packet))
        while waiting and waiting[0][0] <= now:
            _, _, host, packet = heapq.heappop(waiting)
            with suppress(BlockingIOError, OSError):  # a full queue drops packets, as any switch does
                os.write(ports[host], packet)


def main() -> None:
    opened = [open_interface(name) for name in sys.argv[2:]]
    print("ready", flush=True)
    forward(opened, float(sys.argv[1]), 0)


if __name__ == "__main__":
    main()
