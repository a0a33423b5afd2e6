"""Small deterministic environments whose right answers are known, for tests, tutorials and benchmarks."""

from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from appo.envs.spec import Array, BoolArray, FloatArray

Info = dict[str, Any]

TOYS = {
    "toy/Memory-v0": ("toy:Memory", None),
    "toy/Corridor-v0": ("toy:Corridor", None),
    "toy/Cliff-v0": ("toy:Cliff", None),
    "toy/Target-v0": ("toy:Target", None),
    "toy/Counter-v0": ("toy:Counter", "toy:CounterVector"),
    "toy/Spaces-v0": ("spaces:Spaces", "spaces:spaces_vector"),
    "toy/Zero-v0": ("toy:Zero", "toy:ZeroVector"),
    "toy/Pair-v0": ("agents:Pair", None),
    "toy/Shifts-v0": ("agents:Shifts", None),
    "toy/RockPaperScissors-v0": ("agents:RockPaperScissors", None),
}


def register_toys() -> None:
    """Register the toys with gymnasium; a second call changes nothing."""
    for env_id, (single, vector) in TOYS.items():
        if env_id not in gymnasium.registry:
            of_vector = vector and f"appo.envs.toys.{vector}"
            gymnasium.register(env_id, f"appo.envs.toys.{single}", vector_entry_point=of_vector)


class Memory(gymnasium.Env[FloatArray, np.int64]):
    """Show a cue once, then nothing for `delay` steps, then ask for the cue.

    The last entry of the observation asks. The answer is worth 1 if right and -1 / (num_cues - 1) if not: without a
    memory the best return is 0, with a memory 1.
    """

    def __init__(self, delay: int = 4, num_cues: int = 2):
        self.delay, self.num_cues = delay, num_cues
        self.observation_space = spaces.Box(0.0, 1.0, (num_cues + 1,), np.float32)
        self.action_space = spaces.Discrete(num_cues)
        self._cue = self._step = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[FloatArray, Info]:
        """Show a random cue."""
        super().reset(seed=seed)
        self._step, self._cue = 0, int(self.np_random.integers(self.num_cues))
        return self._observation(self._cue), {}

    def step(self, action: int | np.int64) -> tuple[FloatArray, float, bool, bool, Info]:
        """Only the action that answers the question counts."""
        self._step += 1
        if self._step <= self.delay + 1:
            return self._observation(-1 if self._step == self.delay + 1 else None), 0.0, False, False, {}
        return self._observation(None), 1.0 if action == self._cue else -1.0 / (self.num_cues - 1), True, False, {}

    def _observation(self, entry: int | None) -> FloatArray:
        observation = np.zeros(self.num_cues + 1, np.float32)
        if entry is not None:
            observation[entry] = 1.0
        return observation


class Corridor(gymnasium.Env[np.int64, np.int64]):
    """Walk right through a corridor of `length` cells; 1 at its end, nothing before, cut off after `max_steps`.

    The observation is the number of the cell (a Discrete space).
    """

    def __init__(self, length: int = 8, max_steps: int = 64):
        self.length, self.max_steps = length, max_steps
        self.observation_space = spaces.Discrete(length)
        self.action_space = spaces.Discrete(2)
        self._cell = self._step = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[np.int64, Info]:
        """Go back to cell 0."""
        super().reset(seed=seed)
        self._cell = self._step = 0
        return np.int64(self._cell), {}

    def step(self, action: int | np.int64) -> tuple[np.int64, float, bool, bool, Info]:
        """Action 1 goes right, 0 goes left; the left wall holds."""
        self._step += 1
        self._cell = max(0, self._cell + (1 if action == 1 else -1))
        arrived = self._cell == self.length - 1
        return np.int64(self._cell), float(arrived), arrived, self._step >= self.max_steps and not arrived, {}


