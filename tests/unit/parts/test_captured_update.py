import logging
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from appo.algorithms.appo.learner import APPOLearner
from appo.algorithms.models import actor_critic, cores
from appo.algorithms.parts.captured_update import WARM_UPS, CapturedUpdate
from appo.algorithms.runtime.learning.batches import Batch
from appo.envs.spec import EnvSpec
from tests.unit.appo.batches import COLUMNS, ROLLOUT, SPEC, batch_of, learn, learner_of
from tests.unit.models.cases import CORES, MIXED, env_spec_of
from tests.unit.runtime.devices import RecordingDevice

# Minibatches of four columns and, as six columns are no multiple of it, of two.
FLAGS = {"batch_size": 4 * ROLLOUT, "num_batches_per_iteration": 2, "ppo_epochs": 2, "lr_schedule": "kl_adaptive_epoch"}


def train(learner: APPOLearner, spec: EnvSpec = SPEC) -> APPOLearner:
    for seed in range(5):
        batch = batch_of(learner_of(spec, model=CORES["gru"]).model, spec, seed=seed)
        assert learn(learner, batch) == 4
    return learner


@pytest.mark.parametrize("spec", [SPEC, env_spec_of(*MIXED)])
def test_captured_steps_learn_the_same(spec: EnvSpec) -> None:
    plain = train(learner_of(spec, model=CORES["gru"], **FLAGS), spec)
    captured, device = learner_of(spec, model=CORES["gru"], **FLAGS), RecordingDevice()
    captured.quick = CapturedUpdate(captured.update, device)
    train(captured, spec)
    assert torch.equal(captured.flat.flat, plain.flat.flat)
    assert captured.metrics() == plain.metrics()
    assert (captured.statistics.to_array() == plain.statistics.to_array()).all()
    shapes = 2
    assert (len(device.captured), device.strict_runs) == (shapes, shapes)
    assert device.replays == 5 * 4 - shapes * WARM_UPS


def test_coefficients_change_in_captured_steps() -> None:
    """A graph reads tensors at the places of the capture."""
    linear = {"ppo_clip_schedule": "linear", "exploration_loss_schedule": "linear", "lr_schedule": "linear"}
    flags = {**linear, "ppo_clip_ratio": 0.4, "exploration_loss_coeff": 0.5}
    plain, captured, device = learner_of(**flags), learner_of(**flags), RecordingDevice()
    captured.quick = CapturedUpdate(captured.update, device)
    numbers = [(number, number.data_ptr()) for number in (captured.clip_ratio, captured.exploration_coeff)]
    for i in range(WARM_UPS + 3):
        batch = batch_of(plain.model, noise=1.0, seed=i)
        assert [learn(learner, batch, i / 10) for learner in (plain, captured)] == [1, 1]
    assert device.replays == 3
    assert torch.equal(captured.flat.flat, plain.flat.flat)
    left = 1 - (WARM_UPS + 2) / 10
    assert [float(number) for number, _ in numbers] == pytest.approx([0.4 * left, 0.5 * left])
    assert [number.data_ptr() for number, _ in numbers] == [place for _, place in numbers]


def test_targets_outlive_the_next_step() -> None:
    learner, device = learner_of(), RecordingDevice()
    step = CapturedUpdate(learner.update, device)
    batches = [batch_of(learner.model, seed=seed) for seed in range(WARM_UPS + 2)]
    targets = [step(batch) for batch in batches]
    assert device.replays == 2
    assert not torch.equal(targets[-2], targets[-1])
    kept = targets[-1].clone()
    step(batches[0])
    assert torch.equal(targets[-1], kept)


@pytest.mark.parametrize("refuses", ["strict", "capture"])
def test_what_cannot_be_captured_runs_as_it_is_after_one_warning(
    caplog: pytest.LogCaptureFixture, refuses: str
) -> None:
    seen: list[int] = []

    def update(batch: Batch) -> Tensor:
        seen.append(batch.valid.shape[1])
        return batch.reward

    step = CapturedUpdate(update, RecordingDevice(refuses))
    batch = batch_of(learner_of().model)
    narrow = batch.columns(slice(0, 2))
    with caplog.at_level(logging.WARNING):
        for _ in range(WARM_UPS + 2):
            assert step(batch) is batch.reward
            assert step(narrow) is narrow.reward
    assert seen == [COLUMNS, 2] * (WARM_UPS + 2)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("core", ["none", "gru", "lstm"])
@pytest.mark.parametrize("flags", [{}, {"with_vtrace": False}, {"exploration_loss": "symmetric_kl"}])
def test_nothing_in_acting_and_learning_is_read_back(
    monkeypatch: pytest.MonkeyPatch, core: str, flags: dict[str, object]
) -> None:
    """Tensors without memory raise where a number is asked of them: what would stall a GPU, and cannot be captured."""
    for module in (actor_critic, cores):
        monkeypatch.setattr(module, "autocast_off", lambda device: nullcontext())  # "meta" is unknown to autocast
    learner = learner_of(model=CORES[core], **flags)
    batch = batch_of(learner.model).map(lambda x: x.to("meta"))
    for parameter in learner.model.parameters():
        parameter.grad = None
    learner.model.to("meta")
    loss, target, _ = learner.loss(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert target.shape == batch.reward.shape
    assert all(parameter.grad is not None for parameter in learner.model.parameters())
    state = torch.zeros(COLUMNS, learner.model.rnn_state_size, device="meta")
    logits, _, _ = learner.model.act({key: x[0] for key, x in batch.obs.items()}, batch.first[0], state)
    assert logits.shape == batch.recorded["logits"][0].shape
