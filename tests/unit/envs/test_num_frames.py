import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from appo.envs.loop.python_loop import PythonLoop
from appo.envs.spec import GroupEnv, StepRow
from appo.envs.vectors.gym_vector import GymVector

FRAMES: dict[str, list[int | None]] = {
    "constant": [4, 4, 4],
    "varying": [4, 1, 7],
    "sometimes": [None, 3, None],
    "last": [None, None, 5],
    "never": [None, None, None],
}
KINDS = ["python", *(mode.value for mode in AutoresetMode)]


class Framed(gymnasium.Env):
    """Says of some steps how many frames they took, as `frames` does; of its resets it says 99, which is no step."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, frames: list[int | None], says_at_reset: bool = False) -> None:
        self.frames, self.count, self.says_at_reset = frames, 0, says_at_reset

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        self.count = 0
        return np.zeros(1, np.float32), {"num_frames": 99} if self.says_at_reset else {}

    def step(self, action: np.ndarray) -> tuple:
        frames = self.frames[self.count]
        self.count += 1
        said = {} if frames is None else {"num_frames": frames}
        return np.full(1, self.count / 9, np.float32), 0.0, False, self.count == len(self.frames), said


def group_of(kind: str, frames: list[int | None], says_at_reset: bool) -> GroupEnv:
    """A row that never says a word beside one that does: gymnasium fills up with zeros what one env does not say."""
    env_fns = [lambda: Framed([None] * 4), lambda: Framed(frames, says_at_reset)]
    if kind == "python":
        return PythonLoop(env_fns, name="Framed")
    return GymVector(lambda: SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode(kind)), name="Framed")


@pytest.mark.parametrize("says_at_reset", [False, True])
@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_frames_that_envs_report_are_counted(kind: str, name: str, says_at_reset: bool) -> None:
    """All steps are written to one row, as if slots had one step: nothing of an earlier one may stay."""
    frames = FRAMES[name]
    group = group_of(kind, frames, says_at_reset)
    obs, flags = {"obs": np.zeros((2, 1), np.float32)}, [np.zeros(2, bool) for _ in range(4)]
    final_obs = {"obs": np.zeros((2, 1), np.float32)} if group.spec.same_step else {}
    num_frames = np.ones(2, np.int32)
    row = StepRow(obs, flags[0], np.zeros(2, np.float32), flags[1], flags[2], num_frames, final_obs, flags[3])
    group.reset([0, 1], obs)
    found = []
    for _ in range(9):
        group.step(np.zeros((2, 1), np.float32), row)
        valid = np.ones(2, bool) if group.spec.same_step else ~flags[0]
        assert num_frames[0] == 1 or not valid[0]
        found += num_frames[1:].tolist() if valid[1] else []
    assert found == ([frame or 1 for frame in frames] * 3)[: len(found)]
    assert len(found) == (9 if group.spec.same_step else 7)
