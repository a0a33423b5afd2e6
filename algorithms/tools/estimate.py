"""`appo estimate` estimates the return of a policy from a dataset of episodes of other policies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from appo.algorithms.datasets.episodes import Episode
from appo.algorithms.datasets.reader import dataset_for
from appo.algorithms.models.actor_critic import ActingNetwork, ActorCritic
from appo.algorithms.models.custom import custom_class
from appo.algorithms.models.policy_network import PolicyNetwork
from appo.algorithms.offline.fitted_q import FittedQ, Transitions
from appo.algorithms.ops import off_policy
from appo.algorithms.ops.distributions import ActionDistribution
from appo.algorithms.ops.intervals import Floats
from appo.algorithms.ops.off_policy import Interval
from appo.algorithms.parts.stochastic_policy import StochasticPolicy
from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.playing.player import load_player
from appo.algorithms.playing.saved_run import SavedRun, load_run
from appo.algorithms.run.folder import find_run
from appo.algorithms.run.trust import ANSWERS
from appo.algorithms.runtime.memory.plain_state import read_plain
from appo.algorithms.runtime.messages import PolicyTraits
from appo.algorithms.tools.flags import BY_RATIOS, BY_VALUES, EstimateConfig
from appo.envs.spec import MASK_KEY, EnvSpec
from appo.utils.command_line import say
from appo.utils.errors import UsageError
from appo.utils.run_folder import RunFolder
from appo.utils.system import machine
from appo.utils.values import from_plain, json_text, shown


class Thoughts(NamedTuple):
    """The probabilities of the evaluated policy for an episode of L steps.

    Attributes:
        log_prob: [L] log-probabilities of the actions taken.
        probabilities: [L+1, n] probabilities of every choice, if an action is one choice; else [L+1, 0].
    """

    log_prob: Floats
    probabilities: Tensor


def estimate(config: EstimateConfig) -> int:
    """Estimate, print, and return the exit code.

    Raises:
        UsageError: run or dataset is missing, both do not fit, or the dataset lacks columns.
        CheckpointError: the run has no usable checkpoint.
    """
    machine.limit_threads(1)
    flags = EvaluationConfig.of(config)
    run = load_run(RunFolder(find_run(config.run, Path(config.train_dir))), flags, ANSWERS)
    dataset = dataset_for(run.config.env, config.dataset)
    player, _ = load_player(run, dataset.spec, flags, 0)
    if not isinstance(player.policy, StochasticPolicy):
        raise UsageError(f"run {shown(run.folder.path.name)}: --algo={run.config.run.algo} acts without probabilities")
    gamma = _gamma_of(run) if config.gamma is None else config.gamma
    episodes = list(dataset)
    thoughts = [thoughts_of(player.policy.model, dataset.spec, episode) for episode in episodes]
    terms = {"dataset": off_policy.of_episodes(np.array([episode.returns(gamma) for episode in episodes]))}
    effective = values = None
    if set(config.estimators) & set(BY_RATIOS):
        if lacking := [index for index, episode in enumerate(episodes) if "log_prob" not in episode.infos]:
            raise UsageError(
                f"--dataset: episode {lacking[0]} of {dataset.sources[0].name} and those after it lack the"
                f" probabilities of what was done, which {', '.join(BY_RATIOS)} need:"
                f" {'take --estimators=fitted_q' if _is_one_choice(dataset.spec) else 'appo record stores them'}"
            )
        effective = off_policy.effective_episodes(_log_ratios(episodes, thoughts))
    if set(config.estimators) & set(BY_VALUES):
        values = fitted_values(run, dataset.spec, player.policy.model, episodes, thoughts, gamma, config)
    terms |= {name: terms_of(name, episodes, thoughts, values, gamma) for name in config.estimators}
    with np.errstate(invalid="ignore"):
        found = {name: one.interval(config.resamples, seed=config.seed) for name, one in terms.items()}
    if odd := [name for name, one in found.items() if not np.isfinite(one).all()]:
        raise UsageError(f"--estimators={odd[0]}: ratios of probabilities overflow, the two policies differ too much")
    say(_report(found, len(episodes), effective, gamma, as_json=config.json))
    return 0


def _gamma_of(run: SavedRun) -> float:
    """Return the discount with which the policy of the checkpoint learned; a population may have changed the flag."""
    traits = PolicyTraits.in_state(read_plain(run.files["state.json"])) or PolicyTraits()
    own = {**run.config.per_policy[run.policy], **traits.hyperparameters}
    return cast(float, from_plain(run.config.table.flags["gamma"], own.get("gamma", run.config.learning.gamma)))


@torch.inference_mode()
def thoughts_of(model: ActingNetwork, spec: EnvSpec, episode: Episode) -> Thoughts:
    """Return the probabilities of a model for an episode, the final observation included."""
    steps = len(episode)
    obs = {key: torch.from_numpy(np.concatenate((x, x[-1:])))[:, None] for key, x in episode.obs.items()}  # [L+2, 1, *]
    first = torch.zeros(steps + 2, 1, dtype=torch.bool)
    first[0] = True
    state = torch.zeros(1, 1, model.rnn_state_size)
    if isinstance(model, PolicyNetwork):
        logits = model.unroll_all(obs, first, state)[:-1]
    else:
        assert isinstance(model, ActorCritic)
        logits, _ = model.unroll(obs, first, state, steps + 1)
    mask = obs[MASK_KEY][:-1, 0].flatten(1) > 0 if spec.action_mask else None
    policy = ActionDistribution(spec.action.parts, logits[:, 0], mask)
    action = torch.from_numpy(np.concatenate((episode.action, np.zeros_like(episode.action[:1]))))
    probabilities = torch.zeros(steps + 1, 0)
    if _is_one_choice(spec):
        every = torch.arange(spec.action.num_logits, dtype=action.dtype).view(-1, 1, 1).expand(-1, steps + 1, 1)
        probabilities = torch.stack([policy.log_prob(choice) for choice in every], dim=-1).exp()
    return Thoughts(policy.log_prob(action)[:-1].double().numpy(), probabilities.clone())


def _is_one_choice(spec: EnvSpec) -> bool:
    return [part.kind for part in spec.action.parts] == ["categorical"]


def terms_of(
    name: str,
    episodes: Sequence[Episode],
    thoughts: Sequence[Thoughts],
    values: Sequence[tuple[Floats, Floats]] | None,
    gamma: float,
) -> off_policy.Terms:
    """Return the terms of an estimate.

    Args:
        name: name of the estimator.
        episodes: episodes of the dataset.
        thoughts: probabilities, in the order of the episodes.
        values: v [L+1] and q of the actions taken [L] per episode; None if the estimator needs no values.
        gamma: discount per step.
    """
    if name == "fitted_q":
        assert values is not None
        return off_policy.of_episodes(np.array([v[0] for v, _ in values]))
    log_ratio = _log_ratios(episodes, thoughts)
    reward = _padded([episode.reward.astype(np.float64) for episode in episodes])
    if name == "is":
        return off_policy.importance_sampling(log_ratio, reward, gamma)
    if name == "wis":
        return off_policy.weighted_importance_sampling(log_ratio, reward, gamma)
    assert values is not None
    value, q_taken = map(_padded, zip(*values, strict=True))
    return off_policy.doubly_robust(log_ratio, reward, value, q_taken, gamma)


def _log_ratios(episodes: Sequence[Episode], thoughts: Sequence[Thoughts]) -> Floats:
    """Return log-ratios of the evaluated policy to the acting policy, [E, L]."""
    pairs = zip(episodes, thoughts, strict=True)
    return _padded([thought.log_prob - episode.infos["log_prob"].astype(np.float64) for episode, thought in pairs])


def _padded(rows: Sequence[Floats]) -> Floats:
    """Return rows of different lengths as an array [E, L], padded with zeros."""
    padded = np.zeros((len(rows), max(map(len, rows))))
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


def fitted_values(
    run: SavedRun,
    spec: EnvSpec,
    model: ActingNetwork,
    episodes: Sequence[Episode],
    thoughts: Sequence[Thoughts],
    gamma: float,
    config: EstimateConfig,
) -> list[tuple[Floats, Floats]]:
    """Return v [L+1] and q of the actions taken [L] of every episode, by fitted Q evaluation.

    After the last step, v is 0 if the episode terminated; if truncated, v estimates the rest of the episode.

    Raises:
        UsageError: actions are not one choice, or `--encoder_custom` names a whole model.
    """
    if not _is_one_choice(spec):
        raise UsageError(f"{', '.join(BY_VALUES)} need actions that are one choice: take --estimators=is,wis")
    network = run.config.model_of(run.policy)
    if custom_class(network, "model"):
        raise UsageError(
            f"{', '.join(BY_VALUES)} need an encoder for a network of values, and"
            f" --encoder_custom={network.encoder_custom} is a whole model: take --estimators=is,wis"
        )
    keys = [key for key in episodes[0].obs if key != MASK_KEY]
    lengths = [len(episode) for episode in episodes]
    begins = np.cumsum([0, *(length + 1 for length in lengths)])
    data = Transitions(
        obs={key: torch.from_numpy(np.concatenate([episode.obs[key] for episode in episodes])) for key in keys},
        here=torch.cat([int(b) + torch.arange(length) for b, length in zip(begins, lengths, strict=False)]),
        action=torch.from_numpy(np.concatenate([episode.action[:, 0] for episode in episodes])).long(),
        reward=torch.from_numpy(np.concatenate([episode.reward for episode in episodes])),
        terminated=torch.cat([(torch.arange(len(e)) == len(e) - 1) & e.terminated for e in episodes]),
        probabilities=torch.cat([thought.probabilities for thought in thoughts]),
    )
    fitted = FittedQ(spec, network, model, config.seed)
    fitted.fit(data, gamma, config.updates)
    q = fitted.values(data.obs)
    v, taken = (data.probabilities * q).sum(-1).double().numpy(), q[data.here].gather(-1, data.action[:, None])
    found, at = [], np.cumsum([0, *lengths])
    for i, episode in enumerate(episodes):
        value = v[begins[i] : begins[i + 1]].copy()
        value[-1] *= not episode.terminated
        found.append((value, taken[at[i] : at[i + 1], 0].double().numpy()))
    return found


def _report(found: dict[str, Interval], episodes: int, effective: float | None, gamma: float, *, as_json: bool) -> str:
    if as_json:
        head = {"gamma": gamma, "episodes": episodes, "effective_episodes": effective}
        return json_text(head | {name: one._asdict() for name, one in found.items()})
    lines = [f"discounted return (gamma {gamma:g}) by {episodes} episodes, with 95 % intervals over episodes"]
    for name, one in found.items():
        what = "of those who acted" if name == "dataset" else "of the policy"
        lines.append(f"{name:9} {one.value:12.3f}  [{one.low:.3f}, {one.high:.3f}]  {what}")
    if effective is not None:
        lines.append(f"ratios leave as much as {effective:.1f} episodes of equal weight")
    return "\n".join(lines)
