"""A player of a trained policy: acts like a policy worker, for one environment.

Torch's dispatch takes most of the time of a small forward pass, so small networks are played without torch.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from appo.algorithms.models.numpy_mlp import NumpyMlp, numpy_mlp
from appo.algorithms.ops.numpy_twins import ActionSampler, most_probable
from appo.algorithms.parts.stochastic_policy import StochasticPolicy
from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.playing.episodes import EpisodeRecorder, PlayedEpisode
from appo.algorithms.playing.saved_run import SavedRun
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.state_files import decode
from appo.algorithms.runtime.sampling.policy import Policy
from appo.envs.spec import EnvSpec, GroupEnv, step_row
from appo.utils.command_line import complain
from appo.utils.errors import UsageError
from appo.utils.system.devices import choose_device

Look = Callable[[bool], None]
LONG = 100_000
"""Steps without the end of an episode after which a warning follows."""


def load_player(run: SavedRun, spec: EnvSpec, config: EvaluationConfig, seed: int) -> tuple["Player", int]:
    """Return the player of a checkpoint, and the env steps learned from by the policy.

    Raises:
        UsageError: the checkpoint does not fit the flags of the run, or the policy lacks `--epsilon`.
    """
    own = dict(enumerate(run.config.per_policy)).get(run.policy, {})
    learning = replace(run.config.learning, **own)
    context = Context(spec, learning, run.config.model_of(run.policy), "fp32", choose_device(config.device))
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
    """A policy with an adjustable share of random actions."""

    def explore(self, epsilon: float) -> None:
        """Act at random with this probability, in all rows."""
        ...


class Acts(Protocol):
    """A player, a pair of players that share the agents of an environment, or a player without torch."""

    def act(self, obs: dict[str, Array], first: Array) -> Array:
        """Return actions [R, A] for observations [R, *]; an episode starts in rows with `first` [R]."""
        ...


class Player:
    """Acts like a policy worker for the rows of one environment."""

    def __init__(self, policy: Policy, spec: EnvSpec, config: EvaluationConfig, seed: int) -> None:
        self.policy, self.spec, self.device = policy, spec, policy.flat.flat.device
        self.random = policy.random(seed, spec.num_agents)
        self.rnn_state = torch.zeros(spec.num_agents, policy.rnn_state_size, device=self.device)
        self.greedy: bool | torch.Tensor = config.deterministic
        if not config.deterministic and not config.continuous_actions_sample:
            self.greedy = torch.tensor(spec.action.is_real, device=self.device)

    @torch.inference_mode()
    def act(self, obs: dict[str, Array], first: Array, *, deterministic: bool = False) -> Array:
        """Return actions [R, A] for observations [R, *]; an episode starts in rows with `first` [R].

        With `deterministic` all actions are the most probable, whatever the flags.
        """
        tensors = {key: torch.from_numpy(value).to(self.device) for key, value in obs.items()}
        starts = torch.from_numpy(first).to(self.device)
        greedy = deterministic or self.greedy
        recorded, self.rnn_state = self.policy.act(tensors, starts, self.rnn_state, None, self.random, greedy=greedy)
        return np.asarray(recorded["action"].cpu().numpy())


class NumpyPlayer:
    """Acts like a `Player` of one environment, except for rounding and random numbers; made by `cheapest`.

    Without a sampler, the most probable actions are taken.
    """

    def __init__(self, mlp: NumpyMlp, spec: EnvSpec, sampler: ActionSampler | None) -> None:
        rows, self._mlp, self._sampler, self._parts = spec.num_agents, mlp, sampler, spec.action.parts
        self._logits = np.empty((rows, spec.action.num_logits), np.float32)
        self._value, self._log_prob = np.empty((2, rows), np.float32)
        self._action = np.empty((rows, spec.action.num_values), spec.action.dtype)

    def act(self, obs: dict[str, Array], first: Array) -> Array:
        """Return actions [R, A] for observations [R, *], valid until the next call; an MLP ignores `first`."""
        self._mlp.act(obs, self._logits, self._value)
        if self._sampler is None:
            most_probable(self._parts, self._logits, self._action)
        else:
            self._sampler.sample(self._logits, self._action, self._log_prob)
        return self._action


def cheapest(player: Player, seed: int, *, deterministic: bool) -> Acts:
    """Return a `NumpyPlayer` for simple networks and actions, else the given player."""
    policy, spec = player.policy, player.spec
    if type(policy) is not StochasticPolicy:  # a subclass may act otherwise
        return player
    sampler, mlp = policy.random(seed, spec.num_agents).sampler, numpy_mlp(policy.model, spec.num_agents)
    if sampler is None or mlp is None:
        return player
    return NumpyPlayer(mlp, spec, None if deterministic else sampler)


def play(
    envs: GroupEnv, player: Acts, config: EvaluationConfig, seed: int, look: Look | None = None
) -> Iterator[PlayedEpisode]:
    """Yield episodes as they end, up to the limits of the flags. Equal seeds give equal episodes.

    `look` is called before every action and at the end of an episode, with True at the end.
    """
    row = step_row(envs.spec, envs.num_rows)
    row.first[:] = True
    envs.reset([int(s) >> 1 for s in np.random.SeedSequence(seed).generate_state(1)], row.obs)
    recorder = EpisodeRecorder(envs.spec.num_agents)
    num_episodes = frames = length = 0
    ended = False
    seconds_per_frame = 1 / config.fps if config.window and config.fps else 0.0
    due = time.monotonic()
    limits = config.episode_limit or math.inf, config.max_num_frames or math.inf
    while num_episodes < limits[0] and frames < limits[1]:
        if look is not None:
            look(ended)
        stats = envs.step(player.act(row.obs, row.first), row)
        valid = np.ones_like(row.first) if envs.spec.same_step else ~row.first  # the reset step belongs to no episode
        frames += recorder.add(row, valid, stats)
        length += 1
        if ended := recorder.over:
            yield recorder.episode()
            num_episodes, length = num_episodes + 1, 0
        if length == LONG:
            ends = "--max_num_frames=N stops, horizon=N in --flags (--eval_flags) ends episodes"
            complain(f"warning: no episode has ended after {LONG} steps: {ends}\n")
        if seconds_per_frame:
            now = time.monotonic()
            due = max(due + seconds_per_frame, now)  # delays are not made up for
            time.sleep(due - now)
    if look is not None:
        look(ended)
