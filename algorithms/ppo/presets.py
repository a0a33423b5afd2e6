"""Presets of PPO by the names of `envs.presets`; given flags replace a preset's values.

The values come from Raffin's tuned agents (rl-baselines3-zoo, hyperparams/ppo.yml): `n_steps` is rollout, and `n_envs`
times `n_steps` is batch_size times num_batches_per_iteration. Flags that the zoo leaves out keep their defaults.
"""

from appo.algorithms.parts import recipes
from appo.algorithms.parts.recipes import SEPARATE
from appo.envs import presets as env_presets
from appo.envs.family import Preset

NORMALIZED: Preset = {"normalize_input": True, "normalize_returns": True}
AS_IT_IS: Preset = {"normalize_input": False, "normalize_returns": False}

CARTPOLE: Preset = {
    **SEPARATE,
    **AS_IT_IS,
    "rollout": 32,
    "batch_size": 256,  # 8 environments
    "num_batches_per_iteration": 1,
    **recipes.CARTPOLE,
    "ppo_clip_schedule": "linear",
    "train_for_env_steps": 100_000,  # where rate and clip reach 0
}
ACROBOT: Preset = {
    **SEPARATE,
    **NORMALIZED,
    "rollout": 256,
    "batch_size": 64,
    "num_batches_per_iteration": 64,  # 16 environments
    **recipes.ACROBOT,
}
LUNAR_LANDER: Preset = {
    **SEPARATE,
    **AS_IT_IS,
    "rollout": 1024,
    "batch_size": 64,
    "num_batches_per_iteration": 256,  # 16 environments
    **recipes.LUNAR_LANDER,
}
HALF_CHEETAH: Preset = {
    **SEPARATE,
    **NORMALIZED,
    "rollout": 512,
    "batch_size": 64,
    "num_batches_per_iteration": 8,
    "num_workers": 1,
    "num_envs_per_worker": 1,  # a further one would fill trajectories for the iteration after the next
    **recipes.HALF_CHEETAH,
}
ATARI: Preset = {
    "rollout": 128,
    "batch_size": 256,
    "num_batches_per_iteration": 4,  # 8 environments
    "ppo_epochs": 4,
    "learning_rate": 2.5e-4,
    "lr_schedule": "linear",
    "ppo_clip_ratio": 0.1,
    "ppo_clip_schedule": "linear",
    "exploration_loss_coeff": 0.01,
    "value_loss_coeff": 0.5,
    "train_for_env_steps": 10_000_000,  # where rate and clip reach 0
}

PRESETS: dict[str, Preset] = {
    "CartPole": CARTPOLE,
    "Acrobot": ACROBOT,
    "LunarLander": LUNAR_LANDER,
    "LunarLanderContinuous": LUNAR_LANDER,
    "HalfCheetah": HALF_CHEETAH,
    "atari": ATARI,
}
"""Name of a preset -> flags of learning. Other known environments have `WITHOUT_BUDGET`."""

IMAGES: Preset = {name: ATARI[name] for name in ("batch_size", "ppo_epochs", "learning_rate", "exploration_loss_coeff")}
"""The values of `ATARI` that need no budget, for environments with images that have no other; numbers use the defaults.
"""

CONTINUOUS: Preset = {"num_batches_per_iteration": 8}
"""For environments without other values, with actions that are numbers. The clip limits how far a mean moves per
iteration, relative to the standard deviation. After 100,000 steps, three right numbers at once (`tests/reaching.py`)
reached 0.867 of the best return with the default of 32 (49 iterations), 0.856 with 32 and a rate of 1e-3, and 0.984
with 8."""


def _iteration(envs: int, rollout: int, batch_size: int) -> Preset:
    """Return the sizes of an iteration of so many trajectories."""
    return {"rollout": rollout, "batch_size": batch_size, "num_batches_per_iteration": envs * rollout // batch_size}


TIANSHOU: Preset = {
    **SEPARATE,
    **NORMALIZED,
    **_iteration(8, 256, 64),
    **recipes.TIANSHOU,
    "recompute_advantages": True,
    "normalize_advantages": "off",
}
MINIGRID: Preset = {**SEPARATE, **NORMALIZED, **_iteration(8, 128, 64), **recipes.MINIGRID}
DM_CONTROL: Preset = {**SEPARATE, **NORMALIZED, **_iteration(1, 2048, 64), "lr_schedule": "linear"}  # CleanRL's
# A reward that is normalized solves MountainCar, where a reward ends the episode.
MOUNTAIN_CAR: Preset = {**SEPARATE, **NORMALIZED, **_iteration(16, 16, 64), "ppo_epochs": 4, "gae_lambda": 0.98}

SAMPLE_EFFICIENT: dict[str, Preset] = recipes.with_steps(
    {
        **{name: preset for name, preset in PRESETS.items() if name != "atari"},
        "Acrobot": ACROBOT | {"ppo_epochs": 10, "lr_schedule": "linear"},  # -72.8; the zoo's flags: -74.4
        # 278, 277 and 237; the zoo's flags: 260, 261 and 260
        "LunarLanderContinuous": LUNAR_LANDER
        | {"ppo_epochs": 10, "lr_schedule": "linear", "exploration_loss_coeff": 0.0},
        "MountainCar": MOUNTAIN_CAR,
        "Pendulum": {**SEPARATE, **AS_IT_IS, **_iteration(4, 1024, 64), **recipes.PENDULUM},
        "BipedalWalker": {**SEPARATE, **NORMALIZED, **_iteration(32, 2048, 64), **recipes.BIPEDAL_WALKER},
        **dict.fromkeys(("Hopper", "Humanoid", "InvertedDoublePendulum", "InvertedPendulum", "Walker2d"), TIANSHOU),
        "Ant": TIANSHOU | recipes.WITHOUT_CONTACT_FORCES,
        "Reacher": TIANSHOU | {"gamma": 0.9},
        "Swimmer": {**SEPARATE, **NORMALIZED, **_iteration(4, 1024, 256), **recipes.SWIMMER},
        **dict.fromkeys(recipes.MINIGRID_STEPS, MINIGRID),
        **{
            game: ATARI | recipes.AS_PUBLISHED_ATARI | {"gae_lambda": mixing}
            for game, mixing in recipes.LAMBDA_OF_GAMES.items()
        },
        "dm_control/*": DM_CONTROL,
    }
)
"""Presets for `--preset=sample_efficient`. docs/results.md has returns of those that `--algo=auto` takes. One seed
each: InvertedDoublePendulum 8,071, Ant 2,577, Pendulum -210, DoorKey-5x5 0. The others have not been measured."""

WITHOUT_BUDGET: dict[str, Preset] = {
    **dict.fromkeys(("BipedalWalkerHardcore", "HumanoidStandup", "MountainCarContinuous", "Pusher"), CONTINUOUS),
    **{
        name: {flag: value for flag, value in preset.items() if flag not in ("train_for_env_steps", "env_kwargs")}
        for name, preset in SAMPLE_EFFICIENT.items()
        if name in env_presets.PRESETS and name not in PRESETS
    },
    "dm_control": DM_CONTROL,
    "minigrid": MINIGRID,
    "vizdoom": IMAGES,
}
"""Default presets of environments that `PRESETS` does not contain, by names of `envs.presets`: the recipes, for the
environments as they are and any budget, else the values of unknown environments. Without a budget, a rate with a linear
schedule stays."""
