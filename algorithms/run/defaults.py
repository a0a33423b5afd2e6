"""Flags that depend on the environment: defaults by its kind of observation."""

from collections.abc import Mapping, Set
from dataclasses import replace
from math import prod

from appo.algorithms.models.config import ENCODERS, MLPS, ModelConfig, encoder_names, is_large, is_picture
from appo.algorithms.run.algorithms import find_preset
from appo.algorithms.run.config import Config, check, without_excluded
from appo.algorithms.runtime.algorithm import Algorithm
from appo.algorithms.runtime.config import NO_PRESET
from appo.envs import presets as env_presets
from appo.envs.presets import find_name
from appo.envs.spec import MASK_KEY, EnvSpec
from appo.utils.command_line import words_of
from appo.utils.errors import UsageError
from appo.utils.values import shown

ORIGIN = "kind of observation"
"""Name of this source of flags."""
COUNTS = frozenset({"num_workers", "num_envs_per_worker", "worker_num_splits"})
"""Flags of sampling that may depend on the kind: processes are planned when the kind is known."""


def flags_by_kind(algorithm: Algorithm) -> frozenset[str]:
    """Return the names of the flags that the kind of observation may decide."""
    kinds = [
        algorithm.preset_by_kind(images=images, continuous=continuous, rollout=1)
        for images in (False, True)
        for continuous in (False, True)
    ]
    return env_presets.BY_KIND.union(*kinds)


def flags_by_preset(env: str, algorithm: Algorithm, preset: str) -> Set[str]:
    """Return the names of the flags that the preset, or else the kind of observation, may give another value."""
    known = find_preset(env, "cpu", algorithm, preset)
    return flags_by_kind(algorithm) if known is None else known.keys()


def completed(config: Config, spec: EnvSpec) -> Config:
    """Return the configuration with every open flag decided by the kind of observation.

    Flags of the environment may be among the decided flags. The caller then makes the environment again if `env`
    changed; the kind stays the kind of the first environment.

    Args:
        config: configuration of a run; flags from the user, a preset or a saved run stay.
        spec: spaces of the environment.

    Raises:
        UsageError: flags contradict each other, or the algorithm decides a flag that is read before this.
    """
    has_preset = config.run.preset != NO_PRESET and find_name(config.env.env) is not None
    if has_preset or config.by_kind:
        return config
    by_kind, by_part = without_excluded(config.to_flat(), _by_kind(config, spec)), config.table.by_part
    allowed = {name for part in ("env", "learning", "model") for name in by_part[part]} - {"env"} | COUNTS
    if late := sorted(by_kind.keys() - allowed):
        what = "is read before the environment is made" if late[0] in config.table.flags else "is none of its flags"
        raise UsageError(f"--algo={config.run.algo}: its preset_by_kind chooses {late[0]}, which {what}")
    parts = {
        part: replace(getattr(config, part), **chosen)
        for part, flags in by_part.items()
        if (chosen := {name: by_kind[name] for name in by_kind.keys() & config.undecided & flags.keys()})
    }
    config = replace(config, **parts, undecided=frozenset(), by_kind=by_kind)
    if parts:
        check(config)
    return config


def learned_spec(config: Config, played: EnvSpec | None) -> EnvSpec:
    """Return the spec that networks are made for: of the datasets in runs without actors, else of the environment.

    Raises:
        UsageError: the datasets cannot be read, or spaces of the environment differ from the datasets'.
    """
    known = config.algorithm.find_spec(config.learning, config.env)
    if known is None:
        assert played is not None, "a run without an environment has an algorithm that knows what it learns from"
        return played
    frames = known.frames_per_step or (played.frames_per_step if played else 1)
    if played is None:
        return replace(known, frames_per_step=frames)
    for what, own, its in (
        ("observations", known.observations, played.observations), ("actions", known.action, played.action)
    ):  # fmt: skip
        if own != its:
            raise UsageError(f"--env={shown(config.env.env)}: its {what} have another space than those of --input")
    if frames != played.frames_per_step:
        there = f"and {frames} in --input"
        raise UsageError(f"--env={shown(config.env.env)}: a step is {played.frames_per_step} frames, {there}")
    # Networks read keys in the order of the environment, which they will be played in.
    return replace(known, observations=played.observations, frames_per_step=frames)


def chosen_in(config: Config, undecided: Set[str]) -> dict[str, object]:
    """Return the decided values of a completed configuration that had these flags open."""
    return {name: value for name, value in config.by_kind.items() if name in undecided}


def told(config: Config, undecided: Set[str], spec: EnvSpec | None = None) -> str:
    """Return one log line with the decided flags; empty without any."""
    values = chosen_in(config, undecided)
    if config.model.encoder_custom:  # it stands in the place of the encoder that these describe
        values = {name: value for name, value in values.items() if not name.startswith("encoder_")}
    if not values:
        return ""
    can_remember = not config.model.use_rnn and (
        not config.algorithm.replays or hasattr(config.learning, "batch_replay")
    )
    memory = "; --use_rnn=True adds a memory" * can_remember
    words = " ".join(f"{name}={words_of(value)}" for name, value in values.items())
    what = "numbers and no image" if "encoder_mlp_layers" in config.by_kind else "images"
    what += f" ({decided})" if spec and (decided := _decisive(config, spec)) else ""
    whom = shown(config.env.env) if config.env.env else "datasets"
    return f"{ORIGIN}: no preset for {whom}, which show{'s' * bool(config.env.env)} {what}: {words}{memory}"


def _decisive(config: Config, spec: EnvSpec) -> str:
    """Return the keys with three dimensions that count as images, or are close to images; empty without such keys."""
    model, shown = ModelConfig() if config.model.encoder_custom else config.model, spec.observations
    large = {key: one for key, one in shown.items() if key != MASK_KEY and is_large(one, ENCODERS[0].min_side)}
    images, others = list[str](), list[str]()
    for key, encoder in encoder_names(model, large).items() if large else ():
        if encoder not in MLPS or not is_picture(large[key]):
            (others if encoder in MLPS else images).append(f"{key} {list(large[key].shape)}")
    if images:
        return f"by key {', '.join(images)}"
    channels = "not 1 to 4 channels in up to 4 frames, as a picture: --encoder_type=conv reads such keys as one"
    return f"{', '.join(others)} has {channels}" if others else ""


def _by_kind(config: Config, spec: EnvSpec) -> Mapping[str, object]:
    """Decide flags by the observations and actions of the environment."""
    inputs = {key: observation for key, observation in spec.observations.items() if key != MASK_KEY}
    encoder = ModelConfig() if config.model.encoder_custom else config.model
    continuous, rollout = any(spec.action.is_real), config.learning.rollout
    if images := not MLPS.issuperset(encoder_names(encoder, inputs).values()):
        network = env_presets.network_for_images(continuous=continuous)
    else:
        network = env_presets.network_for_numbers(
            sum(prod(observation.shape) for observation in inputs.values()),
            continuous=continuous,
            remembers=config.model.use_rnn and "use_rnn" not in config.undecided,
        )
    acting = env_presets.SCALED if continuous and spec.action.scale is not None else {}
    learning = config.algorithm.preset_by_kind(images=images, continuous=continuous, rollout=rollout)
    return {**network, **acting, **learning}
