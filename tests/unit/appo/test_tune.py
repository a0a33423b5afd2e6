"""Other hyperparameters in a running learner: whoever makes the steps, they are those of a learner made with them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.appo.learner import APPOLearner
from appo.algorithms.appo.numpy_learner import NumpyUpdate, numpy_update
from appo.algorithms.parts.captured_update import WARM_UPS, CapturedUpdate
from tests.unit.appo.batches import ROLLOUT, batch_of, context_of, learn, learner_of, learning
from tests.unit.runtime.devices import RecordingDevice

OTHERS = {
    "learning_rate": 3e-3,
    "max_grad_norm": 0.1,
    "ppo_clip_ratio": 0.02,
    "ppo_clip_value": 0.05,
    "exploration_loss_coeff": 0.2,
    "value_loss_coeff": 2.0,
    "gamma": 0.8,
}
STEPS_BEFORE = 5
Quick = Callable[[APPOLearner], object]
WAYS: dict[str, Quick] = {
    "torch": lambda learner: None,
    "numpy": numpy_update,
    "captured": lambda learner: CapturedUpdate(learner.update, RecordingDevice()),
}


def tune(learner: APPOLearner, values: dict[str, object]) -> int:
    learner.configure(replace(learner.config, **values))  # type: ignore[arg-type]
    return learner.config.macro_batch_columns


def trained(learner: APPOLearner, seeds: range) -> APPOLearner:
    for seed in seeds:
        assert learn(learner, batch_of(learner_of(model={"use_rnn": False}).model, seed=seed)) == 1
    return learner


@pytest.mark.parametrize(
    ("way", "name"),
    [
        pytest.param(way, name, marks=[] if way == "numpy" or name == "all" else pytest.mark.slow)
        for way in WAYS
        for name in (*OTHERS, "all")
    ],
)
def test_they_take_effect_however_steps_are_made(way: str, name: str) -> None:
    values = OTHERS if name == "all" else {name: OTHERS[name]}
    tuned, made_with = learner_of(model={"use_rnn": False}), learner_of(model={"use_rnn": False}, **values)
    tuned.accelerate(WAYS[way])
    assert (tuned.quick is None) == (way == "torch")
    trained(tuned, range(STEPS_BEFORE))
    left_alone = learner_of(model={"use_rnn": False})
    for other in (made_with, left_alone):
        other.quick = WAYS[way](other)  # type: ignore[assignment]
        other.restore(tuned.state())
    assert tune(tuned, values) == 6
    for learner in (tuned, made_with, left_alone):
        trained(learner, range(STEPS_BEFORE, STEPS_BEFORE + WARM_UPS + 2))
    assert torch.equal(tuned.flat.flat, made_with.flat.flat)
    assert not torch.equal(tuned.flat.flat, left_alone.flat.flat)


def test_steps_are_captured_anew() -> None:
    learner, devices = learner_of(), []

    def captured(learner: APPOLearner) -> CapturedUpdate:
        devices.append(RecordingDevice())
        return CapturedUpdate(learner.update, devices[-1])

    learner.accelerate(captured)
    for seed in range(WARM_UPS + 2):
        learn(learner, batch_of(learner.model, seed=seed))
    tune(learner, {"value_loss_coeff": 5.0})
    for seed in range(WARM_UPS + 2):
        learn(learner, batch_of(learner.model, seed=seed))
    assert [(len(device.captured), device.replays) for device in devices] == [(1, 2), (1, 2)]


def test_a_twin_in_numpy_comes_and_goes_with_the_options_it_knows() -> None:
    learner = learner_of(model={"use_rnn": False})
    learner.accelerate(numpy_update)
    assert isinstance(learner.quick, NumpyUpdate)
    tune(learner, {"kl_loss_coeff": 0.1})
    assert learner.quick is None
    tune(learner, {"kl_loss_coeff": 0.0})
    assert isinstance(learner.quick, NumpyUpdate)


def test_an_adapted_rate_stays_unless_another_one_is_set() -> None:
    learner = learner_of(lr_schedule="kl_adaptive_minibatch", lr_schedule_kl_threshold=1e-9)
    learn(learner, batch_of(learner.model))
    adapted = float(learner.optimizer.learning_rate)
    assert adapted < 1e-2
    tune(learner, {"gamma": 0.9})
    assert float(learner.optimizer.learning_rate) == adapted
    tune(learner, {"learning_rate": 0.25})
    assert float(learner.optimizer.learning_rate) == 0.25


def test_the_size_of_batches_and_minibatches() -> None:
    learner = learner_of(num_batches_per_iteration=2)
    assert tune(learner, {"batch_size": 2 * ROLLOUT}) == 4
    assert learn(learner, batch_of(learner.model)) == 3  # six columns by two


class Own(APPOLearner):
    """A learner of a user, whose loss may count and decide in Python."""


@pytest.mark.parametrize(("kind", "quick"), [(APPOLearner, CapturedUpdate), (Own, type(None))])
def test_the_update_of_a_subclass_is_not_captured(
    kind: type[APPOLearner], quick: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(APPO, "learner_class", lambda self: kind)
    flat = learner_of(model={"use_rnn": False}).flat
    context = replace(context_of(learning()), buffered=True)
    learner = APPO().new_learner(context, flat, RecordingDevice())
    assert isinstance(learner, kind)
    assert type(learner.quick) is quick
