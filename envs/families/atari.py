"""Atari is preprocessed as by Mnih et al. 2015 (https://www.nature.com/articles/nature14236), by ale-py itself.

Training steps ale-py's vector environment, written in C++; watching needs single environments that can be rendered,
and gymnasium's wrappers show what the vector shows. Frames are skipped, gray, 84x84 and stacked by four; rewards stay
raw here (a preset clips them to their sign for training); a lost life ends nothing and nothing presses FIRE.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec as Registration
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from appo.envs.config import EnvConfig
from appo.envs.families import MANY_STEPS, PIXELS, Family
from appo.envs.wrappers import make_registered
from appo.utils.errors import UsageError

FAMILY = Family(
    "Atari",
    package="ale_py",
    extra="atari",
    ids=r"ALE/|\w+NoFrameskip-v\d|\w+Deterministic-v\d",
    prefixes=("ALE/",),
    names=r"adventure|airraid|alien|amidar|assault|asterix|asteroids|atlantis2?|backgammon|bankheist|basicmath|battlezone|"
    r"beamrider|berzerk|blackjack|bowling|boxing|breakout|carnival|casino|centipede|choppercommand|crazyclimber|"
    r"crossbow|darkchambers|defender|demonattack|donkeykong|doubledunk|earthworld|elevatoraction|enduro|entombed|et|"
    r"fishingderby|flagcapture|freeway|frogger|frostbite|galaxian|gopher|gravitar|hangman|hauntedhouse|hero|"
    r"humancannonball|icehockey|jamesbond|journeyescape|kaboom|kangaroo|keystonekapers|kingkong|klax|koolaid|krull|"
    r"kungfumaster|lasergates|lostluggage|mariobros|miniaturegolf|montezumarevenge|mrdo|mspacman|namethisgame|othello|"
    r"pacman|phoenix|pitfall2?|pong|pooyan|privateeye|qbert|riverraid|roadrunner|robotank|seaquest|sirlancelot|skiing|"
    r"solaris|spaceinvaders|spacewar|stargunner|superman|surround|tennis|tetris|tictactoe3d|timepilot|trondead|turmoil|"
    r"tutankham|upndown|venture|videocheckers|videochess|videocube|videopinball|wizardofwor|wordzapper|yarsrevenge|"
    r"zaxxon",
    entry_points=r"ale_py\.",
    register=partial(import_module, "ale_py"),
    harmless={
        **dict.fromkeys(
            (
                "repeat_action_probability", "full_action_space", "continuous", "continuous_action_threshold",
                "grayscale", "maxpool", "episodic_life", "life_loss_info", "reward_clipping", "use_fire_reset",
            ),
            1.0,
        ),
        **dict.fromkeys(("frameskip", "stack_num", "num_threads"), 64.0),
        **dict.fromkeys(("mode", "difficulty"), 255.0),
        **dict.fromkeys(("img_height", "img_width"), PIXELS),
        "noop_max": 1000,
        "max_num_frames_per_episode": MANY_STEPS,
        "obs_type": r"rgb|grayscale|ram",
        "autoreset_mode": r"NextStep|SameStep",
    },
)  # fmt: skip

FRAME_SKIP = 4
FRAME_STACK = 4
MAX_FRAMES = 108_000  # half an hour of play, as the environments are registered

# What a person may set by --env_kwargs and how the wrapper calls it; everything else goes to the emulator.
PREPROCESSING = {"noop_max": "noop_max", "episodic_life": "terminal_on_life_loss", "grayscale": "grayscale_obs"}
SIZES = ("img_height", "img_width")


def vector_arguments(config: EnvConfig, registration: Registration) -> dict[str, Any]:
    """Return arguments of `ale_py.vector_env.AtariVectorEnv`; one thread, as there are as many actors as cores."""
    defaults = {"num_threads": 1, "reward_clipping": False, "use_fire_reset": False}
    ours = {
        "frameskip": _frame_skip(config),
        "stack_num": _frame_stack(config),
        "max_num_frames_per_episode": _max_frames(config, registration),
    }
    return {name: value for name, value in defaults.items() if name not in config.env_kwargs} | ours


def make_single(registration: Registration, config: EnvConfig, arguments: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    """Make one game behind gymnasium's wrappers.

    Raises:
        UsageError: an argument is known to the vector environment only.
    """
    arguments = dict(arguments)
    preprocessing = {ours: arguments.pop(name) for name, ours in PREPROCESSING.items() if name in arguments}
    height, width = (arguments.pop(name, 84) for name in SIZES)
    for name in ("stack_num", "num_threads", "thread_affinity_offset"):  # taken below, or of no meaning for one game
        arguments.pop(name, None)
    for name in ("reward_clipping", "use_fire_reset"):
        if arguments.pop(name, False):
            raise UsageError(f"--env_kwargs {name}=True: only ale-py's vector environment has it, and it cannot render")
    skip = _frame_skip(config)
    arguments |= {"frameskip": 1, "max_num_frames_per_episode": _max_frames(config, registration)}
    env = make_registered(registration, **arguments)
    env = AtariPreprocessing(env, frame_skip=skip, screen_size=(width, height), **preprocessing)
    return FrameStackObservation(env, _frame_stack(config), padding_type="zero")


# The flags decide, then --env_kwargs, then what is usual.


def _frame_skip(config: EnvConfig) -> int:
    skip: Any = config.env_frameskip or config.env_kwargs.get("frameskip", FRAME_SKIP)
    return int(skip)


def _frame_stack(config: EnvConfig) -> int:
    stack: Any = config.env_framestack or config.env_kwargs.get("stack_num", FRAME_STACK)
    return int(stack)


def _max_frames(config: EnvConfig, registration: Registration) -> int:
    if config.horizon is not None:
        return config.horizon * _frame_skip(config)
    registered = registration.kwargs.get("max_num_frames_per_episode", MAX_FRAMES)
    frames: Any = config.env_kwargs.get("max_num_frames_per_episode", registered)
    return int(frames)
