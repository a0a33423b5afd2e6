"""The choice of points that a long curve can lose."""

from collections import Counter
from collections.abc import Hashable


class Thinning:
    """Chooses about half of the points of several curves, evenly along each curve.

    Dropping every second point each time would thin the beginning of a long curve most. Pass every point to `see`
    first, then every point in the same order to `keeps`.
    """

    def __init__(self) -> None:
        self._ends: dict[Hashable, tuple[float, float]] = {}
        self._counts, self._asked = Counter[Hashable](), Counter[Hashable]()
        self._kept: dict[Hashable, float] = {}

    def see(self, curve: Hashable, place: float) -> None:
        """Count a point of a curve at a place on the axis."""
        low, high = self._ends.get(curve, (place, place))
        self._ends[curve] = min(low, place), max(high, place)
        self._counts[curve] += 1

    def keeps(self, curve: Hashable, place: float) -> bool:
        """Return whether a point stays: after twice the mean distance, or where the curve goes back."""
        low, high = self._ends[curve]
        self._asked[curve] += 1
        last = self._kept.get(curve)
        if low == high:  # all points are at one place
            return self._asked[curve] % 2 == 1
        if last is not None and 0 <= place - last < 2 * (high - low) / self._counts[curve]:
            return False
        self._kept[curve] = place
        return True
