import pytest

from appo.algorithms.population.self_play import PRIOR_GAMES, Record, expected_score, probabilities, rating_of


def test_four_hundred_points_are_odds_of_ten_to_one() -> None:
    assert expected_score(400.0, 0.0) == pytest.approx(10 / 11)
    assert expected_score(100.0, 100.0) == 0.5
    assert expected_score(0.0, 123.0) == pytest.approx(1 - expected_score(123.0, 0.0))


def test_the_rating_explains_all_games() -> None:
    records = [Record(0.0, 100, 80.0), Record(150.0, 40, 20.5), Record(300.0, 10, 0.0)]
    rating = rating_of(records)
    expected = sum((one.games + PRIOR_GAMES) * expected_score(rating, one.rating) for one in records)
    assert expected == pytest.approx(80.0 + 20.5 + 3 * PRIOR_GAMES / 2)


def test_ratings_without_games() -> None:
    assert rating_of([]) == 0.0
    assert rating_of([Record(70.0, 0, 0.0)]) == pytest.approx(70.0)
    assert 400 < rating_of([Record(0.0, 100, 100.0)]) < 1200  # it has won all, and is not infinitely good


def test_hard_opponents_are_drawn_by_the_square_of_what_they_win() -> None:
    records = [Record(0.0, 9, 4.5), Record(0.0, 9, 8.5), Record(0.0, 0, 0.0)]  # win rates 0.5, 0.9, 0.5
    assert probabilities(records, "hard") == pytest.approx([0.25 / 0.51, 0.01 / 0.51, 0.25 / 0.51])
    assert probabilities(records, "uniform") == [1 / 3] * 3
    assert probabilities([], "uniform") == []
