"""From episodes to batches: shuffled units of a dataset, each step read once per epoch.

A stream contains episodes in succession, each with a row for the final observation, as slots do where a step that only
resets follows each end (NEXT_STEP). A unit is T rows, a column, or a single row. The order depends only on the number
of steps read so far, so a replacement learner and a later start continue where the last one ended.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from appo.algorithms.datasets.episodes import Episode
from appo.algorithms.datasets.reader import Dataset
from appo.algorithms.runtime.learning.batches import Batch
from appo.algorithms.runtime.memory.arena import Array
from appo.envs.conversion import scale_rewards
from appo.envs.spec import BoolArray, EnvSpec, IntArray
from appo.utils.errors import UsageError

ORDER = 0x0FF11E
"""Part of the seeds of all orders; the rest are the numbers of the epoch and of the window."""

Stream = dict[str, Array]
"""Episodes as rows, [M, *] by their names in batches; see `stream_of`."""

Gather = Callable[[Stream, Array], dict[str, Array]]
"""Returns the arrays of a batch, [*, units, *] by name, from a stream and the numbers of the units."""


class Needs(NamedTuple):
    """Requirements on the episodes of datasets.

    Attributes:
        recorded: infos that every episode must have, and batches receive.
        reward_scale, reward_clip: transformation of rewards, as for played rewards.
    """

    recorded: tuple[str, ...] = ()
    reward_scale: float = 1.0
    reward_clip: float = 0.0


NOTHING = Needs()


class ShuffledReader:
    """Reads batches of units in an order decided by the number of the epoch.

    `window_steps` steps of whole episodes are held in memory and shuffled (0: all); a unit has `unit_rows` rows of a
    stream. A step counts as the frames of `spec`, of the dataset or of the environment; None: that of the dataset.
    """

    def __init__(
        self,
        dataset: Dataset,
        window_steps: int,
        unit_rows: int,
        gather: Gather,
        needs: Needs = NOTHING,
        spec: EnvSpec | None = None,
    ) -> None:
        self.dataset, self.window_steps, self.unit_rows, self.gather = dataset, window_steps, unit_rows, gather
        self.needs, self.spec = needs, spec or dataset.spec
        self._plan: tuple[int, list[Array]] | None = None
        self._held: tuple[bytes, Stream] | None = None
        self._order: tuple[tuple[int, int], Array, Array] | None = None

    @property
    def steps_per_unit(self) -> float:
        """Mean number of valid steps in a unit; only rows that are steps are read as units of one row."""
        steps, episodes = self.dataset.steps, len(self.dataset)
        return 1.0 if self.unit_rows == 1 else self.unit_rows * steps / (steps + episodes)

    def read(self, samples: int, units: int) -> Batch:
        """Return the batch of `units` units that follows `samples` steps (UsageError: an episode is damaged)."""
        epoch, within = divmod(samples, self.dataset.steps)
        parts: list[dict[str, Array]] = []
        while units:
            windows, window, before = self._windows(epoch), 0, 0
            while within >= before + (steps := int(self.dataset.lengths[windows[window]].sum())):
                window, before = window + 1, before + steps
                if window == len(windows):
                    epoch, within = epoch + 1, within - before
                    windows, window, before = self._windows(epoch), 0, 0
            stream = self._stream(windows[window])
            order, read = self._shuffled(epoch, window, stream)
            begin = int(np.searchsorted(read, within - before))
            taken = order[begin : begin + units]
            parts.append(self.gather(stream, taken))
            units, within = units - len(taken), before + int(read[begin + len(taken)])
        arrays = parts[0]  # of most batches
        if len(parts) > 1:
            arrays = {name: np.concatenate([part[name] for part in parts], axis=1) for name in arrays}
        return Batch.of({name: torch.from_numpy(array) for name, array in arrays.items()})

    def _windows(self, epoch: int) -> list[Array]:
        if self._plan is None or self._plan[0] != epoch:
            order, cuts = np.arange(len(self.dataset)), np.zeros(0, np.int64)
            if 0 < self.window_steps < self.dataset.steps:
                order = np.random.default_rng((ORDER, epoch)).permutation(order)
                cuts = np.flatnonzero(np.diff((np.cumsum(self.dataset.lengths[order]) - 1) // self.window_steps)) + 1
            self._plan = epoch, np.split(order, cuts)
        return self._plan[1]

    def _stream(self, episodes: Array) -> Stream:
        key = episodes.tobytes()
        if self._held is None or self._held[0] != key:
            self._held = None  # before the next one is read
            content = [self.dataset[index] for index in episodes.tolist()]
            stream = stream_of(content, self.spec, self.unit_rows, self.needs.recorded)
            scale_rewards(stream["reward"], self.needs.reward_scale, self.needs.reward_clip)
            self._held = key, stream
        return self._held[1]

    def _shuffled(self, epoch: int, window: int, stream: Stream) -> tuple[Array, Array]:
        """Return the units of a window in order, and the valid steps in front of each and behind the last."""
        if self._order is None or self._order[0] != (epoch, window):
            valid = np.count_nonzero(stream["valid"][:-1].reshape(-1, self.unit_rows), axis=1)
            order = np.random.default_rng((ORDER, epoch, window)).permutation(np.flatnonzero(valid))
            self._order = (epoch, window), order, np.cumsum([0, *valid[order]])
        return self._order[1:]


def stream_of(episodes: Sequence[Episode], spec: EnvSpec, unit_rows: int, recorded: Sequence[str] = ()) -> Stream:
    """Put episodes in succession: L+1 rows each; the last row is not a step. One more row follows the last unit.

    Raises:
        UsageError: an episode lacks one of the infos `recorded`.
    """
    ends = np.cumsum(np.array([len(episode) for episode in episodes]) + 1) - 1  # the rows of final observations
    size = int(ends[-1]) + 1
    rows = -(-size // unit_rows) * unit_rows + 1
    is_step: BoolArray = np.ones(rows, np.bool_)
    is_step[ends] = is_step[size:] = False
    steps = np.flatnonzero(is_step)
    first = np.zeros(rows, np.bool_)
    first[ends[:-1] + 1] = first[0] = first[size:] = True
    is_terminal = np.array([episode.terminated for episode in episodes])
    terminated, truncated = np.zeros((2, rows), np.bool_)
    terminated[ends - 1], truncated[ends - 1] = is_terminal, ~is_terminal
    action = np.zeros((rows, spec.action.num_values), spec.action.dtype)
    action[steps] = np.concatenate([episode.action for episode in episodes])
    reward = np.zeros(rows, np.float32)
    reward[steps] = np.concatenate([episode.reward for episode in episodes])
    frames: IntArray = np.full(rows, spec.frames_per_step, np.int32)
    stream: Stream = {"first": first, "valid": is_step, "action": action, "reward": reward, "num_frames": frames}
    stream |= {"terminated": terminated, "truncated": truncated, "policy_version": np.zeros(rows, np.int64)}
    for key, one in spec.observations.items():
        stream[f"obs.{key}"] = obs = np.zeros((rows, *one.shape), one.dtype)
        np.concatenate([episode.obs[key] for episode in episodes], out=obs[:size])
    for name in recorded:
        if any(name not in episode.infos for episode in episodes):
            raise UsageError(
                f"--input: an episode lacks the column {name}, which is needed beside what is played; datasets that a"
                " stochastic policy has played have it, for continuous actions if it acted in the same units"
            )
        values = np.concatenate([episode.infos[name] for episode in episodes])
        stream[f"recorded.{name}"] = column = np.zeros((rows, *values.shape[1:]), np.float32)
        column[steps] = values
    return stream


def columns_of(rollout: int, segments: int, state_size: int) -> Gather:
    """Return a function that gathers columns: [T, B, *], or [T+1, B, *] for observations.

    Args:
        rollout: T.
        segments: N, segments of a column.
        state_size: H of the recurrent states [N, B, H], all zero: datasets contain no states.
    """

    def gather(stream: Stream, units: Array) -> dict[str, Array]:
        rows = units * rollout + np.arange(rollout + 1)[:, None]  # [T+1, B]
        arrays = {name: array[rows if is_seen(name) else rows[:-1]] for name, array in stream.items()}
        return arrays | {"rnn_state": np.zeros((segments, len(units), state_size), np.float32)}

    return gather


def without_values(gather: Gather) -> Gather:
    """Return a function that gathers the same columns with recorded values of 0.

    Final observations have no values: they are rows of the columns.
    """

    def gathered(stream: Stream, units: Array) -> dict[str, Array]:
        columns = gather(stream, units)
        none, unknown = np.zeros((0, len(units)), np.float32), np.zeros(columns["valid"].shape, np.float32)
        return columns | {"recorded.final_value": none, "recorded.value": unknown}

    return gathered


def transitions_of(n_steps: int, gamma: float, state_size: int) -> Gather:
    """Return a function that gathers single steps, [1, B], with n-step rewards as a replay does.

    Observations are [2, B, *]. Rewards are summed over m = min(n, steps to the end of the episode); `discount` is
    gamma^m, or 0 if the episode has terminated by then. All steps have equal weight. Recurrent states [1, B, H] are
    zero.
    """

    def gather(stream: Stream, units: Array) -> dict[str, Array]:
        count, last = len(units), len(stream["valid"]) - 1
        ends = stream["terminated"] | stream["truncated"]
        goes_on: BoolArray = np.ones(count, np.bool_)
        total, length = np.zeros(count, np.float64), np.zeros(count, np.int64)
        for k in range(n_steps):
            row = np.minimum(units + k, last)
            goes_on = goes_on & stream["valid"][row]
            total += np.where(goes_on, gamma**k * stream["reward"][row], 0.0)
            length += goes_on
            goes_on = goes_on & ~ends[row]
        later = units + length
        terminated = stream["terminated"][later - 1]
        pairs = np.stack((units, later))
        seen = {name: array[pairs] for name, array in stream.items() if is_seen(name)}
        of_step = {name: stream[name][units][None] for name in ("action", "num_frames", "policy_version", "valid")}
        made = {
            "reward": total,
            "recorded.discount": np.where(terminated, 0.0, gamma**length),
            "recorded.weight": np.ones(count),
        }
        numbers = {name: array.astype(np.float32)[None] for name, array in made.items()}
        flags = {"terminated": terminated[None], "truncated": stream["truncated"][later - 1][None]}
        return {**seen, **of_step, **numbers, **flags, "rnn_state": np.zeros((1, count, state_size), np.float32)}

    return gather


def is_seen(name: str) -> bool:
    """Return whether a batch has one more row of an array than steps."""
    return name == "first" or name.startswith("obs.")
