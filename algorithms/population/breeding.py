"""What becomes of a policy: its first traits, and those after every decision. Nothing here has an effect."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from algorithms.appo.config import FLAGS_BY_PART, Config
from algorithms.population.config import SHARED, PopulationConfig
from algorithms.population.rules import REFERENCE, Selection, Tuned, mutated, mutated_shaping
from algorithms.runtime.traits import Traits
from utils.errors import CheckpointError, UsageError
from utils.values import from_plain, shown

Kind = Literal["copy", "mutation", "none"]
SEED_BRANCH = 7
"""Of the run's seed; the others are the `SEED_BRANCHES` of `blueprint.py`."""

MOST_SHAPING_BYTES = 16 << 10
"""Of the coefficients of an environment's rewards, as JSON; they are kept with the learner's state."""


class Decision(NamedTuple):
    """What becomes of a policy.

    Attributes:
        kind: copy: it gets weights and hyperparameters of the source; mutation: its own hyperparameters have changed.
        source: the policy itself, unless it copies.
        traits: from now on.
    """

    kind: Kind
    source: int
    traits: Traits


@dataclass(frozen=True)
class Breeding:
    """The rules with the values of one run.

    Attributes:
        config: the flags of populations.
        tuned: hyperparameters that mutate; none without population-based training.
        shaping: coefficients of rewards as the environment has them; {}: it has none.
        seed: of the run. What a policy draws depends on this, its number and how often was decided about it.
    """

    config: PopulationConfig
    tuned: Mapping[str, Tuned]
    shaping: Mapping[str, Any]
    seed: int

    @classmethod
    def of(cls, config: Config, shaping: Mapping[str, Any], seed: int) -> Self:
        """That of a run.

        Raises:
            UsageError: the environment has more coefficients than can be kept.
        """
        size = len(json.dumps(shaping))
        if size > MOST_SHAPING_BYTES:
            raise UsageError(f"the reward shaping of {config.env.env} takes {size} bytes, of {MOST_SHAPING_BYTES}")
        return cls(config.population, tuned_by(config), shaping if config.population.with_pbt else {}, seed)

    @property
    def selection(self) -> Selection:
        """Who is replaced by whom."""
        c = self.config
        return Selection(c.pbt_replace_fraction, c.pbt_replace_reward_gap, c.pbt_replace_reward_gap_absolute)

    def first(self, policy: int, given: Mapping[str, Any], *, learns: bool = True) -> Traits:
        """Those of a policy that has not learned yet: mutated, but for the reference and for what it was given.

        Args:
            policy: whose.
            given: values of `--per_policy`.
            learns: whether it ever will.
        """
        traits = Traits({name: one.default for name, one in self.tuned.items()} | dict(given), self.shaping)
        if not self.config.with_pbt or policy == REFERENCE or not learns:
            return traits
        tuned = {name: one for name, one in self.tuned.items() if name not in given}
        return self._mutated(traits, tuned, self._random(policy, 0))

    def decide(
        self, policy: int, env_steps: int, objectives: Mapping[int, float], traits: Sequence[Traits]
    ) -> Decision:
        """What becomes of a policy now.

        Args:
            policy: about which is decided.
            env_steps: of it.
            objectives: of all policies that learn; higher is better.
            traits: of all policies.
        """
        own = traits[policy]
        random = self._random(policy, own.changes + 1)
        source = self.selection.source(policy, objectives, random)
        copies = source != policy
        traits_then = traits[source]
        if policy != REFERENCE and (copies or policy not in self.selection.best(objectives)):
            traits_then = self._mutated(traits_then, self.tuned, random)
        decided = replace(
            traits_then, changes=own.changes + 1, adoptions=own.adoptions + copies, decided_env_steps=env_steps
        )
        return Decision("copy" if copies else "mutation" if differs(own, decided) else "none", source, decided)

    def _mutated(self, traits: Traits, tuned: Mapping[str, Tuned], random: np.random.Generator) -> Traits:
        rate = self.config.pbt_mutation_rate
        values = mutated(traits.hyperparameters, tuned, rate, random)
        shaping = mutated_shaping(traits.reward_shaping, self.shaping, rate, random)
        return replace(traits, hyperparameters=values, reward_shaping=shaping)

    def _random(self, policy: int, change: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(SEED_BRANCH, policy, change)))


def differs(one: Traits, other: Traits) -> bool:
    """Whether they learn differently."""
    same = one.hyperparameters == other.hyperparameters and one.reward_shaping == other.reward_shaping
    return not same


def tuned_by(config: Config) -> dict[str, Tuned]:
    """The hyperparameters that population-based training tunes, by these flags.

    The learning rate is not among them where a schedule adapts it.
    """
    tuned: dict[str, Tuned] = {}
    learning, adaptive = config.learning, config.learning.lr_schedule.startswith("kl_adaptive")
    for name, flag in FLAGS_BY_PART["learning"].items() if config.population.with_pbt else ():
        default = getattr(learning, name)
        if flag.mutation == "samples" and config.population.pbt_optimize_batch_size:
            tuned[name] = Tuned(default, learning.rollout, config.largest_batch_size, unit=learning.rollout)
        elif flag.mutation == "scale" and not (adaptive and name == "learning_rate"):
            assert flag.mutation_range is not None
            low, high = flag.mutation_range
            tuned[name] = Tuned(default, min(low, default or low), max(high, default))
    return tuned


def traits_of_start(config: Config, breeding: Breeding, resumed: Sequence[Mapping[str, Any]]) -> list[Traits]:
    """The traits with which every policy begins or goes on.

    A policy whose hyperparameters have been changed by a population keeps them; otherwise the flags of this start hold.

    Args:
        config: all flags.
        breeding: of the run.
        resumed: plain state of each policy's checkpoint; {} where there is none.

    Raises:
        CheckpointError: a checkpoint holds hyperparameters that no run has.
    """
    traits = []
    for policy, (given, state) in enumerate(zip(config.per_policy, resumed, strict=True)):
        first = breeding.first(policy, given, learns=policy not in config.frozen)
        kept = Traits.in_state(state)
        goes_on = kept is not None and (config.population.with_pbt or kept.changes)
        traits.append(_checked(kept, first, config) if kept is not None and goes_on else first)
    return traits


def _checked(kept: Traits, first: Traits, config: Config) -> Traits:
    """Traits of a checkpoint, with first ones where it has none; flags may have changed since then.

    Raises:
        CheckpointError: see `traits_of_start`.
    """
    flags, rollout = FLAGS_BY_PART["learning"], config.learning.rollout
    unknown = [name for name in kept.hyperparameters if name not in flags or name in SHARED]
    if unknown:
        raise CheckpointError(f"state.json has {shown(unknown[0])} among the hyperparameters of a policy")
    try:
        values = {name: from_plain(flags[name], value) for name, value in kept.hyperparameters.items()}
    except UsageError as error:
        raise CheckpointError(f"state.json has hyperparameters that are none: {error}") from None
    if isinstance(size := values.get("batch_size"), int):
        values["batch_size"] = max(rollout, min(size, config.largest_batch_size) // rollout * rollout)
    fits = alike(kept.reward_shaping, first.reward_shaping)
    shaping = kept.reward_shaping if fits else first.reward_shaping
    return replace(kept, hyperparameters={**first.hyperparameters, **values}, reward_shaping=shaping)


def alike(one: object, other: object) -> bool:
    """Whether two schemes of coefficients have the same names, lengths and kinds of values."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(alike(a, b) for a, b in zip(one, other, strict=True))
    numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
    return isinstance(one, bool) == isinstance(other, bool) if numbers else type(one) is type(other)
