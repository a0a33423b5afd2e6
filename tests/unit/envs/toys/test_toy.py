import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from appo.envs.toys.toy import (
    TOYS,
    Cliff,
    Corridor,
    Counter,
    CounterVector,
    Memory,
    Target,
    ZeroVector,
    counter_length,
    counter_step,
    register_toys,
)


def test_registering_twice_is_harmless() -> None:
    register_toys()
    register_toys()
    assert {env_id for env_id in gymnasium.registry if env_id.startswith("toy/")} == set(TOYS)


@pytest.mark.parametrize("env_class", [Memory, Corridor, Cliff, Target, Counter])
def test_toys_obey_gymnasium(env_class: type[gymnasium.Env]) -> None:
    check_env(env_class(), skip_render_check=True)


@pytest.mark.parametrize("num_cues", [2, 3])
def test_memory_shows_cue_asks_and_pays(num_cues: int) -> None:
    env = Memory(delay=3, num_cues=num_cues)
    for episode in range(20):
        observation, _ = env.reset(seed=7 if episode == 0 else None)
        cue = int(observation.argmax())
        assert observation.sum() == 1
        assert cue < num_cues
        answer = episode % num_cues
        seen = []
        for _ in range(4):
            observation, reward, terminated, truncated, _ = env.step(answer)
            assert (reward, terminated, truncated) == (0.0, False, False)
            seen.append(observation.tolist())
        blank = [0.0] * (num_cues + 1)
        assert seen == [blank, blank, blank, [*blank[:-1], 1.0]]
        _, reward, terminated, truncated, _ = env.step(answer)
        assert reward == (1.0 if answer == cue else -1.0 / (num_cues - 1))
        assert (terminated, truncated) == (True, False)


def test_memory_cues_are_balanced() -> None:
    env = Memory()
    cues = [int(env.reset(seed=0 if i == 0 else None)[0].argmax()) for i in range(1000)]
    assert 0.45 < np.mean(cues) < 0.55


def test_corridor_pays_at_its_end_and_is_cut_off() -> None:
    env = Corridor(length=4, max_steps=5)
    env.reset()
    assert [env.step(1)[:4] for _ in range(3)] == [
        (1, 0.0, False, False), (2, 0.0, False, False), (3, 1.0, True, False)
    ]  # fmt: skip
    env.reset()
    assert [env.step(0)[:4] for _ in range(5)][-1] == (0, 0.0, False, True)
    env = Corridor(length=4, max_steps=3)
    env.reset()
    assert [env.step(1)[:4] for _ in range(3)][-1] == (3, 1.0, True, False)


def test_one_action_goes_on_along_the_cliff_and_the_other_falls() -> None:
    env, right = Cliff(length=3), (0, 1, 0)
    env.reset()
    assert [env.step(action)[:4] for action in right] == [
        (1, 0.0, False, False), (2, 0.0, False, False), (3, 1.0, True, False)
    ]  # fmt: skip
    for cell in range(3):
        env.reset()
        for action in right[:cell]:
            env.step(action)
        assert env.step(1 - right[cell])[:4] == (cell, 0.0, True, False)


def test_target_optimum_is_reached_by_going_straight_and_beaten_by_nothing() -> None:
    env, rng = Target(), np.random.default_rng(0)
    for seed in range(50):
        observation, _ = env.reset(seed=seed)
        best, total, truncated = env.optimal_return(), 0.0, False
        while not truncated:
            straight = np.clip((observation[2:] - observation[:2]) / env.SPEED, -1, 1)
            action = straight if seed % 2 == 0 else rng.uniform(-1, 1, 2).astype(np.float32)
            observation, reward, _, truncated, _ = env.step(action)
            total += reward
        assert total == pytest.approx(best, abs=1e-5) if seed % 2 == 0 else total < best


def test_counter_says_what_the_functions_say() -> None:
    env = Counter()
    observation, _ = env.reset(seed=2**16 + 3)
    for episode in range(4):
        assert observation.tolist() == [3, episode, 0, 0]
        total = 0.0
        for step in range(counter_length(3, episode)):
            observation, reward, terminated, truncated, info = env.step(step % 4)
            assert (reward, terminated, truncated) == counter_step(3, episode, step, step % 4)
            assert np.float32(reward) == reward
            assert observation.tolist() == [3, episode, step + 1, step % 4]
            total += reward
        assert terminated != truncated
        assert info == {"episode_extra_stats": {"length": step + 1}, "true_reward": total}
        observation, _ = env.reset()
    lengths = {counter_length(env_id, episode) for env_id in range(9) for episode in range(9)}
    assert lengths == set(range(3, 10))
    ends = {counter_step(env_id, 0, counter_length(env_id, 0) - 1, 0)[1:] for env_id in range(4)}
    assert ends == {(True, False), (False, True)}


def test_counter_vector_with_autoreset_disabled_insists_on_the_reset() -> None:
    env = CounterVector(2, "Disabled")
    env.reset(seed=0)
    for _ in range(counter_length(0, 0)):
        env.step(np.zeros(2, np.int64))
    with pytest.raises(gymnasium.error.ResetNeeded, match="row 0"):
        env.step(np.zeros(2, np.int64))
    before = env.reset(options={"reset_mask": np.array([True, False])})[0].copy()
    assert before.tolist() == [[0, 1, 0, 0], [1, 0, 3, 0]]


def test_counter_vector_through_gymnasium() -> None:
    register_toys()
    env = gymnasium.make_vec("toy/Counter-v0", 3, autoreset_mode="SameStep")
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert env.reset(seed=5)[0][:, 0].tolist() == [5, 6, 7]


def test_zero_vector_ends_all_rows_together() -> None:
    env = ZeroVector(3, obs_bytes=8, episode_steps=2)
    observation, _ = env.reset(seed=0)
    assert observation.shape == (3, 8)
    assert observation.dtype == np.uint8
    assert [env.step(np.zeros(3, int))[3].tolist() for _ in range(7)] == [
        [step % 3 == 1] * 3 for step in range(7)
    ]  # fmt: skip
