"""Presets of APPO by the names of `envs.presets`; given flags replace a preset's values."""

from appo.envs.presets import MUJOCO_NAMES, Preset

CLASSIC_CONTROL: Preset = {
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
    "MountainCarContinuous": CLASSIC_CONTROL | {"gamma": 0.999},
    # Returns of seeds 1 and 2 after 1 M steps: -275 and -276 with trajectories of 32 and batches of 256, -195 and -204
    # with lambda, -185 and -199 with these, in two thirds of the time.
    "Pendulum": CLASSIC_CONTROL
    | {"rollout": 64, "batch_size": 1024, "gamma": 0.9, "vtrace_lambda": 0.95, "exploration_loss_coeff": 0.0},
    # A few discrete states and a rare reward need persistent exploration.
    **dict.fromkeys(("FrozenLake", "CliffWalking", "Taxi"), CLASSIC_CONTROL | {"exploration_loss_coeff": 0.02}),
}

# The discounts of Raffin's tuned PPO (rl-baselines3-zoo): episodes of up to 1600 steps with the reward at their end.
LUNAR_LANDER: Preset = {
    "gamma": 0.999,
    "rollout": 64,
    "batch_size": 1024,
    "ppo_epochs": 2,
    "learning_rate": 1e-3,
    "exploration_loss_coeff": 0.01,
}
BIPEDAL_WALKER: Preset = LUNAR_LANDER | {
    "learning_rate": 3e-4,
    "ppo_epochs": 4,
    "ppo_clip_ratio": 0.2,
    "exploration_loss_coeff": 0.0,
}
BOX2D: dict[str, Preset] = {
    "LunarLander": LUNAR_LANDER,
    "LunarLanderContinuous": LUNAR_LANDER,
    "BipedalWalker": BIPEDAL_WALKER,
    "BipedalWalkerHardcore": BIPEDAL_WALKER,
}

# The settings with which Sample Factory 2 trains MuJoCo, published with its results.
MUJOCO: Preset = {
    "rollout": 64,
    "batch_size": 1024,
    "num_batches_per_iteration": 4,
    "ppo_epochs": 2,
    "learning_rate": 3e-3,
    "lr_schedule": "linear",
    "train_for_env_steps": 10_000_000,  # where the rate reaches 0
    "ppo_clip_ratio": 0.2,
    "value_loss_coeff": 1.3,
    "exploration_loss_coeff": 0.0,
    "max_grad_norm": 3.5,
    "with_vtrace": False,
    "gae_lambda": 0.95,
}
# The same physics, but rewards in [0, 1] in every step of episodes that never end early. Returns of cartpole-swingup
# after 75 s on two cores: 151 with batches of 1024, GAE and a rate that falls; 604 with batches of 256; 684 with these.
# cheetah-run and walker-walk learn as fast either way.
DM_CONTROL: Preset = MUJOCO | {
    "batch_size": 256,
    "ppo_epochs": 4,
    "learning_rate": 5e-4,
    "lr_schedule": "constant",
    "value_loss_coeff": 0.5,
    "max_grad_norm": 1.0,
    "with_vtrace": True,
    "vtrace_lambda": 0.95,
}

# Minibatches of 256 as in Schulman et al. 2017, table 5 (arXiv:1707.06347); one pass over fresher data and a larger
# step learn more per second here than their four passes.
ATARI: Preset = {
    "rollout": 32,
    "batch_size": 256,
    "num_batches_per_iteration": 4,
    "learning_rate": 5e-4,
    "vtrace_lambda": 0.95,
    "adam_eps": 1e-5,
    "max_grad_norm": 0.5,
    "exploration_loss_coeff": 0.01,
}

# Batches and passes are for a machine of a few cores. Returns of VizdoomBasic after 110 s on two of them: -160 with one
# pass over batches of 512 (as in Petrenko et al. 2020), 70 with one over batches of 256, and 80 with these.
VIZDOOM: Preset = {
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

MINIGRID: Preset = {
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

# A step of the game takes 100 times longer than learning from it, so that many passes over little data pay.
PURSUIT: Preset = {
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

# Discount, learning rate, minibatches and epochs of highway-env's own PPO example. A step of the game takes a hundred
# times longer than learning from it, so that many passes over little data pay.
HIGHWAY: Preset = {
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

PRESETS: dict[str, Preset] = {
    **CLASSIC,
    **BOX2D,
    **dict.fromkeys(MUJOCO_NAMES, MUJOCO),
    "dm_control": DM_CONTROL,
    "atari": ATARI,
    "vizdoom": VIZDOOM,
    "minigrid": MINIGRID,
    "pursuit": PURSUIT,
    "highway": HIGHWAY,
}
"""Name of a preset -> flags of learning. Other known environments use the defaults of the flags."""

# With the smaller network that Atari has on a CPU, a step of the game costs more than training on it: two passes pay.
ON_CPU: dict[str, Preset] = {"atari": {"ppo_epochs": 2}}

BATCH_SIZE = 256
# Defaults of an environment without a preset whose observations contain no image.
# Mean returns after 45 s on two cores, with every default and with these (and the network of `envs.presets`):
# FrozenLake 0.00 and 0.81, Taxi -180 and 7.9, CartPole 207 and 500, Acrobot -498 and -84, LunarLander -150 and 176,
# Pendulum -1215 and -229.
NUMBERS: Preset = {
    "batch_size": BATCH_SIZE,
    "num_batches_per_iteration": 4,
    "ppo_epochs": 4,
    "ppo_clip_ratio": 0.2,
    "learning_rate": 1e-3,
    "vtrace_lambda": 0.95,
    "exploration_loss_coeff": 0.01,
    "max_grad_norm": 1.0,
}
# Defaults for images. VizdoomBasic without its preset had a return of 75 after 45 s on two cores (70 s without
# normalization); with a memory 59 after 75 s; with one pass over batches of 512 still -160 after 110 s.
IMAGES: Preset = NUMBERS | {"ppo_epochs": 2, "learning_rate": 5e-4, "max_grad_norm": 0.5}
CONTINUOUS: Preset = {"exploration_loss_coeff": 0.0}
BY_KIND = frozenset(NUMBERS | IMAGES | CONTINUOUS)
"""Flags that depend on the kind of observations and actions."""


def learning_preset(name: str, device: str) -> Preset:
    """Return flag -> value of learning for a known environment.

    Args:
        name: name of the preset from `appo.envs.presets.find_name`.
        device: device of the learner, `cpu` or `cuda`.
    """
    return PRESETS.get(name, {}) | (ON_CPU.get(name, {}) if device == "cpu" else {})


def learning_by_kind(*, images: bool, continuous: bool, rollout: int) -> Preset:
    """Return flag -> value of learning for an unknown environment.

    Args:
        images: whether observations contain images.
        continuous: whether actions contain numbers.
        rollout: number of steps of a trajectory; a batch has room for at least one trajectory.
    """
    room = {"batch_size": rollout} if rollout > BATCH_SIZE else {}
    return (IMAGES if images else NUMBERS) | (CONTINUOUS if continuous else {}) | room
