"""The Ape-X learner on batches as a replay gives them: one update against float64, counts, the target, its state."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from appo.algorithms.apex.algorithm import APEX
from appo.algorithms.apex.config import METRICS, ApexConfig
from appo.algorithms.apex.learner import TARGET, ApexLearner
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.models.q_network import QNetwork, build_q_network
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.devices import Device
from appo.algorithms.runtime.learning.batches import Batch
from appo.envs.spec import MASK_KEY, ActionPart, EnvSpec, ObservationSpec
from tests.unit.models.cases import CATEGORICAL, config_of, context_of, env_spec_of

SPEC = env_spec_of(*CATEGORICAL)
BRANCHES = env_spec_of(ActionPart("categorical", 3), ActionPart("categorical", 2))
MASKED = replace(
    env_spec_of(
        ActionPart("categorical", 3),
        ActionPart("categorical", 2),
        obs=ObservationSpec((5,), "float32"),
        **{MASK_KEY: ObservationSpec((5,), "uint8", high=1)},
    ),
    action_mask=5,
)
SIZE = 12


def learner_of(spec: EnvSpec = SPEC, *, seed: int = 0, **flags: object) -> ApexLearner:
    """Learners of one seed start from the same weights; the small gain of the last layer would hide mistakes."""
    values = {"rollout": 4, "batch_size": SIZE, "learning_rate": 1e-2, "max_weight_sync_delay": 0, **flags}
    normalize = bool(values.pop("normalize_input", False))
    config = ApexConfig(**values)  # type: ignore[arg-type]
    torch.manual_seed(seed)
    model = build_q_network(config_of(use_rnn=False, normalize_input=normalize), spec, dueling=config.dueling)
    with torch.no_grad():
        model.q_head.weight.mul_(100.0)
    return ApexLearner(FlatModule(model), context_of(config, spec))


def batch_of(spec: EnvSpec = SPEC, *, seed: int = 0) -> Batch:
    """Steps with every kind of end; weights are 1 / (N P) over their largest."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {key: seen.shape for key, seen in spec.observations.items() if key != MASK_KEY}
    obs = {key: torch.randn(2, SIZE, *shape, generator=generator) for key, shape in shapes.items()}
    if spec.action_mask:
        allowed = torch.rand(2, SIZE, 5, generator=generator) < 0.6
        allowed[..., [0, 3]] = True
        obs[MASK_KEY] = allowed.to(torch.uint8)
    sizes = [part.size for part in spec.action.parts]
    flags = torch.zeros(1, SIZE, dtype=torch.bool)
    terminated = flags.clone()
    terminated[0, ::4] = True
    weight = torch.rand(1, SIZE, generator=generator) + 0.1
    return Batch(
        obs=obs,
        first=torch.zeros(2, SIZE, dtype=torch.bool),
        valid=~flags,
        reward=3 * torch.randn(1, SIZE, generator=generator),
        terminated=terminated,
        truncated=flags,
        num_frames=torch.ones(1, SIZE, dtype=torch.int32),
        action=torch.stack([torch.randint(size, (1, SIZE), generator=generator) for size in sizes], -1).int(),
        recorded={
            "discount": torch.where(terminated, 0.0, 0.97 ** torch.randint(1, 4, (1, SIZE), generator=generator)),
            "weight": weight / weight.max(),
        },
        policy_version=torch.ones(1, SIZE, dtype=torch.int64),
        rnn_state=torch.zeros(1, SIZE, 0),
    )


def learn(learner: ApexLearner, batch: Batch, progress: float = 0.0) -> Tensor:
    """Train on a batch; its priorities."""
    (said,) = learner.learn(batch, progress)
    assert said["flags"] is learner.config
    return torch.from_numpy(said["priority"][0])


# --- one update, written out in float64 with nothing of ours


