"""A trained policy in the user's own loop, for observations as given by the environment."""

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sized
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from appo.algorithms.models.actor_critic import ActingNetwork
from appo.algorithms.models.flat_module import split
from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.playing.player import Player, load_player
from appo.algorithms.playing.saved_run import SavedRun, load_run
from appo.algorithms.run.folder import find_run
from appo.algorithms.run.trust import ANSWERS, PLAYED
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.learner_state import NETWORKS, vector_of
from appo.envs.config import EnvConfig
from appo.envs.conversion import ActionConverter, ObservationWriter
from appo.envs.finite import FiniteCheck
from appo.envs.given import name_of
from appo.envs.loop.env_set import RAISE, EnvSet
from appo.envs.make import is_factory, is_vector_only, make_first, make_single
from appo.envs.masks import BY_METHOD, METHOD, mask_of_batched
from appo.envs.spaces import ActionForm, MaskForm, note_frames, spec_of
from appo.envs.spec import MASK_KEY, BoolArray, EnvSpec
from appo.envs.vectors.gym_vector import GymVector
from appo.envs.wrappers.flags import unbounded
from appo.utils.errors import UsageError
from appo.utils.flags import flags_of
from appo.utils.run_folder import RunFolder
from appo.utils.values import from_plain

Which = Literal["latest", "best", "best_evaluated", "milestone", "past"]
Spaces = tuple[spaces.Space[Any], spaces.Space[Any]]
"""Spaces of the observations and actions of one agent."""


def load_policy(  # noqa: PLR0913 (all but one are keywords)
    run: str | Path,
    *,
    policy: int = 0,
    which: Which = "latest",
    device: str = "cpu",
    seed: int | None = None,
    spaces: Spaces | None = None,
    train_dir: str | Path = "./train_dir",
    trust: bool = False,
    env: str | Callable[..., Any] = "",
) -> "Policy":
    """Load a policy of a run. Reading runs no code, unless the run is the user's own or trusted.

        policy = load_policy("train_dir/CartPole-v1_1")
        observation, _ = env.reset()
        action = policy.act(observation)

    Args:
        run: folder of a run, or the run's name in `train_dir`.
        policy: number of the policy in the run.
        which: the newest checkpoint, the best by training or by evaluation, the newest milestone, or past version.
        device: cpu, cuda, or auto.
        seed: seed of the sampling of actions; None: a random seed.
        spaces: spaces of the environment; without them the environment is made once to read the spaces. Spaces do not
            show masks in infos: an action without `action_mask` is then drawn from all choices.
        train_dir: folder of all runs.
        trust: allow code named by a run without this user's mark, like `--trust`.
        env: the class or function given to `train` as the environment.

    Raises:
        UsageError: the run, policy, kind of checkpoint or device is missing, the environment cannot be made, or the run
            names code that is not trusted.
        CheckpointError: the policy has no usable checkpoint.
    """
    folder, flags = RunFolder(find_run(str(run), Path(train_dir))), flags_of(EvaluationConfig)
    asked = {"policy_index": policy, "load_checkpoint_kind": which, "device": device, "trust": trust}
    checked: dict[str, Any] = {name: from_plain(flags[name], value) for name, value in asked.items()}
    config = EvaluationConfig(**checked, train_dir=str(train_dir), env=name_of(env, is_factory))
    saved = load_run(folder, config, PLAYED if spaces is None else ANSWERS)
    seen, spec = look_at(saved.config.env, spaces)
    with torch.random.fork_rng(devices=[]):  # a new model draws random weights
        player, env_steps = load_player(saved, spec, config, secrets.randbits(32) if seed is None else seed)
    return Policy(saved, player, seen, env_steps)


class Computed(NamedTuple):
    """The output of a policy for one observation.

    Attributes:
        action: action in the format of the action space.
        state: [H] float32 state for the next call; empty without a memory.
        logits: [L] float32 outputs for all parts of the action side by side, without a mask: unnormalized
            log-probabilities of choices (values with --algo=APEX); means, then log standard deviations, of numbers.
        value: value of the observation, in units of return (with --algo=APEX the largest value of an allowed action, in
            the scale of learning); None if no value is learned, as with --algo=BC or --value_loss_coeff=0, or the
            network that acts has none.
    """

    action: Any
    state: Array
    logits: Array
    value: float | None


