"""Parts of the user's own that act otherwise than they learn are refused before a run starts."""

import pytest
import torch

from appo.algorithms.models.build import build_model
from appo.algorithms.models.custom import refuse_hidden_inputs, refuse_two_behaviours
from appo.algorithms.models.flat_module import FlatModule
from appo.utils.errors import UsageError
from tests.unit.models import custom_encoders, custom_parts, two_minded
from tests.unit.models.cases import GAUSSIAN, config_of, env_spec_of

SPEC = env_spec_of()


def looked_at(part: type, **flags: object) -> None:
    config = config_of(encoder_custom=f"{part.__module__}:{part.__name__}", **flags)
    flat = FlatModule(build_model(config, SPEC))
    refuse_two_behaviours(flat.module, config, SPEC)
    random = torch.get_rng_state()
    refuse_hidden_inputs(flat, lambda: FlatModule(build_model(config, SPEC)), config, SPEC)
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("part", "message"),
    [
        (two_minded.WithDropout, r"its 1 \(Dropout\) learns otherwise than it acts, by what it leaves out by chance"),
        (
            two_minded.WithBatchNorm,
            r"its more \(BatchNorm1d\) learns otherwise than it acts, by its statistics of batch",
        ),
        (two_minded.WithBatchNormThatKeepsNothing, r"its more \(BatchNorm1d\) .*GroupNorm and LayerNorm have none"),
        (two_minded.WithRandomSlopes, r"its more \(RReLU\) learns otherwise than it acts"),
        (two_minded.WithTransformer, r"its \w+ \(\w+\) learns otherwise than it acts"),
        (two_minded.WithFunctionalDropout, r"what it computes in train\(\) differs by .* from that in eval\(\)"),
        (two_minded.WithSwitch, r"what it computes in train\(\) differs by .* from that in eval\(\)"),
        (two_minded.ForgetfulWhereItLearns, r"what it computes in train\(\) differs by .* from that in eval\(\)"),
        (two_minded.WithHiddenWeights, "it computes with tensors that are neither parameters nor buffers"),
        (two_minded.WithHiddenTable, "it computes with tensors that are neither parameters nor buffers"),
        (two_minded.OverRows, "what it computes for a row depends on the other rows of the batch"),
        (two_minded.Detached, "its output has no gradient, so nothing can be learned through it"),
    ],
)
def test_what_differs_between_acting_and_learning_is_refused(part: type, message: str, shared: bool) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        looked_at(part, actor_critic_share_weights=shared)
    assert str(caught.value).startswith(f"--encoder_custom={part.__module__}:{part.__name__}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "flags"),
    [
        (two_minded.Plain, {}),
        (two_minded.Plain, {"use_rnn": True}),
        (two_minded.WithoutEffect, {}),
        (two_minded.WithSpectralNorm, {}),  # its estimate advances while it learns, and converges
        (two_minded.Plain, {"use_spectral_norm": True}),
        (custom_encoders.SumOfMeans, {}),
        (custom_parts.Sum, {}),
        (custom_parts.Joined, {}),
    ],
)
def test_what_does_not_differ_is_taken(part: type, flags: dict[str, object]) -> None:
    looked_at(part, **flags)


def test_looking_leaves_no_trace() -> None:
    config = config_of(encoder_custom="tests.unit.models.two_minded:WithSpectralNorm")
    spec = env_spec_of(*GAUSSIAN)
    model = build_model(config, spec)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    refuse_two_behaviours(model, config, spec)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