def q_of(weights: dict[str, Tensor], x: Tensor, sizes: list[int]) -> Tensor:
    """Q [L] of one observation [D]: one hidden layer of ELU, then the heads."""
    ((w, b),) = (
        (weights[name], weights[name.replace("weight", "bias")])
        for name in weights
        if name.startswith("tower.encoder") and name.endswith("weight")
    )
    hidden = torch.nn.functional.elu(w @ x + b)
    q = weights["q_head.weight"] @ hidden + weights["q_head.bias"]
    if "value_head.weight" not in weights:
        return q
    value = (weights["value_head.weight"] @ hidden + weights["value_head.bias"])[0]
    start, parts = 0, []
    for size in sizes:
        branch = q[start : start + size]
        parts.append(value + branch - branch.sum() / size)
        start += size
    return torch.cat(parts)


def best_of(q: Tensor, mask: Tensor | None, start: int, size: int) -> int:
    choices = [i for i in range(size) if mask is None or mask[start + i]]
    return max(choices, key=lambda i: float(q[start + i]))


def h(x: Tensor) -> Tensor:
    return torch.sign(x) * (torch.sqrt(torch.abs(x) + 1) - 1) + 1e-3 * x


def inverse_h(y: float) -> float:
    low, high = -1e6, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if float(h(torch.tensor(middle, dtype=torch.float64))) < y else (low, middle)
    return low


def reference(learner: ApexLearner, batch: Batch, spec: EnvSpec, beta: float) -> tuple[dict[str, Tensor], Tensor]:
    """The weights after one step of Adam from rest, and the errors of the batch."""
    c, sizes = learner.config, [part.size for part in spec.action.parts]
    weights = {n: p.detach().double().requires_grad_() for n, p in learner.model.named_parameters()}
    target = {n: p.detach().double() for n, p in learner.target.module.named_parameters()}
    total, errors = torch.zeros((), dtype=torch.float64), []
    for i in range(SIZE):
        now, after = batch.obs["obs"][0, i].double(), batch.obs["obs"][1, i].double()
        mask = batch.obs[MASK_KEY][1, i].bool() if spec.action_mask else None
        q, q_target = q_of(weights, now, sizes), q_of(target, after, sizes)
        chooser = q_of(weights, after, sizes).detach() if c.double_q else q_target
        start, values = 0, []
        for size in sizes:
            values.append(float(q_target[start + best_of(chooser, mask, start, size)]))
            start += size
        value = sum(values) / len(values)
        goal = batch.reward[0, i].double() + float(batch.recorded["discount"][0, i]) * (
            inverse_h(value) if c.value_rescaling else value
        )
        goal = h(goal) if c.value_rescaling else goal
        start, losses, sizes_of_errors = 0, [], []
        for part, size in enumerate(sizes):
            error = goal - q[start + int(batch.action[0, i, part])]
            is_large = c.huber_loss and float(error.detach().abs()) > 1
            losses.append(error.abs() - 0.5 if is_large else 0.5 * error**2)
            sizes_of_errors.append(float(error.detach().abs()))
            start += size
        allowed = batch.obs[MASK_KEY][0, i].bool() if spec.action_mask else torch.ones(sum(sizes), dtype=torch.bool)
        start = 0
        for part, size in enumerate(sizes):
            of_part = slice(start, start + size)
            soft = torch.log(sum(torch.exp(one) for one in q[of_part][allowed[of_part]]))
            losses.append(c.cql_alpha * (soft - q[start + int(batch.action[0, i, part])]))
            start += size
        total = total + float(batch.recorded["weight"][0, i]) ** beta * sum(losses) / len(sizes)
        errors.append(sum(sizes_of_errors) / len(sizes))
    gradients = torch.autograd.grad(total / SIZE, list(weights.values()))
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
    factor = min(1.0, c.max_grad_norm / norm) if c.max_grad_norm else 1.0
    stepped = {}
    for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
        g = gradient * factor  # moments divided by 1 - beta are the gradient and its square after the first step
        stepped[name] = weight.detach() - c.learning_rate * g / (g.abs() + c.adam_eps)
    return stepped, torch.tensor(errors)


