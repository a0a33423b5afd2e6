"""PettingZoo: ids, and environments as environments of several agents for our loop."""

import copy
import functools
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np

from appo.envs.agents.common_spaces import AGENT_ID, CommonSpaces
from appo.envs.conversion import one_line
from appo.envs.family import Harmless
from appo.envs.infos import ACTIVE_KEY
from appo.envs.outcome import FLAGS, truth_of
from appo.envs.spec import MASK_KEY
from appo.utils.errors import SpaceMismatch, UsageError
from appo.utils.values import nearest

ID = re.compile(r"(?:pettingzoo[./](\w+)|(atari|butterfly|classic|sisl))[./](\w+?)[-_]v(\d+)")
"""Ids as in PettingZoo's registry, `sisl/pursuit-v5`, or like modules, `pettingzoo.sisl.pursuit_v5`."""

HARMLESS: Harmless = {
    **dict.fromkeys(("max_cycles", "num_agents"), 1e6),
    **dict.fromkeys(("n_pursuers", "n_evaders", "n_poisons", "n_coop", "n_obstacles", "n_sensors", "n_walkers"), 64.0),
    **dict.fromkeys(("x_size", "y_size", "obs_range", "n_catch"), 128.0),
    **dict.fromkeys(("freeze_evaders", "shared_reward", "continuous_actions", "continuous", "surround"), 1.0),
    **dict.fromkeys(("tag_reward", "catch_reward", "urgency_reward", "local_ratio", "constraint_window"), 1e6),
}
"""Arguments that an untrusted run may set."""

NAMES = (
    r"pursuit|multiwalker|pistonball|cooperative_pong|knights_archers_zombies|chess|connect_four|go|hanabi|leduc_holdem|rps"
    r"|texas_holdem(_no_limit)?|tictactoe"
)
"""Regular expression of names without what is before and behind them, by which its environments are known that need no
further package."""

INSTALL = 'pip install "appo[multiagent]"'
Factory = Callable[..., Any]
MOST_NAMES = 8  # of agents, in one line


def find(name: str, *, registered: bool) -> Factory | None:
    """Return the maker of PettingZoo's environment with a name; None for a name in another form.

    Args:
        name: id in PettingZoo's form, or an id that a user's module has registered.
        registered: whether a user's module may have registered the id.

    Raises:
        UsageError: PettingZoo has no such environment, or is missing or too old to have a registry.
    """
    match = ID.fullmatch(name)
    if match is None:
        makers = _makers(name) if registered and hasattr(sys.modules.get("pettingzoo"), "parallel_registry") else {}
        return makers.get(re.sub(r"_v(?=\d+$)", "-v", name))
    env_id, makers = f"{match[1] or match[2]}/{match[3]}-v{match[4]}", _makers(name)
    if env_id not in makers:
        raise UsageError(f"PettingZoo has no environment {env_id}{nearest(env_id, makers, 3)}")
    return makers[env_id]


def ids() -> list[str]:
    """List the ids in PettingZoo's registry; [] if PettingZoo is not installed, or has no registry."""
    try:
        return list(_makers(""))
    except (UsageError, ImportError):
        return []


def _makers(env_id: str) -> dict[str, Factory]:
    """Return id -> maker of all of PettingZoo's environments, the parallel maker if one exists."""
    if find_spec("pettingzoo") is None:
        raise UsageError(f"{env_id} needs the package pettingzoo: {INSTALL}")
    zoo = importlib.import_module("pettingzoo")
    if not hasattr(zoo, "parallel_registry"):
        raise UsageError(f"{env_id} needs pettingzoo 1.27 or newer, this is {getattr(zoo, '__version__', 'older')}")
    return {name: functools.partial(_make, entry) for name, entry in (zoo.aec_registry | zoo.parallel_registry).items()}


def _make(entry: Any, **arguments: Any) -> Any:
    try:
        return entry.make(**arguments)
    except ImportError as error:
        extra = f'pip install "pettingzoo[{entry.namespace}]"'
        raise UsageError(f"{entry.id} needs a package that is not installed: {one_line(error)}; {extra}") from error


def classes() -> tuple[type, ...]:
    """The base classes of PettingZoo's environments, parallel and not; none where nothing has imported it."""
    zoo = sys.modules.get("pettingzoo")
    return (zoo.ParallelEnv, zoo.AECEnv) if zoo is not None else ()


def as_gymnasium(env: Any, name: str, *, ids: bool = False, scaled: bool = False) -> Any:
    """Return PettingZoo's environment in a form for our loop; any other environment unchanged.

    Raises:
        UsageError: the environment cannot be stepped in this form, with the reason.
    """
    if not isinstance(env, classes()):
        return env
    if isinstance(env, sys.modules["pettingzoo"].AECEnv):
        if not _metadata(env).get("is_parallelizable", False):
            raise UsageError(
                f"{name}: its agents take turns (no is_parallelizable in its metadata): only environments in which all "
                "act at once can be played"
            )
        observe = env.observe  # of one agent after the other, maybe into one buffer
        env.observe = lambda agent: copy.deepcopy(observe(agent))
        env = importlib.import_module("pettingzoo.utils.conversions").aec_to_parallel(env)
    return ParallelAgents(env, name, ids=ids, scaled=scaled)


