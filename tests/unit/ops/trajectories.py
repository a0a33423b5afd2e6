"""Random trajectories as the runtime writes them, and slow references for what is computed from them."""

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray

NEXT_STEP, SAME_STEP = "next_step", "same_step"


@dataclass(frozen=True)
class Trajectory:
    """Arrays [T, B], `value` and `first` [T+1, B]."""

    reward: NDArray
    value: NDArray
    terminated: NDArray
    truncated: NDArray
    valid: NDArray
    first: NDArray
    final_value: NDArray | None

    def tensors(self) -> dict[str, torch.Tensor | None]:
        """Keyword arguments of `vtrace` and `gae`, float32."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: None if a is None else _tensor(a) for name, a in arrays.items()}

    def clean(self) -> "Trajectory":
        """The same trajectory with zeros instead of every NaN."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: np.nan_to_num(a) for n, a in arrays.items() if a is not None and a.dtype != bool})


def _tensor(array: NDArray) -> torch.Tensor:
    return torch.tensor(array, dtype=torch.bool if array.dtype == bool else torch.float32)


def random_trajectory(rng: np.random.Generator, reset: str, steps: int, columns: int) -> Trajectory:
    """A trajectory consistent with the reset mode; what must not be read is NaN."""
    reward, value = rng.normal(size=(steps, columns)), rng.normal(size=(steps + 1, columns)) * 2
    final_value = rng.normal(size=(steps, columns)) * 2
    terminated, truncated, valid = (np.zeros((steps, columns), bool) for _ in range(3))
    first = np.zeros((steps + 1, columns), bool)
    for b in range(columns):
        start = rng.integers(0, steps) if rng.random() < 0.25 else 0  # staggered: rows before the start are invalid
        first[: start + 1, b] = start > 0 or rng.random() < 0.3
        resetting = reset == NEXT_STEP and start == 0 and rng.random() < 0.2  # the slot before ended with a done
        for t in range(start, steps):
            valid[t, b] = not resetting
            terminated[t, b], truncated[t, b] = (rng.random(2) < 0.2) & (not resetting)  # both at once happens too
            done = terminated[t, b] or truncated[t, b]
            first[t + 1, b] = resetting if reset == NEXT_STEP else done
            resetting = reset == NEXT_STEP and done
    trajectory = Trajectory(
        reward, value, terminated, truncated, valid, first, final_value if reset == SAME_STEP else None
    )
    if rng.random() < 0.3:
        trajectory = replace(trajectory, valid=valid & (rng.random(valid.shape) < 0.8))  # too old, or another policy's
    return poisoned(trajectory, rng)


def poisoned(trajectory: Trajectory, rng: np.random.Generator) -> Trajectory:
    """Put NaN (random bits in the flags) wherever nothing may be read."""
    t = trajectory
    next_is_other = t.valid & t.first[1:]
    is_reached = np.concatenate([np.zeros_like(t.valid[:1]), t.valid & ~t.terminated & ~next_is_other])
    is_reached[1:] |= next_is_other & ~t.terminated if t.final_value is None else False
    value_is_read = is_reached.copy()
    value_is_read[:-1] |= t.valid
    ended, cut = rng.random((2, *t.valid.shape)) < 0.3
    return replace(
        t,
        reward=np.where(t.valid, t.reward, np.nan),
        value=np.where(value_is_read, t.value, np.nan),
        terminated=np.where(t.valid, t.terminated, ended),
        truncated=np.where(t.valid, t.truncated, cut),
        final_value=None if t.final_value is None else np.where(next_is_other & ~t.terminated, t.final_value, np.nan),
    )


