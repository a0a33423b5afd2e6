"""Recipes of PPO for `--preset=sample_efficient`, by their sources; every algorithm adds the sizes of its batches.

- zoo: Raffin's tuned agents, rl-baselines3-zoo, hyperparams/ppo.yml and benchmark.md.
- tianshou: Weng et al. 2022 (arXiv:2107.14171), examples/mujoco.
- rl_games: configs/mujoco/*_envpool.yaml and docs/CONFIG_PARAMS.md.
- CleanRL: Huang et al. 2022 (arXiv:2111.08819), ppo_continuous_action.py; SLM-Lab 5: docs/BENCHMARKS.md.
"""

from collections.abc import Mapping

from appo.envs.family import Preset

SEPARATE: Preset = {"actor_critic_share_weights": False, "policy_init_gain": 2**0.5}
"""Actor and critic share no layers (zoo, tianshou, CleanRL)."""

CARTPOLE: Preset = {
    "ppo_epochs": 20, "gamma": 0.98, "gae_lambda": 0.8, "learning_rate": 1e-3, "lr_schedule": "linear",
    "ppo_clip_ratio": 0.2, "exploration_loss_coeff": 0.0,
}  # fmt: skip
ACROBOT: Preset = {"ppo_epochs": 4, "gamma": 0.99, "gae_lambda": 0.94, "exploration_loss_coeff": 0.0}
LUNAR_LANDER: Preset = {"ppo_epochs": 4, "gamma": 0.999, "gae_lambda": 0.98, "exploration_loss_coeff": 0.01}
PENDULUM: Preset = {"ppo_epochs": 10, "gamma": 0.9, "learning_rate": 1e-3}
BIPEDAL_WALKER: Preset = {
    "initial_stddev": 1.0, "ppo_epochs": 10, "gamma": 0.999, "ppo_clip_ratio": 0.18, "learning_rate": 3e-4,
}  # fmt: skip
SWIMMER: Preset = {
    "initial_stddev": 1.0, "ppo_epochs": 10, "gamma": 0.9999, "gae_lambda": 0.98, "learning_rate": 6e-4,
}  # fmt: skip
HALF_CHEETAH: Preset = {
    "encoder_mlp_layers": (256, 256), "nonlinearity": "relu", "policy_initialization": "torch_default",
    "initial_stddev": 0.1353,  # exp(-2)
    "ppo_epochs": 20, "gamma": 0.98, "gae_lambda": 0.92, "learning_rate": 2.0633e-5, "ppo_clip_ratio": 0.1,
    "exploration_loss_coeff": 0.000401762, "value_loss_coeff": 0.58096, "max_grad_norm": 0.8,
}  # fmt: skip
# The zoo solves tasks of MiniGrid without a memory and without a bonus for entropy.
MINIGRID: Preset = {
    "use_rnn": False, "encoder_mlp_layers": (64, 64), "nonlinearity": "tanh",
    "ppo_epochs": 10, "learning_rate": 2.5e-4, "exploration_loss_coeff": 0.0,
}  # fmt: skip
TIANSHOU: Preset = {
    "initial_stddev": 0.6065,  # exp(-0.5)
    "ppo_epochs": 10, "learning_rate": 3e-4, "lr_schedule": "linear", "value_loss_coeff": 0.25,
}  # fmt: skip
WITHOUT_CONTACT_FORCES: Preset = {"env_kwargs": {"include_cfrc_ext_in_observation": False}}
"""Ant shows 27 numbers instead of 105, as the older versions behind the published returns did."""

AS_PUBLISHED_ATARI: Preset = {"episodic_life": True, "env_kwargs": {"use_fire_reset": True}}
LAMBDA_OF_GAMES: Mapping[str, float] = {
    **dict.fromkeys(("ALE/Breakout", "ALE/DemonAttack", "ALE/Gopher", "ALE/Kangaroo", "ALE/KungFuMaster"), 0.7),
    **dict.fromkeys(("ALE/Enduro", "ALE/Hero", "ALE/MsPacman", "ALE/Pong"), 0.85),
    "ALE/*": 0.95,
}
"""Games of Atari -> mixing of n-step estimates (SLM-Lab 5)."""

MINIGRID_STEPS: Mapping[str, int] = {
    **dict.fromkeys(("MiniGrid-DoorKey-5x5", "MiniGrid-Unlock"), 100_000),
    "MiniGrid-KeyCorridorS3R1": 500_000,
    "MiniGrid-RedBlueDoors-6x6": 1_000_000,
    "MiniGrid-FourRooms": 5_000_000,
}
STEPS: Mapping[str, int] = {
    "CartPole": 100_000,
    "MountainCarContinuous": 100_000,
    "Pendulum": 100_000,
    "Humanoid": 3_000_000,
    "VizdoomDefendCenter": 4_000_000,  # of agents: a quarter
    "BipedalWalker": 5_000_000,
    "dm_control/*": 8_000_000,
    **MINIGRID_STEPS,
    **dict.fromkeys(LAMBDA_OF_GAMES, 10_000_000),  # likewise
}
"""Pattern of names -> env steps of a published return; 1 M for others."""


def with_steps(presets: Mapping[str, Preset]) -> dict[str, Preset]:
    """Return presets by patterns of names, with the env steps of published returns as the budget."""
    return {name: {**preset, "train_for_env_steps": STEPS.get(name, 1_000_000)} for name, preset in presets.items()}
