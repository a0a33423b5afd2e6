"""Runs a group as an actor does, into arrays shaped like a slot."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from appo.envs.journal import JournalMemory
from appo.envs.spec import ActionSpec, EpisodeStats, GroupEnv, StepRow

Policy = Callable[[dict[str, np.ndarray]], np.ndarray]


@dataclass
class Rollout:
    obs: dict[str, np.ndarray]  # [T+1, R, *]
    first: np.ndarray  # [T+1, R]
    action: np.ndarray  # [T, R, A]
    reward: np.ndarray  # [T, R]
    terminated: np.ndarray
    truncated: np.ndarray
    num_frames: np.ndarray  # [T, R]
    final_obs: dict[str, np.ndarray]  # [T, R, *]
    has_final: np.ndarray  # [T, R]
    episodes: list[tuple[int, EpisodeStats]]

    @property
    def done(self) -> np.ndarray:
        return self.terminated | self.truncated


def journal_memory(num_envs: int, action: ActionSpec) -> JournalMemory:
    """As the arena has it for single agents."""
    shapes = JournalMemory.shapes(num_envs, 1, action, walk_steps=4)
    return JournalMemory(**{name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()})


def collect(group: GroupEnv, num_steps: int, seeds: list[int], policy: Policy) -> Rollout:
    """Garbage is planted everywhere first: what is not written in every step is found out."""
    steps, rows, spec = num_steps, group.num_rows, group.spec
    rng = np.random.default_rng(0)

    def garbage(length: int) -> dict[str, np.ndarray]:
        return {k: np.full((length, rows, *o.shape), 77, o.dtype) for k, o in spec.observations.items()}

    def flags(length: int) -> np.ndarray:
        return rng.random((length, rows)) < 0.5

    obs, first = garbage(steps + 1), flags(steps + 1)
    action = np.zeros((steps, rows, spec.action.num_values), spec.action.dtype)
    rollout = Rollout(
        obs, first, action, np.full((steps, rows), 77, np.float32), flags(steps), flags(steps),
        np.full((steps, rows), spec.frames_per_step, np.int32),
        garbage(steps) if spec.same_step else {}, flags(steps), [],
    )  # fmt: skip
    group.reset(seeds, {key: array[0] for key, array in obs.items()})
    first[0] = True
    for t in range(steps):
        action[t] = policy({key: array[t] for key, array in obs.items()})
        row = StepRow(
            obs={key: array[t + 1] for key, array in obs.items()},
            first=first[t + 1],
            reward=rollout.reward[t],
            terminated=rollout.terminated[t],
            truncated=rollout.truncated[t],
            num_frames=rollout.num_frames[t],
            final_obs={key: array[t] for key, array in rollout.final_obs.items()},
            has_final=rollout.has_final[t] if spec.same_step else None,
        )
        rollout.episodes += [(t, stats) for stats in group.step(action[t], row)]
    return rollout
