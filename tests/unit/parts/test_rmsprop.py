"""RMSProp against the paper in float64, known values, and what it does with gradients that would do harm."""

import math

import numpy as np
import pytest
import torch

from appo.algorithms.a3c.config import A3CConfig
from appo.algorithms.parts.rmsprop import SQUARES, FlatRMSProp

YES, NONE = torch.tensor(True), torch.zeros(())


def optimizer_of(*weights: float, **flags: float) -> FlatRMSProp:
    return FlatRMSProp(torch.tensor(weights), A3CConfig(**{"max_grad_norm": 0.0, **flags}))  # type: ignore[arg-type]


def test_steps_have_known_values() -> None:
    """g = 0.1 * 0.25, then 0.9 * 0.025 + 0.1: each step is 0.1 d / sqrt(g + 0.01)."""
    optimizer = optimizer_of(1.0, learning_rate=0.1, rmsprop_alpha=0.9, rmsprop_eps=0.01)
    found = []
    for gradient in (0.5, -1.0):
        optimizer.gradient.fill_(gradient)
        optimizer.step(YES, YES, NONE)
        found.append(float(optimizer.weights))
    assert found == pytest.approx([1 - 0.05 / math.sqrt(0.035), 1 - 0.05 / math.sqrt(0.035) + 0.1 / math.sqrt(0.1325)])
    assert found == pytest.approx([0.7327388, 1.0074597], abs=1e-6)


@pytest.mark.parametrize("limit", [0.0, 1.5])
def test_many_steps_are_those_of_the_paper(limit: float) -> None:
    rng, size = np.random.default_rng(1), 50
    start, gradients = rng.normal(size=size), rng.normal(size=(200, size))
    optimizer = FlatRMSProp(torch.tensor(start, dtype=torch.float32), A3CConfig(max_grad_norm=limit))
    c, w, g = optimizer.config, start.astype(np.float32).astype(np.float64), np.zeros(size)
    for d in gradients.astype(np.float32).astype(np.float64):
        optimizer.gradient.copy_(torch.from_numpy(d))
        norm, skipped = optimizer.step(YES, YES, NONE)
        assert (float(norm), float(skipped)) == (pytest.approx(np.linalg.norm(d)), 0)
        clipped = d * (min(1.0, limit / np.linalg.norm(d)) if limit else 1.0)
        g = c.rmsprop_alpha * g + (1 - c.rmsprop_alpha) * clipped**2
        w -= c.learning_rate * clipped / np.sqrt(g + c.rmsprop_eps)
    assert np.allclose(optimizer.weights.numpy(), w, atol=1e-5)


def test_harmful_gradients_are_skipped_and_counted() -> None:
    optimizer = optimizer_of(1.0, 2.0)
    for harmful, is_finite in ((math.nan, True), (math.inf, True), (1.0, False)):
        optimizer.gradient.fill_(harmful)
        assert float(optimizer.step(YES, torch.tensor(is_finite), NONE)[1]) == 1
    assert float(optimizer.step(torch.tensor(False), YES, NONE)[1]) == 0  # no valid step, but nothing is lost
    assert optimizer.weights.tolist() == [1.0, 2.0]
    assert optimizer.meta()["skipped_in_a_row"] == 3
    optimizer.gradient.fill_(1.0)
    optimizer.step(YES, YES, NONE)
    assert optimizer.meta()["skipped_in_a_row"] == 0


def test_squares_are_a_vector_of_the_state() -> None:
    layout = optimizer_of(1.0, 2.0).layout(4, {})
    assert {name: (v.size, v.inherited) for name, v in layout.vectors.items()} == {
        "weights": (4, True),
        SQUARES: (4, False),
    }
    one, other = optimizer_of(1.0, 2.0), optimizer_of(1.0, 2.0)
    vectors = {SQUARES: np.full(4, 9.0, np.float32)}
    one.gradient.fill_(2.0)
    one.step(YES, YES, NONE)
    one.save(vectors)
    assert vectors[SQUARES].tolist() == pytest.approx([0.04, 0.04, 0, 0])
    other.restore(vectors, one.meta())
    other.weights.copy_(one.weights)
    for optimizer in (one, other):
        optimizer.gradient.fill_(-1.0)
        optimizer.step(YES, YES, NONE)
    assert torch.equal(one.weights, other.weights)
