"""Flags and checks of several policies that are trained together. Imports neither torch nor numpy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from appo.utils.command_line import words_of
from appo.utils.errors import UsageError
from appo.utils.flags import Flag, flag
from appo.utils.values import flag_hint, from_plain, shown

READ_ONCE = ("epsilon", "epsilon_alpha", "prioritized_replay")
"""Flags that the start alone reads: the exploration of actors, and whether errors decide the draws of a replay."""
SHARED = (
    "rollout",
    "recurrence",
    "num_batches_per_iteration",
    "max_skipped_updates",
    "normalize_returns",
    "dueling",
    "encoder_custom",
    "replay_capacity",
    "replay_compression",
    "replay_compressed_share",
    "batch_replay",
    "num_replay_shards",
)
"""Flags of learning and of the network that all policies share: sizes of memory, and names of code."""
BATCH_GROWTH = 1.5
"""Largest batch after mutations, relative to the batch at the start."""


@dataclass(frozen=True)
class PopulationConfig:
    """Several policies, and population-based training."""

    per_policy: dict[str, object] = flag(
        {},
        "flags of learning and of the network in which policies differ, a value for each policy:"
        " learning_rate=1e-6,1e-4 hidden_size=64,512; with --with_pbt what they start with, and none of the network",
    )
    policy_mapping: str = flag(
        "",
        "function of yours, package.module:function, that says which policy plays an episode: given the agent's number"
        " in its env, the env's number in the run and a numpy generator, it returns the policy; empty = drawn so that"
        " all play as many steps",
        needs="actors",
    )
    policies_to_train: tuple[int, ...] = flag((), "policies that learn, the others only play; empty = all", minimum=0)
    frozen_policies: tuple[int, ...] = flag((), "policies that only play and never learn; empty = none", minimum=0)
    with_pbt: bool = flag(False, "population-based training: bad policies copy good ones, hyperparameters mutate")
    pbt_mix_policies_in_one_env: bool = flag(
        True, "let different policies play in one multi-agent env", needs="num_policies>1 policy_mapping= agents"
    )
    pbt_period_env_steps: int = flag(
        5_000_000, "env steps of a policy between two of its mutations", minimum=1, needs="with_pbt"
    )
    pbt_start_mutation: int = flag(20_000_000, "env steps before the first mutation", minimum=0, needs="with_pbt")
    pbt_replace_fraction: float = flag(
        0.3,
        "share of policies that are worst, or best, enough to be replaced, or copied",
        minimum=0,
        maximum=1,
        needs="with_pbt",
    )
    pbt_mutation_rate: float = flag(
        0.15, "probability that a mutation changes a value", minimum=0, maximum=1, needs="with_pbt"
    )
    pbt_replace_reward_gap: float = flag(
        0.1,
        "smallest gap of the objective at which weights are replaced, relative to the larger of both without sign",
        minimum=0,
        needs="with_pbt",
    )
    pbt_replace_reward_gap_absolute: float = flag(
        1e-6, "smallest absolute gap of the objective at which weights are replaced", minimum=0, needs="with_pbt"
    )
    pbt_optimize_batch_size: bool = flag(False, "mutate batch_size too", needs="with_pbt")
    pbt_target_objective: str = flag(
        "true_reward",
        "episode statistic by which policies are ranked: reward, len, or one that the env reports",
        harmless=True,
        needs="with_pbt",
    )
    pbt_min_episodes: int = flag(
        10,
        "episodes of every policy that must have ended, since it was replaced, before policies are compared",
        minimum=1,
        needs="with_pbt",
    )
    self_play: bool = flag(
        False, "in an env of several agents, play against past versions of the policy too", needs="actors"
    )
    self_play_period_env_steps: int = flag(
        500_000, "env steps after which the policy joins the pool of past versions", minimum=1, needs="self_play"
    )
    self_play_pool_size: int = flag(
        8, "past versions that are kept, the newest ones", minimum=1, maximum=256, needs="self_play"
    )
    self_play_past_share: float = flag(
        0.5,
        "share of games against past versions; in the others the policy plays all agents",
        minimum=0,
        maximum=1,
        needs="self_play",
    )
    self_play_opponents: str = flag(
        "uniform",
        "which past version plays: all alike, or hard ones more often, by (1 - win rate)^2",
        choices=("uniform", "hard"),
        needs="self_play",
    )


class PopulationFlags(Protocol):
    """Flags of a run that a population reads."""

    @property
    def population(self) -> PopulationConfig:
        """Return the flags of populations."""

    @property
    def learning(self) -> Any:
        """Return the initial learning flags of all policies, in the algorithm's dataclass."""

    @property
    def per_policy(self) -> Sequence[Mapping[str, Any]]:
        """Return the learning flags of single policies, by policy."""

    @property
    def frozen(self) -> frozenset[int]:
        """Return the policies that never learn."""

    @property
    def largest_batch_size(self) -> int:
        """Return the largest possible batch of a policy."""


