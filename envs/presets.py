"""Presets are working settings of environment and network; a command line, config file or saved run overrules them.

The settings of learning stand under the same names in the `presets.py` of every algorithm; modules of families have
APPO's.
"""

import functools
import re

from appo.envs import families
from appo.envs.family import GAUSSIAN_MLP, MLP, SHARED_LEARNING, FamilyPreset, Preset
from appo.envs.given import unnumbered

MUJOCO_NAMES = (
    "Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum", "InvertedPendulum",
    "Pusher", "Reacher", "Swimmer", "Walker2d",
)  # fmt: skip

# Where policies act in [-1, 1]. A free deviation moves by the learning rate at most, whatever the rest learns: from 1,
# it cost 8 % of the best return of a single right number after 100,000 steps, from 0.4 less than 5 %. HalfCheetah of
# APPO returned 1,570 after 60 s from 1, and 3,915 from 0.4.
SCALED: Preset = {"initial_stddev": 0.4}
PRESETS: dict[str, Preset] = {
    **dict.fromkeys(("CartPole", "Acrobot", "MountainCar", "FrozenLake", "CliffWalking", "Taxi", "LunarLander"), MLP),
    **dict.fromkeys(("MountainCarContinuous", "LunarLanderContinuous"), GAUSSIAN_MLP),
    "Pendulum": GAUSSIAN_MLP | {"initial_stddev": 0.5},  # 1 in units of the environment
    **dict.fromkeys(("BipedalWalker", "BipedalWalkerHardcore", *MUJOCO_NAMES), GAUSSIAN_MLP | SCALED),
}
"""Presets of single environments by their name."""

DISCOUNTS = {
    **dict.fromkeys(("MountainCar", "MountainCarContinuous", "LunarLander", "LunarLanderContinuous"), 0.999),
    # Reacher's default preset of APPO, one seed after 1 M steps: -4.4, and -9.5 with 0.99.
    **dict.fromkeys(("Pendulum", "Reacher"), 0.9),
}
"""`--gamma` of single environments that need another value than the default of the flag."""

FIRST_VERSIONS = {"include_cfrc_ext_in_observation": 5}
"""Argument of environments in presets -> first version of the environments that takes the argument."""
NAMES_IN_ENVPOOL = {"include_cfrc_ext_in_observation": "use_contact_force"}
"""Argument of environments in presets -> the same argument of envpool's environments of every version."""

WITHOUT_MODULE: dict[str, FamilyPreset] = {
    "toy": FamilyPreset(r"toy/"),  # for tests, which count on what every flag is by default
    "pursuit": FamilyPreset(
        r"(pettingzoo[./])?sisl[./]pursuit[-_]v\d",
        # 7x7 cells with counts of walls, allies and opponents, seen by each of 8 agents that play as one policy.
        network={"encoder_type": "mlp", "encoder_mlp_layers": (128, 128), "use_rnn": False},
        # A step of the game takes 100 times longer than learning from the step, so many passes over little data pay.
        learning=SHARED_LEARNING
        | {"rollout": 32, "batch_size": 512, "num_batches_per_iteration": 2, "ppo_epochs": 5, "learning_rate": 7e-4},
    ),
}
"""Presets of families that have no module in `envs/families`."""

# The network that an environment without a preset begins with: here, where it shows numbers and choices only. What it
# is worth together with the settings of learning, the algorithm's `presets.py` says.
NUMBERS: Preset = {"encoder_mlp_layers": (64, 64), "nonlinearity": "tanh", "use_rnn": False}
# And where it shows images, alone or beside others.
IMAGES: Preset = {"normalize_images": True, "use_rnn": False}
CONTINUOUS: Preset = {"adaptive_stddev": False}
BY_KIND = frozenset(NUMBERS | IMAGES | CONTINUOUS | SCALED | {"hidden_size": 0})
"""Flags that the kind of observation may decide."""
MANY_NUMBERS = 64
"""Numbers of an observation beyond which layers are twice as large."""


@functools.cache
def by_family() -> dict[str, FamilyPreset]:
    """Return the presets of all families, by the name of the family's module."""
    declared = families.modules().items()
    return WITHOUT_MODULE | {name: module.FAMILY.preset for name, module in declared if module.FAMILY.preset}


