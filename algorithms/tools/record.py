"""`appo record` writes a dataset of whole episodes played by a trained policy, or with random actions."""

import contextlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from appo.algorithms.datasets.assembler import EpisodeAssembler, Steps
from appo.algorithms.datasets.config import POLICY_VERSION
from appo.algorithms.datasets.door import Place
from appo.algorithms.datasets.writer import DatasetWriter, require_pyarrow
from appo.algorithms.ops.distributions import ActionDistribution
from appo.algorithms.parts.stochastic_policy import THOUGHTS, StochasticPolicy
from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.playing.player import load_player
from appo.algorithms.playing.saved_run import SavedRun, load_run
from appo.algorithms.run.folder import find_run
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.plain_state import read_plain
from appo.algorithms.tools.flags import RecordConfig
from appo.envs.config import EnvConfig
from appo.envs.make import is_vector_only, make_group
from appo.envs.spec import MASK_KEY, BoolArray, EnvSpec, GroupEnv, StepRow
from appo.utils.command_line import apart, say
from appo.utils.errors import OtherNumber, ResourceError, UsageError
from appo.utils.run_folder import RunFolder
from appo.utils.system import machine
from appo.utils.system.machine import available_memory_bytes
from appo.utils.values import json_text, shown

CHUNK_STEPS = 64  # of all environments, between two searches for whole episodes
Act = Callable[[dict[str, Array], BoolArray], dict[str, Array]]
"""Function from observations [R, *] and starts of episodes [R] to "action" [R, A] and more columns [R, *] by name."""


