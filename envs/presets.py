"""Settings that work for families of environments; the command line, a config file and a saved run overrule them."""

import re

Preset = dict[str, object]

MLP: Preset = {"encoder_type": "mlp", "encoder_mlp_layers": (64, 64), "nonlinearity": "tanh", "use_rnn": False}

CLASSIC_CONTROL: Preset = MLP | {
    "rollout": 32,
    "batch_size": 256,
    "num_batches_per_iteration": 4,
    "ppo_epochs": 4,
    "ppo_clip_ratio": 0.2,
    "learning_rate": 1e-3,
    "exploration_loss_coeff": 0.005,
    "max_grad_norm": 1.0,
}
CLASSIC: dict[str, Preset] = {
    "CartPole": CLASSIC_CONTROL,
    "Acrobot": CLASSIC_CONTROL,
    "MountainCar": CLASSIC_CONTROL | {"gamma": 0.999, "exploration_loss_coeff": 0.02},
    "MountainCarContinuous": CLASSIC_CONTROL | {"gamma": 0.999, "adaptive_stddev": False},
    # Returns of seeds 1 and 2 after 1 M steps: -275 and -276 with trajectories of 32 and batches of 256, -195 and -204
    # with lambda, -185 and -199 with these, in two thirds of the time.
    "Pendulum": CLASSIC_CONTROL
    | {
        "rollout": 64,
        "batch_size": 1024,
        "gamma": 0.9,
        "vtrace_lambda": 0.95,
        "adaptive_stddev": False,
        "exploration_loss_coeff": 0.0,
    },
    # A few discrete states, and a reward that is rarely met: what counts is to go on trying.
    **dict.fromkeys(("FrozenLake", "CliffWalking", "Taxi"), CLASSIC_CONTROL | {"exploration_loss_coeff": 0.02}),
}

# The Nature network. Minibatches of 256 as in Schulman et al. 2017, table 5 (arXiv:1707.06347); one pass over fresher
# data and a larger step learn more per second here than their four passes.
ATARI: Preset = {
    "encoder_type": "conv",
    "encoder_subtype": "convnet_atari",
    "nonlinearity": "relu",
    "policy_init_gain": 1.414,
    "use_rnn": False,
    "normalize_images": True,
    "reward_clip": 1.0,
    "rollout": 32,
    "batch_size": 256,
    "num_batches_per_iteration": 4,
    "learning_rate": 5e-4,
    "vtrace_lambda": 0.95,
    "adam_eps": 1e-5,
    "max_grad_norm": 0.5,
    "exploration_loss_coeff": 0.01,
}

# The network of Petrenko et al. 2020, appendix (arXiv:2006.11751); the few numbers beside the picture have an encoder
# of their own. Batches and passes are for a machine of a few cores. Returns of VizdoomBasic after 110 s on two of them:
# -160 with one pass over batches of 512 (their way), 70 with one over batches of 256, and 80 with these.
VIZDOOM: Preset = {
    "encoder_type": "conv",
    "encoder_subtype": "convnet_simple",
    "encoder_mlp_layers": (128, 128),
    "normalize_images": True,
    "use_rnn": True,
    "rnn_type": "gru",
    "env_frameskip": 4,
    "rollout": 32,
    "batch_size": 256,
    "num_batches_per_iteration": 4,
    "ppo_epochs": 2,
    "ppo_clip_ratio": 0.2,
    "vtrace_lambda": 0.95,
    "learning_rate": 5e-4,
    "max_grad_norm": 0.5,
    "exploration_loss_coeff": 0.01,
}

# 7x7 symbols, not pixels: too small for strided convolutions, and partial views need a memory. Most symbols hardly ever
# change; normalized, those that do stand out, and what they mean together is learned several times faster.
MINIGRID: Preset = {
    "encoder_type": "mlp",
    "encoder_mlp_layers": (128, 128),
    "hidden_size": 128,
    "normalize_images": True,
    "use_rnn": True,
    "rollout": 32,
    "batch_size": 512,
    "num_batches_per_iteration": 2,
    "ppo_epochs": 3,
    "ppo_clip_ratio": 0.2,
    "vtrace_lambda": 0.95,
    "learning_rate": 1e-3,
    "max_grad_norm": 0.5,
    "exploration_loss_coeff": 0.01,
}