class Cliff(gymnasium.Env[np.int64, np.int64]):
    """Walk along a cliff of `length` cells: in each, one of two actions goes on, the other falls and ends the episode.

    The return is 1 at the end of the cliff, else 0. Of episodes with random actions, one in 2^length reaches the end,
    so nearly everything in a replay is useless, except for a few steps. The observation is the number of the cell (a
    Discrete space).

    Source: Schaul et al. 2016, arXiv:1511.05952, section 3.1, "Blind Cliffwalk".
    """

    def __init__(self, length: int = 10):
        self.length = length
        self.observation_space = spaces.Discrete(length + 1)  # the end among them
        self.action_space = spaces.Discrete(2)
        self._cell = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[np.int64, Info]:
        """Go back to cell 0."""
        super().reset(seed=seed)
        self._cell = 0
        return np.int64(self._cell), {}

    def step(self, action: int | np.int64) -> tuple[np.int64, float, bool, bool, Info]:
        """Action 0 goes on in even cells, action 1 in odd ones."""
        falls = action != self._cell % 2
        self._cell += not falls
        arrived = self._cell == self.length
        return np.int64(self._cell), float(arrived), bool(falls or arrived), False, {}


class Target(gymnasium.Env[FloatArray, FloatArray]):
    """Move a point to a target on every axis; the reward is minus the distance left, summed over the axes.

    An action of 1 moves `SPEED` along an axis; an episode is cut off after `num_steps`. The best return is known
    (`optimal_return`): go straight, then stay.
    """

    SPEED = 0.25

    def __init__(self, num_axes: int = 2, num_steps: int = 20):
        self.num_steps = num_steps
        self.observation_space = spaces.Box(-1.0, 1.0, (2 * num_axes,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (num_axes,), np.float32)
        self._position = np.zeros(num_axes, np.float32)
        self._target = np.zeros(num_axes, np.float32)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[FloatArray, Info]:
        """Put point and target anywhere in the unit cube."""
        super().reset(seed=seed)
        both = self.np_random.uniform(-1.0, 1.0, (2, len(self._position))).astype(np.float32)
        self._position, self._target, self._step = both[0], both[1], 0
        return self._observation(), {}

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, Info]:
        """Move by `SPEED` times the action, inside the cube."""
        self._step += 1
        self._position = np.clip(self._position + self.SPEED * action, -1.0, 1.0).astype(np.float32)
        reward = -float(np.abs(self._target - self._position).sum())
        return self._observation(), reward, False, self._step >= self.num_steps, {}

    def optimal_return(self) -> float:
        """The largest return from the present state to the end of the episode, undiscounted."""
        steps = np.arange(1, self.num_steps - self._step + 1)[:, None]
        return -float(np.maximum(0.0, np.abs(self._target - self._position)[None] - self.SPEED * steps).sum())

    def _observation(self) -> FloatArray:
        return np.concatenate([self._position, self._target])


class CounterStep(NamedTuple):
    """A step of `Counter`: a pure function of who, when and what."""

    reward: float
    terminated: bool
    truncated: bool


def counter_length(env_id: int, episode: int) -> int:
    """Steps of that episode: 3 to 9, different from env to env."""
    return 3 + (3 * env_id + 5 * episode) % 7


def counter_step(env_id: int, episode: int, step: int, action: int) -> CounterStep:
    """The outcome of step number `step` (from 0); every other episode ends by truncation. Exact in float32."""
    ends = step + 1 == counter_length(env_id, episode)
    truncates = (env_id + episode) % 2 == 1
    return CounterStep(
        env_id % 16 + episode % 16 / 16 + (step + 1) / 256 + action / 1024, ends and not truncates, ends and truncates
    )


class Counter(gymnasium.Env[FloatArray, np.int64]):
    """Shows env, episode and step in every observation: [env id, episode, step, action that led here].

    The env id is the seed of the last seeded reset (modulo 2^16). Nothing is random, so a mix-up of rows, steps,
    episodes or actions is caught: `counter_step` and `counter_length` return the expected values.
    """

    NUM_ACTIONS = 4

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0.0, 2.0**16, (4,), np.float32)
        self.action_space = spaces.Discrete(self.NUM_ACTIONS)
        self._env_id = self._step = 0
        self._episode = -1
        self._return = 0.0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[FloatArray, Info]:
        """Begin the next episode, or with a seed episode 0 of the env it names."""
        super().reset(seed=seed)
        if seed is not None:
            self._env_id, self._episode = seed % 2**16, -1
        self._episode, self._step, self._return = self._episode + 1, 0, 0.0
        return self._observation(0), {}

    def step(self, action: int | np.int64) -> tuple[FloatArray, float, bool, bool, Info]:
        """Count; at an episode's end report its length and return."""
        reward, terminated, truncated = counter_step(self._env_id, self._episode, self._step, int(action))
        self._step, self._return = self._step + 1, self._return + reward
        info: Info = {}
        if terminated or truncated:
            info = {"episode_extra_stats": {"length": self._step}, "true_reward": self._return}
        return self._observation(int(action)), reward, terminated, truncated, info

    def _observation(self, action: int) -> FloatArray:
        return np.array([self._env_id, self._episode, self._step, action], np.float32)


