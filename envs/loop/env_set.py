"""The single environments of a group: made, reset and closed, and made again where they fail."""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np

from appo.envs.conversion import close_env, failure_of, require_info, reraise
from appo.envs.incidents import IncidentFolder, random_state
from appo.envs.journal import Journal, JournalMemory
from appo.envs.loop.reward_shaping import default_reward_shaping, set_reward_shaping
from appo.envs.masks import BY_METHOD, METHOD
from appo.envs.spaces import (
    AS_THEY_ARE,
    ActionForm,
    described,
    frames_per_step,
    num_agents_of,
    require_spec,
    rows_said,
    spec_of,
)
from appo.envs.spec import MASK_KEY, EnvSpec
from appo.utils.errors import EnvironmentFailure, SpaceMismatch
from appo.utils.timing import RESET, clock

log = logging.getLogger(__name__)
SingleEnv = gymnasium.Env[Any, Any]
Begun = tuple[Any, Any]
"""The first observation of an episode and the info; of several agents, lists of both."""

PERIOD_STEPS = 1000
IN_A_ROW = 3
LINE_SECONDS = 10.0


class FailureRule:
    """When an environment that fails again and again is given up.

    An environment that fails now and then is made again for ever. Too often is more than `most` times in `PERIOD_STEPS`
    of the environment's steps (with 10, failures by chance once in 1,000 steps are never too many), or `IN_A_ROW` times
    without a successful step in between.

    Args:
        most: largest number of rebuilds of an environment within `PERIOD_STEPS` of its steps; 0: never rebuild.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._failures: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=max(most + 1, IN_A_ROW)))

    def forgives(self, index: int, step: int) -> bool:
        """Note a failure of an environment in a step of the group; return whether the environment may be made again."""
        failures = self._failures[index]
        failures.append(step)
        latest = list(failures)[-IN_A_ROW:]
        if len(latest) == IN_A_ROW and all(later - earlier <= 1 for earlier, later in pairwise(latest)):
            return False
        return len(failures) <= self._most or step - failures[-self._most - 1] >= PERIOD_STEPS


def tell_nobody() -> None:
    """Where nobody waits for signs of life."""


@dataclass(frozen=True)
class OnFailure:
    """Rules for an environment that fails, and signs of life that distinguish a hang from many slow environments.

    Attributes:
        max_rebuilds: number of rebuilds, see `FailureRule`; 0: a failure is raised.
        incidents: writer of the steps before a failure; None: nothing is written.
        memory: memory of the steps that outlives the process; None: none.
        alive: function called before an environment is made or reset, and before each step of decorrelation.
    """

    max_rebuilds: int = 0
    incidents: IncidentFolder | None = None
    memory: JournalMemory | None = None
    alive: Callable[[], None] = tell_nobody


RAISE = OnFailure()


class EnvSet:
    """The single environments of one group, which have equal spaces.

    Raises:
        EnvironmentFailure: a factory raised, or the spaces differ.
    """

    def __init__(self, env_fns: Sequence[Callable[[], SingleEnv]], name: str, on_failure: OnFailure) -> None:
        self.name, self.rebuilds = name, 0
        self.spaces: tuple[Any, Any] | None = None
        self._num_agents = 0
        self.step_functions: list[Callable[[Any], tuple[Any, ...]]] = []
        self._env_fns, self._rule = list(env_fns), FailureRule(on_failure.max_rebuilds)
        self._incidents, self.alive = on_failure.incidents, on_failure.alive
        self.journal = Journal(len(env_fns), on_failure.memory) if on_failure.incidents else None
        self._envs: list[SingleEnv] = []
        self._lives = [0] * len(env_fns)
        self._seeds = [0] * len(env_fns)  # the last ones of resets that had one
        self._shaping: list[dict[int, Mapping[str, Any]]] = [{} for _ in env_fns]  # of each, by agent
        self._silent_until, self._unsaid, self._has_shown_cause = 0.0, 0, False
        try:
            for index in range(len(env_fns)):
                self._envs.append(gymnasium.Env())
                self.step_functions.append(self._envs[index].step)
                self._make(index)
            self._leave()
        except BaseException as error:
            self.close()
            reraise(name, error)

    def __len__(self) -> int:
        return len(self._envs)

    def __getitem__(self, index: int) -> SingleEnv:
        return self._envs[index]

    def spec(self, known: EnvSpec | None = None, form: ActionForm = AS_THEY_ARE) -> EnvSpec:
        """Return the spec; an environment is reset if its info could contain a mask, unless the spec is known.

        Without a known spec, policies act in the units of `form`.

        Raises:
            SpaceMismatch: the known spec is of other spaces.
        """
        assert self.spaces is not None
        if known is not None:
            require_spec(self.name, known, *self.spaces)
            if (agents := num_agents_of(self._envs[0]) or 1) != known.num_agents:
                raise SpaceMismatch(
                    f"{self.name}: it has {agents} agents, the first one that was made {known.num_agents}"
                )
            return known
        frames, agents = frames_per_step(self._envs[0]), num_agents_of(self._envs[0])
        shaping, said = default_reward_shaping(self._envs[0], self.name), rows_said(self._envs[0], agents)
        describe = partial(spec_of, *self.spaces, num_agents=agents or 1, frames_per_step=frames, form=form)
        spec = describe()
        if not spec.action_mask and any(part.kind == "categorical" for part in spec.action.parts):
            spec = self._with_mask_in_info(spec, describe)
        return replace(spec, reward_shaping=shaping, agents=said)

    def _with_mask_in_info(self, spec: EnvSpec, describe: Callable[..., EnvSpec]) -> EnvSpec:
        """Return the spec with the mask that the info of a first reset holds."""
        try:
            _, info = self.begin(0, None)
        except BaseException as error:
            reraise(self.name, error)
        if not any(MASK_KEY in one for one in (info if isinstance(info, list | tuple) else [info])):
            return spec
        masked = describe(mask_in_info=True)
        return replace(masked, mask_source=BY_METHOD) if self._envs[0].has_wrapper_attr(METHOD) else masked

    def shape_rewards(self, index: int, agent: int, shaping: Mapping[str, Any]) -> None:
        """Set the coefficients of an agent's reward, also for every rebuild of the environment."""
        self._shaping[index][agent] = shaping
        set_reward_shaping(self._envs[index], self.name, agent, shaping)

    def begin(self, index: int, seed: int | None) -> Begun:
        """Begin an episode; None keeps the environment's own random numbers going."""
        if seed is None:
            return self._begin(index, None)
        self._seeds[index] = seed
        begun = self._begin(index, seed)
        log.debug("env %d of %d has begun, with seed %d", index, len(self), seed)
        return begun

    def forgive(self, index: int, error: BaseException, step: int) -> EnvironmentFailure:
        """Return the failure of an error, if the environment may be made again.

        Raises:
            EnvironmentFailure: the environment fails too often, or would only fail again.
            BaseException: the error is not the environment's.
        """
        failure = failure_of(self.name, error)
        if failure is None:
            raise error
        given_up = failure.lasting or not self._rule.forgives(index, step)
        if self.journal is not None and self._incidents is not None:
            if given_up or self._incidents.is_due():
                self._incidents.write(index, failure, self.journal.story(index))
            self.journal.place = "step"
        if given_up:
            raise failure
        return failure

    def begin_anew(self, index: int, failure: EnvironmentFailure) -> Begun:
        """Close an environment that failed, make a new one, and begin an episode with a new seed."""
        self._say(index, failure)
        self._close(index)
        self._make(index)
        self._lives[index] += 1
        self.rebuilds += 1
        seeds = np.random.SeedSequence(self._seeds[index], spawn_key=(self._lives[index],))
        return self._begin(index, int(seeds.generate_state(1)[0]) >> 1)  # some keep seeds in a signed int

    def close(self) -> None:
        """Close every environment; a failure to close is reported as a warning."""
        for index in range(len(self._envs)):
            self._close(index)
        self._leave()

    def _enter(self, index: int, place: str) -> None:
        if self.journal is not None:
            self.journal.enters(index, place)

    def _leave(self) -> None:
        if self.journal is not None:
            self.journal.leaves()

    def _begin(self, index: int, seed: int | None) -> Begun:
        env = self._envs[index]
        self.alive()
        if self.journal is not None:
            self.journal.begins(index, seed, random_state(env) if seed is None else None)
        before = clock.enter(RESET)
        try:
            result = env.reset(seed=seed)
        finally:
            clock.enter(before)
        # an old-style reset returns the observation alone, which could unpack into two by accident
        if not isinstance(result, tuple) or len(result) != 2:
            raise SpaceMismatch(f"{self.name}: reset must return (observation, info), as gymnasium's environments do")
        info: Any = result[1]
        for one in info if isinstance(info, list | tuple) and num_agents_of(env) else (info,):
            require_info(self.name, "reset", one)
        if self.journal is not None:
            self.journal.began(index)
        return result

    def _make(self, index: int) -> None:
        self.alive()
        self._enter(index, "init")
        env = self._envs[index] = self._env_fns[index]()
        self.step_functions[index] = env.step
        for agent, shaping in self._shaping[index].items():
            set_reward_shaping(env, self.name, agent, shaping)
        spaces, agents = (env.observation_space, env.action_space), num_agents_of(env)
        if self.spaces is None:
            self.spaces, self._num_agents = spaces, agents
        than = "env 0" if index else "before"
        if spaces != self.spaces:
            unlike = next(pair for pair in zip(spaces, self.spaces, strict=True) if pair[0] != pair[1])
            own, other = map(described, unlike)
            said = f": {own}, not {other}" if own != other else ""
            raise SpaceMismatch(f"{self.name}: env {index} has other spaces than {than}{said}")
        if agents != self._num_agents:
            raise SpaceMismatch(f"{self.name}: env {index} has {agents or 1} agents, {than} {self._num_agents or 1}")

    def _close(self, index: int) -> None:
        """Close an environment and replace it by one that can be closed again."""
        env, self._envs[index] = self._envs[index], gymnasium.Env()
        self._enter(index, "close")
        close_env(env, self.name, stacklevel=4)

    def _say(self, index: int, failure: EnvironmentFailure) -> None:
        """Log why an environment is made again, at most once in `LINE_SECONDS`."""
        now = time.monotonic()
        if now < self._silent_until:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more since the last such line)" if self._unsaid else ""
        cause = None if self._has_shown_cause else failure.__cause__
        self._has_shown_cause = self._has_shown_cause or cause is not None  # a failure may have none
        log.warning("env %d is made again: %s%s", index, failure, more, exc_info=cause)
        self._silent_until, self._unsaid = now + LINE_SECONDS, 0
