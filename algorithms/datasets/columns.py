"""From episodes to batches: units of a dataset, shuffled, of which every step is read once per epoch.

Episodes stand one behind the other in a stream, each with a row for its final observation, as slots hold them where a
step that only resets follows each end (NEXT_STEP). A unit is some rows of it: T, which make a column, or a single one.
What is read next follows from the number of steps read so far alone, so that a learner which takes the place of one
that died, and a later start, read on where the last one ended.
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
"""Part of the seeds of all orders; the others are the numbers of the epoch and of the window."""

Stream = dict[str, Array]
"""Some episodes as rows, [M, *] by the name that batches have for them; see `stream_of`."""

Gather = Callable[[Stream, Array], dict[str, Array]]
"""Returns the arrays of a batch of units, [*, units, *] by name, of a stream and the numbers of the units."""


class Needs(NamedTuple):
    """Demands of learning on the episodes of datasets.

    Attributes:
        recorded: names of infos that every episode must have, and batches get.
        reward_scale, reward_clip: what is done to rewards, as to those that are played beside them.
    """

    recorded: tuple[str, ...] = ()
    reward_scale: float = 1.0
    reward_clip: float = 0.0


NOTHING = Needs()


class ShuffledReader:
    """Reads batches of units in an order that the number of the epoch decides.

    Args:
        dataset: what is read.
        window_steps: steps that are held in memory and shuffled, whole episodes in an order of their own; 0: all.
        unit_rows: rows of a stream that are one unit.
        gather: makes batches of units.
        needs: what every episode must have, and what is done to rewards.
    """

    def __init__(
        self, dataset: Dataset, window_steps: int, unit_rows: int, gather: Gather, needs: Needs = NOTHING
    ) -> None:
        self.dataset, self.window_steps, self.unit_rows, self.gather = dataset, window_steps, unit_rows, gather
        self.needs = needs
        self._plan: tuple[int, list[Array]] | None = None
        self._held: tuple[bytes, Stream] | None = None
        self._order: tuple[tuple[int, int], Array, Array] | None = None

    @property
    def steps_per_unit(self) -> float:
        """Valid steps that a unit has in the mean; units of one row are read only where that is a step."""
        steps, episodes = self.dataset.steps, len(self.dataset)
        return 1.0 if self.unit_rows == 1 else self.unit_rows * steps / (steps + episodes)

    def read(self, samples: int, units: int) -> Batch:
        """Return the batch of so many units that follows so many steps.

        Raises:
            UsageError: an episode is damaged.
        """
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
        """The numbers of the episodes of each window."""
        if self._plan is None or self._plan[0] != epoch:
            order, cuts = np.arange(len(self.dataset)), np.zeros(0, np.int64)
            if 0 < self.window_steps < self.dataset.steps:
                order = np.random.default_rng((ORDER, epoch)).permutation(order)
                last = np.cumsum(self.dataset.lengths[order]) - 1
                cuts = np.flatnonzero(np.diff(last // self.window_steps)) + 1
            self._plan = epoch, np.split(order, cuts)
        return self._plan[1]

    def _stream(self, episodes: Array) -> Stream:
        key = episodes.tobytes()
        if self._held is None or self._held[0] != key:
            self._held = None  # before the next one is read
            content = [self.dataset[index] for index in episodes.tolist()]
            stream = stream_of(content, self.dataset.spec, self.unit_rows, self.needs.recorded)
            scale_rewards(stream["reward"], self.needs.reward_scale, self.needs.reward_clip)
            self._held = key, stream
        return self._held[1]

    def _shuffled(self, epoch: int, window: int, stream: Stream) -> tuple[Array, Array]:
        """The units of a window in their order, and the valid steps in front of each of them and behind the last."""
        if self._order is None or self._order[0] != (epoch, window):
            valid = np.count_nonzero(stream["valid"][:-1].reshape(-1, self.unit_rows), axis=1)
            order = np.random.default_rng((ORDER, epoch, window)).permutation(np.flatnonzero(valid))
            self._order = (epoch, window), order, np.cumsum([0, *valid[order]])
        return self._order[1:]


def stream_of(episodes: Sequence[Episode], spec: EnvSpec, unit_rows: int, recorded: Sequence[str] = ()) -> Stream:
    """Put episodes one behind the other: L+1 rows each, of which the last is no step.

    Args:
        episodes: at least one.
        spec: of what they show and take.
        unit_rows: of a unit; behind the last one there is one more row.
        recorded: names of infos.

    Raises:
        UsageError: an episode lacks one of them.
    """
    lengths = np.array([len(episode) for episode in episodes])
    ends = np.cumsum(lengths + 1) - 1  # the rows of final observations
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
    """Return what gathers columns: [T, B, *], or [T+1, B, *] of what is seen.

    Args:
        rollout: T.
        segments: N, of a column.
        state_size: H of the recurrent states, all zero: nobody has recorded any.
    """

    def gather(stream: Stream, units: Array) -> dict[str, Array]:
        rows = units * rollout + np.arange(rollout + 1)[:, None]  # [T+1, B]
        arrays = {name: array[rows if is_seen(name) else rows[:-1]] for name, array in stream.items()}
        return arrays | {"rnn_state": np.zeros((segments, len(units), state_size), np.float32)}

    return gather


def without_values(gather: Gather) -> Gather:
    """Return what gathers the same columns as if values were recorded: 0 for steps, whatever a dataset has.

    There are none of final observations: those are in the columns.
    """

    def gathered(stream: Stream, units: Array) -> dict[str, Array]:
        columns = gather(stream, units)
        none, unknown = np.zeros((0, len(units)), np.float32), np.zeros(columns["valid"].shape, np.float32)
        return columns | {"recorded.final_value": none, "recorded.value": unknown}

    return gathered


def transitions_of(n_steps: int, gamma: float, state_size: int) -> Gather:
    """Return what gathers single steps with the rewards of n, as a replay gives them: [1, B], what is seen [2, B, *].

    Rewards are summed over m = min(n, steps to the end of the episode); `discount` is gamma^m, or 0 where the episode
    has terminated by then. Every step has the same weight.

    Args:
        n_steps: n.
        gamma: discount per step.
        state_size: H of the recurrent states, all zero.
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
    """Whether a batch has one more row of an array than there are steps."""
    return name == "first" or name.startswith("obs.")