# 7x7 cells with counts of walls, allies and opponents, seen by each of 8 agents that play as one policy. A step of the
# game takes 100 times longer than learning from it, so that many passes over little data pay.
PURSUIT: Preset = {
    "encoder_type": "mlp",
    "encoder_mlp_layers": (128, 128),
    "use_rnn": False,
    "rollout": 32,
    "batch_size": 512,
    "num_batches_per_iteration": 2,
    "ppo_epochs": 5,
    "ppo_clip_ratio": 0.2,
    "vtrace_lambda": 0.95,
    "learning_rate": 7e-4,
    "max_grad_norm": 0.5,
    "exploration_loss_coeff": 0.01,
}

# The settings with which Sample Factory 2 trains MuJoCo, published with its results.
MUJOCO: Preset = MLP | {
    "adaptive_stddev": False,
    "rollout": 64,
    "batch_size": 1024,
    "num_batches_per_iteration": 4,
    "ppo_epochs": 2,
    "learning_rate": 3e-3,
    "lr_schedule": "linear",
    "train_for_env_steps": 10_000_000,
    "ppo_clip_ratio": 0.2,
    "value_loss_coeff": 1.3,
    "exploration_loss_coeff": 0.0,
    "max_grad_norm": 3.5,
    "with_vtrace": False,
    "gae_lambda": 0.95,
}
DOMAINS = (
    "Acrobot", "BallInCup", "Cartpole", "Cheetah", "Dog", "Finger", "Fish", "Hopper", "Humanoid", "Lqr", "Manipulator",
    "Pendulum", "PointMass", "Quadruped", "Reacher", "Stacker", "Swimmer", "Walker",
)  # fmt: skip
"""Of dm_control's suite, as they begin the names that envpool gives its tasks."""

# The same physics, but rewards in [0, 1] in every step of episodes that never end early. Returns of cartpole-swingup
# after 75 s on two cores: 151 with batches of 1024, GAE and a rate that falls; 604 with batches of 256; 684 with these.
# cheetah-run and walker-walk learn as fast either way.
CONTROL_SUITE: Preset = MUJOCO | {
    "batch_size": 256,
    "ppo_epochs": 4,
    "learning_rate": 5e-4,
    "lr_schedule": "constant",
    "value_loss_coeff": 0.5,
    "max_grad_norm": 1.0,
    "with_vtrace": True,
    "vtrace_lambda": 0.95,
}

# Network, discount, learning rate, minibatches and epochs of highway-env's own PPO example. A step of the game takes a
# hundred times longer than learning from it, so that many passes over little data pay.
HIGHWAY: Preset = {
    "encoder_type": "mlp",
    "encoder_mlp_layers": (256, 256),
    "nonlinearity": "tanh",
    "use_rnn": False,
    "gamma": 0.8,
    "rollout": 16,
    "batch_size": 64,
    "num_batches_per_iteration": 4,
    "ppo_epochs": 10,
    "ppo_clip_ratio": 0.2,
    "vtrace_lambda": 0.95,
    "learning_rate": 5e-4,
    "max_grad_norm": 0.5,
    "exploration_loss_coeff": 0.01,
}

MUJOCO_NAMES = (
    "Ant",
    "HalfCheetah",
    "Hopper",
    "Humanoid",
    "HumanoidStandup",
    "InvertedDoublePendulum",
    "InvertedPendulum",
    "Pusher",
    "Reacher",
    "Swimmer",
    "Walker2d",
)

# The discounts of Raffin's tuned PPO (rl-baselines3-zoo): episodes of up to 1600 steps with the reward at their end.
LUNAR_LANDER: Preset = MLP | {
    "gamma": 0.999,
    "rollout": 64,
    "batch_size": 1024,
    "ppo_epochs": 2,
    "learning_rate": 1e-3,
    "exploration_loss_coeff": 0.01,
}
BIPEDAL_WALKER: Preset = LUNAR_LANDER | {
    "adaptive_stddev": False,
    "learning_rate": 3e-4,
    "ppo_epochs": 4,
    "ppo_clip_ratio": 0.2,
    "exploration_loss_coeff": 0.0,
}
BOX2D: dict[str, Preset] = {
    "LunarLander": LUNAR_LANDER,
    "LunarLanderContinuous": LUNAR_LANDER | {"adaptive_stddev": False},
    "BipedalWalker": BIPEDAL_WALKER,
    "BipedalWalkerHardcore": BIPEDAL_WALKER,
}

