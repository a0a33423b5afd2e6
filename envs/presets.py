"""Presets are settings of environment and network that work; a command line, config file or saved run overrules them.

How an environment is learned is for the algorithm to know: its settings stand under the same names in the `presets.py`
of the algorithm.
"""

import re

from appo.envs.given import unnumbered

Preset = dict[str, object]

DOMAINS = (
    "Acrobot", "BallInCup", "Cartpole", "Cheetah", "Dog", "Finger", "Fish", "Hopper", "Humanoid", "Lqr", "Manipulator",
    "Pendulum", "PointMass", "Quadruped", "Reacher", "Stacker", "Swimmer", "Walker",
)  # fmt: skip
"""Domains of dm_control's suite, with which the names of envpool's tasks begin."""

PATTERNS: dict[str, str] = {
    "toy": r"toy/",
    "atari": r"ALE/|\w+(NoFrameskip|Deterministic)-v\d|envpool:\w+-v5$",
    "vizdoom": r"Vizdoom",
    "minigrid": r"MiniGrid-|BabyAI-",
    "pursuit": r"(pettingzoo[./])?sisl[./]pursuit[-_]v\d",
    "dm_control": r"dm_control/|envpool:(" + "|".join(DOMAINS) + r")[A-Z]\w*-v1$",
    "highway": r"(highway|merge|roundabout|intersection|two-way|exit|u-turn)(-(fast|generic))?-v\d",
}
"""Regular expressions of how ids begin, by the name of a preset; all other presets are named like an environment."""

MUJOCO_NAMES = (
    "Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum", "InvertedPendulum",
    "Pusher", "Reacher", "Swimmer", "Walker2d",
)  # fmt: skip

MLP: Preset = {"encoder_type": "mlp", "encoder_mlp_layers": (64, 64), "nonlinearity": "tanh", "use_rnn": False}
GAUSSIAN_MLP: Preset = MLP | {"adaptive_stddev": False}

PRESETS: dict[str, Preset] = {
    "toy": {},  # for tests, which count on what every flag is by default
    **dict.fromkeys(("CartPole", "Acrobot", "MountainCar", "FrozenLake", "CliffWalking", "Taxi", "LunarLander"), MLP),
    **dict.fromkeys(("MountainCarContinuous", "LunarLanderContinuous"), GAUSSIAN_MLP),
    **dict.fromkeys(("BipedalWalker", "BipedalWalkerHardcore", *MUJOCO_NAMES), GAUSSIAN_MLP),
    # Bounds other than [-1, 1]: the first deviation is 1 in the units of the environment, with which they were tuned.
    **dict.fromkeys(("Pendulum", "Pusher"), GAUSSIAN_MLP | {"initial_stddev": 0.5}),
    "InvertedPendulum": GAUSSIAN_MLP | {"initial_stddev": 0.333},
    **dict.fromkeys(("Humanoid", "HumanoidStandup"), GAUSSIAN_MLP | {"initial_stddev": 2.5}),
    "dm_control": GAUSSIAN_MLP,
    # The Nature network.
    "atari": {
        "encoder_type": "conv",
        "encoder_subtype": "convnet_atari",
        "nonlinearity": "relu",
        "policy_init_gain": 1.414,
        "use_rnn": False,
        "normalize_images": True,
        "reward_clip": 1.0,
    },
    # The network of Petrenko et al. 2020, appendix (arXiv:2006.11751); the few numbers beside the picture have an
    # encoder of their own.
    "vizdoom": {
        "encoder_type": "conv",
        "encoder_subtype": "convnet_simple",
        "encoder_mlp_layers": (128, 128),
        "normalize_images": True,
        "use_rnn": True,
        "rnn_type": "gru",
        "env_frameskip": 4,
    },
    # 7x7 symbols, not pixels: too small for strided convolutions, and partial views need a memory. Most symbols hardly
    # ever change; normalized, those that do stand out, and what they mean together is learned several times faster.
    "minigrid": {
        "encoder_type": "mlp",
        "encoder_mlp_layers": (128, 128),
        "hidden_size": 128,
        "normalize_images": True,
        "use_rnn": True,
    },
    # 7x7 cells with counts of walls, allies and opponents, seen by each of 8 agents that play as one policy.
    "pursuit": {"encoder_type": "mlp", "encoder_mlp_layers": (128, 128), "use_rnn": False},
    # The network of highway-env's own PPO example.
    "highway": MLP | {"encoder_mlp_layers": (256, 256)},
}

# On two cores the Nature network has hardly begun with Pong after ten minutes; this one is a third of the work.
# VizdoomBasic learns as much from a sample with half the units, and has a third more samples.
ON_CPU: dict[str, Preset] = {
    "atari": {"encoder_subtype": "convnet_dqn", "hidden_size": 256},
    "vizdoom": {"hidden_size": 256},
}

# The network that an environment without a preset begins with: here, where it shows numbers and choices only. What it
# is worth together with the settings of learning, the algorithm's `presets.py` says.
NUMBERS: Preset = {"encoder_mlp_layers": (64, 64), "nonlinearity": "tanh", "use_rnn": False}
# And where it shows images, alone or beside others.
IMAGES: Preset = {"normalize_images": True, "use_rnn": False}
CONTINUOUS: Preset = {"adaptive_stddev": False}
# Where policies act in [-1, 1]. A free deviation moves by the learning rate at most, whatever the rest learns: from 1,
# it cost 8 % of the best return of a single right number after 100,000 steps, from 0.4 less than 5 %.
SCALED: Preset = {"initial_stddev": 0.4}
BY_KIND = frozenset(NUMBERS | IMAGES | CONTINUOUS | SCALED | {"hidden_size": 0})
"""Flags that the kind of observation may decide."""
MANY_NUMBERS = 64
"""Numbers of an observation beyond which layers are twice as large."""


def find_name(env_id: str) -> str | None:
    """Return the name of the preset of an environment, as `--env` has it; None if it has none.

    A module (`package.module:Id`) and a version (`-v1`) are ignored; single environments match by their whole name.
    """
    env_id = unnumbered(env_id)
    env = env_id.rpartition(":")[2]
    name = re.sub(r"-v\d+$", "", env)
    if name in PRESETS and name not in PATTERNS:
        return name
    return next((key for key, pattern in PATTERNS.items() if re.match(pattern, env) or re.match(pattern, env_id)), None)


def env_preset(name: str, device: str) -> Preset:
    """Return flag -> value of the environment and the network for the name of a preset.

    Args:
        name: of the preset.
        device: `cpu` or `cuda`, where the network is trained.
    """
    return PRESETS[name] | (ON_CPU.get(name, {}) if device == "cpu" else {})


def network_for_numbers(count: int, *, continuous: bool, remembers: bool) -> Preset:
    """Return flag -> value of the network for an unknown environment that shows numbers and choices only.

    Args:
        count: of the numbers in an observation; a choice counts as often as it has values.
        continuous: whether actions, or parts of them, are numbers.
        remembers: whether a memory is asked for.
    """
    units = 128 if count > MANY_NUMBERS else 64
    memory = {"hidden_size": units} if remembers else {}
    return NUMBERS | {"encoder_mlp_layers": (units, units)} | memory | (CONTINUOUS if continuous else {})


def network_for_images(*, continuous: bool) -> Preset:
    """Return flag -> value of the network for an unknown environment that shows images, alone or beside others."""
    return IMAGES | (CONTINUOUS if continuous else {})
