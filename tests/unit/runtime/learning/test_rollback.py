from appo.algorithms.runtime.learning.rollback import RollbackRule

GO_ON, ROLL_BACK, GIVE_UP = "go on", "roll back", "give up"


def test_a_few_skipped_updates_are_nothing() -> None:
    rule = RollbackRule(max_skipped=50)
    assert [rule.judge(skipped, updates) for skipped, updates in ((0, 10), (49, 59), (0, 60))] == [GO_ON] * 3
    assert rule.rollbacks == 0


def test_three_rollbacks_in_vain_are_the_limit() -> None:
    rule = RollbackRule(max_skipped=50)
    verdicts = [rule.judge(skipped, updates) for skipped, updates in ((50, 60), (30, 90), (70, 130), (50, 180))]
    assert verdicts == [ROLL_BACK, GO_ON, ROLL_BACK, ROLL_BACK]
    assert rule.judge(49, 229) == GO_ON
    assert rule.judge(50, 230) == GIVE_UP
    assert rule.rollbacks == 3


def test_a_good_update_begins_a_new_count_even_if_it_was_never_seen_as_the_last() -> None:
    rule = RollbackRule(max_skipped=50)
    for updates in (50, 100, 150):
        assert rule.judge(50, updates) == ROLL_BACK
    assert [rule.judge(50, updates) for updates in (201, 251, 301)] == [ROLL_BACK] * 3  # the 151st was good
    assert rule.judge(50, 351) == GIVE_UP
    assert rule.rollbacks == 6


def test_counts_of_an_earlier_start_are_no_rollbacks() -> None:
    rule = RollbackRule(max_skipped=2)
    assert rule.judge(2, 100_002) == ROLL_BACK
    assert [rule.judge(2, updates) for updates in (100_004, 100_006, 100_008)] == [ROLL_BACK, ROLL_BACK, GIVE_UP]
