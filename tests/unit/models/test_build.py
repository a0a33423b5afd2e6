import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from appo.algorithms.models import encoders
from appo.algorithms.models.actor_critic import model_inputs
from appo.algorithms.models.build import OUTPUT_GAIN, build_model, build_tower, count_weights
from appo.algorithms.models.config import ENCODERS, EncoderRow, ModelConfig, encoder_names
from appo.algorithms.models.policy_network import build_policy_network
from appo.algorithms.models.q_network import build_q_network
from appo.envs.spec import EnvSpec, ObservationSpec
from appo.utils.errors import ResourceError, UsageError
from appo.utils.flags import flags_of
from appo.utils.system import machine
from tests.unit.models import custom_encoders
from tests.unit.models.cases import (
    GAUSSIAN,
    IMAGE,
    VECTOR,
    act_through,
    config_of,
    env_spec_of,
    model_of,
    observation,
)

SMALL_IMAGE = ObservationSpec((7, 7, 3), "uint8")


def build(env_spec: EnvSpec | None = None, **flags: object) -> nn.Module:
    torch.manual_seed(0)
    return build_model(config_of(**flags), env_spec or env_spec_of())


def names_of(flags: dict[str, object], **observations: ObservationSpec) -> list[str]:
    return list(encoder_names(config_of(**flags), observations).values())


@pytest.mark.parametrize("use_rnn", [True, False])
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("spec", [VECTOR, IMAGE])
@pytest.mark.parametrize("layers", [(5, 7), (5, 5)])
def test_weights_are_counted_before_there_are_any(
    spec: ObservationSpec, shares: bool, use_rnn: bool, layers: tuple[int, int]
) -> None:
    subtype = "mlp_residual" if layers == (5, 5) and spec == VECTOR else "auto"
    config = config_of(
        use_rnn=use_rnn, rnn_num_layers=2, rnn_type="lstm", actor_critic_share_weights=shares,
        encoder_mlp_layers=layers, encoder_subtype=subtype,
    )  # fmt: skip
    env_spec = env_spec_of(obs=spec)
    model = build_model(config, env_spec)
    heads = sum(p.numel() for part in (model.policy_head, model.value_head) for p in part.parameters())
    counted = count_weights(config, model_inputs(env_spec))
    assert counted == sum(p.numel() for p in model.parameters()) - heads


def test_counting_draws_no_random_number() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert count_weights(ModelConfig(), model_inputs(env_spec_of())) > 1000
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "flags",
    [
        {"encoder_mlp_layers": (200_000, 200_000)},
        {"encoder_mlp_layers": (2**31,)},
        {"hidden_size": 10**6},
        {"hidden_size": 100_000, "rnn_num_layers": 100},
    ],
)
def test_a_network_that_no_memory_holds_is_refused_with_the_numbers(
    flags: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 8 << 30)
    with pytest.raises(ResourceError, match=r"a network of [0-9,]+ weights needs [0-9,]+ MiB to be made, of memory"):
        build(**flags)


def test_the_size_of_observations_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 1 << 20)
    with pytest.raises(ResourceError, match="a network of "):
        build(env_spec_of(obs=ObservationSpec((3000,), "float32")), encoder_mlp_layers=(100,), use_rnn=False)
    build(encoder_mlp_layers=(100,), use_rnn=False)
    large = ModelConfig(encoder_mlp_layers=(100,), use_rnn=False)
    for make in (build_policy_network, partial(build_q_network, dueling=False)):
        with pytest.raises(ResourceError, match="a network of "):
            make(large, env_spec_of(obs=ObservationSpec((3000,), "float32")))


def test_defaults_build_and_act() -> None:
    model = build_model(ModelConfig(), env_spec_of())
    assert model.rnn_state_size == 512
    logits, value, _ = model.act(observation(env_spec_of(), 2), torch.ones(2, dtype=torch.bool), torch.zeros(2, 512))
    assert torch.isfinite(logits).all()
    assert torch.isfinite(value).all()


def test_encoder_follows_the_observation() -> None:
    assert names_of({}, a=VECTOR, b=IMAGE, c=SMALL_IMAGE) == ["mlp", "convnet_simple", "mlp"]
    assert names_of({"encoder_subtype": "convnet_atari"}, a=VECTOR, b=IMAGE) == ["mlp", "convnet_atari"]
    assert names_of({"encoder_type": "conv"}, obs=IMAGE) == ["convnet_simple"]
    assert names_of({"encoder_type": "resnet"}, obs=SMALL_IMAGE) == ["resnet_impala"]
    assert names_of({"encoder_type": "mlp"}, obs=IMAGE) == ["mlp"]
    assert names_of({"encoder_subtype": "mlp"}, obs=IMAGE) == ["mlp"]
    residual = {"encoder_subtype": "mlp_residual"}
    assert names_of(residual, a=VECTOR, b=IMAGE, c=SMALL_IMAGE) == ["mlp_residual"] * 3
    assert names_of({"encoder_type": "mlp", **residual}, obs=VECTOR) == ["mlp_residual"]


