"""An environment that misbehaves on demand, torch-free: `--env=tests.chaos.hostile_env:Hostile --env_kwargs fault=...`.

It does what `fault` names when it is called for the `at`-th time (-1: every time) in `where` (init, reset, step or
close), in processes whose name begins with `process` (`actor_1`, or nothing: all of them), and notes the moment in the
file `stamp`; with `once`, not again when that file is there. A step takes `pause` seconds and gives `reward`; an
episode has `length`.
"""

import ctypes
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

EPISODE_STEPS = 50
NUM_CHILDREN = 2
LEAK_BYTES, LEAK_FILES = 4 << 20, 10
kept: list[object] = []


class HostileError(Exception):
    """What the environment raises."""


def _raise() -> None:
    raise HostileError("out of cheese")


def _hang() -> None:
    while True:
        time.sleep(60.0)


def _hang_in_c() -> None:
    ctypes.PyDLL(None).sleep(3600)  # keeps the interpreter to itself


def _recur() -> None:
    _recur()


def _hang_in_a_message() -> None:
    """Stand stopped with half of a message to main written."""
    (channels,) = (found for found in gc.get_objects() if type(found).__name__ == "Channels")
    os.write(channels.pipe.fileno(), (1000).to_bytes(4, "big") + b"half of it")
    os.kill(os.getpid(), signal.SIGSTOP)


def _interrupt() -> None:
    raise KeyboardInterrupt("of the environment")


def _take_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(99))


def _move() -> None:
    os.chdir("/")
    os.umask(0o777)


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)


def _close_stdout() -> None:
    sys.stdout.close()


def _spam() -> None:
    for _ in range(2000):
        print("x" * 500)
        print("y" * 500, file=sys.stderr)


def _start_children() -> None:
    for _ in range(NUM_CHILDREN):
        subprocess.Popen(["sleep", "1000"])


def _leak_memory() -> None:
    kept.append(b"x" * LEAK_BYTES)


def _leak_files() -> None:
    kept.extend(os.dup(0) for _ in range(LEAK_FILES))


def _poison_queues() -> None:
    """Die as a process dies that is killed inside a faster-fifo queue: with its mutex locked."""
    libc, shared_kind = ctypes.CDLL(None), 128
    for queue in [found for found in gc.get_objects() if type(found).__name__ == "Queue"]:
        if (memory := getattr(queue, "queue_obj_buffer", None)) is not None:
            kinds = np.frombuffer(memory, np.int32)
            mutex = 4 * int((kinds == shared_kind).argmax()) - 16  # __kind is the fifth int of a pthread_mutex_t
            libc.pthread_mutex_lock(ctypes.c_void_p(ctypes.addressof(memory) + mutex))
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, Callable[[], object]] = {
    "raise": _raise,
    "hang": _hang,
    "hang_in_c": _hang_in_c,
    "memory_error": lambda: bytearray(1 << 60),
    "recursion": _recur,
    "stop_iteration": lambda: next(iter(())),
    "abort": os.abort,
    "kill_itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sys_exit": lambda: sys.exit("bye"),
    "os_exit": lambda: os._exit(7),
    "segfault": lambda: ctypes.string_at(0),
    "keyboard_interrupt": _interrupt,
    "spam": _spam,
    "move": _move,
    "seed": _seed,
    "close_stdout": _close_stdout,
    "thread": lambda: threading.Thread(target=_hang, daemon=True).start(),
    "warn": lambda: warnings.warn("of the environment", stacklevel=1),
    "take_signals": _take_signals,
    "start_children": _start_children,
    "poison_queues": _poison_queues,
    "hang_in_a_message": _hang_in_a_message,
    "leak_memory": _leak_memory,
    "leak_files": _leak_files,
}
"""What happens instead of the call; those that return let it go on."""

POSITION = spaces.Box(-1.0, 1.0, (3,), np.float32)
SPEED = spaces.Box(-1.0, 1.0, (2,), np.float32)
ODD_OBSERVATIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "shape": lambda: {"position": np.zeros(4, np.float32), "speed": np.zeros(2, np.float32)},
    "dtype": lambda: {"position": np.array(["a", "b", "c"]), "speed": np.zeros(2, np.float32)},
    "missing_key": lambda: {"position": np.zeros(3, np.float32)},
    "no_dict": lambda: np.zeros(3, np.float32),
    "extra_key": lambda: {"position": np.zeros(3, np.float32), "speed": np.zeros(2, np.float32), "mass": 1.0},
    "nan": lambda: {"position": np.array([0.0, np.nan, 0.0]), "speed": np.zeros(2, np.float32)},
    "out_of_bounds": lambda: {"position": np.full(3, 1e6), "speed": np.zeros(2, np.float32)},
    "lists": lambda: {"position": [0.0, 0.5, 1.0], "speed": (0.0, 1.0)},
}
ODD_STEPS: dict[str, Callable[[Any], Any]] = {
    "nan_reward": lambda observation: (observation, float("nan"), False, False, {}),
    "inf_reward": lambda observation: (observation, -np.inf, False, False, {}),
    "text_reward": lambda observation: (observation, "high", False, False, {}),
    "array_reward": lambda observation: (observation, np.zeros(2), False, False, {}),
    "four_values": lambda observation: (observation, 1.0, False, {}),
}
ODD_SPACES: dict[str, tuple[spaces.Space[Any], spaces.Space[Any]]] = {
    "text": (spaces.Text(5), spaces.Discrete(2)),
    "graph": (spaces.Graph(POSITION, None), spaces.Discrete(2)),
    "sequence_action": (POSITION, spaces.Sequence(spaces.Discrete(2))),
    "integer_action": (POSITION, spaces.Box(0, 9, (2,), np.int32)),
}


