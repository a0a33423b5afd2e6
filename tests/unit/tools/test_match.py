import pytest

from appo.algorithms.cli import parse
from appo.algorithms.tools.match import score_of, wilson
from appo.utils.errors import UsageError


def test_shares_have_the_interval_of_wilson() -> None:
    assert wilson(8, 10) == pytest.approx((0.8, 0.49016, 0.94331), abs=1e-5)
    assert wilson(10, 10) == pytest.approx((1.0, 0.72247, 1.0), abs=1e-5)
    assert wilson(0, 10) == pytest.approx((0.0, 0.0, 0.27753), abs=1e-5)


def test_draws_count_half() -> None:
    score = score_of([1.0, 2.0, 0.0, -1.0])
    assert (score.wins, score.draws, score.losses) == (2, 1, 1)
    assert (score.win_rate.mean, score.difference.mean) == (0.625, 0.5)
    assert score.difference.low <= 0.5 <= score.difference.high


def test_a_match_without_games_says_so() -> None:
    with pytest.raises(UsageError, match="in no episode"):
        score_of([])


@pytest.mark.parametrize("words", [["x", "y:best"], ["--a=x", "--b=y:best"], ["x", "--b=y:best"]])
def test_two_words_are_the_runs(words: list[str]) -> None:
    (config,) = parse("match", [*words, "--episodes=7", "--seed=3"])
    assert (config.a, config.b, config.episodes, config.seed) == ("x", "y:best", 7, 3)


@pytest.mark.parametrize("words", [[], ["x"], ["--episodes=9"]])
def test_a_run_is_missing(words: list[str]) -> None:
    with pytest.raises(UsageError, match="two runs"):
        parse("match", words)
