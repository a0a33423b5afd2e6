"""What an environment that is in no preset is trained with: its kind of observation decides, once it is known."""

from collections.abc import Mapping, Set
from dataclasses import replace
from math import prod

from algorithms.models.config import MLP, ModelConfig, encoder_names
from algorithms.run.config import FLAGS_BY_PART, Config, check
from envs.presets import preset, preset_of_images, preset_of_numbers
from envs.spec import MASK_KEY, EnvSpec
from utils.command_line import words_of
from utils.values import shown

ORIGIN = "kind of observation"
"""The name of this source of flags."""


def completed(config: Config, spec: EnvSpec) -> Config:
    """The configuration with what the kind of observation decides in place of what nobody has given.

    Args:
        config: of a run; flags that are given, or that a preset or a saved run has, stay as they are.
        spec: of its environment.

    Raises:
        UsageError: flags that are right alone are wrong together.
    """
    if preset(config.env.env, "cpu") is not None:
        return config
    by_kind = _by_kind(config, spec)
    parts = {
        part: replace(getattr(config, part), **chosen)
        for part, flags in FLAGS_BY_PART.items()
        if (chosen := {name: by_kind[name] for name in by_kind.keys() & config.undecided & flags.keys()})
    }
    config = replace(config, **parts, undecided=frozenset(), by_kind=by_kind)
    if parts:
        check(config)
    return config


def chosen_in(config: Config, undecided: Set[str]) -> dict[str, object]:
    """What was chosen for a completed configuration in which these flags were undecided."""
    return {name: value for name, value in config.by_kind.items() if name in undecided}


def origins_in(config: Config, undecided: Set[str]) -> dict[str, str]:
    """Where those flags come from."""
    return dict.fromkeys(chosen_in(config, undecided), ORIGIN)


def told(config: Config, undecided: Set[str]) -> str:
    """The same in one line; empty if nothing was."""
    values = chosen_in(config, undecided)
    if not values:
        return ""
    memory = "" if config.model.use_rnn else "; --use_rnn=True adds a memory"
    words = " ".join(f"{name}={words_of(value)}" for name, value in values.items())
    what = "numbers and no image" if "encoder_mlp_layers" in config.by_kind else "images"
    return f"{ORIGIN}: no preset for {shown(config.env.env)}, which shows {what}: {words}{memory}"


def _by_kind(config: Config, spec: EnvSpec) -> Mapping[str, object]:
    """Flags for what the environment shows and takes."""
    inputs = {key: observation for key, observation in spec.observations.items() if key != MASK_KEY}
    encoder = ModelConfig() if config.model.encoder_custom else config.model
    continuous, rollout = any(part.kind == "gaussian" for part in spec.action.parts), config.learning.rollout
    if any(name != MLP for name in encoder_names(encoder, inputs).values()):
        return preset_of_images(continuous=continuous, rollout=rollout)
    return preset_of_numbers(
        sum(prod(observation.shape) for observation in inputs.values()),
        continuous=continuous,
        remembers=config.model.use_rnn and "use_rnn" not in config.undecided,
        rollout=rollout,
    )
