"""dm_control's tasks are made by shimmy; what all sensors measure is shown as one vector.

Tassa et al. 2018 (arXiv:1801.00690). Episodes of the suite last 1,000 steps and are then cut off, which shimmy says as
a truncation; rewards are in [0, 1].
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec as Registration

from appo.envs.config import EnvConfig
from appo.envs.families import Family
from appo.envs.wrappers import JoinedVectors, RepeatAction, joined_space, make_registered, stack_frames


def register_tasks() -> None:
    """Register the suite's tasks with gymnasium, which shimmy does when it is imported."""
    from absl import logging

    logging.set_verbosity(logging.ERROR)  # dm_control tells how it looks for a screen, and what MuJoCo says of models
    importlib.import_module("shimmy")


FAMILY = Family(
    "dm_control",
    package="dm_control",
    extra="dm-control",
    ids=r"dm_control/",
    prefixes=("dm_control/",),
    names=r"(acrobot|ball_in_cup|cartpole|cheetah|dog|finger|fish|hopper|humanoid(_cmu)?|lqr|manipulator|pendulum|"
    r"point_mass|quadruped|reacher|stacker|swimmer|walker)-\w+",
    register=register_tasks,
)


def make_single(registration: Registration, config: EnvConfig, arguments: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    """Make one task; those that show pictures too, as some of the locomotion do, keep their keys."""
    _know_only_what_is_there()
    if config.horizon is not None:
        arguments = arguments | {"max_episode_steps": config.horizon * (config.env_frameskip or 1)}
    env = make_registered(registration, **arguments)
    seconds: float = env.unwrapped.control_timestep()  # type: ignore[attr-defined]
    env.metadata = {**env.metadata, "render_fps": 1 / seconds}  # shimmy's is that of a task with steps of 0.03 s
    if joined_space(env.observation_space) is not None:
        env = JoinedVectors(env)
    if config.env_frameskip is not None:
        env = RepeatAction(env, config.env_frameskip)
    return env if config.env_framestack is None else stack_frames(env, config.env_framestack)


@functools.cache
def _know_only_what_is_there() -> None:
    """Let dm_control pass over the fields that its tables have and MuJoCo has no more.

    dm_control 1.0.50 accepts MuJoCo 4, which has other fields for soft bodies, and would fail at the first of the old.
    """
    import mujoco
    from dm_control.mujoco.wrapper.mjbindings import sizes

    for name, struct in {"mjmodel": mujoco.MjModel, "mjdata": mujoco.MjData}.items():
        fields = sizes.array_sizes[name]
        for field in [field for field in fields if not hasattr(struct, field)]:
            del fields[field]