def frozen(config: PopulationConfig, num_policies: int) -> frozenset[int]:
    """Return the policies that never learn."""
    learning = config.policies_to_train or range(num_policies)
    return frozenset({*range(num_policies)} - {*learning} | {*config.frozen_policies})


def check_population(config: PopulationConfig, num_policies: int, stats_avg: int) -> None:
    """Refuse contradictory flags of a population (UsageError)."""
    for name in ("policies_to_train", "frozen_policies"):
        if any(policy >= num_policies for policy in getattr(config, name)):
            raise UsageError(f"--{name}={words_of(getattr(config, name))}: there are --num_policies={num_policies}")
    learning = num_policies - len(frozen(config, num_policies))
    if not learning:
        raise UsageError("--policies_to_train and --frozen_policies leave no policy that learns")
    if config.with_pbt and learning < 2:
        raise UsageError(f"--with_pbt needs at least 2 policies that learn, got {learning}: raise --num_policies")
    if config.with_pbt and config.pbt_min_episodes > stats_avg:
        raise UsageError(
            f"--pbt_min_episodes={config.pbt_min_episodes}: returns of the last --stats_avg={stats_avg} episodes count"
        )
    once = [name for name in config.per_policy if name.replace("-", "_") in READ_ONCE]
    if config.with_pbt and once:
        raise UsageError(f"--per_policy {once[0]}: --with_pbt copies policies, and the start alone reads this flag")
    if config.policy_mapping and num_policies < 2:
        raise UsageError("--policy_mapping chooses among policies: raise --num_policies")
    if config.self_play and num_policies > 1:
        raise UsageError(f"--self_play trains one policy, got --num_policies={num_policies}")


def check_copies(differences: Sequence[Mapping[str, Any]], flags: Mapping[str, Flag]) -> None:
    """Refuse policies that could not go on from each other's weights and state (UsageError).

    Args:
        differences: values of `--per_policy`, by policy.
        flags: all flags of the run.
    """
    for name, value in differences[0].items():
        # As for a resumed run: the state of another value has another form, or another meaning.
        if flags[name].fixed_on_resume is True and any(other[name] != value for other in differences):
            raise UsageError(f"--per_policy {name}: --with_pbt copies weights and state, which need one {name} for all")


def past_slots(config: PopulationConfig, env: str, num_agents: int) -> int:
    """Count the policies beside the learner: the pool, and a place for a version that leaves the pool.

    Raises:
        UsageError: the environment has a single agent.
    """
    if not config.self_play:
        return 0
    if num_agents < 2:
        raise UsageError(f"--self_play needs an environment of several agents; {shown(env)} has one")
    return config.self_play_pool_size + 1


def values_per_policy(config: PopulationConfig, flags: Mapping[str, Flag], num_policies: int) -> list[dict[str, Any]]:
    """Return the converted values of `--per_policy`, by policy.

    Raises:
        UsageError: unknown flag, wrong number of values, or invalid value.
    """
    found: list[dict[str, Any]] = [{} for _ in range(num_policies)]
    own = [name for name in flags if name not in SHARED]
    for key, text in config.per_policy.items():
        name = key.replace("-", "_")
        if name not in own:
            reason = "is the same for all policies"
            if name not in (*flags, "algo"):  # a run has a single algorithm
                reason = f"is no flag of learning or of the network{flag_hint(name, own, dashes='')}"
            raise UsageError(f"--per_policy {shown(name)}: {shown(name)} {reason}")
        if len(words := _words(text)) != num_policies:
            raise UsageError(f"--per_policy {name} has {len(words)} values for --num_policies={num_policies}")
        for values, word in zip(found, words, strict=True):
            values[name] = from_plain(flags[name], word)
    return found


def changed_per_policy(saved: Mapping[str, Any], asked: Mapping[str, Any], flags: Mapping[str, Flag]) -> list[str]:
    """Return `per_policy flag old -> new` for changed values of flags that a resumed run cannot change."""
    before, after = (
        {name.replace("-", "_"): words_of(tuple(map(str, _words(text)))) for name, text in values.items()}
        for values in (saved.get("per_policy", {}), asked.get("per_policy", saved.get("per_policy", {})))
    )
    changed = sorted(name for name in {*before, *after} & {*flags} if before.get(name) != after.get(name))
    begun = {*before, *(name for name in changed if flags[name].mutation)} if saved.get("with_pbt") else set()
    fixed = [name for name in changed if flags[name].is_fixed(saved) or name in begun]  # a population goes on
    return [f"per_policy {name} {before.get(name, 'none')} -> {after.get(name, 'none')}" for name in fixed]


def _words(text: object) -> list[Any]:
    return text if isinstance(text, list) else [word.strip() for word in str(text).split(",")]


def largest_batch_size(config: PopulationConfig, sizes: Sequence[int], rollout: int) -> int:
    """Return the largest batch of policies with these initial sizes; sizes grow by whole rollouts."""
    grows = config.with_pbt and config.pbt_optimize_batch_size
    return int(BATCH_GROWTH * max(sizes)) // rollout * rollout if grows else max(sizes)
