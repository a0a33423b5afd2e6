"""Which encoder reads which observation; torch-free, so that main can ask."""

from algorithms.models.config import ModelConfig
from envs.spec import ObservationSpec, is_channels_first
from utils.errors import UsageError

Shape = tuple[int, ...]

MLP = "mlp"
"""The encoder of all that is no image."""

MIN_CONVNET_SIDES = {"convnet_simple": 36, "convnet_atari": 36, "convnet_dqn": 20}
"""Pixels: the smallest square that each stack reduces to at least one pixel."""

SUBTYPES: dict[str, tuple[str, ...]] = {
    "auto": ("convnet_simple", "convnet_atari", "convnet_dqn", "convnet_impala", "resnet_impala", "mlp"),
    "mlp": ("mlp",),
    "conv": ("convnet_simple", "convnet_atari", "convnet_dqn", "convnet_impala"),
    "resnet": ("resnet_impala",),
}
"""What each `--encoder_type` allows; the first is what `--encoder_subtype=auto` means."""


def encoder_names(config: ModelConfig, observations: dict[str, ObservationSpec]) -> dict[str, str]:
    """Which of `ENCODERS` reads each observation key.

    An image is an observation of three dimensions whose sides the chosen net can take; everything else, be it the
    smaller key of a Dict, is flattened into an mlp.

    Raises:
        UsageError: type and subtype contradict each other, or an image net was asked for and there is no image.
    """
    allowed, subtype = SUBTYPES[config.encoder_type], config.encoder_subtype
    if subtype == "auto":
        subtype = allowed[0]
    if subtype not in allowed:
        raise UsageError(
            f"--encoder_subtype={subtype} does not go with --encoder_type={config.encoder_type}; "
            f"choose from {', '.join(allowed)}"
        )
    min_side = MIN_CONVNET_SIDES.get(subtype, 1)
    names = {key: subtype if _is_image(spec.shape, min_side) else MLP for key, spec in observations.items()}
    was_asked_for = (config.encoder_type, config.encoder_subtype) != ("auto", "auto")
    if was_asked_for and subtype not in names.values():
        shapes = ", ".join(f"{key} {list(spec.shape)}" for key, spec in observations.items())
        raise UsageError(
            f"encoder {subtype} needs an image [C,H,W] or [H,W,C] of at least {min_side}x{min_side} pixels; "
            f"the environment shows {shapes}"
        )
    return names


def image_sides(shape: Shape) -> tuple[int, int]:
    """Height and width, in pixels, of an image of three dimensions."""
    return (shape[1], shape[2]) if is_channels_first(shape) else (shape[0], shape[1])


def _is_image(shape: Shape, min_side: int) -> bool:
    return len(shape) == 3 and min(image_sides(shape)) >= min_side