@pytest.mark.parametrize("row", ENCODERS, ids=lambda row: row.subtype)
def test_every_row_of_the_table_is_a_choice_of_the_flags_and_names_a_builder(row: EncoderRow) -> None:
    flags = flags_of(ModelConfig)
    assert row.type in flags["encoder_type"].choices
    assert row.subtype in flags["encoder_subtype"].choices
    assert callable(getattr(encoders, row.builder, None)), f"encoders.py has no function {row.builder}"
    chosen: dict[str, object] = {"encoder_type": row.type, "encoder_subtype": row.subtype}
    assert names_of(chosen, obs=IMAGE) == [row.subtype]
    assert isinstance(build(env_spec_of(obs=IMAGE), **chosen), nn.Module)


def test_subtypes_are_unique() -> None:
    assert len({row.subtype for row in ENCODERS}) == len(ENCODERS)


@pytest.mark.parametrize(
    ("flags", "observations", "message"),
    [
        ({"encoder_type": "conv"}, {"obs": VECTOR}, r"at least 36x36 pixels; the environment shows obs \[5\]"),
        ({"encoder_type": "conv"}, {"obs": SMALL_IMAGE}, r"the environment shows obs \[7, 7, 3\]"),
        ({"encoder_subtype": "resnet_impala"}, {"obs": VECTOR}, "resnet_impala needs an image"),
        (
            {"encoder_type": "mlp", "encoder_subtype": "convnet_atari"},
            {"obs": IMAGE},
            "convnet_atari does not go with --encoder_type=mlp",
        ),
        (
            {"encoder_subtype": "mlp_residual", "encoder_mlp_layers": (64, 32)},
            {"obs": VECTOR},
            "--encoder_mlp_layers=64,32: blocks of --encoder_subtype=mlp_residual have one width",
        ),
        ({"encoder_subtype": "mlp_residual", "encoder_mlp_layers": ()}, {"obs": VECTOR}, "_layers=empty: blocks of"),
    ],
)
def test_wrong_encoder_flags(flags: dict[str, object], observations: dict[str, ObservationSpec], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        build(env_spec_of(**observations), **flags)
    assert "\n" not in str(caught.value)


def test_a_mask_alone_is_no_observation() -> None:
    with pytest.raises(UsageError, match="nothing but action_mask"):
        build(env_spec_of(action_mask=ObservationSpec((4,), "uint8")))


def is_orthogonal(weight: Tensor, gain: float) -> bool:
    """The shorter of rows and columns are orthogonal and of length `gain`."""
    matrix = weight.detach().flatten(1).double()
    matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    return torch.allclose(matrix @ matrix.T, gain**2 * torch.eye(len(matrix), dtype=torch.float64), atol=1e-5 * gain)


@pytest.mark.parametrize("observation_spec", [VECTOR, IMAGE])
@pytest.mark.parametrize("shared", [True, False])
def test_orthogonal_initialization(observation_spec: ObservationSpec, shared: bool) -> None:
    gain = 1.5
    model = build(env_spec_of(obs=observation_spec), policy_init_gain=gain, actor_critic_share_weights=shared)
    towers = [model.actor] if shared else [model.actor, model.critic]
    layers = [layer for t in towers for layer in t.encoder.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    assert layers
    assert all(is_orthogonal(layer.weight, gain) for layer in layers)
    assert all(is_orthogonal(head.weight, OUTPUT_GAIN) for head in (model.policy_head.linear, model.value_head))
    for tower in towers:
        gates = [gate for n, p in tower.core.rnn.named_parameters() if "weight" in n for gate in p.split(8)]
        assert len(gates) == 6
        assert all(is_orthogonal(gate, gain) for gate in gates)
    assert not any(p.any() for n, p in model.named_parameters() if "bias" in n.rpartition(".")[2])


def test_xavier_initialization() -> None:
    model = build(policy_initialization="xavier_uniform", policy_init_gain=2.0)
    weight = model.actor.encoder.encoders[0][0].weight
    bound = 2.0 * (6 / (5 + 16)) ** 0.5
    assert 0.9 * bound < weight.abs().max() <= bound
    assert not is_orthogonal(weight, 2.0)


def test_torch_default_leaves_weights_as_torch_draws_them() -> None:
    model = build(policy_initialization="torch_default", policy_init_gain=2.0, use_rnn=False)
    torch.manual_seed(0)
    layer = nn.Linear(5, 16)  # the first that is made, so that it takes the first random numbers
    drawn = model.actor.encoder.encoders[0][0]
    assert torch.equal(drawn.weight, layer.weight)
    assert torch.equal(drawn.bias, layer.bias)
    bound = model.policy_head.linear.in_features**-0.5
    assert 0.8 * bound < model.policy_head.linear.weight.abs().max() <= bound
    assert model.value_head.bias.any()


def test_torch_default_keeps_the_initial_deviation_of_actions() -> None:
    model = build(
        env_spec_of(*GAUSSIAN), policy_initialization="torch_default", initial_stddev=0.5, adaptive_stddev=True
    )
    bias = model.policy_head.linear.bias
    assert bias[3:].tolist() == pytest.approx([math.log(0.5)] * 3)
    assert bias[:3].any()


def test_the_two_towers_start_differently() -> None:
    model = build(actor_critic_share_weights=False)
    pairs = zip(model.actor.parameters(), model.critic.parameters(), strict=True)
    assert not any(torch.equal(p, q) for p, q in pairs if p.any())


def test_one_seed_one_model() -> None:
    first, second = build(), build()
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))


