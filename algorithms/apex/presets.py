"""Presets of Ape-X by the names of `envs.presets`; given flags replace a preset's values.

Presets of small environments start from Stable-Baselines3's tuned DQN (rl-baselines3-zoo, hyperparams/dqn.yml), the
Atari preset from Horgan et al. 2018, arXiv:1803.00933, section 4.1.
"""

from appo.envs.family import Preset

SMALL: Preset = {
    "use_rnn": False,
    "normalize_input": False,
    "nonlinearity": "relu",
    "rollout": 16,
    "priority_beta_final": 1.0,
    "max_grad_norm": 10.0,
    "max_weight_sync_delay": 0,
    "num_workers": 1,
    "num_envs_per_worker": 4,
}
CARTPOLE: Preset = {
    **SMALL,
    "encoder_mlp_layers": (256, 256),
    "batch_size": 64,
    "learning_rate": 1e-3,
    "lr_schedule": "linear",
    "gamma": 0.99,
    "n_steps": 3,
    "learning_starts": 1000,
    "replay_capacity": 100_000,
    "replay_ratio": 32.0,
    "target_update_interval": 200,
    "train_for_env_steps": 60_000,  # where the rate reaches 0
}
LUNAR_LANDER: Preset = {
    **CARTPOLE,
    "batch_size": 128,
    "reward_scale": 0.1,  # errors of about 1, where the Huber loss becomes linear
    "gamma": 0.995,
    "replay_capacity": 100_000,  # old steps come from policies that crash
    "replay_ratio": 24.0,
    "target_update_interval": 600,
    "learning_starts": 5000,
    "num_envs_per_worker": 8,
    "train_for_env_steps": 300_000,
}
# The paper makes 20 updates of 512 steps a second from hundreds of actors. One machine learns more per step with
# smaller batches and a higher rate: with the paper's values Pong learned nothing in 400,000 steps.
ATARI: Preset = {
    "use_rnn": False,
    "rollout": 32,
    "batch_size": 128,
    "learning_rate": 5e-4,
    "adam_eps": 1.5e-4,
    "max_grad_norm": 40.0,
    "n_steps": 3,
    "priority_alpha": 0.6,
    "priority_beta": 0.4,
    "priority_beta_final": 0.4,
    "target_update_interval": 500,
    "learning_starts": 10_000,
    "replay_capacity": 200_000,
    "replay_ratio": 8.0,
    "max_weight_sync_delay": 100,
    "normalize_images": False,
}

NUMBERS: Preset = {name: CARTPOLE[name] for name in ("use_rnn", "batch_size", "learning_rate", "learning_starts")} | {
    "rollout": 16,
    "replay_capacity": 200_000,
    "target_update_interval": 500,
}
IMAGES: Preset = {"use_rnn": False, "learning_starts": 10_000, "replay_capacity": 200_000}

PRESETS: dict[str, Preset] = {
    "toy": {"use_rnn": False},
    "CartPole": CARTPOLE,
    "Acrobot": {**CARTPOLE, "train_for_env_steps": 100_000},
    "LunarLander": LUNAR_LANDER,
    "atari": ATARI,
    "vizdoom": IMAGES,
}
"""Name of a preset -> flags of learning. Other known environments use `NUMBERS`."""
