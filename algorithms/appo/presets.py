"""Presets of APPO by the names of `envs.presets`; given flags replace a preset's values."""

from appo.algorithms.parts import recipes
from appo.envs.family import SHARED_LEARNING, Preset
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
# Where a step costs many times as much as learning from it. Returns of the most probable actions after 50,000 steps of
# 1 ms under names without a preset, seeds 1 to 3, with these settings (and with `NUMBERS`): LunarLander 35, 110 and 119
# (-346, -362, -348), Pendulum -297, -832 and -798 (-1271, -1291, -1247), Hopper 343, 361 and 352 (227, 249, 285).
# 20 passes over batches of 256: LunarLander 24, -163 and -126, Pendulum -349 and -793, Hopper 426, 349 and 441.
SLOW: Preset = {"ppo_epochs": 10}
SLOW_BATCH_SIZE = 128
# Actions that are numbers, with GAE in place of V-trace. Returns of two seeds under names without a preset: HalfCheetah
# 5,414 and 4,529 after 60 s (V-trace, one seed: 3,915), Hopper 944 and 325 (1,030 and 567), LunarLanderContinuous 215
# and -74 (-86 and 162), Pendulum -253 and -165 after 40 s (-174 and -182); the toy of `benchmarks.scores.choosing` at
# its goal after 10 and 11 s (more than 28, and 11).
CONTINUOUS: Preset = {"exploration_loss_coeff": 0.0, "with_vtrace": False}
# Returns after 80 s, one seed each, with a constant rate, and with the settings that Sample Factory 2 publishes:
# HalfCheetah 5,480 (1,428), Walker2d 1,798 (465), Hopper 1,222 (817), Ant 637 (-22), Humanoid 501 (316), Swimmer 33
# (34). BipedalWalker: 0 (-103).
MUJOCO: Preset = {
    **NUMBERS,
    **CONTINUOUS,
    "lr_schedule": "linear",
    "train_for_env_steps": 10_000_000,  # where the rate reaches 0
}
BIPEDAL_WALKER: Preset = {**NUMBERS, **CONTINUOUS, "gamma": 0.999}
# Seconds to a return of 200, seeds 1 to 3: 50, 47 and 39; with the settings of LunarLanderContinuous 53, 101 and 116.
LUNAR_LANDER: Preset = {**NUMBERS, "with_vtrace": False}
LUNAR_LANDER_CONTINUOUS: Preset = {
    "rollout": 64,
    "batch_size": 1024,
    "ppo_epochs": 2,
    "learning_rate": 1e-3,
    "exploration_loss_coeff": 0.01,
}
PRESETS: dict[str, Preset] = {
    **dict.fromkeys(("CartPole", "Acrobot", "MountainCarContinuous"), CLASSIC_CONTROL),
    # Returns of seeds 1 and 2 after 1 M steps: -275 and -276 with trajectories of 32 and batches of 256, -195 and -204
    # with lambda, -185 and -199 with the sizes below, -159 and -165 with gamma 0.95 and 8 epochs, too.
    "Pendulum": CLASSIC_CONTROL
    | {
        "rollout": 64,
        "batch_size": 1024,
        "ppo_epochs": 8,
        "gamma": 0.95,
        "vtrace_lambda": 0.95,
        "exploration_loss_coeff": 0.0,
    },
    # A few discrete states and a rare reward need persistent exploration.
    **dict.fromkeys(
        ("MountainCar", "FrozenLake", "CliffWalking", "Taxi"), CLASSIC_CONTROL | {"exploration_loss_coeff": 0.02}
    ),
    "LunarLander": LUNAR_LANDER,
    "LunarLanderContinuous": LUNAR_LANDER_CONTINUOUS,
    **dict.fromkeys(("BipedalWalker", "BipedalWalkerHardcore"), BIPEDAL_WALKER),
    **dict.fromkeys(MUJOCO_NAMES, MUJOCO),
}
"""Presets of single environments; families have theirs in `envs/families`. Others learn with the defaults of flags."""

# Returns, one seed each: Hopper 2,331, Swimmer 277, MountainCarContinuous 94.4, MiniGrid-DoorKey-5x5 0.964; below the
# published ones: InvertedDoublePendulum, Pendulum, Reacher, Walker2d. Batches consist of whole trajectories, so
# trajectories are shorter than in the sources of the recipes, environments more numerous and small batches larger; an
# iteration has about as many steps. Actors wait while the learner trains: many passes over fresh steps pay where steps
# are counted, not seconds.
SYNCHRONOUS: Preset = {"num_minibatches_to_accumulate": 0, "with_vtrace": False}
SMALL_BATCHES: Preset = {
    **SYNCHRONOUS, **recipes.SEPARATE, "ppo_clip_ratio": 0.2, "max_grad_norm": 0.5, "learning_rate": 3e-4,
    "exploration_loss_coeff": 0.0,
}  # fmt: skip