class CounterVector(VectorEnv[FloatArray, Array, Array]):
    """`Counter` as a vector, in any autoreset mode; like many vectors, returns the same buffer again and again."""

    def __init__(self, num_envs: int = 1, autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP):
        self.num_envs = num_envs
        self.mode = AutoresetMode(autoreset_mode)
        self.metadata = {"autoreset_mode": self.mode}
        self._envs = [Counter() for _ in range(num_envs)]
        self.single_observation_space = self._envs[0].observation_space
        self.single_action_space = self._envs[0].action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._ended = np.zeros(num_envs, np.bool_)
        self._observation = np.zeros((num_envs, 4), np.float32)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[FloatArray, Info]:
        """Reset all rows, or those of options["reset_mask"]; row i is env seed + i."""
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
        for row in np.flatnonzero(mask):
            self._observation[row], _ = self._envs[row].reset(seed=None if seed is None else seed + int(row))
        self._ended[mask] = False
        return self._observation, {}

    def step(self, actions: Array) -> tuple[FloatArray, Array, BoolArray, BoolArray, Info]:
        """Step every row as the autoreset mode says."""
        reward = np.zeros(self.num_envs)
        terminated, truncated = np.zeros(self.num_envs, np.bool_), np.zeros(self.num_envs, np.bool_)
        infos: Info = {}
        for row, env in enumerate(self._envs):
            if self._ended[row]:
                if self.mode is AutoresetMode.DISABLED:
                    raise gymnasium.error.ResetNeeded(f"row {row} ended and was not reset")
                self._observation[row], _ = env.reset()
                continue
            observation, reward[row], terminated[row], truncated[row], info = env.step(int(actions[row]))
            if info and self.mode is AutoresetMode.SAME_STEP:
                info = {"final_obs": observation, "final_info": info}
                observation, _ = env.reset()
            self._observation[row] = observation
            infos = self._add_info(infos, info, row)
        same_step = self.mode is AutoresetMode.SAME_STEP
        self._ended = np.zeros(self.num_envs, np.bool_) if same_step else terminated | truncated
        return self._observation, reward, terminated, truncated, infos


class Zero(gymnasium.Env[Array, np.int64]):
    """Costs next to nothing and means nothing, for measurements of the framework."""

    def __init__(self, obs_bytes: int = 16, episode_steps: int = 1000):
        self.observation_space = spaces.Box(0, 255, (obs_bytes,), np.uint8)
        self.action_space = spaces.Discrete(4)
        self.episode_steps = episode_steps
        self._observation = np.zeros(obs_bytes, np.uint8)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        """Start over."""
        super().reset(seed=seed)
        self._step = 0
        return self._observation, {}

    def step(self, action: int | np.int64) -> tuple[Array, float, bool, bool, Info]:
        """Do nothing; cut the episode off after `episode_steps`."""
        self._step += 1
        return self._observation, 0.0, False, self._step >= self.episode_steps, {}


class ZeroVector(VectorEnv[Array, Array, Array]):
    """`Zero` for any number of rows at once (NEXT_STEP); all arrays are made beforehand."""

    def __init__(self, num_envs: int = 1, obs_bytes: int = 16, episode_steps: int = 1000):
        self.num_envs = num_envs
        self.episode_steps = episode_steps
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = spaces.Box(0, 255, (obs_bytes,), np.uint8)
        self.single_action_space = spaces.Discrete(4)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._observation = np.zeros((num_envs, obs_bytes), np.uint8)
        self._reward = np.zeros(num_envs, np.float32)
        self._no, self._yes = np.zeros(num_envs, np.bool_), np.ones(num_envs, np.bool_)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        """Start over."""
        self._step = 0
        return self._observation, {}

    def step(self, actions: Array) -> tuple[Array, Array, BoolArray, BoolArray, Info]:
        """Do nothing; all rows are cut off together after `episode_steps`, and the next step resets all."""
        self._step = 0 if self._step == self.episode_steps else self._step + 1
        return (
            self._observation,
            self._reward,
            self._no,
            self._yes if self._step == self.episode_steps else self._no,
            {},
        )
