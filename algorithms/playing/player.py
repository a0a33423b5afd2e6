"""Playing a trained policy: the environment, the model and the order of things are those of training."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.playing.episodes import Episode, EpisodeRecorder
from appo.algorithms.playing.saved_run import SavedRun
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.state_files import decode
from appo.algorithms.runtime.sampling.policy import Policy
from appo.envs.spec import EnvSpec, GroupEnv, StepRow
from appo.utils.errors import UsageError
from appo.utils.system.devices import choose_device

Look = Callable[[bool], None]


def load_player(run: SavedRun, spec: EnvSpec, config: EvaluationConfig, seed: int) -> tuple["Player", int]:
    """Make the player of a run's checkpoint; return it with the env steps that its policy has learned from.

    Raises:
        UsageError: the checkpoint belongs to another model than the run's flags describe, or the flags of playing ask
            for what its policy has not.
    """
    context = Context(spec, run.config.learning, run.config.model_of(run.policy), "fp32", choose_device(config.device))
    algorithm = run.config.algorithm
    flat = algorithm.make_model(context)
    state, _ = decode(run.files, flat.table)
    flat.flat.copy_(torch.from_numpy(state.weights))
    policy = algorithm.make_policy(context, flat)
    if config.epsilon:
        if not isinstance(policy, Explores):
            raise UsageError(f"--epsilon={config.epsilon:g}: a policy of --algo={run.config.run.algo} has none")
        policy.explore(config.epsilon)
    return Player(policy, spec, config, seed), int(state.meta["env_steps"])


@runtime_checkable
class Explores(Protocol):
    """A policy that can be told how often it acts at random while it is played."""

    def explore(self, epsilon: float) -> None:
        """Act at random with this probability, in all rows."""
        ...


class Acts(Protocol):
    """A player, two that share the agents of an environment, or one without torch."""

    def act(self, obs: dict[str, Array], first: Array) -> Array:
        """Actions [R, A] for observations [R, *] of rows that start an episode where `first` [R] says so."""
        ...


class Player:
    """Acts as a policy worker does, for the rows of one environment.

    Args:
        policy: with its weights.
        spec: of the environment.
        config: how actions are chosen.
        seed: of their sampling.
    """

    def __init__(self, policy: Policy, spec: EnvSpec, config: EvaluationConfig, seed: int) -> None:
        self.policy, self.spec, self.device = policy, spec, policy.flat.flat.device
        self.random = policy.random(seed, spec.num_agents)
        self.rnn_state = torch.zeros(spec.num_agents, policy.rnn_state_size, device=self.device)
        self.greedy: bool | torch.Tensor = config.deterministic
        if not config.deterministic and not config.continuous_actions_sample:
            self.greedy = torch.tensor(spec.action.is_real, device=self.device)

    @torch.inference_mode()
    def act(self, obs: dict[str, Array], first: Array, *, deterministic: bool = False) -> Array:
        """Actions [R, A] for observations [R, *] of rows that start an episode where `first` [R] says so.

        With `deterministic` all are the most probable ones, whatever the flags say.
        """
        tensors = {key: torch.from_numpy(value).to(self.device) for key, value in obs.items()}
        starts = torch.from_numpy(first).to(self.device)
        greedy = deterministic or self.greedy
        recorded, self.rnn_state = self.policy.act(tensors, starts, self.rnn_state, None, self.random, greedy=greedy)
        action: Array = recorded["action"].cpu().numpy()
        return action


def play(
    envs: GroupEnv, player: Acts, config: EvaluationConfig, seed: int, look: Look | None = None
) -> Iterator[Episode]:
    """Yield episodes as they end, up to the limits of the flags. The same seed gives the same episodes.

    `look` is called before every action and at the end of an episode, once each; it is told whether it is the end.
    """
    row = _first_row(envs, seed)
    recorder = EpisodeRecorder(envs.spec.num_agents)
    num_episodes = frames = 0
    ended = False
    clock = _Clock(config.fps if config.window else 0.0)
    limits = config.episode_limit or math.inf, config.max_num_frames or math.inf
    while num_episodes < limits[0] and frames < limits[1]:
        if look is not None:
            look(ended)
        stats = envs.step(player.act(row.obs, row.first), row)
        valid = np.ones_like(row.first) if envs.spec.same_step else ~row.first  # the reset step belongs to no episode
        frames += recorder.add(row, valid, stats)
        if ended := recorder.over:
            yield recorder.episode()
            num_episodes += 1
        clock.wait()
    if look is not None:
        look(ended)


def _first_row(envs: GroupEnv, seed: int) -> StepRow:
    """Return the first observations of the environments, in the memory that every step is written into."""
    spec, rows = envs.spec, envs.num_rows
    obs = {key: np.zeros((rows, *o.shape), o.dtype) for key, o in spec.observations.items()}
    final = {key: np.zeros_like(value) for key, value in obs.items()} if spec.same_step else {}
    flags = [np.zeros(rows, np.bool_) for _ in range(4)]
    num_frames = np.full(rows, spec.frames_per_step, np.int32)
    row = StepRow(obs, flags[0], np.zeros(rows, np.float32), flags[1], flags[2], num_frames, final, flags[3])
    row.first[:] = True
    envs.reset([int(s) >> 1 for s in np.random.SeedSequence(seed).generate_state(1)], row.obs)
    return row


class _Clock:
    """Lets at most so many frames pass per second; 0: as many as come."""

    def __init__(self, frames_per_second: float) -> None:
        self.interval = 1 / frames_per_second if frames_per_second else 0.0
        self.due = time.monotonic()

    def wait(self) -> None:
        """Wait until the next frame is due; time lost is not made up for by haste."""
        now = time.monotonic()
        self.due = max(self.due + self.interval, now)
        if self.interval:
            time.sleep(self.due - now)