class Hostile(gymnasium.Env[Any, Any]):
    """Two vectors to see, two actions to take, episodes of a fixed length, and a fault."""

    def __init__(
        self,
        fault: str = "",
        where: str = "step",
        at: int = 1,
        process: str = "",
        stamp: str = "",
        space: str = "",
        pause: float = 0.0,
        once: bool = False,
        reward: float | str = 1.0,
        length: int = EPISODE_STEPS,
    ):
        self.pause, self.once, self.reward, self.length = pause, once, float(reward), length
        self.fault, self.where, self.at, self.process, self.stamp = fault, where, at, process, stamp
        plain = spaces.Dict({"position": POSITION, "speed": SPEED}), spaces.Discrete(2)
        self.observation_space, self.action_space = ODD_SPACES.get(space, plain)
        self._calls = dict.fromkeys(("init", "reset", "step", "close"), 0)
        self._steps = 0
        self._odd = ""  # what is odd about this call's answer
        self._call("init")
        if self._odd == "other_space":
            self.observation_space = spaces.Dict({"position": POSITION, "speed": POSITION})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        observation = self._call("reset")
        return observation if self._odd == "reset_alone" else (observation, {})

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        time.sleep(self.pause)
        observation = self._call("step")
        if self._odd in ODD_STEPS:
            return ODD_STEPS[self._odd](observation)
        return observation, self.reward, self._steps >= self.length, False, {}

    def close(self) -> None:
        self._call("close")

    def _call(self, place: str) -> Any:
        """Misbehave if it is time to; otherwise the observation."""
        self._calls[place] += 1
        self._odd = ""
        again = self.once and Path(self.stamp).exists()
        due = place == self.where and self.at in (-1, self._calls[place])
        if due and not again and _process_name().startswith(self.process):
            if self.stamp:
                Path(self.stamp).write_text(repr(time.monotonic()))
            if self.fault in ODD_OBSERVATIONS:
                return ODD_OBSERVATIONS[self.fault]()
            self._odd = self.fault
            if self.fault in FAULTS:
                FAULTS[self.fault]()
        return {"position": POSITION.sample(), "speed": SPEED.sample()}


STAY = """
import os, signal, sys, time
for number in range(1, 32):
    if number not in (9, 19):
        signal.signal(number, signal.SIG_IGN)
words = open("/proc/self/stat").read().rpartition(")")[2].split()
open(os.path.join(sys.argv[1], f"owner-{os.getpid()}"), "w").write(sys.argv[2])
open(os.path.join(sys.argv[1], f"stray-{os.getpid()}-{words[19]}"), "w").close()
time.sleep(100)
"""
TWICE = "import os, subprocess, sys; os.setsid(); subprocess.Popen([sys.executable, '-S', *sys.argv[1:]])"


class Straying(gymnasium.Env[Any, Any]):
    """Starts a process in a session of its own that hears no signal but SIGKILL.

    Args:
        kind: session = as programs with a launcher do; twice = its parent ends at once, as of a daemon; bare = the same
            without an environment; forked = no other program; script = by a shell; chain = the third of a chain, each
            in a session of its own.
        folder: where it is noted.
    """

    def __init__(self, kind: str, folder: str):
        self.observation_space, self.action_space, self._steps = POSITION, spaces.Discrete(2), 0
        here = [folder, _process_name()]
        stay = [sys.executable, "-S", "-c", STAY, *here]
        if kind == "session":
            subprocess.Popen(stay, start_new_session=True)
        elif kind in ("twice", "bare"):
            subprocess.run(
                [sys.executable, "-S", "-c", TWICE, *stay[2:]], env={} if kind == "bare" else None, check=True
            )
        elif kind == "forked":
            _fork_away(here)
        elif kind == "script":
            subprocess.run(["sh", "-c", 'setsid "$@" & exit 0', "sh", *stay], check=True)
        elif kind == "chain":
            link = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True).wait()"
            subprocess.Popen([sys.executable, "-S", "-c", link, *stay], start_new_session=True)
        else:
            raise ValueError(kind)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return POSITION.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return POSITION.sample(), 1.0, self._steps % EPISODE_STEPS == 0, False, {}


def _fork_away(arguments: list[str]) -> None:
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            sys.argv = ["stay", *arguments]
            exec(STAY)
        os._exit(0)
    os.waitpid(child, 0)


class Chatterbox(gymnasium.Env[Any, Any]):
    """Prints so many bytes a second, or `burst` bytes at once in its tenth step, and invents statistics."""

    def __init__(self, bytes_per_second: int = 1 << 20, names: int = 1, burst: int = 0, length: int = EPISODE_STEPS):
        self.observation_space, self.action_space = POSITION, spaces.Discrete(2)
        self.bytes_per_second, self.names, self.burst, self.length = bytes_per_second, names, burst, length
        self._begin, self._printed, self._steps, self._episodes = time.monotonic(), 0, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return POSITION.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        if self.burst and self._steps == 10:
            print("!" * self.burst, flush=True)
        while self._printed < self.bytes_per_second * (time.monotonic() - self._begin):
            line = f"step {self._steps} " + "." * 100
            self._printed += len(line) + 1
            print(line, flush=True)
        if self._steps % self.length:
            return POSITION.sample(), 1.0, False, False, {}
        self._episodes += 1
        invented = {f"{os.getpid()}/{self._episodes}/{name}": 1.0 for name in range(self.names)}
        return POSITION.sample(), 1.0, True, False, {"episode_extra_stats": {"known": 1.0, **invented}}


def _process_name() -> str:
    module = sys.modules.get("multiprocessing.process")
    return module.current_process().name if module else ""


gymnasium.register("Hostile-v0", entry_point="tests.chaos.hostile_env:Hostile")
