"""A trained policy in a loop of one's own: it answers observations as the environment gives them."""

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from appo.algorithms.models.actor_critic import ActorCritic
from appo.algorithms.models.flat_module import FlatModule, split
from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.playing.player import Player, load_player
from appo.algorithms.playing.saved_run import SavedRun, load_run
from appo.algorithms.run.folder import find_run
from appo.algorithms.run.trust import ANSWERS, PLAYED
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.learner_state import vector_of
from appo.envs.config import EnvConfig
from appo.envs.conversion import ActionConverter, ObservationWriter
from appo.envs.given import name_of
from appo.envs.loop.env_set import RAISE, EnvSet
from appo.envs.make import is_factory, is_vector_only, make_first, make_single
from appo.envs.masks import BY_METHOD, METHOD, mask_of_batched
from appo.envs.spaces import ActionForm, MaskForm, note_frames, spec_of
from appo.envs.spec import MASK_KEY, BoolArray, EnvSpec
from appo.envs.vectors.gym_vector import GymVector
from appo.utils.errors import UsageError
from appo.utils.flags import flags_of
from appo.utils.run_folder import RunFolder
from appo.utils.values import from_plain

Which = Literal["latest", "best", "best_evaluated", "milestone", "past"]
Spaces = tuple[spaces.Space[Any], spaces.Space[Any]]
"""Of the observations and of the actions of one agent."""


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
    """Load a policy of a run; nothing that is read can run code, unless the run is the user's own or trusted.

        policy = load_policy("train_dir/CartPole-v1_1")
        observation, _ = env.reset()
        action = policy.act(observation)

    Args:
        run: folder of a run, or its name in `train_dir`.
        policy: which one of the run.
        which: the newest checkpoint, the best by training or by evaluation, the newest milestone, or past version.
        device: cpu, cuda, or auto.
        seed: of the sampling of actions; None: a random one.
        spaces: of the environment; without them it is made once to look at them.
        train_dir: folder of all runs.
        trust: let a run without a mark of this user use what it names, as `--trust`.
        env: the environment once more, where it was given to `train` as a class or function.

    Raises:
        UsageError: there is no such run or policy, kind of checkpoint or device, the environment cannot be made, or
            what the run names is not to be trusted.
        CheckpointError: the policy has no checkpoint that can be used.
    """
    folder = RunFolder(find_run(str(run), Path(train_dir)))
    flags = flags_of(EvaluationConfig)
    asked = {"policy_index": policy, "load_checkpoint_kind": which, "device": device, "trust": trust}
    checked: dict[str, Any] = {name: from_plain(flags[name], value) for name, value in asked.items()}
    config = EvaluationConfig(**checked, train_dir=str(train_dir), env=name_of(env, is_factory))
    saved = load_run(folder, config, PLAYED if spaces is None else ANSWERS)
    seen, spec = look_at(saved.config.env, spaces)
    with torch.random.fork_rng(devices=[]):  # a new model draws weights
        player, env_steps = load_player(saved, spec, config, secrets.randbits(32) if seed is None else seed)
    return Policy(saved, player, seen, env_steps)


class Computed(NamedTuple):
    """Result of a policy for one observation.

    Attributes:
        action: as the action space describes it.
        state: [H] float32, for the next call; empty without a memory.
        logits: [L] float32 of all parts of the action side by side, without a mask: of choices their unnormalized
            log-probabilities (values of --algo=APEX), of numbers their means, then the logarithms of their deviations.
        value: of the observation, in units of return (of --algo=APEX the largest of an action that is allowed, as it is
            learned); None: nothing has learned to estimate it, as with --algo=BC or --value_loss_coeff=0.
    """

    action: Any
    state: Array
    logits: Array
    value: float | None