def _iteration(rollout: int, batch_size: int, batches: int, recipe: Preset) -> Preset:
    """Return a recipe with small batches, and with the sizes of an iteration."""
    sizes = {"rollout": rollout, "batch_size": batch_size, "num_batches_per_iteration": batches}
    return {**SMALL_BATCHES, **sizes, **recipe}


TIANSHOU = _iteration(64, 128, 16, recipes.TIANSHOU)
# 64 environments and batches half as large as in rl_games. Between bounds, a rate adapted after every epoch suits small
# batches. The factor 0.1 on rewards has no effect where the critic predicts normalized returns.
RL_GAMES: Preset = {
    **SYNCHRONOUS, "encoder_mlp_layers": (256, 128, 64), "nonlinearity": "elu",
    "initial_stddev": 1.0,  # exp(0)
    "rollout": 64, "batch_size": 1024, "num_batches_per_iteration": 4, "ppo_epochs": 5,
    "learning_rate": 5e-4, "lr_schedule": "kl_adaptive_epoch", "lr_adaptive_min": 1e-5, "lr_adaptive_max": 1e-3,
    "ppo_clip_ratio": 0.2, "value_loss_coeff": 2.0, "exploration_loss_coeff": 0.0, "max_grad_norm": 1.0,
}  # fmt: skip
LARGE: Preset = RL_GAMES | {"encoder_mlp_layers": (512, 256, 128), "value_loss_coeff": 4.0}
# Batches, passes and rate of the zoo, with the large network on every device.
ATARI: Preset = {
    **recipes.AS_PUBLISHED_ATARI, "encoder_subtype": "convnet_atari", "hidden_size": 512,
    "rollout": 64, "batch_size": 256, "num_batches_per_iteration": 4, "ppo_epochs": 4,
    "learning_rate": 2.5e-4, "lr_schedule": "linear", "adam_eps": 1e-5, "max_grad_norm": 0.5,
    "exploration_loss_coeff": 0.01,
}  # fmt: skip
VIZDOOM: Preset = {
    **SHARED_LEARNING, "rollout": 32, "batch_size": 256, "num_batches_per_iteration": 4, "ppo_epochs": 4,
    "learning_rate": 5e-4, "lr_schedule": "linear",
}  # fmt: skip
EXPLORING: Preset = {"ppo_epochs": 10, "gamma": 0.9999, "gae_lambda": 0.9, "exploration_loss_coeff": 0.00429}

SAMPLE_EFFICIENT: dict[str, Preset] = recipes.with_steps(
    {
        "CartPole": _iteration(32, 256, 1, recipes.CARTPOLE),
        "Acrobot": _iteration(32, 64, 64, recipes.ACROBOT),
        "MountainCarContinuous": _iteration(32, 64, 16, EXPLORING),
        "Pendulum": _iteration(32, 64, 64, recipes.PENDULUM),
        **dict.fromkeys(("LunarLander", "LunarLanderContinuous"), _iteration(128, 256, 64, recipes.LUNAR_LANDER)),
        "BipedalWalker": _iteration(128, 256, 64, recipes.BIPEDAL_WALKER),
        "HalfCheetah": MUJOCO,
        "Ant": MUJOCO | recipes.WITHOUT_CONTACT_FORCES,
        **dict.fromkeys(("Hopper", "Walker2d"), RL_GAMES),
        "Humanoid": LARGE,
        "Swimmer": _iteration(128, 256, 16, recipes.SWIMMER),
        "Reacher": TIANSHOU | {"gamma": 0.9},
        **dict.fromkeys(("InvertedDoublePendulum", "InvertedPendulum"), TIANSHOU),
        **dict.fromkeys(recipes.MINIGRID_STEPS, _iteration(32, 64, 16, recipes.MINIGRID)),
        **{game: ATARI | {"vtrace_lambda": mixing} for game, mixing in recipes.LAMBDA_OF_GAMES.items()},
        "VizdoomDefendCenter": VIZDOOM,
        "dm_control/*": RL_GAMES | {"value_loss_coeff": 4.0},
    }
)
"""Presets for `--preset=sample_efficient`, by patterns of names of environments."""

# Defaults for images. VizdoomBasic without its preset had a return of 75 after 45 s on two cores (70 s without
# normalization); with a memory 59 after 75 s; with one pass over batches of 512 still -160 after 110 s.
IMAGES: Preset = NUMBERS | {"ppo_epochs": 2, "learning_rate": 5e-4, "max_grad_norm": 0.5}
BY_KIND = frozenset(NUMBERS | IMAGES | CONTINUOUS)
"""Flags that depend on the kind of observations and actions."""
