"""Play a trained policy: load a checkpoint, run episodes, show or report them."""

import json
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from algorithms.appo.build import new_model
from algorithms.appo.config import Config, EvaluationConfig
from algorithms.appo.placement import choose_device
from algorithms.appo.runs import newest_run, saved_flags
from algorithms.models.actor_critic import ActorCritic
from algorithms.ops.distributions import ActionDistribution
from algorithms.runtime.checkpointing import decode
from envs.config import EnvConfig
from envs.make import is_vector_only, make_group, make_single
from envs.python_loop import PythonLoop
from envs.spec import MASK_KEY, Array, EnvSpec, GroupEnv, StepRow
from utils import checkpoint
from utils.errors import CheckpointError, UsageError


@dataclass(frozen=True)
class Episode:
    """One finished episode.

    Attributes:
        episode_return: sum of the rewards as the environment gave them.
        length: env steps.
    """

    episode_return: float
    length: int


class Player:
    """Acts with a trained model for one environment, in one's own loop.

    Args:
        model: the network, in eval mode.
        spec: of the environment.
        deterministic: take the most probable action instead of sampling.
        device: of the network.
        seed: of the sampling.
    """

    def __init__(self, model: ActorCritic, spec: EnvSpec, *, deterministic: bool, device: str, seed: int) -> None:
        self.model, self.spec, self.deterministic, self.device = model, spec, deterministic, device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.state = torch.zeros(1, model.rnn_state_size, device=device)

    @torch.inference_mode()
    def act(self, obs: dict[str, Array], first: Array) -> Array:
        """The action [1, A], as stored in trajectories, for observations [1, *]; `first` [1] starts an episode."""
        tensors = {key: torch.from_numpy(value).to(self.device) for key, value in obs.items()}
        logits, _, self.state = self.model.act(tensors, torch.from_numpy(first).to(self.device), self.state)
        mask = tensors[MASK_KEY].flatten(1) > 0 if self.spec.action_mask else None
        policy = ActionDistribution(self.spec.action.parts, logits, mask)
        action = policy.mode() if self.deterministic else policy.sample(self.generator)
        return action.cpu().numpy()


def enjoy(config: EvaluationConfig) -> int:
    """Play episodes with the newest checkpoint of a run and report them; the exit code.

    Raises:
        UsageError: there is no such run.
        CheckpointError: it has no usable checkpoint.
    """
    directory = _run_directory(config)
    trained = Config.from_flat(saved_flags(directory))
    if not saved_flags(directory):
        raise UsageError(f"{directory} holds no run")
    seed = config.seed if config.seed is not None else secrets.randbits(32)
    envs = _make_env(trained.env, config)
    try:
        model, env_steps = load_model(directory, trained, envs.spec, config)
        device = choose_device(config.device)
        gaussian = any(part.kind == "gaussian" for part in envs.spec.action.parts)
        deterministic = config.deterministic or (gaussian and not config.continuous_actions_sample)
        player = Player(model, envs.spec, deterministic=deterministic, device=device, seed=seed)
        episodes = []
        for number, episode in enumerate(play(envs, player, config, seed), start=1):
            episodes.append(episode)
            if not config.json:
                _say(f"episode {number:4}  return {episode.episode_return:10.2f}  length {episode.length:6}")
    finally:
        envs.close()
    _report(config, episodes, env_steps, seed)
    return 0


def load_model(directory: Path, trained: Config, spec: EnvSpec, config: EvaluationConfig) -> tuple[ActorCritic, int]:
    """The model of a run with the weights of its newest checkpoint that verifies, and that checkpoint's env steps.

    Raises:
        CheckpointError: there is none.
        UsageError: it does not fit the model.
    """
    parent = directory / f"checkpoint_p{config.policy_index}"
    loaded = checkpoint.load(parent) if parent.exists() else None
    if loaded is None:
        raise CheckpointError(f"{directory} holds no checkpoint of policy {config.policy_index} yet")
    flat = new_model(trained, spec, choose_device(config.device))
    state, _ = decode(loaded.files, flat.table)
    flat.flat.copy_(torch.from_numpy(state.vectors[0]))
    assert isinstance(flat.module, ActorCritic)
    return flat.module.eval(), int(state.meta["env_steps"])


def play(envs: GroupEnv, player: Player, config: EvaluationConfig, seed: int) -> Iterator[Episode]:
    """Episodes one after the other, until the limits of the flags."""
    obs, row = _buffers(envs.spec)
    envs.reset([seed % 2**32], obs)
    first = np.ones(1, bool)
    frames = episodes = length = 0
    total = 0.0
    while not (config.max_num_episodes and episodes >= config.max_num_episodes):
        if config.max_num_frames and frames >= config.max_num_frames:
            return
        begin = time.perf_counter()
        action = player.act(obs, first)
        envs.step(action, row)
        valid = envs.spec.same_step or not row.first[0]
        frames += envs.spec.frames_per_step * valid
        length += envs.spec.frames_per_step * valid
        total += float(row.reward[0])
        if row.terminated[0] or row.truncated[0]:
            episodes += 1
            yield Episode(total, length)
            total, length = 0.0, 0
        for key, value in row.obs.items():
            obs[key][:] = value
        first[:] = row.first
        if config.fps:
            time.sleep(max(0.0, 1 / config.fps - (time.perf_counter() - begin)))


def _run_directory(config: EvaluationConfig) -> Path:
    group = Path(config.train_dir, config.experiments_root)
    if not config.experiment:
        return newest_run(group, config.env)
    if not (group / config.experiment).is_dir():
        raise UsageError(f"there is no run {group / config.experiment}")
    return group / config.experiment


def _make_env(trained: EnvConfig, config: EvaluationConfig) -> GroupEnv:
    """One environment behind the same adapters as in training, so that nothing differs but the rendering."""
    if config.render_action_repeat is not None:
        trained = replace(trained, env_frameskip=config.render_action_repeat)
    trained = replace(trained, decorrelate_envs_on_one_worker=False)
    if is_vector_only(trained):
        return make_group(trained, 1)
    render_mode = None if config.no_render or config.json else "human"
    return PythonLoop([lambda: make_single(trained, render_mode)], name=trained.env)


def _buffers(spec: EnvSpec) -> tuple[dict[str, Array], StepRow]:
    def arrays() -> dict[str, Array]:
        return {key: np.zeros((1, *o.shape), o.dtype) for key, o in spec.observations.items()}

    row = StepRow(
        obs=arrays(),
        first=np.zeros(1, bool),
        reward=np.zeros(1, np.float32),
        terminated=np.zeros(1, bool),
        truncated=np.zeros(1, bool),
        final_obs=arrays() if spec.same_step else {},
        has_final=np.zeros(1, bool) if spec.same_step else None,
    )
    return arrays(), row


def _report(config: EvaluationConfig, episodes: list[Episode], env_steps: int, seed: int) -> None:
    returns = np.array([episode.episode_return for episode in episodes])
    summary: dict[str, object] = {"env_steps": env_steps, "num_episodes": len(episodes), "seed": seed}
    if len(episodes):
        summary |= {"mean": float(returns.mean()), "std": float(returns.std()), "median": float(np.median(returns))}
    if config.json:
        _say(json.dumps({**summary, "episodes": [asdict(episode) for episode in episodes]}))
    elif len(episodes):
        _say(
            f"{len(episodes)} episodes at env step {env_steps}: return {summary['mean']:.2f} +- {summary['std']:.2f}, "
            f"median {summary['median']:.2f} (seed {seed})"
        )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
