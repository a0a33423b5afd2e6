"""The SAC learner on batches as a replay gives them: updates against float64, counts, targets, its state."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributions

from appo.algorithms.models import encoders
from appo.algorithms.models.config import ModelConfig
from appo.algorithms.models.critics import Critics
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.models.images import IMAGES_AT_ONCE
from appo.algorithms.models.policy_network import build_policy_network
from appo.algorithms.parts.captured_update import WARM_UPS, CapturedUpdate
from appo.algorithms.run.config import parse_train
from appo.algorithms.run.placement import plan_workers, topology_of
from appo.algorithms.runtime.learning.batches import Batch
from appo.algorithms.runtime.memory.learner_state import ModelDescription
from appo.algorithms.sac.algorithm import SAC
from appo.algorithms.sac.config import METRICS, SACConfig
from appo.algorithms.sac.learner import SACLearner
from appo.envs.spec import ActionPart, EnvSpec, ObservationSpec
from appo.utils.system import machine
from tests.unit.models.cases import SEED, config_of, context_of, env_spec_of
from tests.unit.runtime.devices import RecordingDevice

NUM_ACTIONS, SIZE = 3, 16
SPEC = env_spec_of(ActionPart("tanh_gaussian", 2), ActionPart("tanh_gaussian", 1))
MODEL = config_of(use_rnn=False, normalize_input=False, encoder_mlp_layers=(8, 6), nonlinearity="tanh")


def learner_of(spec: EnvSpec = SPEC, model: ModelConfig = MODEL, **flags: Any) -> SACLearner:
    config = SACConfig(**({"batch_size": SIZE, "learning_rate": 1e-2, "critic_learning_rate": 3e-2} | flags))
    torch.manual_seed(0)
    network = build_policy_network(model, spec)
    with torch.no_grad():
        network.policy_head.linear.weight.mul_(100.0)  # whose small gain would hide mistakes
    return SACLearner(FlatModule(network), context_of(config, spec, model))


def batch_of(spec: EnvSpec = SPEC, *, seed: int = 0) -> Batch:
    """Steps with both kinds of end; weights are 1 / (N P) over their largest."""
    generator = torch.Generator().manual_seed(seed)
    obs = {
        key: torch.randint(0, 256, (2, SIZE, *one.shape), generator=generator, dtype=torch.uint8)
        if one.dtype == "uint8"
        else torch.randn(2, SIZE, *one.shape, generator=generator)
        for key, one in spec.observations.items()
    }
    flags = torch.zeros(1, SIZE, dtype=torch.bool)
    terminated = flags.clone()
    terminated[0, ::4] = True
    weight = torch.rand(1, SIZE, generator=generator) + 0.1
    discount = 0.97 ** torch.randint(1, 4, (1, SIZE), generator=generator)
    return Batch(
        obs=obs,
        first=torch.zeros(2, SIZE, dtype=torch.bool),
        valid=~flags,
        reward=3 * torch.randn(1, SIZE, generator=generator),
        terminated=terminated,
        truncated=flags,
        num_frames=torch.ones(1, SIZE, dtype=torch.int32),
        action=torch.randn(1, SIZE, spec.action.num_values, generator=generator),
        recorded={"discount": torch.where(terminated, 0.0, discount), "weight": weight / weight.max()},
        policy_version=torch.ones(1, SIZE, dtype=torch.int64),
        rnn_state=torch.zeros(1, SIZE, 0),
    )


def learn(learner: SACLearner, batch: Batch, progress: float = 0.0) -> Tensor:
    (feedback,) = list(learner.learn(batch, progress))
    assert feedback is not None
    return torch.from_numpy(feedback["priority"])


def copies(tensors: Any) -> list[Tensor]:
    return [tensor.detach().double().clone().requires_grad_() for tensor in tensors]


@dataclass
class Reference:
    """The equations of arXiv:1812.05905, one network after the other, in float64."""

    policy: list[Tensor]
    critics: list[list[Tensor]]
    targets: list[list[Tensor]]
    log_temperature: Tensor

    @classmethod
    def of(cls, learner: SACLearner) -> "Reference":
        def networks(critics: Any) -> list[list[Tensor]]:
            layers = list(zip(critics.weights, critics.biases, strict=True))
            return [copies(x[n] for layer in layers for x in layer) for n in range(learner.config.num_critics)]

        log = torch.tensor(float(np.log(learner.config.temperature)), dtype=torch.float64, requires_grad=True)
        return cls(
            copies(learner.flat.module.parameters()),
            networks(learner.critics.flat.module),
            networks(learner.targets.module),
            log,
        )

    def draw(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        w1, b1, w2, b2, w3, b3 = self.policy
        logits = torch.tanh(torch.tanh(obs @ w1.T + b1) @ w2.T + b2) @ w3.T + b3
        mean, log_std = logits[:, [0, 1, 4]], logits[:, [2, 3, 5]].clamp(-5, 2)  # a part of two numbers, one of one
        drawn = mean + log_std.exp() * noise
        squash = distributions.TanhTransform(cache_size=1)
        density = distributions.TransformedDistribution(distributions.Normal(mean, log_std.exp()), squash)
        action = squash(drawn)
        return action, density.log_prob(action).sum(-1)

    @staticmethod
    def value(network: list[Tensor], obs: Tensor, action: Tensor) -> Tensor:
        w1, b1, w2, b2, w3, b3 = network
        x = torch.cat((obs, action), -1)
        return (torch.tanh(torch.tanh(x @ w1 + b1) @ w2 + b2) @ w3 + b3).squeeze(-1)

    def smallest(self, networks: list[list[Tensor]], obs: Tensor, action: Tensor) -> Tensor:
        return torch.stack([self.value(network, obs, action) for network in networks]).min(0).values


@pytest.mark.parametrize("prioritized", [True, False])
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("num_critics", [1, 2, 3])
def test_updates_are_those_of_the_equations(num_critics: int, learned: bool, prioritized: bool) -> None:
    flags = {"num_critics": num_critics, "learn_temperature": learned, "temperature": 0.3, "target_rate": 0.1}
    flags |= {"target_entropy": -1.7, "prioritized_replay": prioritized, "priority_beta": 0.7}
    learner = learner_of(**flags)
    ref, random = Reference.of(learner), torch.Generator().manual_seed(SEED)
    of_critics = torch.optim.Adam([x for network in ref.critics for x in network], 3e-2, eps=1e-8)
    of_policy, of_temperature = torch.optim.Adam(ref.policy, 1e-2), torch.optim.Adam([ref.log_temperature], 1e-2)
    for seed in range(3):
        batch = batch_of(seed=seed)
        error = learn(learner, batch)
        now, later = batch.obs["obs"].double()
        weight = batch.recorded["weight"][0].double()
        of_parts = [torch.empty(2 * SIZE, n).normal_(generator=random) for n in (2, 1)]
        noise, noise_later = torch.cat(of_parts, -1).double().chunk(2)
        temperature = ref.log_temperature.exp()
        with torch.no_grad():
            action, log_prob = ref.draw(later, noise_later)
            soft = ref.smallest(ref.targets, later, action) - temperature * log_prob
            target = batch.reward[0].double() + batch.recorded["discount"][0].double() * soft
        q = torch.stack([ref.value(network, now, batch.action[0].double().tanh()) for network in ref.critics])
        torch.testing.assert_close(error[0].double(), (q - target).abs().mean(0), rtol=1e-4, atol=1e-4)
        action, log_prob = ref.draw(now, noise)
        gain = ref.smallest(ref.critics, now, action) - temperature.detach() * log_prob  # by the critics as they were
        of_policy.zero_grad()
        (-(weight / weight.mean() * gain).mean()).backward()
        of_critics.zero_grad()
        (0.5 * (q - target).square() * weight**0.7).mean(-1).sum().backward()
        of_critics.step()
        of_policy.step()
        if learned:
            of_temperature.zero_grad()
            (-ref.log_temperature * (log_prob.detach() - 1.7).mean()).backward()
            of_temperature.step()
        for targets, critics in zip(ref.targets, ref.critics, strict=True):
            for slow, quick in zip(targets, critics, strict=True):
                slow.data += 0.1 * (quick.data - slow.data)
    found = Reference.of(learner)
    for mine, exact in ((found.policy, ref.policy), *zip(found.critics, ref.critics, strict=True)):
        for one, other in zip(mine, exact, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-4)
    for mine, exact in zip(found.targets, ref.targets, strict=True):
        for one, other in zip(mine, exact, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-4)
    assert float(learner.temperature) == pytest.approx(float(ref.log_temperature.detach().exp()), rel=1e-5)
    assert learner.updates == 3


def test_metrics_are_those_that_are_declared() -> None:
    learner = learner_of()
    learn(learner, batch_of())
    found = learner.metrics()
    assert found.keys() - {"skipped_in_a_row"} == METRICS.keys()
    assert found["temperature"] == 1.0
    assert found["critics_learning_rate"] == 3e-2


def test_the_aim_of_the_entropy_is_one_nat_below_zero_per_number() -> None:
    assert learner_of().target_entropy == -3.0


@pytest.mark.parametrize(("delay", "versions"), [(0, [2, 3, 4, 5]), (32, [1, 2, 2, 3])])
def test_versions_rise_as_often_as_asked(delay: int, versions: list[int]) -> None:
    """32 agent steps are two updates of 16 steps at one use of each."""
    learner, found = learner_of(max_weight_sync_delay=delay, updates_per_step=1 / 16), []
    for seed in range(4):
        learn(learner, batch_of(seed=seed))
        found.append(learner.version)
    assert found == versions


@pytest.mark.parametrize("what", ["reward", "obs"])
def test_a_step_that_is_not_finite_changes_no_network(what: str) -> None:
    learner, batch = learner_of(), batch_of()
    (batch.reward[0] if what == "reward" else batch.obs["obs"][1])[1] = torch.nan  # of a step that goes on
    before = learner.state()
    error = learn(learner, batch)
    after = learner.state()
    assert error.isnan().any()
    names = [name for name in before.vectors if name.startswith(("networks.critics", "networks.targets"))]
    assert len(names) == 12
    for name in names:
        assert np.array_equal(before.vectors[name], after.vectors[name]), name


def test_a_new_learner_goes_on_with_every_tensor() -> None:
    learner = learner_of()
    for seed in range(3):
        learn(learner, batch_of(seed=seed))
    state = learner.state()
    names = state.vectors.keys()
    assert {f"networks.critics.weights.{i}" for i in range(3)} <= names
    assert {"networks.entropy_weight.log", "entropy_weight.exp_avg.log", "critics.adam_steps"} <= names
    other = learner_of()
    other.restore(state)
    assert state.vectors.keys() == other.layout.vectors.keys()
    for seed in range(3, 6):
        assert torch.equal(learn(learner, batch_of(seed=seed)), learn(other, batch_of(seed=seed)))
    one, two = learner.state(), other.state()
    assert one.meta == two.meta
    for name, vector in one.vectors.items():
        assert np.array_equal(vector, two.vectors[name]), name


def test_rates_follow_the_schedule_and_other_flags() -> None:
    learner = learner_of(lr_schedule="linear")
    learn(learner, batch_of(), progress=0.5)
    found = learner.metrics()
    assert found["learning_rate"] == found["entropy_weight_learning_rate"] == pytest.approx(0.5e-2)
    assert found["critics_learning_rate"] == pytest.approx(1.5e-2)


IMAGES = env_spec_of(
    ActionPart("tanh_gaussian", 2), pixels=ObservationSpec((3, 36, 40), "uint8"), more=ObservationSpec((), "float32")
)


@pytest.mark.parametrize("spec", [IMAGES, SPEC], ids=["image_and_number", "numbers"])
@pytest.mark.parametrize(
    "flags", [{"normalize_input": True}, {"normalize_input": False, "encoder_subtype": "mlp_residual"}]
)
def test_every_observation_is_learned_from(spec: EnvSpec, flags: dict[str, Any]) -> None:
    flags = flags if spec is SPEC else {"normalize_input": flags["normalize_input"], "normalize_images": True}
    learner = learner_of(spec, config_of(use_rnn=False, encoder_mlp_layers=(8,), **flags))
    before = learner.critics.flat.flat.clone(), learner.flat.flat.clone()
    assert learn(learner, batch_of(spec)).isfinite().all()
    assert not torch.equal(before[0], learner.critics.flat.flat)
    assert not torch.equal(before[1], learner.flat.flat)
    assert learner.statistics.to_array().any() == flags["normalize_input"]


def test_threads_share_the_images_of_critics_and_targets_too(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, shares = learner_of(IMAGES), []
    monkeypatch.setattr(machine, "threads", lambda: 2)
    monkeypatch.setattr(encoders, "side_by_side", lambda function, parts, trained: shares.append(len(parts)))
    for flat in (learner.critics.flat, learner.targets):
        (encoder,) = (
            one for one in flat.module.modules() if isinstance(one, encoders.Encoder) and one.num_image_layers
        )
        encoder(torch.zeros(2 * IMAGES_AT_ONCE[torch.float32], 3, 36, 40))
    assert shares == [2, 2]


def test_critics_begin_apart_and_gradients_of_actions_pass_frozen_ones() -> None:
    torch.manual_seed(1)
    critics = Critics(dict(SPEC.observations), MODEL, NUM_ACTIONS, 4)
    obs, action = {"obs": torch.randn(6, 5)}, torch.randn(6, NUM_ACTIONS, requires_grad=True)
    q = critics(obs, action)
    assert q.shape == (4, 6)
    assert q.detach().std(0).min() > 0
    (exact,) = torch.autograd.grad(q.sum(), action)
    critics(obs, action, frozen=True).sum().backward()
    assert action.grad is not None
    torch.testing.assert_close(action.grad, exact)
    assert all(parameter.grad is None for parameter in critics.parameters())


def test_normalized_layers_of_critics_forget_the_scale_of_their_weights() -> None:
    obs, action = {"obs": torch.randn(6, 5)}, torch.randn(6, NUM_ACTIONS)
    for normalized in (True, False):
        critics = Critics(dict(SPEC.observations), config_of(layer_norm=normalized), NUM_ACTIONS, 2)
        before = critics(obs, action)
        with torch.no_grad():
            critics.weights[0].mul_(7.0)
            critics.biases[0].mul_(7.0)
        assert torch.allclose(critics(obs, action), before, atol=1e-3) == normalized


@pytest.mark.parametrize("categorical", [0, 5])
def test_captured_updates_learn_the_same(categorical: int) -> None:
    """A graph reads the exponent of the weights at its place, and flags only when captured anew."""
    device = RecordingDevice()
    flags = {"prioritized_replay": True, "learn_temperature": True, "categorical_critics": categorical}
    plain = learner_of(**flags)
    captured = learner_of(**flags).accelerate(
        lambda learner: CapturedUpdate(learner.update, device, learner.device_generator)
    )
    for step in range(2 * (WARM_UPS + 2)):
        if step == WARM_UPS + 2:
            for learner in (plain, captured):
                learner.configure(replace(learner.config, target_rate=0.5))
        errors = [learn(learner, batch_of(seed=step), step / 20) for learner in (plain, captured)]
        assert torch.equal(*errors)
    assert (len(device.captured), device.replays) == (2, 4)
    assert captured.metrics() == plain.metrics()
    for name, vector in plain.state().vectors.items():
        assert (captured.state().vectors[name] == vector).all(), name


class Counting(SACLearner):
    """A learner with a decision in Python, which a graph would freeze."""

    made = 0

    def update(self, batch: Batch) -> Tensor:
        self.made += 1
        return super().update(batch)


def test_only_the_learner_itself_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    own = learner_of()
    context = replace(own.context, buffered=True)
    assert SAC().new_learner(context, learner_of().flat, RecordingDevice()).quick is not None
    monkeypatch.setattr(SAC, "learner_class", lambda self: Counting)
    counting = SAC().new_learner(context, own.flat, RecordingDevice())
    for step in range(WARM_UPS + 2):
        learn(counting, batch_of(seed=step))
    assert isinstance(counting, Counting)
    assert (counting.quick, counting.made) == (None, WARM_UPS + 2)


@pytest.mark.parametrize(
    ("words", "shards"),
    [
        ([], 1),
        (["--num_replay_shards=0"], 0),
        (["--num_policies=2"], 0),
        (["--n_steps=8"], 0),
        (["--n_steps=8", "--rollout=8"], 1),
        (["--lockstep", "--save_replay=False"], 0),
    ],
)
def test_another_process_draws_where_flags_allow_it(words: list[str], shards: int) -> None:
    config = parse_train(["--env=Pendulum-v1", "--algo=SAC", "--experiment=x", "--train_dir=.", *words])
    topology = topology_of(config, plan_workers(config, 2, "local"), 1)
    assert sum(count for _, count in topology.apart) == shards


def test_several_learners_add_up_the_gradients_of_critics_too() -> None:
    learner = learner_of()
    networks = [learner.optimizer, *(network.optimizer for network in learner.networks.values())]
    found = ModelDescription(learner.flat.table, 0, learner.layout).num_gradients
    assert found == sum(len(one.gradient) for one in networks) > 2 * len(learner.optimizer.gradient)
