"""envpool's environments are written in C++ and stepped by its threads, as a vector or, to be watched, one at a time.

Weng et al. 2022 (arXiv:2206.10558). After the end of an episode the next step resets the environment and ignores the
action; the step returns the first observation of the next episode and a reward of 0: gymnasium's NEXT_STEP.
"""

from typing import Any

from appo.envs.config import EnvConfig
from appo.envs.families.envpool.tasks import counts_frames, task_modules
from appo.envs.family import MANY_STEPS, PIXELS, AnyEnv, Family, Registration
from appo.utils.errors import UsageError
from appo.utils.values import nearest

FAMILY = Family(
    "envpool",
    package="envpool",
    extra="envpool",
    examples=("envpool:Pong-v5", "envpool:HalfCheetah-v5"),
    treatment="every single-player environment of envpool, with envpool's names and defaults (Atari: actions are not"
    " sticky, FIRE is pressed), in a pool of one thread per actor",
    ids=r"envpool[:/]",
    # Its VizDoom takes paths of programs and scenarios as well.
    harmless={
        **dict.fromkeys(
            (
                "episodic_life", "reward_clip", "gray_scale", "use_fire_reset", "use_inter_area_resize",
                "full_action_space", "zero_discount_on_life_loss", "repeat_action_probability", "use_contact_force",
            ),
            1.0,
        ),
        **dict.fromkeys(("frame_skip", "stack_num", "num_threads", "noop_max"), 64.0),
        **dict.fromkeys(("img_height", "img_width"), PIXELS),
        "max_episode_steps": MANY_STEPS,
    },
)  # fmt: skip

FLAGS = {"env_frameskip": "frame_skip", "env_framestack": "stack_num", "horizon": "max_episode_steps"}
RUNTIME_ARGUMENTS = ("num_envs", "batch_size", "seed", "env_seed")


def registration(task: str) -> Registration:
    """Return the entry points of an environment, by envpool's name (UsageError: envpool has no such environment)."""
    from gymnasium.envs.registration import EnvSpec

    tasks = task_modules()
    if task not in tasks:
        raise UsageError(f"envpool has no environment {task or 'without a name'}{nearest(task, tasks, 3)}")
    return EnvSpec(
        id=f"envpool/{task.replace('/', '.')}",
        entry_point="appo.envs.families.envpool.pool:PoolEnv",
        vector_entry_point="appo.envs.families.envpool.pool:PoolVector",
        kwargs={"task": task},
    )


def vector_arguments(config: EnvConfig, registration: Registration) -> dict[str, Any]:
    """Return arguments of the pool; one thread, because every core has an actor.

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
        if (value := getattr(config, flag)) is None:
            continue
        if name not in known or (flag == "env_frameskip" and not counts_frames(task)):
            raise UsageError(f"--{flag}={value}: {config.env} cannot do that")
        arguments[name] = value
    return arguments


def make_single(registration: Registration, config: EnvConfig, arguments: dict[str, Any]) -> AnyEnv:
    """Make one environment, which can be drawn (UsageError: as `vector_arguments`)."""
    from appo.envs.families.envpool.pool import PoolEnv

    return PoolEnv(**(registration.kwargs | arguments | vector_arguments(config, registration)))