@pytest.mark.parametrize(
    ("spec", "flags"),
    [
        (SPEC, {}),
        (SPEC, {"double_q": False, "dueling": False}),
        (SPEC, {"huber_loss": False, "max_grad_norm": 0.0, "priority_beta": 1.0}),
        (SPEC, {"max_grad_norm": 0.05, "priority_beta": 0.0}),
        (SPEC, {"value_rescaling": True}),
        (BRANCHES, {}),
        (MASKED, {}),
        (MASKED, {"double_q": False, "dueling": False}),
        (SPEC, {"cql_alpha": 0.7}),
        (BRANCHES, {"cql_alpha": 2.0, "priority_beta": 1.0}),
        (MASKED, {"cql_alpha": 1.0, "huber_loss": False}),
    ],
)
def test_an_update_is_that_of_the_paper(spec: EnvSpec, flags: dict[str, object]) -> None:
    learner = learner_of(spec, adam_eps=1e-3, **flags)
    with torch.no_grad():  # or the target network would be the other one
        learner.target.flat.add_(
            0.3 * torch.randn(len(learner.target.flat), generator=torch.Generator().manual_seed(9))
        )
    batch = batch_of(spec)
    expected, errors = reference(learner, batch, spec, learner.config.priority_beta)
    before = learner.flat.flat.clone()
    priority = learn(learner, batch)
    found = dict(learner.model.named_parameters())
    assert max(float((found[name].detach() - weight).abs().max()) for name, weight in expected.items()) < 1e-6
    assert torch.allclose(priority, errors.float(), rtol=1e-5, atol=1e-6)
    assert (learner.flat.flat - before).abs().max() > 1e-3


# --- counts and schedules


def test_the_target_follows_at_its_interval_and_versions_at_theirs() -> None:
    flags = {"target_update_interval": 3, "max_weight_sync_delay": 6, "replay_ratio": 4.0}
    learner = learner_of(**flags)  # 6 agent steps are 2 updates of 12 samples at 4 uses
    followed, versions = [], []
    for update in range(1, 7):
        learn(learner, batch_of(seed=update))
        followed.append(torch.equal(learner.target.flat, learner.flat.flat))
        versions.append(learner.version)
    assert learner.updates == 6
    assert followed == [False, False, True, False, False, True]
    assert versions == [1, 2, 2, 3, 3, 4]


def test_beta_goes_to_its_end_over_the_budget() -> None:
    learner = learner_of(priority_beta=0.4, priority_beta_final=1.0)
    assert [learner.beta(progress) for progress in (0.0, 0.5, 1.0, 1.5)] == pytest.approx([0.4, 0.7, 1.0, 1.0])


def test_the_linear_schedule_ends_at_zero() -> None:
    learner = learner_of(lr_schedule="linear")
    before = learner.flat.flat.clone()
    learn(learner, batch_of(), progress=1.0)
    assert torch.equal(learner.flat.flat, before)


def test_a_batch_that_is_not_finite_changes_nothing_and_has_finite_priorities() -> None:
    learner, batch = learner_of(), batch_of()
    batch.reward[0, 2] = math.nan
    before = learner.flat.flat.clone()
    priority = learn(learner, batch)
    assert priority.isfinite().all()
    assert torch.equal(learner.flat.flat, before)
    assert learner.metrics()["skipped"] == 1.0


def test_metrics_are_those_declared() -> None:
    learner = learner_of()
    assert learner.metrics() == {}
    learn(learner, batch_of())
    assert set(learner.metrics()) - {"skipped_in_a_row"} == set(METRICS)


def test_observations_are_normalized_by_what_was_drawn() -> None:
    learner, batch = learner_of(normalize_input=True), batch_of()
    learn(learner, batch)
    (moments,) = learner.statistics.observation.values()
    assert float(moments.count) == SIZE
    assert torch.allclose(moments.mean.float(), batch.obs["obs"][0].mean(0), atol=1e-6)


