"""Several policies in one run: their controllers in main, and their comparison at the end."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from appo.algorithms.ops.intervals import welch_interval
from appo.algorithms.population.controller import Controller
from appo.algorithms.population.exploit_explore import ExploitExplore
from appo.algorithms.population.lineage import Lineage
from appo.algorithms.population.matchmaking import LEARNER
from appo.algorithms.population.past_versions import PastVersions
from appo.algorithms.population.self_play import SelfPlay
from appo.algorithms.run.config import Config
from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.learner_state import ModelDescription, StateBlock
from appo.algorithms.runtime.memory.weights import WeightRing
from appo.algorithms.runtime.messages import PolicyTraits
from appo.algorithms.runtime.monitor.monitor import Monitor
from appo.algorithms.runtime.monitor.policy_progress import PolicyProgress
from appo.algorithms.runtime.topology import Topology
from appo.envs.spec import EnvSpec
from appo.utils.command_line import words_of

log = logging.getLogger(__name__)


def shaping_of(config: Config, spec: EnvSpec) -> Mapping[str, Any]:
    """Return the environment's coefficients of rewards; warn if mutated ones decide about the best checkpoint."""
    if config.algorithm.replays:  # a replay keeps rewards of earlier coefficients, and would mix several tasks
        return {}
    keeps_best = config.run.save_best_after >= 0 and config.run.save_best_metric.startswith("reward/")
    if spec.reward_shaping and config.population.with_pbt and keeps_best:
        log.warning(
            "returns of different rewards decide about the best checkpoint, as --with_pbt mutates coefficients of"
            " rewards: give --save_best_metric=stats/true_reward/mean, or another objective"
        )
    return spec.reward_shaping


def make_controller(
    config: Config, exploit_explore: ExploitExplore, monitor: Monitor, traits: Sequence[PolicyTraits], actors: int
) -> Controller | None:
    """Make the controller of a run with different or changing policies; None for other runs."""
    if not (config.population.with_pbt or config.population.per_policy):
        return None
    learning = [policy for policy in range(len(traits)) if policy not in config.frozen]
    return Controller(exploit_explore, monitor, Lineage(config.run.run_directory, traits), traits, learning, actors)


def make_self_play(
    config: Config,
    topology: Topology,
    arena: Arena,
    model: ModelDescription,
    monitor: Monitor,
    resumed: Mapping[str, Any],
) -> SelfPlay | None:
    """Make the pool of a run with `--self_play`; None for other runs.

    `resumed` is the plain state of the learner's checkpoint; {}: no checkpoint.
    """
    if not topology.num_past:
        return None
    rings = {place: WeightRing(arena, place) for place in range(topology.num_policies, topology.num_acting)}
    past = PastVersions(config.run.folder.checkpoints(LEARNER, "past"), model)
    env_steps = int(resumed["env_steps"]) if resumed else None
    return SelfPlay(config.population, topology, StateBlock(arena, LEARNER), rings, past, monitor, env_steps)


def log_comparison(monitor: Monitor, config: Config) -> None:
    """Log the differences between policies that `--per_policy` has set apart, unless training mixed the policies."""
    if config.population.per_policy and not config.population.with_pbt:
        for line in comparison(monitor.policies, config.differences):
            log.info("%s", line)


def comparison(policies: Sequence[PolicyProgress], given: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for every policy but the first: the difference of its mean return to the first policy's.

    The interval covers the last episodes played; variation between seeds is not included.
    """
    lines = []
    first = policies[0].episode_return.values()
    for policy, (progress, values) in enumerate(zip(policies, given, strict=True)):
        if (found := welch_interval(first, progress.episode_return.values()) if policy else None) is None:
            continue
        low, high = found.mean - found.margin, found.mean + found.margin
        verdict = "" if low > 0 or high < 0 else ": no difference that these episodes show"
        own = " ".join(f"{name}={words_of(value)}" for name, value in values.items())
        its = " ".join(f"{name}={words_of(value)}" for name, value in given[0].items())
        lines.append(
            f"policy {policy} ({own}) against policy 0 ({its}): return {found.mean:+.2f}, 95 % interval"
            f" [{low:+.2f}, {high:+.2f}] over their last {progress.episode_return.count} and {len(first)}"
            f" episodes{verdict}"
        )
    return lines
