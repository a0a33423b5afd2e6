"""Cores and whole models of the user's own: what is made of them, and how wrong ones are refused."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from appo.algorithms.appo.learner import APPOLearner
from appo.algorithms.models.build import build_model
from appo.algorithms.models.custom import custom_kind
from appo.algorithms.models.flat_module import FlatModule
from appo.envs.spec import EnvSpec, ObservationSpec
from appo.utils.errors import UsageError
from tests.unit.appo.batches import batch_of, learn, learning, parameters
from tests.unit.models import custom_encoders, custom_parts
from tests.unit.models.cases import GAUSSIAN, MIXED, VECTOR, act_through, config_of, context_of, env_spec_of, model_of

SPEC = env_spec_of()
MASKED = replace(env_spec_of(obs=VECTOR, action_mask=ObservationSpec((4,), "uint8")), action_mask=4)


def path_of(part: type) -> str:
    return f"{part.__module__}:{part.__name__}"


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        (custom_encoders.SumOfMeans, "encoder"),
        (custom_encoders.NotAModule, "encoder"),
        (custom_parts.Sum, "core"),
        (custom_parts.CoreNotAModule, "core"),
        (custom_parts.Remembering, "model"),
        (custom_parts.Stranger, "model"),
        (lambda observations, config: nn.Identity(), "encoder"),
    ],
)
def test_the_methods_of_a_class_say_what_it_makes(part: object, kind: str) -> None:
    assert custom_kind(part) == kind


@pytest.mark.parametrize("use_rnn", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_custom_core_takes_the_place_of_the_built_in_one(shared: bool, use_rnn: bool) -> None:
    flags = {"encoder_custom": path_of(custom_parts.Sum), "actor_critic_share_weights": shared, "use_rnn": use_rnn}
    model = model_of(MASKED, **flags)
    towers = [model.actor] if shared else [model.actor, model.critic]
    assert all(isinstance(tower.core, custom_parts.Sum) for tower in towers)
    assert len({id(tower.core) for tower in towers}) == len(towers)
    assert model.rnn_state_size == 16 * len(towers)  # the width of the built-in encoder before it
    acted = act_through(model, MASKED, steps=4, columns=3)
    logits, value = model.unroll(acted.obs, acted.first, acted.rnn_state[:-1:2], 2)
    torch.testing.assert_close(logits, acted.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(value, acted.value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("part", [custom_parts.Remembering, custom_parts.Joined])
@pytest.mark.parametrize("spec", [SPEC, MASKED, env_spec_of(*GAUSSIAN), env_spec_of(*MIXED)])
def test_custom_model_learns_in_our_learner(part: type, spec: EnvSpec) -> None:
    model = build_model(config_of(encoder_custom=path_of(part)), spec)
    assert isinstance(model, part)
    assert model.training
    assert model.normalized_keys == ("obs",)
    learner = APPOLearner(FlatModule(model), context_of(learning(), spec))
    before = parameters(learner)
    assert learn(learner, batch_of(model.eval(), spec)) == 1
    metrics = learner.metrics()
    assert metrics["skipped"] == 0.0
    assert metrics["grad_norm"] > 0.0
    assert not torch.equal(parameters(learner), before)
    assert model.scalings[0].mean.any()  # running statistics reach it


def test_a_module_is_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parts_of_a_user.py").write_text("from tests.unit.models.custom_parts import Sum\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    model = build_model(config_of(encoder_custom="parts_of_a_user:Sum"), SPEC)
    assert isinstance(model.actor.core, custom_parts.Sum)


def test_the_trial_draws_no_random_numbers_of_the_run() -> None:
    """Weights that follow a custom part are those that follow a built-in one of the same size."""
    states = []
    for flags in ({"encoder_custom": path_of(custom_parts.Sum)}, {"use_rnn": False}):
        torch.manual_seed(5)
        build_model(config_of(**flags), SPEC)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (custom_parts.SumWithoutReset, "ValueError: its state does not count as zero where an episode starts"),
        (custom_parts.SumWithLateReset, "ValueError: its state does not count as zero where an episode starts"),
        (custom_parts.SumFromZero, "ValueError: its output of unroll differs by .* from that of single steps"),
        (custom_parts.SumThroughResets, "ValueError: its output of unroll differs by .* from that of single steps"),
        (custom_parts.SumToNan, "ValueError: its output of unroll differs by nan from that of single steps"),
        (custom_parts.SumDetached, "ValueError: its output of unroll has no gradient"),
        (custom_parts.SumWithoutLast, r"ValueError: its output of unroll: expected shape \[5, 2, 16\], got \[4, 2, 16"),
        (custom_parts.WrongState, "RuntimeError: .*size of tensor"),
        (custom_parts.WithoutStateSize, "AttributeError: .*state_size"),
        (custom_parts.DoubleOutput, "TypeError: its output of step is no tensor of torch.float32"),
        (custom_parts.DoubleCore, "TypeError: scale is of torch.float64; all parameters and buffers must be of"),
        (custom_parts.CoreNotAModule, "TypeError: a CoreNotAModule is no torch.nn.Module"),
        (custom_parts.ValueOfThePast, "ValueError: its value of unroll differs by .* from that of single steps"),
        (custom_parts.LogitsOfTheEnd, r"ValueError: its logits of unroll: expected shape \[4, 2, 4\], got \[5, 2, 4\]"),
        (custom_parts.ValueAsColumn, r"ValueError: its value of act: expected shape \[2\], got \[2, 1\]"),
        (custom_parts.ValueWithoutGradient, "ValueError: its value of unroll has no gradient"),
        (custom_parts.Incomplete, "TypeError: Can't instantiate abstract class Incomplete .*unroll_scaled"),
        (custom_parts.Stranger, "TypeError: a Stranger acts and unrolls but is no .*actor_critic.ActorCritic"),
    ],
)
@pytest.mark.parametrize("shared", [True, False])
def test_a_broken_contract_is_one_line(part: type, message: str, shared: bool) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        build_model(config_of(encoder_custom=path_of(part), actor_critic_share_weights=shared), SPEC)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"--encoder_custom={path_of(part)} failed: ")