class Reference:
    """V-trace and GAE in float64 by their sums, one step at a time, for one column."""

    def __init__(self, trajectory: Trajectory, column: int, gamma: float) -> None:
        for f in fields(trajectory):
            array = getattr(trajectory, f.name)
            setattr(self, f.name, None if array is None else array[:, column].tolist())
        self.gamma, self.steps = gamma, len(self.reward)

    def next_value(self, t: int) -> float:
        if self.terminated[t]:
            return 0.0
        if self.first[t + 1]:
            return self.value[t] if self.final_value is None else self.final_value[t]
        return self.value[t + 1]

    def continues(self, t: int) -> bool:
        return (
            t + 1 < self.steps
            and not (self.terminated[t] or self.truncated[t] or self.first[t + 1])
            and self.valid[t + 1]
        )

    def difference(self, t: int) -> float:
        return self.reward[t] + self.gamma * self.next_value(t) - self.value[t]

    def weighted_sum(self, t: int, weight: list[float], trace: list[float]) -> float:
        """sum over s >= t of gamma^(s-t) * prod(trace[t..s-1]) * weight[s] * difference(s), to the end of the trace."""
        total, product, s = 0.0, 1.0, t
        while True:
            total += product * weight[s] * self.difference(s)
            if not self.continues(s):
                return total
            product *= self.gamma * trace[s]
            s += 1

    def vtrace(self, ratio: list[float], lam: float, rho_clip: float, c_clip: float) -> tuple[list[float], list[float]]:
        weight, trace = [min(rho_clip, x) for x in ratio], [lam * min(c_clip, x) for x in ratio]
        advantage, target = [0.0] * self.steps, [0.0] * self.steps
        for t in range(self.steps):
            if self.valid[t]:
                target[t] = self.value[t] + self.weighted_sum(t, weight, trace)
                if self.continues(t):
                    after = self.value[t + 1] + self.weighted_sum(t + 1, weight, trace)
                else:
                    after = self.next_value(t)
                advantage[t] = self.reward[t] + self.gamma * after - self.value[t]
        return advantage, target

    def gae(self, lam: float) -> tuple[list[float], list[float]]:
        ones, trace = [1.0] * self.steps, [lam] * self.steps
        advantage = [self.weighted_sum(t, ones, trace) if self.valid[t] else 0.0 for t in range(self.steps)]
        return advantage, [a + v if ok else 0.0 for a, v, ok in zip(advantage, self.value, self.valid, strict=False)]


def over_columns(trajectory: Trajectory, gamma: float, compute: object) -> tuple[NDArray, NDArray]:
    """Apply `compute(reference, column)` to every column; (advantage, target), [T, B] each."""
    columns = trajectory.reward.shape[1]
    results = [compute(Reference(trajectory, b, gamma), b) for b in range(columns)]  # type: ignore[operator]
    return np.array([r[0] for r in results]).T, np.array([r[1] for r in results]).T


@dataclass(frozen=True)
class Tape:
    """What really happened in one deterministic env, apart from how it is reset: one entry per real step."""

    reward: NDArray
    value: NDArray
    ending: NDArray
    """0: goes on, 1: terminated, 2: truncated, 3: both."""
    reached_value: NDArray
    """Of the state after a step with an ending, and after the last step."""
    ratio: NDArray


def random_tape(rng: np.random.Generator, steps: int) -> Tape:
    ending = rng.choice(4, size=steps, p=[0.7, 0.1, 0.1, 0.1])
    reward, value, reached = rng.normal(size=(3, steps))
    return Tape(reward, value, ending, reached, rng.uniform(0.05, 3.0, steps))


def as_same_step(tape: Tape) -> tuple[Trajectory, NDArray]:
    """The tape as an env writes it that resets within the step; and its ratio [T, 1]."""
    done = tape.ending > 0
    after_last = 77.0 if done[-1] else tape.reached_value[-1]  # 77: of the next episode, of no concern to this one
    trajectory = Trajectory(
        reward=tape.reward[:, None],
        value=np.append(tape.value, after_last)[:, None],
        terminated=(tape.ending % 2 == 1)[:, None],
        truncated=(tape.ending >= 2)[:, None],
        valid=np.ones((len(done), 1), bool),
        first=np.append(True, done)[:, None],
        final_value=np.where(done, tape.reached_value, np.nan)[:, None],
    )
    return trajectory, tape.ratio[:, None]


def as_next_step(tape: Tape) -> tuple[Trajectory, NDArray]:
    """The tape as an env writes it that resets on the step after a done; and its ratio [T, 1]."""
    rows: list[tuple[float, float, int, bool, bool, float]] = []  # reward, value, ending, valid, first, ratio
    starts = True
    for i, ending in enumerate(tape.ending):
        rows.append((tape.reward[i], tape.value[i], ending, True, starts, tape.ratio[i]))
        starts = ending > 0
        if starts and i + 1 < len(tape.ending):
            rows.append((0.0, tape.reached_value[i], 0, False, False, np.nan))
    reward, value, ending, valid, first, ratio = (np.array(x)[:, None] for x in zip(*rows, strict=True))
    trajectory = Trajectory(
        reward=reward,
        value=np.append(value, tape.reached_value[-1])[:, None],
        terminated=ending % 2 == 1,
        truncated=ending >= 2,
        valid=valid,
        first=np.append(first, False)[:, None],
        final_value=None,
    )
    return trajectory, ratio
