"""A killer of processes of a run, which it sees from outside and kills at random.

All of them inherit an environment variable with a value that only this run has: so those are found too whose parents
have died. What killing costs the run is no business of this module, see `invariants`.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from appo.algorithms.runtime.roles import MAIN
from appo.utils.run_folder import LOGS
from tests.patience import patient

MARKER = "APPO_RUN_MARKER"
POLL_SECONDS = 0.02
RECOVERY_SECONDS = 60.0
SAVES = 2  # of which the first may have been under way when the last process was killed
GUST_KILLS = (3, 7)
PAUSES_SECONDS = (0.0, 0.0, 0.05, 0.3)
UNMISSED = ("tracker", "starting", "ended")  # come back when the next process is started, or are not there to stay
WORDS = {"resource_tracker": "tracker", "janitor": "janitor", "forkserver": "fork_server"}


class KillerError(Exception):
    """The run has ended, or has not recovered."""


def processes_of(marker: str) -> list[int]:
    """Return living processes with this value of `MARKER`."""
    wanted, found = f"{MARKER}={marker}".encode(), []
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                environment = Path(entry.path, "environ").read_bytes()  # empty for a zombie
                if wanted in environment.split(b"\0"):
                    found.append(int(entry.name))
    return found


def role_of(pid: int) -> str:
    """Tell the role of a process by the log file that is its stdout, else by the command line."""
    try:
        log = Path(os.readlink(f"/proc/{pid}/fd/1"))
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return "ended"
    if log.parent.name == LOGS:
        return log.stem
    return next((name for word, name in WORDS.items() if word in command), "starting")


def roles_of(marker: str, main: int) -> dict[int, str]:
    """Return all processes of a run with their roles."""
    return {pid: MAIN.name if pid == main else role_of(pid) for pid in processes_of(marker)}


def zombies_of(parents: set[int]) -> set[int]:
    """Return children of these processes that have ended and that nobody has asked for their exit code."""
    found = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                state, parent = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:2]
                if state == "Z" and int(parent) in parents:
                    found.add(int(entry.name))
    return found


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Killer:
    """Kills processes of a run at random, some at once or while others are being started again, and lets it recover.

    A process may be killed for ever as long as it gets something done, and a run ends that gets nothing done: so a
    burst ends before any process has died too often in a row.

    Args:
        marker: by which the processes of the run are known.
        main: is spared.
        saves: how many checkpoints the run has said to be saved.
        seed: of the choice of processes and pauses.
        only: beginnings of the roles that are killed; by default all but main.

    Attributes:
        kills: roles, in order.
        longest_recovery_seconds: from the end of a burst until all are back and what was learned since is saved.
    """

    def __init__(
        self, marker: str, main: int, saves: Callable[[], int], seed: int, only: tuple[str, ...] = ("",)
    ) -> None:
        self.marker, self.main, self.saves, self.only = marker, main, saves, only
        self.kills: list[str] = []
        self.longest_recovery_seconds = 0.0
        self._rng = random.Random(seed)
        self._unasked: set[int] = set()  # main asks for their exit codes when it starts the next process

    def kill_burst(self, kills: int) -> None:
        """Kill that many processes.

        Raises:
            KillerError: the run ended, or did not recover.
        """
        missed = set(self._roles().values()).difference(UNMISSED)
        while len(self.kills) < kills:
            for _ in range(min(self._rng.randint(*GUST_KILLS), kills - len(self.kills))):
                self._kill_one()
                time.sleep(self._rng.choice(PAUSES_SECONDS))
            self._recover(missed)

    def _roles(self) -> dict[int, str]:
        roles = roles_of(self.marker, self.main)
        if self.main not in roles:
            raise KillerError(f"the run ended after {len(self.kills)} kills: {' '.join(self.kills[-8:])}")
        return roles

    def _may_kill(self, role: str) -> bool:
        return role not in (MAIN.name, "ended") and role.startswith(self.only)

    def _kill_one(self) -> None:
        began = time.monotonic()
        while not (victims := sorted((r, pid) for pid, r in self._roles().items() if self._may_kill(r))):
            if time.monotonic() - began > patient(RECOVERY_SECONDS):
                raise KillerError(f"nobody was started again within {RECOVERY_SECONDS:g} s")
            time.sleep(POLL_SECONDS)
        role, pid = self._rng.choice(victims)
        if role in UNMISSED:
            self._unasked.add(pid)
        self.kills.append(role)
        kill(pid)

    def _recover(self, missed: set[str]) -> None:
        began, saves = time.monotonic(), self.saves()
        while True:
            roles = self._roles()
            lacking = missed.difference(roles.values())
            zombies = zombies_of(set(roles)) - self._unasked
            if not lacking and not zombies and self.saves() >= saves + SAVES:
                break
            if time.monotonic() - began > patient(RECOVERY_SECONDS):
                state = f"{self.saves() - saves} saves, lacking {sorted(lacking)}, zombies {sorted(zombies)}"
                last = " ".join(self.kills[-8:])
                raise KillerError(f"not recovered {RECOVERY_SECONDS:g} s after killing {last}: {state}")
            time.sleep(POLL_SECONDS)
        self.longest_recovery_seconds = max(self.longest_recovery_seconds, time.monotonic() - began)
