"""envpool's environments are written in C++ and stepped by its threads, as a vector or, to be watched, one at a time.

Weng et al. 2022 (arXiv:2206.10558). An environment whose episode ended is reset by the step after that, which takes no
action, gives the first observation of the next episode and a reward of 0: gymnasium's NEXT_STEP.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec as Registration
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from appo.envs.config import EnvConfig
from appo.envs.families import MANY_STEPS, PIXELS, Family
from appo.envs.spec import MASK_KEY
from appo.envs.wrappers import join_rows, joined_space
from appo.utils.errors import UsageError
from appo.utils.values import nearest

FAMILY = Family(
    "envpool",
    package="envpool",
    extra="envpool",
    ids=r"envpool[:/]",
    # Its VizDoom takes paths of programs and scenarios as well.
    harmless={
        **dict.fromkeys(
            (
                "episodic_life", "reward_clip", "gray_scale", "use_fire_reset", "use_inter_area_resize",
                "full_action_space", "zero_discount_on_life_loss", "repeat_action_probability",
            ),
            1.0,
        ),
        **dict.fromkeys(("frame_skip", "stack_num", "num_threads", "noop_max"), 64.0),
        **dict.fromkeys(("img_height", "img_width"), PIXELS),
        "max_episode_steps": MANY_STEPS,
    },
)  # fmt: skip

FRAMES_PER_SECOND = {"envpool.atari": 60, "envpool.vizdoom": 35}
"""Where games are that count their frames, and how many they show in a second."""

FLAGS = {"env_frameskip": "frame_skip", "env_framestack": "stack_num", "horizon": "max_episode_steps"}
RUNTIME_ARGUMENTS = ("num_envs", "batch_size", "seed", "env_seed")
NUM_SEEDS = 1 << 30  # that of an environment is the pool's and its number, in 32 bits


def registration(task: str) -> Registration:
    """Return the entry points of an environment, named as envpool names it.

    Raises:
        UsageError: there is none of that name.
    """
    tasks = _modules()
    if task not in tasks:
        raise UsageError(f"envpool has no environment {task or 'without a name'}{nearest(task, tasks, 3)}")
    return Registration(
        id=f"envpool/{task.replace('/', '.')}",
        entry_point="appo.envs.families.envpool:PoolEnv",
        vector_entry_point="appo.envs.families.envpool:PoolVector",
        kwargs={"task": task},
    )


def vector_arguments(config: EnvConfig, registration: Registration) -> dict[str, Any]:
    """Return arguments of the pool; one thread, because there are as many actors as cores.

    Raises:
        UsageError: the environment cannot do what a flag asks, or an argument is not for the user to set.
    """
    import envpool

    task = registration.kwargs["task"]
    for name in RUNTIME_ARGUMENTS:
        if name in config.env_kwargs:
            raise UsageError(f"--env_kwargs {name}: {config.env} gets that from the actors")
    known = envpool.make_spec(task).config._fields
    arguments = {} if "num_threads" in config.env_kwargs else {"num_threads": 1}
    for flag, name in FLAGS.items():
        value = getattr(config, flag)
        if value is None:
            continue
        if name not in known or (flag == "env_frameskip" and not _counts_frames(task)):
            raise UsageError(f"--{flag}={value}: {config.env} cannot do that")
        arguments[name] = value
    return arguments


def make_single(registration: Registration, config: EnvConfig, arguments: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    """Make one environment, which can be drawn.

    Raises:
        UsageError: as `vector_arguments`.
    """
    return PoolEnv(**registration.kwargs, **arguments, **vector_arguments(config, registration))


class PoolVector(VectorEnv[Any, Any, Any]):
    """A pool whose environments are all stepped together. Of its infos only a mask of actions is passed on.

    Args:
        task: name of the environment.
        num_envs: in the pool.
        kwargs: arguments of the environment.

    Attributes:
        frames_per_step: of games that count frames; 1 for others.

    Raises:
        UsageError: the environment is one of several players.
    """

    def __init__(self, task: str, num_envs: int, **kwargs: Any) -> None:
        import envpool

        self.num_envs, self.metadata = num_envs, {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self._make = functools.partial(envpool.make_gymnasium, task, num_envs=num_envs, **kwargs)
        self._pool: Any = None
        spec = envpool.make_spec(task, num_envs=num_envs, **kwargs)
        if getattr(spec.config, "max_num_players", 1) > 1:
            raise UsageError(f"envpool:{task} is for several players, which cannot be played from a pool")
        self.frames_per_step = int(spec.config.frame_skip) if _counts_frames(task) else 1
        self._shown = spec.gymnasium_observation_space
        self._joins = (joined := joined_space(self._shown)) is not None
        self.single_observation_space = joined or self._shown
        self.single_action_space = spec.gymnasium_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every environment; a pool has its seed for life, so that another one makes a new pool."""
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
        """Step every environment, or reset it if its episode has ended."""
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
    """A pool of one environment.

    Args:
        task: name of the environment.
        render_mode: rgb_array, or None: it is not drawn.
        kwargs: arguments of the environment.

    Raises:
        UsageError: it cannot be drawn so.
    """

    def __init__(self, task: str, render_mode: str | None = None, **kwargs: Any) -> None:
        # Without a context of OpenGL, which is not to be had, its MuJoCo ends the process.
        modes = [] if _modules()[task].startswith("envpool.mujoco") else ["rgb_array"]
        if render_mode and render_mode not in modes:
            instead = ", --save_video films it" if modes else ""
            raise UsageError(f"envpool:{task} opens no window: --no_render plays it{instead}")
        self._vector = PoolVector(task, 1, **kwargs, **({"render_mode": render_mode} if render_mode else {}))
        self.render_mode, self.frames_per_step = render_mode, self._vector.frames_per_step
        self.metadata = {"render_modes": modes}
        if rate := FRAMES_PER_SECOND.get(_modules()[task]):
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


def _counts_frames(task: str) -> bool:
    return _modules()[task] in FRAMES_PER_SECOND


@functools.cache
def _modules() -> dict[str, str]:
    """Return the module of every task that envpool has."""
    from envpool.registration import registry

    return {task: spec[0] for task, spec in registry.specs.items()}


def _told(infos: dict[str, Any]) -> dict[str, Any]:
    return {MASK_KEY: infos[MASK_KEY]} if MASK_KEY in infos else {}


def _first(batch: Any) -> Any:
    return {key: _first(part) for key, part in batch.items()} if isinstance(batch, dict) else batch[0]


def _batch_of(action: Any) -> Any:
    return {k: _batch_of(part) for k, part in action.items()} if isinstance(action, dict) else np.asarray(action)[None]
