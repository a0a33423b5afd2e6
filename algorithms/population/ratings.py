"""Ratings of the learning policy against past versions, and the choice of opponents; pure functions.

A version keeps the rating of the learner at the time when the version was taken; the first version has 0. The learner's
rating is the best explanation of the last results. 400 points are odds of 10 to 1 (Elo 1978, The Rating of
Chessplayers).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

SCALE = 400 / math.log(10)

PRIOR_GAMES = 1.0
"""Drawn games added for every version, so that no rating is certain."""

HARDNESS = 2
"""Exponent of `hard` opponents."""

LARGEST_STEP = 4000.0  # from the highest or lowest rating of a version: odds that no number of games can show

BISECTIONS = 50


class Record(NamedTuple):
    """Recent results of the learner against a version; `score` counts won games, and half of drawn games."""

    rating: float
    games: int
    score: float

    @property
    def win_rate(self) -> float:
        """Return the share of games won, with the prior."""
        return (self.score + PRIOR_GAMES / 2) / (self.games + PRIOR_GAMES)


def expected_score(rating: float, other: float) -> float:
    """Return the expected score of a game between two ratings."""
    return 1 / (1 + math.exp(-(rating - other) / SCALE))


def rating_of(records: Sequence[Record]) -> float:
    """Return the maximum likelihood rating for all games; 0 without versions.

    Source: Bradley and Terry 1952, Biometrika 39, with one unknown strength.
    """
    if not records:
        return 0.0
    score = sum(one.score + PRIOR_GAMES / 2 for one in records)
    low = min(one.rating for one in records) - LARGEST_STEP
    high = max(one.rating for one in records) + LARGEST_STEP
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        expected = sum((one.games + PRIOR_GAMES) * expected_score(middle, one.rating) for one in records)
        low, high = (middle, high) if expected < score else (low, middle)
    return (low + high) / 2


def probabilities(records: Sequence[Record], opponents: str) -> list[float]:
    """Return the probability of drawing each version.

    Args:
        records: results against the versions.
        opponents: uniform, or hard: by (1 - win rate)^2 (prioritized fictitious self-play, Vinyals et al. 2019).
    """
    weights = [1.0 if opponents == "uniform" else (1 - one.win_rate) ** HARDNESS for one in records]
    return [weight / sum(weights) for weight in weights]