# --- its state


def test_training_goes_on_from_a_state_as_without_it() -> None:
    learner = learner_of(target_update_interval=2, normalize_input=True)
    for seed in range(3):
        learn(learner, batch_of(seed=seed))
    state = learner.state()
    assert set(state.vectors) == set(learner.layout.vectors)
    assert not np.array_equal(state.vectors[TARGET], state.weights)
    other = learner_of(seed=5, target_update_interval=2, normalize_input=True)
    other.restore(state)
    for one in (learner, other):
        for seed in range(3, 6):
            learn(one, batch_of(seed=seed))
    after, of_other = learner.state(), other.state()
    assert all(np.array_equal(after.vectors[name], of_other.vectors[name]) for name in after.vectors)
    assert (after.meta["updates"], after.meta["version"]) == (of_other.meta["updates"], of_other.meta["version"])


def test_a_state_of_another_network_is_refused() -> None:
    state = learner_of(BRANCHES).state()
    with pytest.raises(ValueError, match="weights, the model"):
        learner_of(dueling=False).restore(state)


def test_the_value_of_a_network_is_its_greedy_one() -> None:
    learner = learner_of(BRANCHES)
    model = learner.model
    assert isinstance(model, QNetwork)
    q, value, _ = model.act({"obs": torch.ones(2, 5)}, torch.zeros(2, dtype=torch.bool), torch.zeros(2, 0))
    expected = (q[:, :3].max(1).values + q[:, 3:].max(1).values) / 2
    assert torch.allclose(value, expected)


# --- in bf16


IMAGES = env_spec_of(*CATEGORICAL, obs=ObservationSpec((4, 40, 40), "uint8"))


@pytest.mark.parametrize("dueling", [False, True])
def test_images_are_computed_in_bf16_and_values_in_float32(dueling: bool) -> None:
    """Acting and learning alike: nearly the same numbers, from weights, moments and a target of 32 bits."""
    flags = ApexConfig(rollout=4, batch_size=SIZE, dueling=dueling, learning_rate=1e-3)
    generator = torch.Generator().manual_seed(2)
    images = torch.randint(0, 256, (2, SIZE, 4, 40, 40), dtype=torch.uint8, generator=generator)
    batch = replace(batch_of(), obs={"obs": images})
    first, none = torch.zeros(SIZE, dtype=torch.bool), torch.zeros(SIZE, 0)
    errors, values, weights = [], [], []
    for precision in ("fp32", "bf16"):
        context = Context(IMAGES, flags, config_of(use_rnn=False, hidden_size=32), precision, "cpu")
        torch.manual_seed(0)
        flat = APEX().make_model(context)
        assert isinstance(flat.module, QNetwork)
        with torch.no_grad():
            flat.module.q_head.weight.mul_(100.0)
        acting = FlatModule(copy.deepcopy(flat.module))
        policy = APEX().make_policy(context, acting)
        said, _ = policy.act({"obs": images[0]}, first, none, None, None)
        values.append(said["q_max"])
        learner = APEX().make_learner(context, flat, Device())
        assert isinstance(learner, ApexLearner)
        errors.append(learn(learner, batch))
        weights.append(flat.flat.clone())
        state = learner.state()
        vectors = state.weights, state.vectors[TARGET], learner.target.flat, flat.flat, said["q_max"]
        assert {str(vector.dtype).removeprefix("torch.") for vector in vectors} == {"float32"}
        policy.flat.load(state.weights)  # which acts with what was learned, in whatever numbers it computes
        assert not torch.equal(policy.act({"obs": images[0]}, first, none, None, None)[0]["q_max"], values[-1])
    for exact, rounded in (errors, values, weights):
        assert not torch.equal(exact, rounded)
        torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.02)
