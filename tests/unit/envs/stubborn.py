"""Environments that are not what was asked for."""

import os
import signal
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from appo.envs.toys.toy import Corridor, CounterVector


class Fixed(CounterVector):
    """Makes eight environments, whatever it is asked for."""

    def __init__(self, num_envs: int = 8) -> None:
        super().__init__(8)


class Rounded(CounterVector):
    """Makes a multiple of four environments."""

    def __init__(self, num_envs: int = 4) -> None:
        super().__init__(-(-num_envs // 4) * 4)


class OnePerProcess(Corridor):
    """Cannot be made while there is another one in the process, as emulators with a global state."""

    there_is_one: ClassVar[bool] = False

    def __init__(self) -> None:
        if OnePerProcess.there_is_one:
            raise RuntimeError("Cannot create multiple emulator instances per process")
        super().__init__()
        self.mine = OnePerProcess.there_is_one = True

    def close(self) -> None:
        if vars(self).pop("mine", False):
            OnePerProcess.there_is_one = False


class EndsProcess(Corridor):
    """Ends the process in which a second one is made, as a fault in C++."""

    made: ClassVar[int] = 0

    def __init__(self) -> None:
        EndsProcess.made += 1
        if EndsProcess.made > 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        super().__init__()


class FewPerProcess(Corridor):
    """Cannot begin an episode beside three others, as simulators with licences."""

    begun: ClassVar[list[Any]] = []

    def reset(self, **kwargs: Any) -> Any:
        if self not in self.begun:
            self.begun.append(self)
        if len(self.begun) > 3:
            raise RuntimeError("no more licences")
        return super().reset(**kwargs)

    def close(self) -> None:
        if self in self.begun:
            self.begun.remove(self)


class Growing(gymnasium.Env[Any, Any]):
    """Another one than those before in what `grows` says: its space, or the number of its agents."""

    made: ClassVar[int] = 0

    def __init__(self, grows: str) -> None:
        Growing.made += 1
        self.observation_space = spaces.Box(0, 1, (Growing.made if grows == "space" else 2,))
        self.action_space = spaces.Discrete(2)
        self.is_multiagent, self.num_agents = True, Growing.made if grows == "agents" else 2

    def reset(self, **kwargs: Any) -> Any:
        shown = [np.zeros(self.observation_space.shape, np.float32)] * self.num_agents
        return shown, [{}] * self.num_agents


class AlwaysHuman(Corridor):
    """Opens a window, whatever it is asked for."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["human", "rgb_array"]}

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__()
        self.render_mode = "human"
