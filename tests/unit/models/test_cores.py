import pytest
import torch
from torch import nn

from appo.algorithms.models.cores import IdentityCore, RecurrentCore

CASES = [("gru", 1), ("gru", 2), ("lstm", 1), ("lstm", 2)]


def core_of(rnn_type: str, num_layers: int) -> RecurrentCore:
    torch.manual_seed(0)
    return RecurrentCore(rnn_type, 3, 4, num_layers)


def test_identity_has_no_state() -> None:
    core, x, state = IdentityCore(3), torch.rand(2, 3), torch.empty(2, 0)
    y, after = core.step(x, torch.ones(2, dtype=torch.bool), state)
    assert (core.output_size, core.state_size) == (3, 0)
    assert y is x
    assert after is state


@pytest.mark.parametrize(("rnn_type", "num_layers"), CASES)
def test_state_size(rnn_type: str, num_layers: int) -> None:
    core = core_of(rnn_type, num_layers)
    assert core.state_size == 4 * num_layers * (2 if rnn_type == "lstm" else 1)


@pytest.mark.parametrize(("rnn_type", "num_layers"), CASES)
def test_step_equals_torch_with_its_own_state(rnn_type: str, num_layers: int) -> None:
    core = core_of(rnn_type, num_layers)
    x, state, first = torch.rand(5, 3), torch.rand(5, core.state_size), torch.zeros(5, dtype=torch.bool)
    vectors = [vector.contiguous() for vector in state.reshape(5, -1, 4).transpose(0, 1).split(num_layers)]
    expected, after = core.rnn(x[None], tuple(vectors) if rnn_type == "lstm" else vectors[0])
    expected_state = torch.cat(after if rnn_type == "lstm" else (after,)).transpose(0, 1).reshape(5, -1)
    y, state = core.step(x, first, state)
    torch.testing.assert_close(y, expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state, expected_state, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("rnn_type", "num_layers"), CASES)
@pytest.mark.parametrize("garbage", [3.0, float("nan"), float("inf")])
def test_first_is_exactly_a_zero_state(rnn_type: str, num_layers: int, garbage: float) -> None:
    core, x, first = core_of(rnn_type, num_layers), torch.rand(2, 3), torch.tensor([True, False])
    state = torch.rand(2, core.state_size)
    zeroed = state.clone()
    zeroed[0] = 0.0
    state[0] = garbage
    nobody = torch.zeros(2, dtype=torch.bool)
    for got, expected in zip(core.step(x, first, state), core.step(x, nobody, zeroed), strict=True):
        assert torch.equal(got, expected)
    assert (state[0] == garbage).all() or garbage != garbage  # the caller's state is not touched


@pytest.mark.parametrize(("rnn_type", "num_layers"), CASES)
@pytest.mark.parametrize("recurrence", [6, 3, 2, 1])
def test_unroll_starts_each_segment_from_its_own_state(rnn_type: str, num_layers: int, recurrence: int) -> None:
    """States that do not follow from each other, so that a segment that ignored its own would be seen."""
    core, steps, columns = core_of(rnn_type, num_layers), 6, 3
    x, first = torch.rand(steps + 1, columns, 3), torch.rand(steps + 1, columns) < 0.3
    state = torch.rand(steps // recurrence, columns, core.state_size)
    expected = []
    for t in range(steps + 1):
        if t % recurrence == 0 and t < steps:
            now = state[t // recurrence]
        y, now = core.step(x[t], first[t], now)
        expected.append(y)
    torch.testing.assert_close(core.unroll(x, first, state), torch.stack(expected), rtol=1e-6, atol=1e-6)


def gradient_of(core: RecurrentCore, first: torch.Tensor, segments: int, row: int) -> torch.Tensor:
    """Size [T+1,B] of the gradient of output `row` with respect to the input at every step."""
    x = torch.rand(*first.shape, 3, requires_grad=True)
    state = torch.rand(segments, first.shape[1], core.state_size, requires_grad=True)
    y = core.unroll(x, first, state)
    y[row].sum().backward()
    assert state.grad is None
    return x.grad.abs().sum(-1)


@pytest.mark.parametrize(("rnn_type", "num_layers"), CASES)
def test_gradient_stops_at_resets_of_its_column_only(rnn_type: str, num_layers: int) -> None:
    first = torch.zeros(7, 2, dtype=torch.bool)
    first[3, 0] = True
    gradient = gradient_of(core_of(rnn_type, num_layers), first, 1, row=5)
    assert (gradient[:3, 0] == 0).all()
    assert (gradient[3:6, 0] > 0).all()
    assert (gradient[:6, 1] > 0).all()
    assert (gradient[6] == 0).all()


@pytest.mark.parametrize(("rnn_type", "num_layers"), CASES)
def test_gradient_stops_at_segments(rnn_type: str, num_layers: int) -> None:
    first = torch.zeros(7, 2, dtype=torch.bool)
    gradient = gradient_of(core_of(rnn_type, num_layers), first, 2, row=5)
    assert (gradient[:3] == 0).all()
    assert (gradient[3:6] > 0).all()


def test_last_row_continues_from_the_last_segment() -> None:
    first = torch.zeros(7, 2, dtype=torch.bool)
    gradient = gradient_of(core_of("gru", 1), first, 2, row=6)
    assert (gradient[:3] == 0).all()
    assert (gradient[3:] > 0).all()


@pytest.mark.parametrize("rnn_type", ["gru", "lstm"])
def test_lower_precision_of_the_input_does_not_reach_the_state(rnn_type: str) -> None:
    core, first = core_of(rnn_type, 1), torch.zeros(2, dtype=torch.bool)
    x = torch.rand(2, 3).to(torch.bfloat16)
    y, state = core.step(x, first, torch.zeros(2, core.state_size))
    assert y.dtype == state.dtype == torch.float32


def test_the_cell_is_the_one_asked_for() -> None:
    assert isinstance(core_of("gru", 1).rnn, nn.GRU)
    assert isinstance(core_of("lstm", 1).rnn, nn.LSTM)
