"""Environments of several agents: a row per agent, in the order of the agents, with the signals of our own loop.

Such an environment is a `gymnasium.Env` whose methods use lists, with an entry per agent: `reset` returns observations
and infos, `step` takes actions and returns observations, rewards, terminated, truncated and infos. Both spaces are the
spaces of one agent.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from appo.envs.conversion import require_info
from appo.envs.infos import InfoReader
from appo.envs.journal import NOBODY
from appo.envs.loop.env_set import Begun, SingleEnv
from appo.envs.loop.python_loop import PythonLoop
from appo.envs.masks import random_action
from appo.envs.outcome import FLAGS, LARGEST, LEAST, NUMBERS, reward_of, truth_of
from appo.envs.spaces import num_agents_of
from appo.envs.spec import MASK_KEY, SINGLE_KEY, TEAM_RETURN, Array, EpisodeStats, StepRow, row_name
from appo.utils.errors import EnvironmentFailure, SpaceMismatch

Infos = Sequence[Mapping[str, Any]]
Reports = dict[int, dict[str, float]]
"""Statistics of episodes that ended in a step, by row."""


def loop_over(env_fns: Sequence[Callable[[], SingleEnv]], **arguments: Any) -> PythonLoop:
    """Return the loop for environments of one agent or of several; `arguments` are the arguments of `PythonLoop`."""
    made = [env_fns[0]()]  # only an environment says how many agents it has

    def first() -> SingleEnv:
        return made.pop() if made else env_fns[0]()

    return (MultiAgentLoop if num_agents_of(made[0]) else PythonLoop)([first, *env_fns[1:]], **arguments)


class Said(NamedTuple):
    """Outcome of a step, an entry per agent."""

    observations: Sequence[Any]
    rewards: Sequence[float]
    terminated: Sequence[Any]
    truncated: Sequence[Any]
    infos: Infos


class Roster:
    """The agents of an environment that play.

    Attributes:
        playing: agents that act on an observation.
        out: agents whose episode has ended, until their next observation.
        team_return: sum of the rewards of all agents since the environment's episode began.
        cut: whether the episode began before the first observation.
    """

    def __init__(self, num_agents: int, infos: InfoReader | None = None) -> None:
        self._is_active, self.cut = (infos or InfoReader("")).is_active, False
        self.playing, self.out, self.team_return = [False] * num_agents, [True] * num_agents, 0.0

    @property
    def over(self) -> bool:
        """Whether the episode of the environment has ended: all agents are out."""
        return all(self.out)

    def begin(self, infos: Infos) -> None:
        """The environment has begun an episode."""
        self.playing, self.out = [self._is_active(info) for info in infos], [False] * len(infos)
        self.team_return, self.cut = 0.0, False

    def note(self, agent: int, ended: bool, info: Mapping[str, Any]) -> None:
        """Note the results of an agent's step; `ended`: terminated or truncated."""
        active = self._is_active(info)
        self.playing[agent] = active and not ended
        self.out[agent] = ended or (self.out[agent] and not active)