BATCH_SIZE = 256
# What an environment that is in no preset begins with: here, where it shows numbers and choices only, and no image.
# Mean returns after 45 s on two cores, with every default and with these: FrozenLake 0.00 and 0.81, Taxi -180 and 7.9,
# CartPole 207 and 500, Acrobot -498 and -84, LunarLander -150 and 176, Pendulum -1215 and -229.
NUMBERS: Preset = {
    "encoder_mlp_layers": (64, 64),
    "nonlinearity": "tanh",
    "use_rnn": False,
    "batch_size": BATCH_SIZE,
    "num_batches_per_iteration": 4,
    "ppo_epochs": 4,
    "ppo_clip_ratio": 0.2,
    "learning_rate": 1e-3,
    "vtrace_lambda": 0.95,
    "exploration_loss_coeff": 0.01,
    "max_grad_norm": 1.0,
}
# And where it shows images. VizdoomBasic, taken for an unknown one, had a return of 75 after 45 s on two cores, without
# normalization after 70 s; with a memory 59 after 75 s, and -160 after 110 s with one pass over batches of 512 too.
IMAGES: Preset = {
    "normalize_images": True,
    "use_rnn": False,
    "batch_size": BATCH_SIZE,
    "num_batches_per_iteration": 4,
    "ppo_epochs": 2,
    "ppo_clip_ratio": 0.2,
    "learning_rate": 5e-4,
    "vtrace_lambda": 0.95,
    "exploration_loss_coeff": 0.01,
    "max_grad_norm": 0.5,
}
CONTINUOUS: Preset = {"adaptive_stddev": False, "exploration_loss_coeff": 0.0}
OF_KINDS = frozenset(NUMBERS | IMAGES | CONTINUOUS | {"hidden_size": 0})
"""Flags that the kind of observation may decide."""
MANY_NUMBERS = 64
"""Of an observation; with more, layers are twice as large."""

VIZDOOM_IDS = r"Vizdoom"
ATARI_IDS = r"ALE/|\w+(NoFrameskip|Deterministic)-v\d|envpool:\w+-v5$"
FAMILIES: dict[str, Preset] = {
    r"toy/": {},  # for tests, which count on what every flag is by default
    ATARI_IDS: ATARI,
    VIZDOOM_IDS: VIZDOOM,
    r"MiniGrid-|BabyAI-": MINIGRID,
    r"(pettingzoo[./])?sisl[./]pursuit[-_]v\d": PURSUIT,
    r"dm_control/|envpool:(" + "|".join(DOMAINS) + r")[A-Z]\w*-v1$": CONTROL_SUITE,
    r"(highway|merge|roundabout|intersection|two-way|exit|u-turn)(-(fast|generic))?-v\d": HIGHWAY,
}
NAMES: dict[str, Preset] = CLASSIC | BOX2D | dict.fromkeys(MUJOCO_NAMES, MUJOCO)

# On two cores the Nature network has hardly begun with Pong after ten minutes; this one is a third of the work, and as
# a step of the game then costs more than training on it, two passes pay. VizdoomBasic learns as much from a sample with
# half the units, and has a third more samples.
ON_CPU: dict[str, Preset] = {
    ATARI_IDS: {"encoder_subtype": "convnet_dqn", "hidden_size": 256, "ppo_epochs": 2},
    VIZDOOM_IDS: {"hidden_size": 256},
}


def preset(env_id: str, device: str) -> Preset | None:
    """Return flag -> value for the family of an environment, None for an unknown one.

    A module (`package.module:Id`) and a version (`-v1`) are ignored; single environments match by their whole name.

    Args:
        env_id: as the flag has it.
        device: `cpu` or `cuda`, where the network is trained.
    """
    name = env_id.rpartition(":")[2]
    if values := NAMES.get(re.sub(r"-v\d+$", "", name)):
        return dict(values)
    for pattern, values in FAMILIES.items():
        if re.match(pattern, name) or re.match(pattern, env_id):
            return values | (ON_CPU.get(pattern, {}) if device == "cpu" else {})
    return None


def preset_of_numbers(count: int, *, continuous: bool, remembers: bool, rollout: int) -> Preset:
    """Return flag -> value for an unknown environment that shows numbers and choices only.

    Args:
        count: of the numbers in an observation; a choice counts as often as it has values.
        continuous: whether actions, or parts of them, are numbers.
        remembers: whether a memory is asked for.
        rollout: steps of a trajectory, of which a batch holds one at least.
    """
    units = 128 if count > MANY_NUMBERS else 64
    memory = {"hidden_size": units} if remembers else {}
    return _of_kind(NUMBERS | {"encoder_mlp_layers": (units, units)} | memory, continuous, rollout)


def preset_of_images(*, continuous: bool, rollout: int) -> Preset:
    """The same for one that shows images, alone or beside others."""
    return _of_kind(IMAGES, continuous, rollout)


def _of_kind(values: Preset, continuous: bool, rollout: int) -> Preset:
    room = {"batch_size": rollout} if rollout > BATCH_SIZE else {}
    return values | (CONTINUOUS if continuous else {}) | room
