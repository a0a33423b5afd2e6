import gymnasium
import numpy as np
import pytest

from appo.envs.incidents import random_state
from appo.envs.journal import LEAST_STEPS, MOST_STEPS, NOBODY, Journal, JournalMemory, unfinished
from appo.envs.spec import ActionPart, ActionSpec
from tests.unit.envs.rollouts import journal_memory

CHOICE = ActionSpec((ActionPart("categorical", 1000),))


def memory_of(num_envs: int, steps: int = 64) -> JournalMemory:
    memory = journal_memory(num_envs, CHOICE)
    return memory._replace(actions=memory.actions[:steps])


def action(step: int, rows: int = 2) -> np.ndarray:
    """[R, A]: row and step in one number."""
    return np.array([[1000 * row + step] for row in range(rows)], np.int32)


def taken(journal: Journal, index: int) -> list[int]:
    return [number for (number,) in journal.story(index).actions]


def test_a_journal_holds_each_environments_actions_since_its_episode_began() -> None:
    journal, steps = Journal(2), 775
    for step in range(steps):
        journal.add(action(step))
        if step == 300:
            journal.begins(1, None, {"words": 5})
            journal.began(1)
    assert taken(journal, 0) == list(range(steps))
    assert taken(journal, 1) == list(range(1301, 1000 + steps))
    assert journal.story(1)[:3] == ("step", 0, {"words": 5})
    journal.begins(0, 9, None)
    assert journal.story(0) == ("first reset", 9, None, [], 0, [])


def test_a_reset_that_fails_is_told_with_the_episode_before() -> None:
    journal = Journal(1)
    journal.begins(0, 7, None)
    journal.began(0)
    journal.walk(0, np.array([2.5, 1.5], np.float32))
    for step in range(3):
        journal.add(action(step, 1))
    journal.begins(0, None, {"words": 5})
    assert journal.story(0) == ("reset", 7, None, [[2.5, 1.5], [0], [1]], 3, [])


def test_of_too_many_steps_the_oldest_are_forgotten() -> None:
    journal = Journal(2, memory_of(2, steps=64))
    for step in range(200):
        journal.add(action(step))
        if step in (135, 136):
            journal.begins(step % 2, None, None)
            journal.began(step % 2)
    assert journal.story(0)[3:] == ([[step] for step in range(137, 200)], 63, [])
    assert journal.story(1)[3:] == ([[1000 + step] for step in range(136, 200)], 64, [])
    journal.add(action(200))
    assert journal.story(1)[3:] == ([], 65, [])


@pytest.mark.parametrize(
    ("envs", "agents", "steps"), [(1, 1, MOST_STEPS), (64, 1, 4096), (16, 4, 4096), (10_000, 1, LEAST_STEPS)]
)
def test_a_journal_takes_about_a_mebibyte(envs: int, agents: int, steps: int) -> None:
    assert JournalMemory.shapes(envs, agents, CHOICE, 32)["actions"] == ((steps, envs, agents), "int32")


def test_what_a_process_was_doing_when_it_ended_is_told_from_the_memory_alone() -> None:
    memory, env = memory_of(3), gymnasium.Env()
    env.np_random = np.random.default_rng(3)
    assert unfinished(memory) is None
    journal = Journal(3, memory)
    journal.enters(2, "init")
    assert unfinished(memory) == (2, ("init", 0, None, [], 0, []))
    for index in range(3):
        journal.begins(index, 7 + index, None)
        journal.began(index)
    journal.walk(2, np.array([5], np.int32))
    journal.leaves()
    assert unfinished(memory) is None
    for step in range(3):
        journal.add(action(step, 3))
    state = random_state(env)
    journal.begins(1, None, state)
    journal.inside[0] = 1
    assert unfinished(memory) == (1, ("reset", 8, None, [[1000], [1001]], 2, []))
    journal.began(1)
    journal.add(action(3, 3))
    for index, story in (
        (0, ("step", 7, None, [[step] for step in range(4)], 4, [])),
        (1, ("step", 8, state, [[1003]], 1, [])),
        (2, ("step", 9, None, [[5], *([2000 + step] for step in range(4))], 5, [])),
    ):
        journal.inside[0] = index
        assert unfinished(memory) == (index, story) == (index, journal.story(index))
    Journal(3, memory)
    assert memory.head[2] == NOBODY
    assert unfinished(memory) is None


def test_random_numbers_of_another_kind_are_not_kept() -> None:
    memory = memory_of(1)
    journal = Journal(1, memory)
    journal.begins(0, None, {"bit_generator": "MT19937"})
    journal.began(0)
    journal.inside[0] = 0
    found = unfinished(memory)
    assert found is not None
    assert found[1].random_state == {"bit_generator": "not kept: it is no PCG64"}


def test_of_a_vector_everything_is_told() -> None:
    memory = memory_of(2)
    journal = Journal(2, memory, together=True)
    for index in range(2):
        journal.begins(index, 7 + index, None)
    journal.enters(0, "step")
    for step in range(2):
        journal.add(action(step))
    assert unfinished(memory) == (-1, ("step", 7, None, [[[0], [1000]], [[1], [1001]]], 2, [7, 8]))
