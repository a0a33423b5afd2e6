"""Presets of SAC by the names of `envs.presets`; given flags replace a preset's values.

docs/sac.md lists the measured presets. Sources: CleanRL's `sac_continuous_action.py` for MuJoCo,
rl-baselines3-zoo (hyperparams/sac.yml) for all others.
"""

from appo.envs.family import Preset
from appo.envs.presets import MUJOCO_NAMES

ACTING: Preset = {
    "action_distribution": "tanh_gaussian",
    "adaptive_stddev": True,
    "initial_stddev": 1.0,
    "use_rnn": False,
    "nonlinearity": "relu",
    "policy_initialization": "torch_default",
    "save_replay": True,  # without its replay a resumed run starts over
}
NUMBERS: Preset = {
    **ACTING,
    "encoder_mlp_layers": (256, 256),
    "normalize_input": False,
    "num_workers": 1,
    "num_envs_per_worker": 1,
    "rollout": 4,
    "max_weight_sync_delay": 4,  # a trajectory; weights after every update cost a sixth of the speed of small networks
}
"""Defaults of flags, a network of 256x256 and one environment: every step is followed by an update."""
IMAGES: Preset = {**ACTING, "rollout": 8, "replay_capacity": 100_000, "num_workers": 1, "num_envs_per_worker": 1}
"""Trajectories of several steps store each frame once."""

PRESETS: dict[str, Preset] = {
    **dict.fromkeys(
        MUJOCO_NAMES,
        NUMBERS | {"categorical_critics": 128, "critic_learning_rate": 3e-4, "train_for_env_steps": 1_000_000},
    ),
    "Pendulum": NUMBERS
    | {
        "encoder_mlp_layers": (64, 64),
        "learning_rate": 1e-3,
        "learning_starts": 1000,
        "replay_capacity": 100_000,
        "train_for_env_steps": 20_000,
    },
    "MountainCarContinuous": NUMBERS
    | {
        "gamma": 0.9999,
        "target_rate": 0.01,
        "learn_temperature": False,  # a learned one falls before the goal is found for the first time
        "temperature": 0.1,
        "n_steps": 8,
        "rollout": 8,
        "replay_capacity": 100_000,
        "train_for_env_steps": 50_000,
    },
    "LunarLanderContinuous": NUMBERS
    | {"learning_rate": 7.3e-4, "target_rate": 0.01, "learning_starts": 10_000, "train_for_env_steps": 300_000},
    **dict.fromkeys(
        ("BipedalWalker", "BipedalWalkerHardcore"),
        NUMBERS
        | {
            "learning_rate": 7.3e-4,
            "critic_learning_rate": 7.3e-4,
            "gamma": 0.98,
            "target_rate": 0.02,
            "learning_starts": 10_000,
            "replay_capacity": 300_000,
            "train_for_env_steps": 500_000,
        },
    ),
}
"""Name of a preset -> flags of learning. Other known environments use `NUMBERS`."""

SAMPLE_EFFICIENT: dict[str, Preset] = {
    "Pendulum": PRESETS["Pendulum"],
    "InvertedDoublePendulum": NUMBERS
    | {
        "encoder_mlp_layers": (64, 64),
        "learning_rate": 1e-3,
        "learning_starts": 1000,
        "replay_capacity": 100_000,
        "train_for_env_steps": 100_000,
    },
}
"""Presets for `--preset=sample_efficient`, where SAC needs fewer env steps than the published returns of PPO."""