def spectral_norms(model: nn.Module) -> dict[str, float]:
    """Largest singular value of every linear and convolution layer, kernels as matrices."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    return {name: float(torch.linalg.matrix_norm(layer.weight.detach().flatten(1), 2)) for name, layer in layers}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("observation_spec", "flags", "layers"),
    [
        (VECTOR, {}, 1),
        (IMAGE, {"encoder_subtype": "convnet_simple"}, 4),
        (IMAGE, {"encoder_type": "resnet"}, 16),
        (VECTOR, {"encoder_custom": f"{custom_encoders.__name__}:SumOfMeans"}, 1),
    ],
)
def test_spectral_norm_bounds_all_linear_and_convolution_layers(
    observation_spec: ObservationSpec, flags: dict[str, object], layers: int, shared: bool
) -> None:
    flags = flags | {"use_spectral_norm": True, "use_rnn": False, "policy_init_gain": 3.0}
    model = build(env_spec_of(obs=observation_spec), **flags, actor_critic_share_weights=shared).eval()
    found = spectral_norms(model)
    assert len(found) == layers * (1 if shared else 2) + 2
    assert {"policy_head.linear", "value_head"} <= found.keys()
    assert max(abs(norm - 1.0) for norm in found.values()) < 0.05  # 15 rounds of the power method


def test_values_of_a_normalized_head_keep_their_meaning_when_units_change() -> None:
    model = build(use_spectral_norm=True, use_rnn=False).eval()
    obs, first, state = observation(env_spec_of(), 6), torch.ones(6, dtype=torch.bool), torch.zeros(6, 0)

    def values() -> Tensor:
        with torch.no_grad():
            _, value, _ = model.act(obs, first, state)
        return model.denormalize_value(value)

    before = values()
    for mean, std in ((3.0, 2.0), (-100.0, 50.0)):
        model.set_return_statistics(mean, std)
        torch.testing.assert_close(values(), before, rtol=1e-4, atol=1e-4)
    weight, bias = model.value_layer()
    assert weight.item() == pytest.approx(1 / 50.0)
    assert bias.shape == (1,)


def test_normalized_layers_are_trained() -> None:
    model = build(env_spec_of(obs=IMAGE), use_spectral_norm=True, use_rnn=False)
    logits, value, _ = model.act(observation(env_spec_of(obs=IMAGE), 3), torch.ones(3).bool(), torch.zeros(3, 0))
    (logits.square().sum() + value.square().sum()).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("custom_encoders:Flat", "--use_spectral_norm: Flat has no linear or convolution layer"),
        ("custom_parts:Remembering", "is a whole model, whose values must take any unit; normalize its layers where"),
    ],
)
def test_what_spectral_norm_cannot_cover_is_refused(name: str, message: str) -> None:
    custom_name = f"tests.unit.models.{name}"
    build(encoder_custom=custom_name, use_rnn=False)
    with pytest.raises(UsageError, match=message) as caught:
        build(encoder_custom=custom_name, use_rnn=False, use_spectral_norm=True)
    assert "\n" not in str(caught.value)


def test_values_of_actions_are_not_bounded() -> None:
    with pytest.raises(UsageError, match="values of actions must reach any return"):
        build_q_network(config_of(use_spectral_norm=True), env_spec_of(), dueling=True)


def test_spectral_norms_agree_in_acting_and_learning() -> None:
    model = build(use_spectral_norm=True, use_rnn=False, policy_init_gain=3.0).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    acted = act_through(model, env_spec_of(), steps=4, columns=2)
    _, value = model.unroll(acted.obs, acted.first, acted.rnn_state[:1], 4)
    torch.testing.assert_close(value, acted.value, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def custom(name: str) -> str:
    return f"{custom_encoders.__name__}:{name}"


@pytest.mark.parametrize("shared", [True, False])
def test_custom_encoder(shared: bool) -> None:
    env_spec = env_spec_of(obs=VECTOR, image=IMAGE, action_mask=ObservationSpec((4,), "uint8"))
    model = model_of(env_spec, encoder_custom=custom("SumOfMeans"), actor_critic_share_weights=shared)
    assert isinstance(model.actor.encoder, custom_encoders.SumOfMeans)
    assert model.actor.encoder.keys == ["obs", "image"]
    assert model.actor.encoder.training
    assert (model.actor.encoder.linear.weight == 0.5).all()  # its weights are its own
    acted = act_through(model, env_spec, steps=4, columns=2)
    logits, _ = model.unroll(acted.obs, acted.first, acted.rnn_state[:-1:2], 2)
    torch.testing.assert_close(logits, acted.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module_of_ours:Encoder", "ModuleNotFoundError: No module named 'no_such_module_of_ours'"),
        (custom("NoSuchClass"), "AttributeError: .*NoSuchClass"),
        ("JustAName", "must read package.module:Class"),
        (":Class", "must read package.module:Class"),
        (custom("TakesNothing"), "TypeError"),
        (custom("NotAModule"), "a NotAModule is no torch.nn.Module"),
        (custom("WithoutOutputSize"), "AttributeError: .*output_size"),
        (custom("FloatOutputSize"), "its output_size is a float, not an int"),
        (custom("WrongOutputSize"), r"its output for two rows: expected shape \[2, 7\], got \[2, 5\]"),
        (custom("NotATensor"), "its output is no tensor of floats"),
        (custom("Raises"), "RuntimeError: first line second line"),
        (custom("WithCounter"), "count is of torch.int64"),
    ],
)
def test_custom_encoder_refused_in_one_line(path: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        build(encoder_custom=path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"--encoder_custom={path} ")


@pytest.mark.parametrize("shared", [True, False])
def test_a_whole_model_is_no_part_of_a_critic_of_an_algorithms_own(shared: bool) -> None:
    name = "tests.unit.models.custom_parts:Remembering"
    config = config_of(encoder_custom=name, actor_critic_share_weights=shared)
    with pytest.raises(UsageError) as caught:
        build_tower(config, {"obs": VECTOR})
    assert str(caught.value) == (
        f"--encoder_custom={name} is a whole model, an actor-critic: a network of values of actions, or a critic of"
        " its own, has room for an encoder or a core; name a class of these"
    )


@pytest.mark.parametrize(
    ("shape", "frames", "is_image"),
    [
        ((1, 84, 84), 1, True),
        ((84, 84, 1), 1, True),
        ((3, 64, 64), 1, True),
        ((72, 128, 4), 1, True),
        ((4, 84, 84), 1, True),  # stacked by the environment itself
        ((84, 84, 12), 1, True),
        ((12, 84, 84), 1, True),
        ((9, 84, 84), 1, True),
        ((84, 84, 16), 1, True),
        ((5, 84, 84), 5, True),  # by flags
        ((84, 84, 21), 7, True),
        ((40, 84, 84), 10, True),
        ((80, 84, 84), 20, True),
        ((21, 79, 80), 1, False),  # NLE's letters
        ((79, 80, 21), 1, False),
        ((5, 84, 84), 1, False),
        ((84, 84, 20), 1, False),  # one-hot symbols
        ((17, 40, 40), 1, False),
        ((36, 36, 36), 1, False),  # voxels
        ((36, 36, 256), 1, False),  # text as one-hot bytes
        ((35, 40, 40), 5, False),
        ((12, 84, 84), 5, True),
    ],
)
def test_an_image_has_as_many_channels_as_pictures_unless_flags_say_so(
    shape: tuple[int, ...], frames: int, is_image: bool
) -> None:
    shown = {"obs": ObservationSpec(shape, "uint8", frames=frames), "x": ObservationSpec((3,), "float32")}
    assert encoder_names(ModelConfig(), shown) == {"obs": "convnet_simple" if is_image else "mlp", "x": "mlp"}
    assert encoder_names(ModelConfig(encoder_type="conv"), shown)["obs"] == "convnet_simple"
    assert encoder_names(ModelConfig(encoder_type="mlp"), shown)["obs"] == "mlp"
