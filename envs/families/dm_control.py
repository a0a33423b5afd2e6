"""dm_control's tasks, made by shimmy, with all sensor values as one vector.

Tassa et al. 2018 (arXiv:1801.00690). Episodes of the suite are cut off after 1,000 steps, for shimmy a truncation;
rewards are in [0, 1].
"""

import functools
import importlib
from typing import Any

from appo.envs.config import EnvConfig
from appo.envs.family import GAUSSIAN_MLP, AnyEnv, Family, FamilyPreset, Registration

DOMAINS = (
    "Acrobot", "BallInCup", "Cartpole", "Cheetah", "Dog", "Finger", "Fish", "Hopper", "Humanoid", "Lqr", "Manipulator",
    "Pendulum", "PointMass", "Quadruped", "Reacher", "Stacker", "Swimmer", "Walker",
)  # fmt: skip
"""Domains of the suite; names of envpool's tasks begin with a domain."""


def register_tasks() -> None:
    """Register the suite's tasks with gymnasium by importing shimmy."""
    from absl import logging

    logging.set_verbosity(logging.ERROR)  # dm_control tells how it looks for a screen, and what MuJoCo says of models
    importlib.import_module("shimmy")


FAMILY = Family(
    "dm_control",
    package="dm_control",
    extra="dm-control",
    examples=("dm_control/cheetah-run-v0",),
    treatment="through shimmy; all sensor values as one vector",
    ids=r"dm_control/",
    prefixes=("dm_control/",),
    names=r"(acrobot|ball_in_cup|cartpole|cheetah|dog|finger|fish|hopper|humanoid(_cmu)?|lqr|manipulator|pendulum|"
    r"point_mass|quadruped|reacher|stacker|swimmer|walker)-\w+|(cmuhumanoid|rodent)\w+|"
    r"(lift|place|reach|reassemble|stack)_\w+_(features|vision)",
    register=register_tasks,
    preset=FamilyPreset(
        ids=r"dm_control/|envpool:(" + "|".join(DOMAINS) + r")[A-Z]\w*-v1$",
        network=GAUSSIAN_MLP,
        # MuJoCo's settings with other batches, passes and rates: the physics is the same, but rewards are in [0, 1] in
        # every step of episodes that never end early. Returns of cartpole-swingup after 75 s on two cores: 151 with
        # batches of 1024, GAE and a falling rate; 604 with batches of 256; 684 with these values. cheetah-run and
        # walker-walk learn as fast either way.
        learning={
            "rollout": 64,
            "batch_size": 256,
            "num_batches_per_iteration": 4,
            "ppo_epochs": 4,
            "learning_rate": 5e-4,
            "lr_schedule": "constant",
            "train_for_env_steps": 10_000_000,
            "ppo_clip_ratio": 0.2,
            "value_loss_coeff": 0.5,
            "exploration_loss_coeff": 0.0,
            "max_grad_norm": 1.0,
            "with_vtrace": True,
            "vtrace_lambda": 0.95,
            "gae_lambda": 0.95,
        },
    ),
)


def make_single(registration: Registration, config: EnvConfig, arguments: dict[str, Any]) -> AnyEnv:
    """Make one task; tasks with pictures, such as some of the locomotion, keep their keys."""
    from appo.envs.wrappers.joined import JoinedVectors, joined_space
    from appo.envs.wrappers.making import make_with_flags

    def adapted(env: AnyEnv) -> AnyEnv:
        seconds: float = env.unwrapped.control_timestep()  # type: ignore[attr-defined]
        env.metadata = {**env.metadata, "render_fps": 1 / seconds}  # shimmy's is that of a task with steps of 0.03 s
        return env if joined_space(env.observation_space) is None else JoinedVectors(env)

    _know_only_what_is_there()
    return make_with_flags(registration, config, arguments, adapted)


@functools.cache
def _know_only_what_is_there() -> None:
    """Remove fields from dm_control's tables that MuJoCo no longer has.

    dm_control 1.0.50 accepts MuJoCo 4, which has other fields for soft bodies, and would fail at the first old field.
    """
    import mujoco
    from dm_control.mujoco.wrapper.mjbindings import sizes

    for name, struct in {"mjmodel": mujoco.MjModel, "mjdata": mujoco.MjData}.items():
        fields = sizes.array_sizes[name]
        for field in [field for field in fields if not hasattr(struct, field)]:
            del fields[field]
