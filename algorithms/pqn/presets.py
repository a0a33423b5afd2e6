"""Presets of PQN by the names of `envs.presets`; given flags replace a preset's values.

The Atari preset has the values of the paper's code (Gallici et al. 2024, arXiv:2407.04811, table 5). The paper trains
CartPole and Acrobot for 500,000 steps from 32 environments; the presets of small environments have smaller iterations
and a higher rate, for a fifth of the steps.
"""

from appo.envs.family import Preset

NORMALIZED: Preset = {"use_rnn": False, "layer_norm": True}
"""For all other environments: the layers whose normalization takes the place of a target network."""

CARTPOLE: Preset = {
    **NORMALIZED,
    "normalize_input": False,
    "nonlinearity": "relu",
    "encoder_mlp_layers": (128, 128),
    "rollout": 32,
    "batch_size": 64,
    "num_batches_per_iteration": 4,  # 8 environments
    "ppo_epochs": 4,
    "learning_rate": 1e-3,
    "lr_schedule": "linear",
    "reward_scale": 0.1,
    "gae_lambda": 0.95,
    "epsilon": 0.1,
    "epsilon_decay": 0.2,
    "train_for_env_steps": 100_000,  # where the rate reaches 0
}
LUNAR_LANDER: Preset = {
    **CARTPOLE,
    "normalize_input": True,
    "rollout": 64,
    "batch_size": 128,
    "num_batches_per_iteration": 8,  # 16 environments
    "learning_rate": 5e-4,
    "reward_scale": 0.05,
    "gamma": 0.995,
    "epsilon": 0.05,
    "train_for_env_steps": 1_000_000,
}
ATARI: Preset = {
    **NORMALIZED,
    "nonlinearity": "relu",
    "rollout": 32,
    "batch_size": 128,
    "num_batches_per_iteration": 32,  # 128 environments
    "ppo_epochs": 2,
    "learning_rate": 2.5e-4,
    "max_grad_norm": 10.0,
    "gae_lambda": 0.65,
    "epsilon": 0.001,
    "epsilon_decay": 0.1,
    "train_for_env_steps": 40_000_000,  # frames, by which the probability of a random action falls
}

PRESETS: dict[str, Preset] = {
    "CartPole": CARTPOLE,
    "Acrobot": {**CARTPOLE, "normalize_input": True},
    "LunarLander": LUNAR_LANDER,
    "atari": ATARI,
}
"""Name of a preset -> flags of learning."""