def record(config: RecordConfig) -> int:
    """Play whole episodes, write the dataset, and print counts; return the exit code.

    Raises:
        UsageError: the run or environment is missing, or the dataset exists.
        CheckpointError: the run has no usable checkpoint.
        EnvironmentFailure: the environment raised.
        ResourceError: the disk is full.
    """
    require_pyarrow("output")
    if Place(Path(config.output)).parts():
        raise UsageError(f"--output: there is a dataset {shown(config.output)} already")
    machine.limit_threads(1)
    seed = config.seed if config.seed is not None else secrets.randbits(32)
    run = None
    if config.run:
        folder = RunFolder(find_run(config.run, Path(config.train_dir)))
        with apart(as_json=config.json):
            run = load_run(folder, EvaluationConfig.of(config))
        if not run.config.env.env:
            raise UsageError(
                f"run {shown(run.folder.path.name)} has learned from datasets: name its environment with --env"
            )
    env = EnvConfig(env=config.env, env_kwargs=config.env_kwargs) if run is None else run.config.env
    # Without flags that change training alone: a dataset has the ends of the environment.
    env = replace(env, env_kwargs={**env.env_kwargs, **config.env_kwargs}, no_done_at_end=False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(apart(as_json=config.json))
        kind = env.env_vectorization if is_vector_only(env) else "python"
        wanted = replace(env, env_vectorization=kind)
        try:
            envs = make_group(wanted, config.num_envs)
        except OtherNumber as error:  # a vector has as many as it has
            envs = make_group(wanted, error.made)
        except UsageError:  # an argument of --env_kwargs that only the vector knows
            envs = make_group(env, config.num_envs)
        stack.callback(envs.close)
        if envs.spec.same_step:
            raise UsageError(
                f"{env.env} resets in the step that ends an episode, so no step shows its last observation"
            )
        act = _random_actions(envs.spec, seed) if run is None else _trained_actions(run, config, envs, seed)
        about: dict[str, object] = {
            "algorithm_name": "random" if run is None else run.config.run.algo,
            "environment": env.env,
            "recorded_from": "" if run is None else f"{run.folder.path.name}/{run.checkpoint.name}",
        }
        writer, returns, assembler = _play(envs, act, config, about, seed)
    say(_report(writer, sum(returns) / max(1, len(returns)), assembler, as_json=config.json))
    return 0


def _play(
    envs: GroupEnv, act: Act, config: RecordConfig, about: dict[str, object], seed: int
) -> tuple[DatasetWriter, list[float], EpisodeAssembler]:
    """Write finished episodes until the dataset has enough steps; return the closed writer, returns and assembler."""
    assembler, returns = EpisodeAssembler(envs.num_rows), list[float]()
    writer, most_bytes = DatasetWriter(config, envs.spec, about), available_memory_bytes() // 2
    try:
        with writer:
            for steps in chunks(envs, act, seed):
                for episode in assembler.add(steps):
                    writer.write(episode)
                    returns.append(episode.returns(1.0))
                if writer.steps >= config.steps:
                    break
                if assembler.held_bytes > most_bytes:
                    raise ResourceError(
                        f"episodes without an end fill half of the free memory after {max(assembler.open_steps)} steps:"
                        " a gymnasium.wrappers.TimeLimit in the environment ends them, fewer --num_envs need less"
                    )
    except ResourceError as error:
        raise ResourceError(f"{error}; kept: {writer.episodes} episodes with {writer.steps} steps") from None
    assembler.close()
    return writer, returns, assembler


def chunks(envs: GroupEnv, act: Act, seed: int) -> Iterator[Steps]:
    """Yield steps of environments in autoreset mode NEXT_STEP, without end, in arrays that the next one overwrites."""
    spec, rows, length = envs.spec, envs.num_rows, CHUNK_STEPS
    obs = {key: np.zeros((length + 1, rows, *one.shape), one.dtype) for key, one in spec.observations.items()}
    first, reward = np.ones((length + 1, rows), np.bool_), np.zeros((length, rows), np.float32)
    terminated, truncated = np.zeros((2, length, rows), np.bool_)
    num_frames, num_envs = np.zeros(rows, np.int32), rows // spec.num_agents
    envs.reset([int(s) >> 1 for s in np.random.SeedSequence(seed).generate_state(num_envs)], _at(obs, 0))
    while True:
        chosen: dict[str, list[Array]] = {}
        for t in range(length):
            for name, values in act(_at(obs, t), first[t]).items():
                chosen.setdefault(name, []).append(values)
            row = StepRow(_at(obs, t + 1), first[t + 1], reward[t], terminated[t], truncated[t], num_frames)
            envs.step(chosen["action"][t], row)
        answers = {name: np.stack(values) for name, values in chosen.items()}
        yield Steps(obs, first, ~first[1:], reward, terminated, truncated, answers.pop("action"), answers)
        first[0] = first[length]
        for array in obs.values():
            array[0] = array[length]


def _at(obs: dict[str, Array], t: int) -> dict[str, Array]:
    return {key: array[t] for key, array in obs.items()}


def _trained_actions(run: SavedRun, config: RecordConfig, envs: GroupEnv, seed: int) -> Act:
    """Return the source of a checkpoint's actions, with values and, for sampled actions, probabilities."""
    player, _ = load_player(run, envs.spec, EvaluationConfig.of(config), seed)
    policy, rows = player.policy, envs.num_rows
    if isinstance(policy, StochasticPolicy):
        policy.records = frozenset(("value",) if config.deterministic else THOUGHTS)
    player.rnn_state = torch.zeros(rows, policy.rnn_state_size, device=player.device)
    player.random = policy.random(seed, rows)
    version = np.full(rows, int(read_plain(run.files["state.json"])["version"]), np.int64)

    @torch.inference_mode()
    def act(obs: dict[str, Array], first: BoolArray) -> dict[str, Array]:
        tensors = {key: torch.from_numpy(value).to(player.device) for key, value in obs.items()}
        inputs = tensors, torch.from_numpy(first).to(player.device), player.rnn_state
        found, player.rnn_state = policy.act(*inputs, None, player.random, greedy=config.deterministic)
        kept = {name: values.cpu().numpy() for name, values in found.items() if name in ("action", *THOUGHTS)}
        return kept | {POLICY_VERSION: version}

    return act


def _random_actions(spec: EnvSpec, seed: int) -> Act:
    """Return the source of random actions: allowed choices, bits, normal numbers, with probabilities."""
    generator = torch.Generator().manual_seed(seed)

    def act(obs: dict[str, Array], first: BoolArray) -> dict[str, Array]:
        logits = torch.zeros(len(first), spec.action.num_logits)
        mask = torch.from_numpy(obs[MASK_KEY]).flatten(1) > 0 if MASK_KEY in obs else None
        policy = ActionDistribution(spec.action.parts, logits, mask)
        action = policy.sample(generator)
        found = {"action": action, "logits": logits, "log_prob": policy.log_prob(action)}
        found[POLICY_VERSION] = torch.zeros(len(first), dtype=torch.int64)
        return {name: values.numpy() for name, values in found.items()}

    return act


def _report(writer: DatasetWriter, mean: float, assembler: EpisodeAssembler, *, as_json: bool) -> str:
    if as_json:
        written = {"episodes": writer.episodes, "steps": writer.steps, "parts": writer.parts, "mean_return": mean}
        dropped = {"dropped_episodes": assembler.dropped_episodes, "dropped_steps": assembler.dropped_steps}
        return json_text({"dataset": str(writer.folder), **written, **dropped})
    return (
        f"{shown(str(writer.folder))}: {writer.episodes} episodes, {writer.steps} steps, in {writer.parts} parts; mean"
        f" return {mean:.2f}; {assembler.dropped_episodes} episodes of {assembler.dropped_steps} steps had no end and"
        " are left out"
    )
