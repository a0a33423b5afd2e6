"""ale-py's vector environment, which trains, and the wrapped single one, which is watched, are the same game."""

from typing import Any

import gymnasium
import numpy as np
import pytest

from appo.envs.config import EnvConfig
from appo.envs.loop.python_loop import PythonLoop
from appo.envs.make import make_group, make_single
from appo.envs.spec import GroupEnv, ObservationSpec, step_row
from appo.envs.vectors.gym_vector import GymVector
from appo.utils.errors import UsageError
from tests.unit.envs.rollouts import Rollout, collect

pytest.importorskip("ale_py")
pytest.importorskip("cv2")

EXACT = {"repeat_action_probability": 0.0, "noop_max": 0}
STEPS = 400


def group_of(game: str, vectorization: str, num_envs: int = 2, **flags: Any) -> GroupEnv:
    config = EnvConfig(env=game, env_vectorization=vectorization, decorrelate_envs_on_one_worker=False, **flags)
    group = make_group(config, num_envs)
    assert isinstance(group, GymVector if vectorization == "native" else PythonLoop)
    return group


def played(group: GroupEnv, num_steps: int = STEPS, seeds: tuple[int, ...] = (0, 1)) -> Rollout:
    """The same random actions whatever is shown, different ones in every row."""
    random = np.random.default_rng(3)
    num_choices = group.spec.action.parts[0].size

    def policy(obs: dict[str, np.ndarray]) -> np.ndarray:
        return random.integers(num_choices, size=(group.num_rows, 1)).astype(np.int32)

    rollout = collect(group, num_steps, list(seeds), policy)
    group.close()
    return rollout


