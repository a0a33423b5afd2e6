"""Episodes of which every number is known, and what is written of them."""

import signal
from pathlib import Path
from typing import Any

import numpy as np

from appo.algorithms.datasets.assembler import Steps
from appo.algorithms.datasets.config import OutputConfig
from appo.algorithms.datasets.episodes import Episode
from appo.algorithms.datasets.writer import DatasetWriter
from appo.envs.spec import ActionPart, ActionSpec, EnvSpec, ObservationSpec

CHOICE = ActionSpec((ActionPart("categorical", 3),))
SPEC = EnvSpec({"obs": ObservationSpec((2,), "float32")}, CHOICE, frames_per_step=4)
LENGTHS = (3, 1, 7, 2, 5)


def episode(number: int, length: int, terminated: bool = True) -> Episode:
    """An episode whose step t shows (number, t), takes (number + t) % 3 and is given 10 number + t."""
    t = np.arange(length + 1, dtype=np.float32)
    obs = np.stack((np.full(length + 1, number, np.float32), t), axis=1)
    infos = {
        "logits": np.stack((t[:-1], t[:-1] + 1, t[:-1] + 2), axis=1),
        "log_prob": -t[:-1],
        "policy_version": np.full(length, number, np.int64),
    }
    action = ((number + np.arange(length)) % 3).astype(np.int32)[:, None]
    return Episode({"obs": obs}, action, 10 * number + t[:-1], terminated, infos)


def episodes(lengths: tuple[int, ...] = LENGTHS) -> list[Episode]:
    """Episodes of these lengths, of which every other one was cut."""
    return [episode(number, length, number % 2 == 0) for number, length in enumerate(lengths)]


def steps_of(rows: list[list[Episode | int]], length: int) -> list[Steps]:
    """The rows as environments show them: an episode and the step that resets, or so many steps that never happened."""
    columns = []
    for row in rows:
        obs, first, valid, reward, ended, action, log_prob = [], [], [], [], [], [], []
        for one in row:
            if isinstance(one, int):
                obs += [np.full(2, np.nan, np.float32)] * one
                first, valid = first + [True] * one, valid + [False] * one
                reward, log_prob = reward + [np.nan] * one, log_prob + [0.0] * one
                ended += [(False, False)] * one
                action += [[0]] * one
                continue
            obs += list(one.obs["obs"])
            first += [True] + [False] * len(one)
            valid += [True] * len(one) + [False]
            reward += [*one.reward, 0.0]
            ended += [(False, False)] * (len(one) - 1) + [(one.terminated, not one.terminated), (False, False)]
            action += [*one.action.tolist(), [0]]
            log_prob += [*one.infos["log_prob"], 0.0]
        columns.append((obs, first, valid, reward, ended, action, log_prob))
    size = min(len(column[0]) for column in columns) - 1
    arrays = [np.stack([np.array(column[i][: size + 1]) for column in columns], axis=1) for i in range(7)]
    obs, first, valid, reward, ended, action, log_prob = arrays
    found = []
    for begin in range(0, size - length + 1, length):
        now = slice(begin, begin + length)
        found.append(
            Steps(
                {"obs": obs[begin : begin + length + 1]},
                first[begin : begin + length + 1],
                valid[now],
                reward[now].astype(np.float32),
                ended[now, :, 0],
                ended[now, :, 1],
                action[now].astype(np.int32),
                {"log_prob": log_prob[now].astype(np.float32)},
            )
        )
    return found


def written(folder: Path, content: list[Episode] | None = None, spec: EnvSpec = SPEC, **flags: object) -> DatasetWriter:
    """Write a dataset, of `episodes()` unless others are given."""
    with DatasetWriter(OutputConfig(output=str(folder), **flags), spec, {"algorithm_name": "made"}) as writer:
        for one in episodes() if content is None else content:
            writer.write(one)
    return writer


def write_and_wait(folder: str, ready: Any) -> None:
    """Write four episodes, send how many parts and episodes that makes, and wait for the end: a process to be killed.

    Here, because a process that is spawned imports the module of its function: that of the tests loads Minari.
    """
    writer = DatasetWriter(OutputConfig(output=folder, output_max_file_size=600), SPEC, {})
    for one in episodes(LENGTHS[:4]):
        writer.write(one)
    ready.send((writer.parts, writer.episodes))
    signal.pause()


def assert_same(found: Episode, expected: Episode) -> None:
    """Two episodes are equal to the last bit, and of the same types."""
    pairs = [(found.action, expected.action), (found.reward, expected.reward)]
    assert found.terminated == expected.terminated
    for ours, theirs in ((found.obs, expected.obs), (found.infos, expected.infos)):
        assert ours.keys() == theirs.keys()
        pairs += [(ours[key], theirs[key]) for key in ours]
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
