"""MiniGrid and BabyAI show symbols as one-hot vectors and missions as words."""

from typing import Any

from appo.envs.config import EnvConfig
from appo.envs.family import MANY_STEPS, SHARED_LEARNING, AnyEnv, Family, FamilyPreset, Registration, importing

FAMILY = Family(
    "MiniGrid",
    package="minigrid",
    extra="minigrid",
    examples=("MiniGrid-Empty-5x5-v0", "BabyAI-GoToRedBall-v0"),
    treatment="symbols as one-hot vectors, the mission as hashed words; pixels and flat views unchanged",
    ids=r"MiniGrid-|BabyAI-",
    prefixes=("MiniGrid-", "BabyAI-"),
    names=r"(blockedunlockpickup|distshift|doorkey|dynamic-obstacles|empty|fetch|fourrooms|gotodoor|gotoobject|"
    r"keycorridor|lavacrossing|lavagap|lockedroom|memory|multiroom|obstructedmaze|playground|putnear|redbluedoors|"
    r"simplecrossing|unlock|unlockpickup|wfc)(s?\d.*|-.*)?",
    register=importing("minigrid"),
    harmless={
        **dict.fromkeys(("size", "width", "height", "room_size", "tile_size", "agent_view_size"), 64.0),
        **dict.fromkeys(("num_rows", "num_cols", "num_quarters", "num_rooms_visited", "num_doors"), 32.0),
        **dict.fromkeys(("num_crossings", "n_obstacles", "num_dists", "num_objs", "agent_start_dir"), 64.0),
        **dict.fromkeys(("see_through_walls", "random_length", "highlight", "key_in_box", "blocked"), 1.0),
        "max_steps": MANY_STEPS,
    },
    preset=FamilyPreset(
        ids=r"MiniGrid-|BabyAI-",
        # 7x7 symbols, not pixels: too small for strided convolutions, and partial views need a memory. Most symbols
        # hardly ever change. Normalization makes the others stand out; their joint meaning is learned several times
        # faster.
        network={
            "encoder_type": "mlp",
            "encoder_mlp_layers": (128, 128),
            "hidden_size": 128,
            "normalize_images": True,
            "use_rnn": True,
        },
        learning=SHARED_LEARNING
        | {"rollout": 32, "batch_size": 512, "num_batches_per_iteration": 2, "ppo_epochs": 3, "learning_rate": 1e-3},
    ),
)


def make_single(registration: Registration, config: EnvConfig, arguments: dict[str, Any]) -> AnyEnv:
    """Make one grid world (UsageError: frames of several arrays are to be stacked)."""
    from appo.envs.families.minigrid.symbols import with_symbols
    from appo.envs.wrappers.making import make_with_flags

    return make_with_flags(registration, config, arguments, with_symbols)
