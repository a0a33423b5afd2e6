"""Flags of the network, and the encoder of each observation. Imports neither torch nor, at import, numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from appo.utils.command_line import words_of
from appo.utils.errors import ResourceError, UsageError
from appo.utils.flags import flag
from appo.utils.system import machine

if TYPE_CHECKING:
    from appo.envs.spec import ObservationSpec

Shape = tuple[int, ...]

MOST_LAYERS = 100
"""Limit of the layers of a kind: each is an object in every process."""
COPIES = 3
"""Simultaneous copies of the weights while a network is made: parts, vector, and loaded weights."""


class EncoderRow(NamedTuple):
    """A built-in encoder.

    Attributes:
        subtype: name in `--encoder_subtype`.
        type: value of `--encoder_type`; `auto` allows every encoder.
        min_side: pixels of the smallest square that the encoder reduces to at least one pixel.
        builder: name of the function in `encoders.py`; a name, because `--help` reads this table without torch.
    """

    subtype: str
    type: str
    min_side: int
    builder: str


MLP = "mlp"
"""Subtype for every observation that is not an image, and type of encoders without convolutions."""
MLP_RESIDUAL = "mlp_residual"
"""Subtype of residual blocks, chosen by flags alone."""

ENCODERS = (
    EncoderRow("convnet_simple", "conv", 36, "build_convnet_simple"),
    EncoderRow("convnet_atari", "conv", 36, "build_convnet_atari"),
    EncoderRow("convnet_dqn", "conv", 20, "build_convnet_dqn"),
    EncoderRow("convnet_impala", "conv", 1, "build_impala"),
    EncoderRow("resnet_impala", "resnet", 1, "build_impala"),
    EncoderRow(MLP, MLP, 1, "build_mlp"),
    EncoderRow(MLP_RESIDUAL, MLP, 1, "build_mlp_residual"),
)
"""The built-in encoders; `--encoder_subtype=auto` selects the first of `--encoder_type`."""

MLPS = frozenset(row.subtype for row in ENCODERS if row.type == MLP)
"""Subtypes that flatten an observation."""

ENCODER_TYPES = tuple(dict.fromkeys(row.type for row in ENCODERS))


def reads_images(encoder_type: str) -> bool:
    """Return whether every encoder of a type reads images."""
    return encoder_type not in ("auto", MLP)


@dataclass(frozen=True)
class ModelConfig:
    """Network."""

    encoder_type: str = flag(
        "auto",
        "family of the encoder; auto = conv for images, mlp for vectors",
        choices=("auto", *ENCODER_TYPES),
        fixed_on_resume=True,
    )
    encoder_subtype: str = flag(
        "auto",
        "layers of the encoder; auto = the usual one of its family (convnet_atari is the Nature network, convnet_dqn"
        " its smaller forerunner; mlp_residual has blocks x + W2 relu(W1 LayerNorm(x)) for vectors, as in SimBa)",
        choices=("auto", *(row.subtype for row in ENCODERS)),
        fixed_on_resume=True,
    )
    encoder_custom: str = flag(
        "",
        "your own encoder, core or whole model as package.module:Class (docs/own_model.md says how); empty = none",
        fixed_on_resume=True,
        aliases=("encoder",),
    )
    encoder_mlp_layers: tuple[int, ...] = flag(
        (512, 512),
        "units of each layer of the mlp encoder, separated by commas; mlp_residual has a block per number, all equal",
        minimum=1,
        fixed_on_resume=True,
        needs="vectors",
    )
    encoder_extra_fc_layers: int = flag(
        1,
        "fully connected layers of hidden_size units after the convolutions",
        minimum=0,
        maximum=MOST_LAYERS,
        fixed_on_resume=True,
        needs="images",
    )
    hidden_size: int = flag(
        512,
        "units of the fully connected layers after convolutions and of the RNN",
        minimum=1,
        fixed_on_resume=True,
        needs="images|memory",
    )
    nonlinearity: str = flag(
        "elu", "activation of every layer", choices=("elu", "relu", "tanh"), fixed_on_resume=True, needs="activations"
    )
    layer_norm: bool = flag(
        False,
        "layer normalization between every linear layer or convolution of the encoder and its activation; in residual"
        " nets of images after the first convolution of every stage and the fully connected layers",
        fixed_on_resume=True,
        needs="activations",
    )
    policy_initialization: str = flag(
        "orthogonal",
        "initial weights of all layers, but of the last ones of Q-networks, which begin near 0; torch_default = as"
        " torch draws them, without policy_init_gain",
        choices=("orthogonal", "xavier_uniform", "torch_default"),
        fixed_on_resume=True,
        needs="scratch",
    )
    policy_init_gain: float = flag(
        1.0,
        "gain of the initial weights of the hidden layers",
        minimum=0,
        fixed_on_resume=True,
        needs="policy_initialization=orthogonal|policy_initialization=xavier_uniform scratch",
    )
    actor_critic_share_weights: bool = flag(
        True, "one encoder and core for actor and critic, or one each", fixed_on_resume=True, needs="critic"
    )
    adaptive_stddev: bool = flag(
        True,
        "standard deviation of continuous actions as an output of the network, or one free parameter per action",
        fixed_on_resume=True,
        needs="reals",
    )
    initial_stddev: float = flag(
        1.0,
        "standard deviation of continuous actions at the start; exp(-5) and exp(2) are the limits of any deviation",
        minimum=0.0068,
        maximum=7.38,
        fixed_on_resume=True,
        needs="reals scratch",
    )
    use_spectral_norm: bool = flag(
        False,
        "spectral normalization of all linear and convolution layers, those of heads, --encoder_custom and its cores"
        " included; a whole model of your own is refused",
        fixed_on_resume=True,
    )
    use_rnn: bool = flag(True, "a recurrent core between encoder and heads", fixed_on_resume=True)
    rnn_type: str = flag(
        "gru", "cell of the recurrent core", choices=("gru", "lstm"), fixed_on_resume=True, needs="use_rnn"
    )
    rnn_num_layers: int = flag(
        1, "layers of the recurrent core", minimum=1, maximum=MOST_LAYERS, fixed_on_resume=True, needs="use_rnn"
    )
    normalize_input: bool = flag(
        True, "normalize float observations by their running mean and standard deviation", fixed_on_resume=True
    )
    normalize_images: bool = flag(
        False,
        "normalize images of bytes too, every pixel by its own mean and standard deviation (with normalize_input)",
        fixed_on_resume=True,
        needs="normalize_input pixels",
    )
    obs_subtract_mean: float = flag(
        0.0, "constant subtracted from the main observation (key obs)", fixed_on_resume=True, needs="single"
    )
    obs_scale: float | None = flag(
        None,
        "constant the main observation is divided by after the subtraction; none = the largest value of bytes, else 1",
        minimum=1e-12,
        fixed_on_resume=True,
        needs="single",
    )

    def normalizes(self, spec: ObservationSpec) -> bool:
        """Return whether running statistics normalize an observation."""
        is_image = spec.dtype == "uint8" and len(spec.shape) == 3
        return self.normalize_input and (spec.dtype.startswith("float") or (is_image and self.normalize_images))


def check_size(config: ModelConfig) -> None:
    """Refuse a network that is too large for any observation, before making a part.

    Raises:
        UsageError: too many layers.
        ResourceError: the weights need more memory than is free.
    """
    layers = config.encoder_mlp_layers
    if len(layers) > MOST_LAYERS:
        raise UsageError(f"--encoder_mlp_layers has {len(layers)} layers, at most are allowed {MOST_LAYERS}")
    if config.encoder_custom:
        return
    least = sum(size * units for size, units in zip((1, *layers), layers, strict=False))
    if config.use_rnn:
        gates = 4 if config.rnn_type == "lstm" else 3
        least += gates * config.hidden_size**2 * (2 * config.rnn_num_layers - 1)
    refuse_weights(least * (1 if config.actor_critic_share_weights else 2))


def refuse_weights(count: int) -> None:
    """Refuse a network whose weights need more memory than is free (ResourceError)."""
    needed, free = 4 * COPIES * count, machine.available_memory_bytes()
    if needed > free:
        raise ResourceError(
            f"a network of {count:,} weights needs {needed >> 20:,} MiB to be made, of memory {free >> 20:,} MiB are "
            "free: lower --encoder_mlp_layers, --hidden_size or --rnn_num_layers"
        )


def encoder_names(config: ModelConfig, observations: dict[str, ObservationSpec]) -> dict[str, str]:
    """Return the subtype of `ENCODERS` for each observation key.

    An image has three dimensions, sides that the chosen net accepts, and the channels of a picture (`is_picture`)
    unless flags ask for a net of images. Every other observation is flattened into an mlp, also the smaller key of a
    Dict; `mlp_residual`, if chosen, takes the place of the mlp.

    Raises:
        UsageError: type and subtype contradict each other, no observation is an image for the chosen net, or layers do
            not fit residual blocks.
    """
    row, layers = _chosen_row(config), config.encoder_mlp_layers
    if row.subtype == MLP_RESIDUAL and len(set(layers)) != 1:
        raise UsageError(
            f"--encoder_mlp_layers={words_of(layers)}: blocks of --encoder_subtype={MLP_RESIDUAL} have one width, give"
            " a number per block, all equal"
        )
    of_vectors = row.subtype if row.type == MLP else MLP
    was_asked_for = (config.encoder_type, config.encoder_subtype) != ("auto", "auto")
    names = {
        key: row.subtype if is_large(spec, row.min_side) and (was_asked_for or is_picture(spec)) else of_vectors
        for key, spec in observations.items()
    }
    if was_asked_for and row.subtype not in names.values():
        shapes = ", ".join(f"{key} {list(spec.shape)}" for key, spec in observations.items())
        raise UsageError(
            f"encoder {row.subtype} needs an image [C,H,W] or [H,W,C] of at least {row.min_side}x{row.min_side} pixels;"
            f" the environment shows {shapes}"
        )
    return names


def _chosen_row(config: ModelConfig) -> EncoderRow:
    allowed = {row.subtype: row for row in ENCODERS if config.encoder_type in ("auto", row.type)}
    if config.encoder_subtype == "auto":
        return next(iter(allowed.values()))
    if config.encoder_subtype not in allowed:
        raise UsageError(
            f"--encoder_subtype={config.encoder_subtype} does not go with --encoder_type={config.encoder_type}; "
            f"choose from {', '.join(allowed)}"
        )
    return allowed[config.encoder_subtype]


def with_own_encoder(asked: Mapping[str, object], preset: Mapping[str, object]) -> dict[str, object]:
    """Return a preset without its encoder where flags choose type or subtype; a subtype has the type of its row."""
    of_encoder = {"encoder_type", "encoder_subtype"}
    repeats = "encoder_subtype" not in asked and asked.get("encoder_type") == preset.get("encoder_type")
    if repeats or not asked.keys() & of_encoder or not preset.keys() & of_encoder:
        return dict(preset)
    types = {row.subtype: row.type for row in ENCODERS}
    left = {name: value for name, value in preset.items() if name not in of_encoder}
    return left | {"encoder_type": types.get(str(asked.get("encoder_subtype")), "auto")}


def is_large(spec: ObservationSpec, min_side: int) -> bool:
    """Return whether an observation has three dimensions and sides of at least `min_side` pixels."""
    return len(spec.shape) == 3 and min(image_sides(spec.shape)) >= min_side


def is_picture(spec: ObservationSpec) -> bool:
    """Return whether an observation of three dimensions has the channels of a picture: 1 to 4, in up to 4 frames.

    Flags may have stacked more frames. Letters, one-hot maps and voxels have other numbers.
    """
    channels = min(spec.shape[0], spec.shape[2])
    channels //= spec.frames if channels % spec.frames == 0 else 1
    return channels in {frames * colours for frames in range(1, 5) for colours in range(1, 5)}


def image_sides(shape: Shape) -> tuple[int, int]:
    """Return height and width in pixels of an image."""
    from appo.envs.spec import is_channels_first  # late: --help needs no numpy

    return (shape[1], shape[2]) if is_channels_first(shape) else (shape[0], shape[1])