class Policy:
    """A trained policy; `load_policy` makes it.

    What it remembers of an episode is kept inside, per row of a batch: call `reset` when an episode begins.

    Attributes:
        run: what was loaded: `directory`, `config` (all flags), `checkpoint`.
        env_steps: that it has learned from.
        observation_space, action_space: of one agent.
        spec: the same as arrays: names, shapes, types.
        estimates_returns: whether it knows values of observations.
    """

    def __init__(self, run: SavedRun, player: Player, seen: Spaces, env_steps: int) -> None:
        self.estimates_returns = run.config.estimates_returns(run.policy)
        self.run, self.env_steps, self.spec = run, env_steps, player.spec
        self.observation_space, self.action_space = seen
        self._player = player
        self._writer = ObservationWriter(run.config.env.env, *seen)
        self._actions = ActionConverter(seen[1], player.spec.action)
        choices = [part.size for part in player.spec.action.parts if part.kind == "categorical"]
        self._begins_of_parts = np.cumsum([0, *choices])[:-1]
        self._mask_form = MaskForm(seen[1])
        self._begins = True  # every row begins an episode

    def act(self, observation: Any, *, deterministic: bool = False, action_mask: Any = None) -> Any:
        """The action for one observation, as the action space describes it.

        Args:
            observation: as the environment gave it.
            deterministic: take the most probable action instead of a sample.
            action_mask: of the environment's `info`, if it comes there.

        Raises:
            EnvironmentFailure: the observation does not fit its space.
            UsageError: a mask is missing, has another size, or allows nothing.
        """
        obs = self._one(observation, action_mask)
        return self._actions.rows(self._answer(obs, np.zeros(1, np.bool_), deterministic))[0]

    def compute_action(
        self, observation: Any, state: Any = None, *, deterministic: bool = False, action_mask: Any = None
    ) -> Computed:
        """Act once, with the memory that is given: nothing of this call or of others is kept inside.

        Args:
            observation: as the environment gave it.
            state: [H] that the call for the observation before returned; None: this one begins an episode.
            deterministic: take the most probable action instead of a sample.
            action_mask: of the environment's `info`, if it comes there.

        Raises:
            EnvironmentFailure, UsageError: as `act`; or the state has another size.
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
            value = self.model.value_of(obs, logits, value)
        action = self._actions.rows(recorded["action"].cpu().numpy())[0]
        known = float(value[0]) if self.estimates_returns else None
        return Computed(action, after[0].cpu().numpy().copy(), logits[0].cpu().numpy().copy(), known)

    def act_batch(
        self, observations: Any, *, first: Any = None, deterministic: bool = False, action_mask: Any = None
    ) -> Any:
        """The actions for a batch of observations, as gymnasium's vector environments give and take them.

        Args:
            observations: N of them, batched as the observation space says.
            first: [N] the rows whose observation begins an episode, besides those after `reset`.
            deterministic: take the most probable actions instead of samples.
            action_mask: [N, M] of the environment's `info`, if they come there. A row without any allowed choice has
                ended, and gets any.

        Raises:
            EnvironmentFailure, UsageError: as `act`; or the number of rows has changed without a `reset`.
        """
        num_rows = _num_rows(observations)
        obs = self._writer.empty(num_rows)
        self._writer.write_batch(obs, observations)
        starts = np.zeros(num_rows, np.bool_) if first is None else np.asarray(first, np.bool_)
        said = {} if action_mask is None else {MASK_KEY: action_mask}
        masks = [mask_of_batched(said, row, self._mask_form.size) for row in range(num_rows)] if said else None
        if masks is not None and not all(masks):
            raise UsageError(f"{MASK_KEY}: expected {num_rows} masks, one per row")
        self._take_masks(obs, None if masks is None else [mask[MASK_KEY] for mask in masks])
        return self._actions.batch(self._answer(obs, starts, deterministic))

    def reset(self) -> None:
        """Forget all: the next observation of every row begins an episode."""
        self._begins = True

    def get_weights(self) -> dict[str, Array]:
        """Copies of all weights and normalization statistics, by name."""
        flat = self._flat
        views = zip(flat.table, split(flat.flat, flat.table), strict=True)
        return {name: view.cpu().numpy().copy() for (name, _), view in views}

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Take over weights as `get_weights` returns them.

        Raises:
            UsageError: a name or a shape is not this model's, or one is missing.
        """
        self._flat.load(vector_of(weights, self._flat.table))

    def make_env(self, render_mode: str | None = None) -> "gymnasium.Env[Any, Any]":
        """The environment as it was in training: with its arguments, frame skip, stack and other wrappers.

        Raises:
            UsageError: it cannot be made, or is not to be trusted.
        """
        if self.run.refusal:  # its spaces were given, so that nothing was asked of its environment yet
            raise UsageError(self.run.refusal)
        return make_single(self.run.config.env, render_mode)

    @property
    def model(self) -> ActorCritic:
        """The network; its weights are those of the policy."""
        model = self._flat.module
        assert isinstance(model, ActorCritic)
        return model

    @property
    def _flat(self) -> FlatModule:
        return self._player.policy.flat

    def _one(self, observation: Any, action_mask: Any) -> dict[str, Array]:
        """One observation as a row [1, *] of every key, its mask included."""
        obs = self._writer.empty(1)
        self._writer.write_row(obs, 0, observation)
        self._take_masks(obs, None if action_mask is None else [action_mask])
        if MASK_KEY in obs and not np.logical_or.reduceat(obs[MASK_KEY].reshape(-1), self._begins_of_parts).all():
            raise UsageError(f"{MASK_KEY}: expected at least one allowed choice, got all zero")
        return obs

    def _take_masks(self, obs: dict[str, Array], masks: list[Any] | None) -> None:
        """Put a mask for each row to the observations, or make sure that none is needed."""
        if masks is not None:
            try:
                obs[MASK_KEY] = np.stack([self._mask_form.flat(mask) for mask in masks])
            except ValueError as error:
                raise UsageError(f"{MASK_KEY} must have {self._mask_form.size} entries a row: {error}") from None
        elif self.spec.mask_in_info:
            source = f"env.{METHOD}()" if self.spec.mask_source == BY_METHOD else f'info["{MASK_KEY}"]'
            raise UsageError(f"this environment needs masks: action_mask={source}")

    def _answer(self, obs: dict[str, Array], first: BoolArray, deterministic: bool) -> Array:
        """Stored actions [N, A]."""
        player, num_rows = self._player, len(first)
        if self._begins:
            player.rnn_state = torch.zeros(num_rows, player.rnn_state.shape[1], device=player.device)
        elif len(player.rnn_state) != num_rows:
            raise UsageError(f"{num_rows} rows after {len(player.rnn_state)}: call reset() before")
        action = player.act(obs, first | self._begins, deterministic=deterministic)
        self._begins = False
        return action


def look_at(config: EnvConfig, given: Spaces | None = None) -> tuple[Spaces, EnvSpec]:
    """The spaces of an environment, and their description; it is made, unless they are given.

    Raises:
        UsageError: it cannot be made, or is nothing that can be played.
        EnvironmentFailure: it raised.
    """
    if given is not None:
        note_frames(given[0], config.env_framestack)
        return given, spec_of(*given, form=ActionForm.of(config))
    if is_vector_only(config):
        vector = make_first(config)
        assert isinstance(vector, GymVector)
        vector.close()
        return vector.single_spaces, vector.spec
    envs = EnvSet([lambda: make_single(config)], config.env, RAISE)
    try:
        assert envs.spaces is not None
        return envs.spaces, envs.spec(form=ActionForm.of(config))
    finally:
        envs.close()


def _num_rows(observations: Any) -> int:
    while isinstance(observations, Mapping | tuple):
        observations = next(iter(observations.values() if isinstance(observations, Mapping) else observations))
    return len(observations)