class MultiAgentLoop(PythonLoop):
    """Steps environments of several agents one after the other; the arguments are the arguments of `PythonLoop`.

    A step that an agent does not take is invalid, like a step that only resets, and the agent's next observation begins
    an episode. An agent that left early, or has not come yet, trains nothing, and an agent that comes back remembers
    nothing. Meanwhile the row shows zeros. An agent that leaves without an end is truncated; learning bootstraps from
    the last observation. The step after the end of the last agent resets the environment.
    """

    def __init__(self, env_fns: Sequence[Callable[[], SingleEnv]], **arguments: Any) -> None:
        super().__init__(env_fns, **arguments)
        self._rosters = [Roster(self.spec.num_agents, self.infos) for _ in range(len(self._envs))]

    def step(self, action: Array, row: StepRow) -> Sequence[EpisodeStats]:
        """Step or reset every environment with action [R, A]; write what came out into `row`.

        Raises:
            EnvironmentFailure: as in `PythonLoop.step`.
        """
        self._prepare(action, row)
        reports: Reports = {}
        failed: dict[int, EnvironmentFailure] = {}
        actions = self._actions.rows(action)
        for index, step in enumerate(self._envs.step_functions):
            self._inside[0] = index
            rows = self._rows(index)
            try:
                if self._ended[index]:
                    self.cut[rows] = False
                    self._show(index, row.obs, self._envs.begin(index, None))
                    row.first[rows], row.reward[rows], self._ended[index] = True, 0.0, False
                else:
                    playing = self._rosters[index].playing
                    self._write(index, self._said(index, step(list(actions[rows])), playing), row, reports)
            except BaseException as error:
                failed[index] = self._envs.forgive(index, error, self._num_steps)
        ended = [not plays for one in self._rosters for plays in one.playing] if self._masks else ()
        for index in self._replace_failed(failed, self._odd(row, ended), row):
            for at in range(index * self.spec.num_agents, (index + 1) * self.spec.num_agents):
                reports.pop(at, None)
        self._inside[0] = NOBODY
        return [EpisodeStats(at, report) for at, report in reports.items()]

    def _write(self, index: int, said: Said, row: StepRow, reports: Reports) -> None:
        """Write a step of one environment."""
        roster, rows = self._rosters[index], self._rows(index)
        if all(roster.playing) and not (any(said.terminated) or any(said.truncated) or any(said.infos)):
            row.reward[rows] = said.rewards  # most steps are like this, and cost half as much so
            roster.team_return += sum(said.rewards)
            for at, observation in enumerate(said.observations, rows.start):
                self._observe(row.obs, at, observation, {})
            return
        last_row = rows.start
        for agent, at in enumerate(range(rows.start, rows.stop)):
            if self._write_agent(roster, agent, said, row, at):
                last_row = at
                if stats := self.infos.stats(at, said.infos[agent]):
                    stats.stats.pop(TEAM_RETURN, None)  # a name of ours, which says that the game is over
                    reports[at] = stats.stats
        if roster.over:
            self._ended[index] = True
            if self.spec.num_agents > 1 and not roster.cut:
                reports.setdefault(last_row, {})[TEAM_RETURN] = roster.team_return

    def _write_agent(self, roster: Roster, agent: int, said: Said, row: StepRow, at: int) -> bool:
        """Write a step of an agent; return whether the episode ended."""
        info, observation = said.infos[agent], said.observations[agent]
        require_info(self.name, "step", info)
        terminated, acted = bool(said.terminated[agent]), roster.playing[agent]
        roster.note(agent, terminated or bool(said.truncated[agent]), info)
        plays = roster.playing[agent]
        row.first[at], row.reward[at] = not acted, said.rewards[agent] if acted else 0.0
        ends = acted and not plays
        if acted:
            roster.team_return += said.rewards[agent]
            self._read_frames(info, row, at)
        if ends:
            row.terminated[at], row.truncated[at] = terminated, not terminated
        lost = terminated and observation is None  # nobody asks what comes after
        if plays or (ends and not lost):
            self._observe(row.obs, at, observation, info, ended=ends)
        else:
            self._blank(row.obs, at)
        return ends

    def _show(self, index: int, obs: dict[str, Array], begun: Begun) -> None:
        """Write the first observations of an episode."""
        observations, infos = self._begun(begun)
        roster = self._rosters[index]
        if not self.cut[self._rows(index).start]:  # else who has ended during the walk must not seem to begin here
            roster.begin(infos)
        for agent, plays in enumerate(roster.playing):
            at = self._rows(index).start + agent
            if plays:
                self._observe(obs, at, observations[agent], infos[agent])
                self._finite.require(obs, at)
                if self._masks:
                    self._masks.require(obs, at)
            else:
                self._blank(obs, at)

    def _observe(
        self, obs: dict[str, Array], at: int, observation: Any, info: Mapping[str, Any], *, ended: bool = False
    ) -> None:
        """Write an agent's observation, and the mask if infos have masks; at an end, a mask may be missing."""
        shape, types = self._observations.plain_shape, self._observations.plain_types
        if type(observation) is np.ndarray and observation.dtype.char in types and observation.shape == shape:
            obs[SINGLE_KEY][at] = observation
        elif observation is None:
            when = "at its truncated end, which is valued by what it shows" if ended else "although it plays on"
            raise SpaceMismatch(f"{self.name}: {self._called(at)} shows nothing {when}")
        else:
            self._observations.write_row(obs, at, observation)
        if info:
            self.infos.refuse_masks(info)
        if self.spec.mask_in_info and self._masks:
            if ended and info.get(MASK_KEY) is None:
                obs[MASK_KEY][at] = 1
            else:
                self._masks.write_row(obs, at, info)

    def _called(self, at: int) -> str:
        index, agent = divmod(at, self.spec.num_agents)
        names = getattr(self._envs[index].unwrapped, "agent_names", None)
        return f"env {index}, agent {names[agent]}" if names else row_name(at, self.spec.num_agents)

    def _blank(self, obs: dict[str, Array], at: int) -> None:
        """Write the row of an agent that takes no part: nothing to see, and any choice will do."""
        for key, array in obs.items():
            array[at] = key == MASK_KEY

    def _walk(self, index: int, begun: Begun) -> Begun:
        """Take random steps from first observations; no action is taken that a mask forbids."""
        observations, infos = self._begun(begun)
        roster = Roster(self.spec.num_agents, self.infos)
        roster.begin(infos)
        walked = False
        for _ in range(int(self._random.integers(self._decorrelate_steps)) if self._decorrelate_steps else 0):
            self._envs.alive()
            drawn = []
            for observation, info, plays in zip(observations, infos, roster.playing, strict=True):
                mask = self._masks.choices(observation, info) if self._masks and plays else None
                drawn.append(random_action(self.spec.action, mask, self._random))
            actions = np.concatenate(drawn)
            if self._envs.journal is not None:
                self._envs.journal.walk(index, actions.reshape(-1))
            result = self._envs.step_functions[index](list(self._actions.rows(actions)))
            said = self._said(index, result, roster.playing)
            observations, infos = said.observations, said.infos
            for agent, info in enumerate(infos):
                require_info(self.name, "step", info)
                roster.note(agent, bool(said.terminated[agent] or said.truncated[agent]), info)
            walked = not roster.over
            if roster.over:
                observations, infos = self._begun(self._envs.begin(index, None))
                roster.begin(infos)
        self.cut[self._rows(index)] = roster.cut = walked
        self._rosters[index] = roster
        return observations, infos

    def _begun(self, begun: Any) -> tuple[Sequence[Any], Infos]:
        """First observations and infos, an entry per agent."""
        observations, infos = begun
        return self._entries("observations", observations), self._entries("infos", infos)

    def _said(self, index: int, result: Any, playing: Sequence[bool]) -> Said:
        """Return the outcome of a step, an entry per agent; any other form is refused (SpaceMismatch)."""
        if not isinstance(result, tuple) or len(result) != len(Said._fields):
            raise SpaceMismatch(f"{self.name}: step must return observations, rewards, terminated, truncated and infos")
        observations, rewards, terminated, truncated, infos = map(self._entries, Said._fields, result)
        numbers = [
            paid if type(paid) in NUMBERS and LEAST <= paid <= LARGEST
            else reward_of(self.name, self._called(self._rows(index).start + agent), paid) if playing[agent]
            else 0.0  # whatever is given to an absent agent is ignored
            for agent, paid in enumerate(rewards)
        ]  # fmt: skip
        for key, flags in (("terminated", terminated), ("truncated", truncated)):
            for flag in flags:
                if type(flag) not in FLAGS:
                    truth_of(self.name, key, flag)
        return Said(observations, numbers, terminated, truncated, infos)

    def _entries(self, what: str, entries: Any) -> Any:
        """Return an entry for every agent; an info or a flag may be said once for all, as wrappers do."""
        count = self.spec.num_agents
        if type(entries) is list and len(entries) == count:
            return entries
        if isinstance(entries, bool | np.bool_) or (what == "infos" and isinstance(entries, Mapping)):
            return [entries] * count
        if isinstance(entries, list | tuple | np.ndarray) and len(entries) == count:
            return entries
        got = f"{len(entries)}" if isinstance(entries, list | tuple | np.ndarray) else type(entries).__name__
        raise SpaceMismatch(f"{self.name}: {what}: expected a list of {count}, one per agent, got {got}")
