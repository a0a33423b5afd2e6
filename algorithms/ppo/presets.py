"""Presets of PPO by the names of `envs.presets`; given flags replace a preset's values.

The values come from Raffin's tuned agents (rl-baselines3-zoo, hyperparams/ppo.yml): `n_steps` is rollout, and `n_envs`
times `n_steps` is batch_size times num_batches_per_iteration. Flags that the zoo leaves out keep their defaults.
"""

from appo.envs.family import Preset

SEPARATE: Preset = {"actor_critic_share_weights": False}
"""Actor and critic share no layers, as in the zoo's MlpPolicy."""
NORMALIZED: Preset = {"normalize_input": True, "normalize_returns": True}
AS_IT_IS: Preset = {"normalize_input": False, "normalize_returns": False}

CARTPOLE: Preset = {
    **SEPARATE,
    **AS_IT_IS,
    "rollout": 32,
    "batch_size": 256,  # 8 environments
    "num_batches_per_iteration": 1,
    "ppo_epochs": 20,
    "gamma": 0.98,
    "gae_lambda": 0.8,
    "learning_rate": 1e-3,
    "lr_schedule": "linear",
    "ppo_clip_ratio": 0.2,
    "ppo_clip_schedule": "linear",
    "exploration_loss_coeff": 0.0,
    "train_for_env_steps": 100_000,  # where rate and clip reach 0
}
ACROBOT: Preset = {
    **SEPARATE,
    **NORMALIZED,
    "rollout": 256,
    "batch_size": 64,
    "num_batches_per_iteration": 64,  # 16 environments
    "ppo_epochs": 4,
    "gamma": 0.99,
    "gae_lambda": 0.94,
    "exploration_loss_coeff": 0.0,
}
LUNAR_LANDER: Preset = {
    **SEPARATE,
    **AS_IT_IS,
    "rollout": 1024,
    "batch_size": 64,
    "num_batches_per_iteration": 256,  # 16 environments
    "ppo_epochs": 4,
    "gamma": 0.999,
    "gae_lambda": 0.98,
    "exploration_loss_coeff": 0.01,
}
HALF_CHEETAH: Preset = {
    **SEPARATE,
    **NORMALIZED,
    "encoder_mlp_layers": (256, 256),
    "nonlinearity": "relu",
    "initial_stddev": 0.1353,  # exp(-2)
    "rollout": 512,
    "batch_size": 64,
    "num_batches_per_iteration": 8,  # 1 environment
    "ppo_epochs": 20,
    "gamma": 0.98,
    "gae_lambda": 0.92,
    "learning_rate": 2.0633e-5,
    "ppo_clip_ratio": 0.1,
    "exploration_loss_coeff": 0.000401762,
    "value_loss_coeff": 0.58096,
    "max_grad_norm": 0.8,
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
"""Name of a preset -> flags of learning. Other known environments use the defaults of the flags."""

IMAGES: Preset = {name: ATARI[name] for name in ("batch_size", "ppo_epochs", "learning_rate", "exploration_loss_coeff")}
"""The values of `ATARI` that need no budget, for unknown environments with images; numbers use the defaults."""

CONTINUOUS: Preset = {"num_batches_per_iteration": 8}
"""For unknown environments with actions that are numbers. The clip limits how far a mean moves per iteration, relative
to the standard deviation. After 100,000 steps, three right numbers at once (`tests/reaching.py`) reached 0.867 of the
best return with the default of 32 (49 iterations), 0.856 with 32 and a rate of 1e-3, and 0.984 with 8."""
