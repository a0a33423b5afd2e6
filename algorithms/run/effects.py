"""Given flags that have no effect; known once the environment exists."""

from collections.abc import Iterator, Mapping
from math import isfinite

from appo.algorithms.models.config import MLP_RESIDUAL, MLPS, ModelConfig, encoder_names
from appo.algorithms.run.algorithms import ALGORITHMS
from appo.algorithms.run.config import Config
from appo.algorithms.runtime.config import WITHOUT_EFFECT
from appo.envs.spec import MASK_KEY, SINGLE_KEY, EnvSpec

FEATURES = {
    "activations": f"encoders other than {MLP_RESIDUAL}",
    "actors": "algorithms that play environments",
    "agents": "environments of several agents",
    "alone": "environments of one agent",
    "between": "actions between two finite bounds",
    "bounded": "actions with a finite bound",
    "central": "--inference=central",
    "continuous_as_bins=None": "runs without --continuous_as_bins",
    "critic": "networks with a critic",
    "fresh": "algorithms that learn from new trajectories alone",
    "images": "environments that show images",
    "memory": "networks with a memory",
    "numbers": "actions that are numbers",
    "pixels": "environments that show images of bytes",
    "policy_mapping=": "runs without --policy_mapping",
    "processes": "runs with processes, not --inference=serial",
    "reals": "actions that are drawn as numbers",
    "rounds": "algorithms that learn from batches of several actors",
    "returns": "algorithms that estimate returns",
    "scratch": "runs without --init_from",
    "single": "environments with a single observation, not normalized by --normalize_input",
    "track=*wandb*": "--track=wandb",
    "vectors": "environments that show numbers",
}
"""Words of `Flag.needs` that are no flags -> their names in a message."""


def features_of(config: Config, spec: EnvSpec, placement: str, *, remembers: bool) -> dict[str, object]:
    """Return the values that decide whether flags have an effect: all flags, and each feature as on or off."""
    algorithm, action = config.algorithm, spec.action
    bounds = list(zip(action.low or (), action.high or (), strict=True))
    inputs = {key: observation for key, observation in spec.observations.items() if key != MASK_KEY}
    encoders = set(encoder_names(ModelConfig() if config.model.encoder_custom else config.model, inputs).values())
    features: dict[str, object] = {
        "activations": encoders != {MLP_RESIDUAL},
        "actors": algorithm.needs_actors,
        "agents": spec.num_agents > 1,
        "alone": spec.num_agents == 1,
        "between": any(action.is_squashed) or any(isfinite(low) and isfinite(high) for low, high in bounds),
        "bounded": any(action.is_squashed) or any(isfinite(low) or isfinite(high) for low, high in bounds),
        "central": placement == "central",
        "critic": algorithm.values == "critic",
        "fresh": algorithm.needs_actors and not algorithm.replays,
        "images": bool(encoders - MLPS),
        "memory": remembers,
        "numbers": any(part.is_real or part.kind == "bins" for part in action.parts),
        "pixels": any(one.dtype == "uint8" and len(one.shape) == 3 for one in inputs.values()),
        "processes": placement != "serial",
        "reals": any(action.is_real),
        "rounds": algorithm.needs_actors and not algorithm.whole_rollouts,
        "returns": algorithm.learns_from_rewards,
        "scratch": not config.run.init_from,
        "single": SINGLE_KEY in inputs and not config.model.normalizes(inputs[SINGLE_KEY]),
        "vectors": bool(encoders & MLPS),
    }
    return config.to_flat() | features


SIZES = ("batch_size", "ppo_epochs")
"""Flags whose common values decide about device and number of environments, even beside `--per_policy`."""


def without_effect(config: Config, features: Mapping[str, object]) -> Iterator[str]:
    """Yield a line about every given flag that changes nothing for any policy of this run.

    Flags of network and learning are skipped where a part of the network or the algorithm is the user's: user code may
    read them.
    """
    owned = {"model": bool(config.model.encoder_custom), "learning": config.run.algo not in ALGORITHMS}
    policies = [{**features, **own} for own in config.differences]
    for part, flags in config.table.by_part.items():
        for name in sorted(config.given & flags.keys()):
            if name in WITHOUT_EFFECT:
                yield f"--{name} has no effect: {WITHOUT_EFFECT[name]}"
            elif name in config.differences[0] and not config.population.with_pbt and name not in SIZES:
                yield f"--{name} has no effect: --per_policy gives every policy its own"
            elif not owned.get(part) and all(missing := [flags[name].missing(policy) for policy in policies]):
                words = str(missing[0]).replace(">", " above ").split("|")
                yield f"--{name} has no effect: it is for {' or '.join(FEATURES.get(w, f'--{w}') for w in words)}"
