"""A twin retires because of another loss, not because of rounding."""

import pytest
import torch

from appo.algorithms.parts.twin_check import TwinCheck

EXACT = torch.tensor([3.0, 4.0])
GROWING = [1e-5, 8e-5, 6e-4, 4e-3, 4e-3, 2e-2]


def retired(shares: list[float]) -> list[bool]:
    """Return the verdicts on gradients that differ by shares of the exact gradient's length."""
    check = TwinCheck("twin.py")
    return [check.retires(EXACT * (1.0 + share), EXACT, {"loss"}, {"loss"}) for share in shares]


@pytest.mark.parametrize(
    ("shares", "verdicts"),
    [
        ([1e-5, 2e-3, 1e-5, 2e-3], [False] * 4),  # chance
        ([2e-3, 2e-3], [False, True]),  # another loss from the start
        (GROWING, [False] * 6),
        ([1e-4, 2e-2, 2e-2], [False, False, True]),  # a term that begins later
        ([*GROWING, 0.15, 0.15], [False] * 7 + [True]),
        ([1e-2, *[9e-4] * 3, 5e-3, 5e-3, *[1e-5] * 30, 5e-3, 5e-3], [False] * 37 + [True]),  # forgotten rounding
    ],
)
def test_the_tolerance_follows_rounding(shares: list[float], verdicts: list[bool]) -> None:
    assert retired(shares) == verdicts


def test_a_gradient_of_zero_has_no_share() -> None:
    check, nothing = TwinCheck("twin.py"), torch.zeros(2)
    assert [check.retires(nothing, nothing, set(), set()) for _ in range(2)] == [False, False]
    assert [check.retires(EXACT, nothing, set(), set()) for _ in range(2)] == [False, True]
