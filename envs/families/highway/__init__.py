"""highway-env's environments are made by gymnasium; pictures need no screen."""

from typing import Any

from appo.envs.config import EnvConfig
from appo.envs.family import MLP, SHARED_LEARNING, AnyEnv, Family, FamilyPreset, Registration, importing

NAMES = r"(highway|merge|roundabout|parking|intersection|racetrack|u-turn|two-way|exit|lane-keeping)(-\w+)*"

FAMILY = Family(
    "highway-env",
    package="highway_env",
    extra="highway",
    examples=("highway-fast-v0", "merge-v0", "intersection-multi-agent-v1"),
    treatment='unchanged; settings go through `--env_kwargs \'{"config": {"lanes_count": 2}}\'`',
    ids=rf"{NAMES}-v\d",
    claims_ids=False,
    names=NAMES,
    entry_points=r"highway_env\.",
    register=importing("highway_env"),
    # Discount, network, learning rate, minibatches and epochs of highway-env's own PPO example. A step of the game
    # takes 100 times longer than learning from the step, so many passes over little data pay.
    preset=FamilyPreset(
        ids=r"(highway|merge|roundabout|intersection|two-way|exit|u-turn)(-(fast|generic))?-v\d",
        network=MLP | {"encoder_mlp_layers": (256, 256)},
        discount=0.8,
        learning=SHARED_LEARNING
        | {"rollout": 16, "batch_size": 64, "num_batches_per_iteration": 4, "ppo_epochs": 10, "learning_rate": 5e-4},
    ),
)


def make_single(registration: Registration, config: EnvConfig, arguments: dict[str, Any]) -> AnyEnv:
    """Make one road."""
    from appo.envs.families.highway.drawing import DrawnInMemory
    from appo.envs.wrappers.making import make_with_flags

    return make_with_flags(registration, config, arguments, DrawnInMemory)