def find_name(env_id: str) -> str | None:
    """Return the name of the preset of an environment, as in `--env`; None without a preset.

    A module (`package.module:Id`) and a version (`-v1`) are ignored; single environments match by the whole name. A
    class of a module (`package.module:Pendulum`) has no preset, whatever its name. Behind a foreign module, ids are not
    those of a family that does not claim them.
    """
    env_id = unnumbered(env_id)
    if _is_class(env_id):
        return None
    module, _, env = env_id.rpartition(":")
    name = re.sub(r"-v\d+$", "", env)
    if name in PRESETS:
        return name
    presets = by_family().items()
    return next((key for key, one in presets if re.match(one.ids, env_id) or _has_id(key, one, module, env)), None)


def _has_id(name: str, preset: FamilyPreset, module: str, env: str) -> bool:
    """Return whether an id of a module is one of a family; others register common words too."""
    family = families.modules()[name].FAMILY if name not in WITHOUT_MODULE else None
    claims = family is None or family.claims_ids or module.partition(".")[0] in ("", family.package)
    return claims and re.match(preset.ids, env) is not None


def public_name(env_id: str) -> str:
    """Return the name of an environment without module and version; a game of Atari has the prefix `ALE/`."""
    if _is_class(unnumbered(env_id)):
        return env_id
    name = re.sub(r"(NoFrameskip|Deterministic)?-v\d+$", "", unnumbered(env_id).rpartition(":")[2])
    return f"ALE/{name}" if find_name(env_id) == "atari" and "/" not in name else name


def _is_class(env_id: str) -> bool:
    return re.search(r":\w+$", env_id) is not None  # ids of environments have versions or folders


def env_preset(name: str, device: str) -> Preset:
    """Return flag -> value of the environment and the network."""
    if name in PRESETS:
        return dict(PRESETS[name])
    preset = by_family()[name]
    return preset.network | (preset.network_on_cpu if device == "cpu" else {})


def for_version(preset: Preset, env_id: str) -> Preset:
    """Return a preset without the arguments that the version in an id is too old for; an id without version is new."""
    version = re.search(r"-v(\d+)$", unnumbered(env_id))
    arguments = preset.get("env_kwargs")
    if version is None or not isinstance(arguments, dict):
        return preset
    if re.match(r"envpool[:/]", unnumbered(env_id)):
        taken = {NAMES_IN_ENVPOOL.get(name, name): x for name, x in arguments.items()}
    else:
        taken = {name: x for name, x in arguments.items() if FIRST_VERSIONS.get(name, 0) <= int(version[1])}
    others = {name: x for name, x in preset.items() if name != "env_kwargs"}
    return {**others, "env_kwargs": taken} if taken else others


def discount_preset(name: str) -> Preset:
    """Return the flag of the discount where the environments of a preset need another value than the default."""
    family = by_family().get(name)
    gamma = DISCOUNTS.get(name) if family is None else family.discount
    return {} if gamma is None else {"gamma": gamma}


def family_learning(name: str, device: str) -> Preset:
    """Return flag -> value of learning with APPO for the name of a family; {} for single environments."""
    family = by_family().get(name)
    return {} if family is None else family.learning | (family.learning_on_cpu if device == "cpu" else {})


def network_for_numbers(count: int, *, continuous: bool, remembers: bool) -> Preset:
    """Return flag -> value of the network for an unknown environment that shows numbers and choices only.

    Args:
        count: numbers in an observation; a choice counts as often as it has values.
        continuous: whether actions, or parts of actions, are numbers.
        remembers: whether the flags ask for a memory.
    """
    units = 128 if count > MANY_NUMBERS else 64
    memory = {"hidden_size": units} if remembers else {}
    return NUMBERS | {"encoder_mlp_layers": (units, units)} | memory | (CONTINUOUS if continuous else {})


def network_for_images(*, continuous: bool) -> Preset:
    """Return flag -> value of the network for an unknown environment that shows images, alone or with other arrays."""
    return IMAGES | (CONTINUOUS if continuous else {})
