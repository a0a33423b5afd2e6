"""Flags and tolerances of the checks."""

from collections.abc import Mapping

from benchmarks.shared.workloads import WORKLOADS

# |difference| / (1 + |value|). Convolutions and recurrent cores of cuDNN multiply with 10 bits of mantissa, so passes
# differ after a change in the last bit of an input, and a captured pass differs from a plain pass of another size.
FLOAT32, TF32 = 1e-4, 2e-2
TRAINED = 0.02  # |difference| / largest movement of a weight, after some updates
GROUPS, SLOTS, ROWS, ROLLOUT = 3, 2, 24, 8

TINY = {"encoder_mlp_layers": 24, "hidden_size": 24, "normalize_input": True, "normalize_returns": True}
ODD = "gru of odd size"  # vectors begin off the alignment of cuDNN
MODELS = {
    "mlp": TINY | {"use_rnn": False},
    "gru": TINY | {"use_rnn": True},
    ODD: TINY | {"use_rnn": True, "hidden_size": 21},
}
LIMITS = {"mlp": FLOAT32, "gru": TF32, ODD: TF32}
WHOLE = {
    "algo": "PPO",
    "batch_size": ROLLOUT * 32,
    "num_batches_per_iteration": 1,
    "ppo_epochs": 1,
    "normalize_advantages": "off",
}
STREAM = WHOLE | {"microbatch_size": ROLLOUT * 4}
REPLAY = {
    "algo": "APEX",
    "batch_size": 32,
    "num_batches_per_iteration": None,  # Ape-X has no such flag
    "normalize_returns": None,
    "learning_starts": 64,
    "replay_capacity": 4096,
    "replay_ratio": 1,
    "max_weight_sync_delay": 1,
}
CARTPOLE = {"env": "CartPole-v1", "rollout": ROLLOUT, "batch_size": ROLLOUT * 32, "num_batches_per_iteration": 2}
PONG = {"env": "ALE/Pong-v5"}

Flags = Mapping[str, object]
WORKLOAD_FLAGS = {name: {"env": one.env, **one.flags} for name, one in WORKLOADS.items()}
FIGURES: dict[str, tuple[str | None, Flags]] = {
    "CartPole, vector, batch 16,384": (None, WORKLOAD_FLAGS["cartpole_vector"]),
    "Pong, 1 epoch": ("ale_py", WORKLOAD_FLAGS["pong"] | {"num_envs_per_worker": 16}),
    "Pong, 4 epochs": ("ale_py", WORKLOAD_FLAGS["pong_4_epochs"]),
    "VizDoom, GRU of 512": ("vizdoom", WORKLOAD_FLAGS["vizdoom"]),
    "HalfCheetah, --device=auto": ("mujoco", WORKLOAD_FLAGS["halfcheetah"] | {"device": "auto"}),
    "HalfCheetah": ("mujoco", WORKLOAD_FLAGS["halfcheetah"]),
}
"""Figure -> required package, and flags."""
