"""VizDoom's scenarios, rendered small and fast; an episode that ends by a timeout is truncated."""

from typing import Any

from appo.envs.config import EnvConfig
from appo.envs.family import MANY_STEPS, SHARED_LEARNING, WEIGHT, AnyEnv, Family, FamilyPreset, Registration, importing

FRAME_SKIP = 4
WIDTH, HEIGHT = 128, 72

FAMILY = Family(
    "VizDoom",
    package="vizdoom",
    extra="vizdoom",
    examples=("VizdoomBasic-v1",),
    treatment="rendered at the engine's smallest resolution that covers `--res_w` x `--res_h` (128x72), then resized;"
    " 4 tics per action; a timeout is a truncation",
    ids=r"Vizdoom",
    prefixes=("Vizdoom",),
    names=r"basic|deadlycorridor|deathmatch|defendcenter|defendline|healthgathering(supreme)?|mywayhome|predictposition|"
    r"takecover",
    register=importing("vizdoom.gymnasium_wrapper"),
    flags=("res_w", "res_h"),
    # All other arguments become settings of the engine. One of the settings, `vizdoom_path`, is a program to start.
    harmless={
        "frame_skip": 64,
        "max_buttons_pressed": 16,
        "treat_episode_timeout_as_truncation": 1,
        "use_multi_binary_action_space": 1,
        "screen_resolution": r"RES_\d{3,4}X\d{3,4}",
        "doom_skill": 5,
        "episode_timeout": MANY_STEPS,
        "living_reward": WEIGHT,
        "death_penalty": WEIGHT,
    },
    preset=FamilyPreset(
        ids=r"Vizdoom",
        # The network of Petrenko et al. 2020, appendix (arXiv:2006.11751); the few numbers beside the picture have an
        # encoder of their own.
        network={
            "encoder_type": "conv",
            "encoder_subtype": "convnet_simple",
            "encoder_mlp_layers": (128, 128),
            "normalize_images": True,
            "use_rnn": True,
            "rnn_type": "gru",
        },
        # VizdoomBasic learns as much from a sample with half the units, and has a third more samples.
        network_on_cpu={"hidden_size": 256},
        # Batches and passes suit a machine of a few cores. Returns of VizdoomBasic after 110 s on two cores: -160 with
        # one pass over batches of 512 (as in Petrenko et al. 2020), 70 with one pass over batches of 256, and 80 with
        # these values.
        learning=SHARED_LEARNING
        | {"rollout": 32, "batch_size": 256, "num_batches_per_iteration": 4, "ppo_epochs": 2, "learning_rate": 5e-4},
    ),
)


def make_single(registration: Registration, config: EnvConfig, arguments: dict[str, Any]) -> AnyEnv:
    """Make one game, rendered at the engine's smallest resolution that covers the size in the flags.

    Raises:
        UsageError: no resolution of the engine is large enough, or frames of several arrays are to be stacked.
    """
    from gymnasium import spaces

    from appo.envs.families.vizdoom.observations import DoomObservations, smallest_resolution
    from appo.envs.wrappers.making import make_registered, stack_frames

    width, height = config.res_w or WIDTH, config.res_h or HEIGHT
    usual = {"screen_resolution": smallest_resolution(width, height), "frame_skip": FRAME_SKIP}
    flags = {"frame_skip": config.env_frameskip, "max_episode_steps": config.horizon}
    arguments = usual | arguments | {name: value for name, value in flags.items() if value is not None}
    env: AnyEnv = make_registered(registration, **arguments)
    if isinstance(env.observation_space, spaces.Dict):  # else a user's wrapper decides what is shown
        env = DoomObservations(env, width, height)
    return env if config.env_framestack is None else stack_frames(env, config.env_framestack)