class ParallelAgents(gymnasium.Env[Any, Any]):
    """A parallel environment whose agents are entries of lists, in the order of `possible_agents`.

    Raises:
        UsageError: the environment has no list of possible agents, or the spaces have no common space.
    """

    is_multiagent = True

    def __init__(self, parallel: Any, name: str, *, ids: bool = False, scaled: bool = False) -> None:
        self.parallel, self.name = parallel, name
        self.agents = list(getattr(parallel, "possible_agents", None) or ())
        if not self.agents:
            raise UsageError(f"{name} has no possible_agents: how many agents it may have must be known beforehand")
        self.num_agents, self.agent_names = len(self.agents), [str(agent) for agent in self.agents]
        self.metadata, self.render_mode = _metadata(parallel), getattr(parallel, "render_mode", None)
        self._spaces = CommonSpaces(
            name,
            self.agent_names,
            [parallel.observation_space(agent) for agent in self.agents],
            [parallel.action_space(agent) for agent in self.agents],
            ids=ids,
            scaled=scaled,
        )
        self.observation_space, self.action_space = self._spaces.observation_space, self._spaces.action_space
        self._living: set[Any] = set()
        self._gone: set[Any] = set()  # whose episode has ended, and who have not come back

    @property
    def rows_said(self) -> str:
        """Return one line with the agent of every row, and the key that distinguishes agents."""
        names = self.agent_names
        shown = names if len(names) <= MOST_NAMES else [*names[: MOST_NAMES - 1], "...", names[-1]]
        said = f"{len(names)} agents of each environment are rows in this order: {', '.join(shown)}"
        if not self._spaces.differ:
            return said
        ids = f"{AGENT_ID} says which one (--agent_id=off: not)" if self._spaces.has_ids else f"no {AGENT_ID} is added"
        return f"{said}; their spaces differ, shorter observations end in zeros, {ids}"

    @property
    def np_random(self) -> np.random.Generator:
        """The random numbers of the environment itself, if it keeps them where gymnasium's do."""
        generator: np.random.Generator = self.parallel.unwrapped.np_random
        return generator

    @np_random.setter
    def np_random(self, value: np.random.Generator) -> None:
        self.parallel.unwrapped.np_random = value

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Begin an episode: observations and infos, an entry per agent."""
        result = self.parallel.reset(seed=seed, **({"options": options} if options else {}))
        observations, infos = self._dicts("reset", result, 2)
        self._living, self._gone = self._listed(), set()
        if not self._living:
            raise SpaceMismatch(f"{self.name}: reset must begin with at least one agent")
        return self._shown(observations), self._infos(infos)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Step all living agents with their actions; return lists with an entry per agent.

        An agent that disappears without an end is truncated if the last observation is shown, else terminated. When no
        agent is left, agents that never came are truncated, so all agents have ended. An agent whose episode has ended
        comes back as soon as the list of living agents contains the agent again, or, for an agent that never left the
        list, with the next observation.
        """
        acting, asked = self._living, self._listed()
        taken = {a: self._spaces.action(i, action[i]) for i, a in enumerate(self.agents) if a in asked}
        observations, rewards, terminated, truncated, infos = self._dicts("step", self.parallel.step(taken), 5)
        for key, flags in (("terminated", terminated), ("truncated", truncated)):
            for agent, flag in flags.items():
                if type(flag) not in FLAGS:
                    flags[agent] = truth_of(self.name, f"{key} of agent {agent}", flag)
        observations = {a: shown for a, shown in observations.items() if shown is not None}
        listed = self._listed()
        ended = {a for a in asked | listed if terminated.get(a, False) or truncated.get(a, False)}
        vanished = acting - ended - listed
        back = {a for a in listed - ended if a not in asked or a in observations}
        self._gone = (self._gone | ended | vanished) - back
        self._living = listed - self._gone
        nobody, lost = not self._living, vanished - observations.keys()
        return (
            self._shown(observations),
            [rewards.get(a, 0.0) if a in acting else 0.0 for a in self.agents],
            [bool(terminated.get(a, False)) if a in ended else a in lost for a in self.agents],
            [bool(truncated.get(a, False)) if a in ended else nobody or a in vanished for a in self.agents],
            self._infos(infos),
        )

    def render(self) -> Any:
        """Return the environment's picture."""
        return self.parallel.render()

    def close(self) -> None:
        """Close the environment."""
        self.parallel.close()

    def _listed(self) -> set[Any]:
        """Return the living agents; each must be a possible agent (SpaceMismatch)."""
        listed = set(self.parallel.agents)
        if strangers := listed.difference(self.agents):
            raise SpaceMismatch(f"{self.name}: agent {min(map(str, strangers))} is in agents, not in possible_agents")
        return listed

    def _shown(self, observations: Mapping[Any, Any]) -> list[Any]:
        return [
            self._spaces.observation(i, observations[a]) if a in observations else None
            for i, a in enumerate(self.agents)
        ]

    def _infos(self, infos: Mapping[Any, Any]) -> list[dict[str, Any]]:
        """Return the info of every agent, with a mask if the agents' choices differ."""
        listed = []
        for index, agent in enumerate(self.agents):
            info = dict(infos.get(agent) or {})
            if agent not in self._living:
                info[ACTIVE_KEY] = False
            if self._spaces.masks is not None:
                info[MASK_KEY] = self._spaces.mask(index, info.get(MASK_KEY))
            listed.append(info)
        return listed

    def _dicts(self, where: str, result: Any, count: int) -> Any:
        """Return the answer of PettingZoo's interface, which must be a tuple of dicts by agent (SpaceMismatch)."""
        if isinstance(result, tuple) and len(result) == count and all(isinstance(part, Mapping) for part in result):
            return result
        raise SpaceMismatch(
            f"{self.name}: {where} must return {count} dicts by agent, as PettingZoo's parallel interface does"
        )


def _metadata(env: Any) -> dict[str, Any]:
    return getattr(env, "metadata", None) or {}
