import pytest
import torch
from torch import Tensor, nn

from appo.algorithms.models import unrolling
from appo.algorithms.models.unrolling import segments_at_resets, unroll

T, B, D, HIDDEN = 11, 5, 4, 6


def first_at(*positions: tuple[int, int]) -> Tensor:
    first = torch.zeros(T, B, dtype=torch.bool)
    for t, b in positions:
        first[t, b] = True
    return first


RESETS = {
    "none": first_at(),
    "at the head": first_at((0, 0), (0, 3)),
    "in the middle": first_at((4, 1), (4, 2), (7, 1), (10, 0)),
    "everywhere": torch.ones(T, B, dtype=torch.bool),
    "random": torch.rand(T, B, generator=torch.Generator().manual_seed(0)) < 0.2,
}


def gru_by_segments(gru: nn.GRU) -> object:
    def cell(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, state = gru(x, state.unsqueeze(0))
        return y, state.squeeze(0)

    return cell


def lstm_by_segments(lstm: nn.LSTM) -> object:
    def cell(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        h, c = (s.unsqueeze(0).contiguous() for s in state.chunk(2, -1))
        y, (h, c) = lstm(x, (h, c))
        return y, torch.cat([h, c], -1).squeeze(0)

    return cell


def by_column(cell: object, x: Tensor, first: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One column and one step at a time."""
    outputs, states = [], []
    for b in range(x.shape[1]):
        h, rows = state[b : b + 1], []
        for t in range(x.shape[0]):
            if first[t, b]:
                h = torch.zeros_like(h)
            y, h = cell(x[t : t + 1, b : b + 1], h)  # type: ignore[operator]
            rows.append(y)
        outputs.append(torch.cat(rows))
        states.append(h)
    return torch.cat(outputs, 1), torch.cat(states)


@pytest.mark.parametrize("resets", RESETS)
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_unroll_equals_a_loop_over_columns_and_steps(kind: str, resets: str) -> None:
    torch.manual_seed(1)
    cell = gru_by_segments(nn.GRU(D, HIDDEN)) if kind == "gru" else lstm_by_segments(nn.LSTM(D, HIDDEN))
    width = HIDDEN * (2 if kind == "lstm" else 1)
    x, state = torch.randn(T, B, D, requires_grad=True), torch.randn(B, width, requires_grad=True)
    results, gradients = [], []
    for run in (unroll, by_column):
        y, last = run(cell, x, RESETS[resets], state)
        results.append((y, last))
        gradients.append(torch.autograd.grad(y.square().sum() + last.sum(), (x, state), allow_unused=True))
    for ours, reference in zip(results[0], results[1], strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=2e-6)
    for ours, reference in zip(gradients[0], gradients[1], strict=True):
        expected = torch.zeros_like(ours) if reference is None else reference
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_state_of_a_new_episode_has_no_influence_even_when_nan() -> None:
    def total(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        sums = state + x.cumsum(0)
        return sums, sums[-1]

    state = torch.full((B, 1), float("nan"), requires_grad=True)
    first = first_at(*((0, b) for b in range(B)), (3, 2))
    y, last = unroll(total, torch.ones(T, B, 1), first, state)
    assert y[:, 0, 0].tolist() == list(range(1, T + 1))
    assert y[:, 2, 0].tolist() == [1, 2, 3, *range(1, T - 2)]
    assert last[:, 0].tolist() == [11, 11, 8, 11, 11]
    (grad,) = torch.autograd.grad(y.sum(), state)
    assert grad.tolist() == [[0.0]] * B


def test_caller_keeps_its_state() -> None:
    state = torch.ones(B, 2)
    unroll(lambda x, h: (x, h.add_(1)), torch.zeros(T, B, 2), first_at((0, 0)), state)
    assert state.eq(1).all()


@pytest.mark.parametrize(
    ("resets", "expected"),
    [
        ("none", [(0, 11)]),
        ("at the head", [(0, 11)]),
        ("in the middle", [(0, 4), (4, 7), (7, 10), (10, 11)]),
        ("everywhere", [(t, t + 1) for t in range(T)]),
    ],
)
def test_segments(resets: str, expected: list[tuple[int, int]]) -> None:
    assert segments_at_resets(RESETS[resets]) == expected


def test_fused_cell_is_called_once_per_segment() -> None:
    lengths: list[int] = []

    def cell(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        lengths.append(len(x))
        return x, state

    unroll(cell, torch.zeros(T, B, 1), RESETS["in the middle"], torch.zeros(B, 1))
    assert lengths == [4, 3, 3, 1]


def test_wrong_shapes_are_named() -> None:
    def cell(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return x, state

    with pytest.raises(ValueError, match=r"x: expected shape \[11, 5, any\], got \[10, 5, 4\]"):
        unroll(cell, torch.zeros(T - 1, B, D), RESETS["none"], torch.zeros(B, 1))
    with pytest.raises(ValueError, match=r"state: expected shape \[5, any\], got \[4, 1\]"):
        unroll(cell, torch.zeros(T, B, D), RESETS["none"], torch.zeros(B - 1, 1))
    with pytest.raises(ValueError, match="at least one step"):
        unroll(cell, torch.zeros(0, B, D), torch.zeros(0, B, dtype=torch.bool), torch.zeros(B, 1))


@pytest.mark.parametrize("resets", RESETS)
def test_step_by_step_gives_the_same(monkeypatch: pytest.MonkeyPatch, resets: str) -> None:
    """As on devices where it would cost a synchronization to know where episodes start."""
    torch.manual_seed(0)
    cell, x, state = gru_by_segments(nn.GRU(D, HIDDEN)), torch.randn(T, B, D), torch.randn(B, HIDDEN)
    expected = unroll(cell, x, RESETS[resets], state)  # type: ignore[arg-type]
    monkeypatch.setattr(unrolling, "segments_at_resets", lambda first: unrolling.single_steps(len(first)))
    for found, wanted in zip(unroll(cell, x, RESETS[resets], state), expected, strict=True):  # type: ignore[arg-type]
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