class Policy:
    """A trained policy, made by `load_policy`.

    The policy keeps the memory of the episode, per row of a batch: call `reset` at the start of an episode.

    Attributes:
        run: the loaded run: `directory`, `config` (all flags), `checkpoint`.
        env_steps: number of env steps learned from.
        observation_space, action_space: spaces of one agent.
        spec: the spaces as arrays: names, shapes, types.
        estimates_returns: whether the policy estimates values of observations.
    """

    def __init__(self, run: SavedRun, player: Player, seen: Spaces, env_steps: int) -> None:
        self.run, self.env_steps, self.spec = run, env_steps, player.spec
        self.observation_space, self.action_space = seen
        self._player, self._flat = player, player.policy.flat
        self.estimates_returns = run.config.estimates_returns(run.policy) and self.model.has_value
        self._writer = ObservationWriter(run.config.env.env, *seen)
        self._finite = FiniteCheck(run.config.env.env, player.spec)
        self._actions = ActionConverter(seen[1], player.spec.action)
        choices = [part.size for part in player.spec.action.parts if part.kind == "categorical"]
        self._begins_of_parts, self._mask_form = np.cumsum([0, *choices])[:-1], MaskForm(seen[1])
        self._begins = True  # every row begins an episode

    def act(self, observation: Any, *, deterministic: bool = False, action_mask: Any = None) -> Any:
        """Return the action for one observation, in the format of the action space.

        Args:
            observation: observation as given by the environment.
            deterministic: take the most probable action instead of a sample.
            action_mask: mask from the environment's `info`, if the environment puts masks there.

        Raises:
            EnvironmentFailure: the observation does not fit the space, or is not finite.
            UsageError: a mask is missing, has a wrong size, or allows nothing.
        """
        obs = self._one(observation, action_mask)
        return self._actions.rows(self._answer(obs, np.zeros(1, np.bool_), deterministic))[0]

    def compute_action(
        self, observation: Any, state: Any = None, *, deterministic: bool = False, action_mask: Any = None
    ) -> Computed:
        """Act once with a given memory; the policy's own memory stays unchanged.

        Args:
            observation: observation as given by the environment.
            state: [H] state returned for the previous observation; None: the observation begins an episode.
            deterministic: take the most probable action instead of a sample.
            action_mask: mask from the environment's `info`, if the environment puts masks there.

        Raises:
            EnvironmentFailure, UsageError: see `act`; or the state has a wrong size.
        """
        player, size = self._player, self.model.rnn_state_size
        if state is not None and np.shape(state) != (size,):
            raise UsageError(f"state must have {size} numbers, got shape {np.shape(state)}")
        before = torch.zeros(size) if state is None else torch.tensor(np.asarray(state), dtype=torch.float32)
        arrays = self._one(observation, action_mask)
        obs = {key: torch.from_numpy(rows).to(player.device) for key, rows in arrays.items()}
        inputs = (obs, torch.tensor([state is None], device=player.device), before.to(player.device)[None])
        with torch.inference_mode():
            recorded, after = player.policy.act(*inputs, None, player.random, greedy=deterministic or player.greedy)
            logits, value, _ = self.model.act(*inputs)
            value = self.model.value_of(obs, logits, value) if self.estimates_returns else None
        action = self._actions.rows(recorded["action"].cpu().numpy())[0]
        known = None if value is None else float(value[0])
        return Computed(action, after[0].cpu().numpy().copy(), logits[0].cpu().numpy().copy(), known)

    def act_batch(
        self, observations: Any, *, first: Any = None, deterministic: bool = False, action_mask: Any = None
    ) -> Any:
        """Return the actions for a batch of observations, both in the format of gymnasium's vector environments.

        Args:
            observations: batch of N observations.
            first: [N] rows whose observation begins an episode, besides the rows after `reset`.
            deterministic: take the most probable actions instead of samples.
            action_mask: [N, M] masks from the environment's `info`, if the environment puts masks there. A row without
                allowed choices belongs to an ended episode; the action is arbitrary.

        Raises:
            EnvironmentFailure, UsageError: see `act`; or the number of rows changed without a `reset`.
        """
        some = observations
        while isinstance(some, Mapping | tuple):
            some = next(iter(some.values() if isinstance(some, Mapping) else some))
        if not isinstance(some, Sized) or getattr(some, "shape", None) == ():
            raise UsageError(f"expected a batch of observations, got a {type(some).__name__}")
        num_rows = len(some)
        obs = self._writer.empty(num_rows)
        self._writer.write_batch(obs, observations)
        self._finite.require(obs)
        starts = np.zeros(num_rows, np.bool_) if first is None else np.asarray(first, np.bool_)
        if starts.shape != (num_rows,):
            raise UsageError(f"first: expected {num_rows} values, one per row, got the shape {list(starts.shape)}")
        said = {} if action_mask is None else {MASK_KEY: action_mask}
        masks = [mask_of_batched(said, row, self._mask_form.size) for row in range(num_rows)] if said else None
        if masks is not None and not all(masks):
            raise UsageError(f"{MASK_KEY}: expected {num_rows} masks, one per row")
        self._take_masks(obs, None if masks is None else [mask[MASK_KEY] for mask in masks])
        return self._actions.batch(self._answer(obs, starts, deterministic))

    def reset(self) -> None:
        """Clear the memory: the next observation of every row begins an episode."""
        self._begins = True

    def get_weights(self) -> dict[str, Array]:
        """Return copies of all weights and normalization statistics, by name."""
        views = zip(self._flat.table, split(self._flat.flat, self._flat.table), strict=True)
        return {name: view.cpu().numpy().copy() for (name, _), view in views}

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Replace the weights by weights in the format of `get_weights`, or of `Training.weights`.

        Weights of networks that only the learner has, named `networks.*`, are left out.

        Raises:
            UsageError: a name or a shape does not fit the model, or a name is missing.
        """
        acting = {name: array for name, array in weights.items() if not name.startswith(NETWORKS)}
        self._flat.load(vector_of(acting, self._flat.table))

    def make_env(self, render_mode: str | None = None) -> "gymnasium.Env[Any, Any]":
        """Return the environment of training, with arguments, frame skip, stack and other wrappers.

        Raises:
            UsageError: the environment cannot be made, or is not trusted.
        """
        if self.run.refusal:  # with given spaces, `load_policy` did not check the environment
            raise UsageError(self.run.refusal)
        return make_single(self.run.config.env, render_mode)

    @property
    def model(self) -> ActingNetwork:
        """Return the network with the policy's weights."""
        model = self._flat.module
        assert isinstance(model, ActingNetwork)
        return model

    def _one(self, observation: Any, action_mask: Any) -> dict[str, Array]:
        """Return an observation as rows [1, *] per key, the mask included."""
        obs = self._writer.empty(1)
        self._writer.write_row(obs, 0, observation)
        self._finite.require(obs)
        self._take_masks(obs, None if action_mask is None else [action_mask])
        if MASK_KEY in obs and not np.logical_or.reduceat(obs[MASK_KEY].reshape(-1), self._begins_of_parts).all():
            raise UsageError(f"{MASK_KEY}: expected at least one allowed choice, got all zero")
        return obs

    def _take_masks(self, obs: dict[str, Array], masks: list[Any] | None) -> None:
        """Add a mask per row to the observations; without masks, refuse an environment that needs masks."""
        if masks is not None:
            try:
                obs[MASK_KEY] = np.stack([self._mask_form.flat(mask) for mask in masks])
            except ValueError as error:
                raise UsageError(f"{MASK_KEY} must have {self._mask_form.size} entries a row: {error}") from None
        elif self.spec.mask_in_info:
            source = f"env.{METHOD}()" if self.spec.mask_source == BY_METHOD else f'info["{MASK_KEY}"]'
            raise UsageError(f"this environment needs masks: action_mask={source}")

    def _answer(self, obs: dict[str, Array], first: BoolArray, deterministic: bool) -> Array:
        """Return stored actions [N, A]."""
        player, num_rows = self._player, len(first)
        if self._begins:
            player.rnn_state = torch.zeros(num_rows, player.rnn_state.shape[1], device=player.device)
        elif len(player.rnn_state) != num_rows:
            raise UsageError(f"{num_rows} rows after {len(player.rnn_state)}: call reset() before")
        action = player.act(obs, first | self._begins, deterministic=deterministic)
        self._begins = False
        return action


def look_at(config: EnvConfig, given: Spaces | None = None) -> tuple[Spaces, EnvSpec]:
    """Return the spaces of an environment and the description as arrays; make the environment unless spaces are given.

    Raises:
        UsageError: the environment cannot be made or played.
        EnvironmentFailure: the environment raised.
    """
    if given is not None:
        note_frames(given[0], config.env_framestack)
        given = (given[0], given[1] if config.clip_actions else unbounded(given[1]))
        return given, spec_of(*given, form=ActionForm.of(config))
    if not is_vector_only(config):
        make = [lambda: make_single(config)]
        # A function may make a vector, and a vector may know more arguments; what is wrong otherwise is raised below.
        with contextlib.suppress(UsageError), contextlib.closing(EnvSet(make, config.env, RAISE)) as envs:
            assert envs.spaces is not None
            return envs.spaces, envs.spec(form=ActionForm.of(config))
    with contextlib.closing(make_first(config)) as group:
        assert isinstance(group, GymVector)
        return group.single_spaces, group.spec
