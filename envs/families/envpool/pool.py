"""A pool of envpool's environments as gymnasium's vector, and a pool of one as gymnasium's environment."""

import functools
import warnings
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from appo.envs.families.envpool.tasks import FRAMES_PER_SECOND, counts_frames, task_modules
from appo.envs.infos import LIVES_KEY
from appo.envs.spec import MASK_KEY
from appo.envs.wrappers.joined import join_rows, joined_space
from appo.utils.errors import UsageError

NUM_SEEDS = 1 << 30  # the seed of an environment is the sum of the pool's seed and the environment's number, in 32 bits


class PoolVector(VectorEnv[Any, Any, Any]):
    """A pool whose environments are all stepped together. Of all infos an action mask and lives are passed on.

    Attributes:
        appo_frames_per_step: frame skip of games with a count of frames; 1 for others.

    Raises:
        UsageError: the environment is for several players.
    """

    def __init__(self, task: str, num_envs: int, **kwargs: Any) -> None:
        import envpool

        self.num_envs, self.metadata = num_envs, {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self._make = functools.partial(envpool.make_gymnasium, task, num_envs=num_envs, **kwargs)
        self._pool: Any = None
        spec = envpool.make_spec(task, num_envs=num_envs, **kwargs)
        if getattr(spec.config, "max_num_players", 1) > 1:
            raise UsageError(f"envpool:{task} is for several players, which cannot be played from a pool")
        self.appo_frames_per_step = int(spec.config.frame_skip) if counts_frames(task) else 1
        self._shown = spec.gymnasium_observation_space
        self._joins = (joined := joined_space(self._shown)) is not None
        self.single_observation_space = joined or self._shown
        self.single_action_space = spec.gymnasium_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every environment. A pool keeps the seed for life, so another seed makes a new pool."""
        if seed is not None or self._pool is None:
            self._pool = None  # ends the threads of the last one
            chosen = int(self.np_random.integers(NUM_SEEDS)) if seed is None else seed % NUM_SEEDS
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of bounds in float64, which it says when its space is made
                self._pool = self._make(seed=chosen)
                _ = self._pool.observation_space
        observation, infos = self._pool.reset()
        return self._joined(observation), _told(infos)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every environment; an environment whose episode has ended is reset instead."""
        observation, reward, terminated, truncated, infos = self._pool.step(actions)
        return self._joined(observation), reward, terminated, truncated, _told(infos)

    def render(self) -> Any:
        """Pictures [1,H,W,3] of the first environment."""
        return self._pool.render()

    def close_extras(self, **kwargs: Any) -> None:
        """End the pool's threads."""
        self._pool = None

    def _joined(self, observation: Any) -> Any:
        return join_rows(self._shown, observation) if self._joins else observation


class PoolEnv(gymnasium.Env[Any, Any]):
    """A pool of one environment (UsageError: the environment has no such render mode)."""

    def __init__(self, task: str, render_mode: str | None = None, **kwargs: Any) -> None:
        # Without a context of OpenGL, which is not to be had, its MuJoCo ends the process.
        modes = [] if task_modules()[task].startswith("envpool.mujoco") else ["rgb_array"]
        if render_mode and render_mode not in modes:
            instead = ", --save_video films it" if modes else ""
            raise UsageError(f"envpool:{task} opens no window: --no_render plays it{instead}")
        self._vector = PoolVector(task, 1, **kwargs, **({"render_mode": render_mode} if render_mode else {}))
        self.render_mode, self.appo_frames_per_step = render_mode, self._vector.appo_frames_per_step
        self.metadata = {"render_modes": modes}
        if rate := FRAMES_PER_SECOND.get(task_modules()[task]):
            self.metadata["render_fps"] = rate
        self.observation_space = self._vector.single_observation_space
        self.action_space = self._vector.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        observation, infos = self._vector.reset(seed=seed)
        return _first(observation), _first(infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take the action."""
        observation, reward, terminated, truncated, infos = self._vector.step(_batch_of(action))
        return _first(observation), float(reward[0]), bool(terminated[0]), bool(truncated[0]), _first(infos)

    def render(self) -> Any:
        """A picture [H,W,3]."""
        pictures = self._vector.render()
        return None if pictures is None else pictures[0]

    def close(self) -> None:
        """End the pool's threads."""
        self._vector.close()


def _told(infos: dict[str, Any]) -> dict[str, Any]:
    return {key: infos[key] for key in (MASK_KEY, LIVES_KEY) if key in infos}


def _first(batch: Any) -> Any:
    return {key: _first(part) for key, part in batch.items()} if isinstance(batch, dict) else batch[0]


def _batch_of(action: Any) -> Any:
    return {k: _batch_of(part) for k, part in action.items()} if isinstance(action, dict) else np.asarray(action)[None]
