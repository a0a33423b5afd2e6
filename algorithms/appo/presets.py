"""Presets of APPO by the names of `envs.presets`; given flags replace a preset's values."""

from appo.envs.family import Preset
from appo.envs.presets import MUJOCO_NAMES

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

# The discount is that of Raffin's tuned PPO (rl-baselines3-zoo): episodes of up to 1600 steps, the reward at the end.
LUNAR_LANDER: Preset = {
    "rollout": 64,
    "batch_size": 1024,
    "ppo_epochs": 2,
    "learning_rate": 1e-3,
    "exploration_loss_coeff": 0.01,
}
BIPEDAL_WALKER: Preset = LUNAR_LANDER | {
    "gamma": 0.999,
    "learning_rate": 3e-4,
    "ppo_epochs": 4,
    "ppo_clip_ratio": 0.2,
    "exploration_loss_coeff": 0.0,
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
PRESETS: dict[str, Preset] = {
    **dict.fromkeys(("CartPole", "Acrobot", "MountainCarContinuous"), CLASSIC_CONTROL),
    # Returns of seeds 1 and 2 after 1 M steps: -275 and -276 with trajectories of 32 and batches of 256, -195 and -204
    # with lambda, -185 and -199 with these, in two thirds of the time.
    "Pendulum": CLASSIC_CONTROL
    | {"rollout": 64, "batch_size": 1024, "vtrace_lambda": 0.95, "exploration_loss_coeff": 0.0},
    # A few discrete states and a rare reward need persistent exploration.
    **dict.fromkeys(
        ("MountainCar", "FrozenLake", "CliffWalking", "Taxi"), CLASSIC_CONTROL | {"exploration_loss_coeff": 0.02}
    ),
    **dict.fromkeys(("LunarLander", "LunarLanderContinuous"), LUNAR_LANDER),
    **dict.fromkeys(("BipedalWalker", "BipedalWalkerHardcore"), BIPEDAL_WALKER),
    **dict.fromkeys(MUJOCO_NAMES, MUJOCO),
}
"""Presets of single environments; families have theirs in `envs/families`. Others learn with the defaults of flags."""

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
