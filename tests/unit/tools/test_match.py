import pytest

from appo.algorithms.cli import parse
from appo.algorithms.tools.match import score_of
from appo.utils.errors import UsageError


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