def assert_same(a: Rollout, b: Rollout) -> None:
    np.testing.assert_array_equal(a.action, b.action)
    for name in ("first", "reward", "terminated", "truncated"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    np.testing.assert_array_equal(a.obs["obs"], b.obs["obs"])
    np.testing.assert_array_equal(a.num_frames, b.num_frames)


@pytest.mark.parametrize(
    "game",
    [
        pytest.param("ALE/Breakout-v5", marks=pytest.mark.slow),
        "ALE/Pong-v5",
        pytest.param("ALE/Seaquest-v5", marks=pytest.mark.slow),
        pytest.param("ALE/MsPacman-v5", marks=pytest.mark.slow),
        pytest.param("ALE/Qbert-v5", marks=pytest.mark.slow),
        pytest.param("ALE/Freeway-v5", marks=pytest.mark.slow),
    ],
)
def test_both_ways_show_the_same_game(game: str) -> None:
    native, python = group_of(game, "native", env_kwargs=EXACT), group_of(game, "python", env_kwargs=EXACT)
    assert native.spec == python.spec
    assert native.spec.observations == {"obs": ObservationSpec((4, 84, 84), "uint8")}
    assert (native.spec.frames_per_step, native.spec.same_step) == (4, False)
    one, other = played(native), played(python)
    assert_same(one, other)
    assert (one.num_frames == 4).all()
    assert not np.array_equal(one.obs["obs"][:, 0], one.obs["obs"][:, 1])
    if game == "ALE/Breakout-v5":
        assert one.terminated.any(0).all()  # five lives; a lost one ends nothing
        assert not one.truncated.any()


@pytest.mark.parametrize(
    "flags",
    [
        {"env_frameskip": 2, "env_framestack": 3},
        pytest.param({"env_frameskip": 1, "env_framestack": 1}, marks=pytest.mark.slow),
        {"horizon": 50},
        pytest.param({"horizon": 60, "env_frameskip": 3}, marks=pytest.mark.slow),
    ],
)
def test_both_ways_follow_the_flags(flags: dict[str, int]) -> None:
    groups = [group_of("ALE/Breakout-v5", by, env_kwargs=EXACT, **flags) for by in ("native", "python")]
    skip = flags.get("env_frameskip", 4)
    for group in groups:
        assert group.spec.observations["obs"].shape == (flags.get("env_framestack", 4), 84, 84)
        assert group.spec.frames_per_step == skip
    one, other = (played(group, 200) for group in groups)
    assert_same(one, other)
    if horizon := flags.get("horizon"):
        ends = np.flatnonzero(one.truncated[:, 0])
        assert ends[0] == horizon - 1
        assert not one.terminated[: horizon - 1, 0].any()
    else:
        assert not one.truncated.any()


@pytest.mark.parametrize(("height", "width"), [(42, 60)])
def test_both_ways_have_the_size_asked_for(height: int, width: int) -> None:
    size = {"img_height": height, "img_width": width}
    for by in ("native", "python"):
        group = group_of("ALE/Pong-v5", by, env_kwargs=EXACT | size)
        assert group.spec.observations["obs"].shape == (4, height, width)
        assert played(group, 20).obs["obs"].shape == (21, 2, 4, height, width)


def test_rewards_are_raw_unless_the_vector_is_asked_to_clip_them() -> None:
    raw = played(group_of("ALE/MsPacman-v5", "native", env_kwargs=EXACT), 150)
    assert raw.reward.max() >= 10
    np.testing.assert_array_equal(
        raw.reward, played(group_of("ALE/MsPacman-v5", "python", env_kwargs=EXACT), 150).reward
    )
    clipped = played(group_of("ALE/MsPacman-v5", "native", env_kwargs=EXACT | {"reward_clipping": True}), 150)
    np.testing.assert_array_equal(clipped.reward, np.sign(raw.reward))


@pytest.mark.parametrize("by", ["native", "python"])
def test_actions_stick_by_default(by: str) -> None:
    """What a seed decides is which actions are repeated; without that nothing is left to decide."""
    sticky = played(group_of("ALE/Pong-v5", by, env_kwargs={"noop_max": 0}), 30)
    again = played(group_of("ALE/Pong-v5", by, env_kwargs={"noop_max": 0}), 30)
    other = played(group_of("ALE/Pong-v5", by, env_kwargs={"noop_max": 0}), 30, seeds=(5, 6))
    np.testing.assert_array_equal(sticky.obs["obs"], again.obs["obs"])
    assert not np.array_equal(sticky.obs["obs"], other.obs["obs"])
    exact = [played(group_of("ALE/Pong-v5", by, env_kwargs=EXACT), 30, seeds=seeds) for seeds in ((0, 1), (5, 6))]
    assert_same(*exact)


def test_the_probability_that_actions_stick_is_a_quarter() -> None:
    env = make_single(EnvConfig(env="ALE/Pong-v5"))
    assert env.unwrapped.ale.getFloat("repeat_action_probability") == 0.25
    env.close()
    group = group_of("ALE/Pong-v5", "native")
    assert group._env.spec.kwargs["repeat_action_probability"] == 0.25
    group.close()


def test_an_episode_starts_with_a_random_number_of_idle_frames() -> None:
    for by in ("native", "python"):
        group = group_of("ALE/Freeway-v5", by, num_envs=4, env_kwargs={"repeat_action_probability": 0.0})
        starts = {key: np.zeros((4, *spec.shape), spec.dtype) for key, spec in group.spec.observations.items()}
        group.reset(range(4), starts)
        group.close()
        assert len({start.tobytes() for start in starts["obs"]}) > 1


@pytest.mark.parametrize("by", ["python", "native"])
def test_colours_are_refused(by: str) -> None:
    with pytest.raises(UsageError, match=r"^--env_kwargs grayscale=False: ALE/Pong-v5 is learned in gray; --env=envp"):
        make_group(EnvConfig(env="ALE/Pong-v5", env_vectorization=by, env_kwargs={"grayscale": False}), 1)


def test_a_wrapper_whose_pictures_nobody_would_see_is_refused() -> None:
    class Masked(gymnasium.ObservationWrapper):  # type: ignore[type-arg]
        def observation(self, observation: Any) -> Any:
            return observation

    gymnasium.register("ALE/Masked-v0", lambda **arguments: Masked(gymnasium.make("ALE/Pong-v5", **arguments)))
    try:
        with pytest.raises(UsageError, match=r"^ALE/Masked-v0: pictures are taken from the emulator, beneath Masked;"):
            make_group(EnvConfig(env="ALE/Masked-v0", env_vectorization="python"), 1)
    finally:
        del gymnasium.registry["ALE/Masked-v0"]


def test_a_single_game_refuses_what_only_the_vector_has() -> None:
    with pytest.raises(UsageError, match="reward_clipping=True: only ale-py's vector environment has it"):
        make_single(EnvConfig(env="ALE/Breakout-v5", env_kwargs={"reward_clipping": True}))
    make_single(EnvConfig(env="ALE/Breakout-v5", env_kwargs={"reward_clipping": False})).close()


@pytest.mark.parametrize("by", ["native", "python"])
def test_fire_begins_a_game(by: str) -> None:
    """Who does nothing loses a life of Breakout only if FIRE has thrown the ball."""
    lives = []
    for fire in (False, True):
        group = group_of("ALE/Breakout-v5", by, num_envs=1, env_kwargs=EXACT | {"use_fire_reset": fire})
        row = step_row(group.spec, 1)
        row.lives = np.zeros(1, np.int32)
        group.reset([0], row.obs)
        for _ in range(60):
            group.step(np.zeros((1, 1), np.int32), row)
        group.close()
        lives.append(int(row.lives[0]))
    assert lives == [5, 4]


def test_a_game_can_be_rendered() -> None:
    env = make_single(EnvConfig(env="ALE/Pong-v5"), "rgb_array")
    env.reset(seed=0)
    assert env.render().shape == (210, 160, 3)
    env.close()


@pytest.mark.parametrize("by", ["native", "python"])
def test_arguments_say_what_no_flag_says(by: str) -> None:
    kwargs = {"frameskip": 2, "stack_num": 3, "max_num_frames_per_episode": 40}
    group = group_of("ALE/Pong-v5", by, env_kwargs=EXACT | kwargs)
    assert (group.spec.frames_per_step, group.spec.observations["obs"].shape) == (2, (3, 84, 84))
    group.close()
    group = group_of("ALE/Pong-v5", by, env_kwargs=EXACT | kwargs, env_frameskip=3, env_framestack=1)
    assert (group.spec.frames_per_step, group.spec.observations["obs"].shape) == (3, (1, 84, 84))
    group.close()
