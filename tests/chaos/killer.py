"""Kills random processes of a run, from outside the run.

Every process of the run inherits an environment variable with a value unique to the run, so orphans are found too. The
module `invariants` checks the result.
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
SAVES = 2  # the first may have begun before the last kill
GUST_KILLS = (3, 7)
PAUSES_SECONDS = (0.0, 0.0, 0.05, 0.3)
UNMISSED = ("tracker", "starting", "ended")  # return with the next start of a process, or are short-lived
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
    """Return the role of a process: the name of the log file behind stdout, else a word of the command line."""
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
    """Return ended children of these processes without a wait by the parent."""
    found = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                state, parent = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:2]
                if state == "Z" and int(parent) in parents:
                    found.add(int(entry.name))
    return found


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a process, ended or not."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Killer:
    """Kills random processes of a run in bursts, some while others restart, and waits for recovery after each burst.

    A process may die any number of times, but a run ends if a process dies too often without work in between. A burst
    therefore ends before any process has died too often in a row.

    Args:
        marker: value of `MARKER` in the processes of the run.
        main: process of main, never killed.
        saves: function that returns the number of saved checkpoints in the log.
        seed: seed of the choice of processes and pauses.
        only: beginnings of the roles to kill; by default all but main.

    Attributes:
        kills: roles of killed processes, in order.
        longest_recovery_seconds: longest time from the end of a burst until all processes are back and have saved.
    """

    def __init__(
        self, marker: str, main: int, saves: Callable[[], int], seed: int, only: tuple[str, ...] = ("",)
    ) -> None:
        self.marker, self.main, self.saves, self.only = marker, main, saves, only
        self.kills: list[str] = []
        self.longest_recovery_seconds = 0.0
        self._rng = random.Random(seed)
        self._unasked: set[int] = set()  # main waits for these when the next process starts

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
