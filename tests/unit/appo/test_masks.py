"""A choice that is masked has probability exactly 0 in acting and gets a gradient of exactly 0 in learning."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from appo.algorithms.appo.learner import APPOLearner
from appo.algorithms.ops.distributions import ActionDistribution
from appo.algorithms.parts.learner import row_of
from appo.algorithms.runtime.learning.batches import Batch
from appo.envs.spec import MASK_KEY, ActionPart, EnvSpec, ObservationSpec
from tests.unit.appo.batches import COLUMNS, ROLLOUT, batch_of, learner_of
from tests.unit.models.cases import VECTOR, env_spec_of

ACTIONS = {
    "discrete": (ActionPart("categorical", 5),),
    "multi_discrete": (ActionPart("categorical", 4), ActionPart("categorical", 3)),
    "tuple": (
        ActionPart("gaussian", 2),
        ActionPart("categorical", 3),
        ActionPart("bernoulli", 2),
        ActionPart("categorical", 4),
    ),
}
NEVER = 1
"""A choice of the first categorical part that is masked in every row."""


def masked_spec(name: str) -> EnvSpec:
    parts = ACTIONS[name]
    size = sum(part.size for part in parts if part.kind == "categorical")
    spec = env_spec_of(*parts, obs=VECTOR, action_mask=ObservationSpec((size,), "uint8"))
    return replace(spec, action_mask=size)


def choice_logits(spec: EnvSpec) -> Tensor:
    """Which of the logits belong to choices, in the order of the mask."""
    index, found = 0, []
    for part in spec.action.parts:
        found += list(range(index, index + part.size)) if part.kind == "categorical" else []
        index += part.num_logits
    return torch.tensor(found)


def random_masks(spec: EnvSpec, *leading: int) -> Tensor:
    """Masks [..., M] that leave one choice of every part at least."""
    generator = torch.Generator().manual_seed(5)
    masks = []
    for part in spec.action.parts:
        if part.kind == "categorical":
            mask = torch.rand(*leading, part.size, generator=generator) < 0.5
            if not masks:
                mask[..., NEVER] = False
            mask[..., 2] |= ~mask.any(-1)
            masks.append(mask)
    return torch.cat(masks, -1)


def masked_batch(learner: APPOLearner, spec: EnvSpec) -> Batch:
    """What a policy with these masks would have left."""
    batch = batch_of(learner.model, spec)
    mask = random_masks(spec, ROLLOUT + 1, COLUMNS)
    policy = ActionDistribution(spec.action.parts, batch.recorded["logits"], mask[:-1])
    action = policy.sample(torch.Generator().manual_seed(6))
    obs = batch.obs | {MASK_KEY: mask.to(torch.uint8)}
    return replace(batch, obs=obs, action=action, recorded=batch.recorded | {"log_prob": policy.log_prob(action)})


def logits_of_loss(learner: APPOLearner, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The logits [T, B, L] in the loss, whose gradient has been computed."""
    unroll, seen = learner.model.unroll, []

    def watched(*arguments: object) -> tuple[Tensor, Tensor]:
        logits, value = unroll(*arguments)
        logits.retain_grad()
        seen.append(logits)
        return logits, value

    monkeypatch.setattr(learner.model, "unroll", watched)
    learner.loss(batch)[0].backward()
    (logits,) = seen
    return logits


FLAGS = [{"exploration_loss_coeff": 0.1, "kl_loss_coeff": 0.5}, {"with_vtrace": False, "ppo_clip_ratio": 0.01}]
SYMMETRIC = {"exploration_loss": "symmetric_kl", "exploration_loss_coeff": 0.1}


@pytest.mark.parametrize(
    ("name", "flags"),
    [(name, flags) for name in ACTIONS for flags in FLAGS]
    + [(name, SYMMETRIC) for name in ("discrete", "multi_discrete")],
)
def test_masked_logits_get_a_gradient_of_exactly_zero(
    name: str, flags: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = masked_spec(name)
    learner = learner_of(spec, **flags)
    batch = masked_batch(learner, spec)
    logits = logits_of_loss(learner, batch, monkeypatch)
    columns, mask = choice_logits(spec), batch.obs[MASK_KEY][:-1] > 0
    gradient = logits.grad[..., columns]
    assert torch.equal(gradient[~mask], torch.zeros(int((~mask).sum())))
    assert (gradient[mask & batch.valid[..., None]] != 0).float().mean() > 0.5  # no choice: none either
    head = learner.model.policy_head.linear
    assert torch.equal(head.weight.grad[columns[NEVER]], torch.zeros_like(head.weight[0]))
    assert head.bias.grad[columns[NEVER]] == 0.0
    assert head.weight.grad[columns[2]].abs().max() > 0


@pytest.mark.parametrize("name", ACTIONS)
def test_what_a_masked_logit_says_changes_nothing(name: str) -> None:
    spec = masked_spec(name)
    learner = learner_of(spec, exploration_loss_coeff=0.1, kl_loss_coeff=0.5)
    batch = masked_batch(learner, spec)
    loss, target, metrics = learner.loss(batch)
    with torch.no_grad():
        learner.model.policy_head.linear.bias[choice_logits(spec)[NEVER]] = 1e6
    again, target_again, metrics_again = learner.loss(batch)
    assert torch.equal(loss, again)
    assert torch.equal(target, target_again)
    assert torch.equal(row_of(metrics), row_of(metrics_again))


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("height", [0.0, 50.0, 1e6])
def test_acting_gives_masked_choices_a_probability_of_exactly_zero(name: str, height: float) -> None:
    """Also where the network is sure that they are best."""
    spec = masked_spec(name)
    mask = random_masks(spec, 2000)
    logits = torch.randn(2000, spec.action.num_logits, generator=torch.Generator().manual_seed(1))
    logits[:, choice_logits(spec)] += height * ~mask
    policy = ActionDistribution(spec.action.parts, logits, mask)
    drawn, likeliest = policy.sample(torch.Generator().manual_seed(2)), policy.mode()
    value = begin = 0
    for part in spec.action.parts:
        if part.kind == "categorical":
            allowed = mask[:, begin : begin + part.size]
            for action in (drawn, likeliest):
                assert allowed.gather(1, action[:, value, None].long()).all()
            alone = ActionDistribution((part,), logits[:, choice_logits(spec)[begin : begin + part.size]], allowed)
            probability = torch.stack(
                [alone.log_prob(torch.full((2000, 1), choice)).exp() for choice in range(part.size)], -1
            )
            assert torch.equal(probability[~allowed], torch.zeros(int((~allowed).sum())))
            assert torch.allclose(probability.sum(-1), torch.ones(2000))
            begin += part.size
        value += part.num_values
