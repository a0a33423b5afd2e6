"""The choice of the fastest sampling flags, by a model of the cost of a sample.

Pure arithmetic on measured costs; `algorithms/run/README.md` has the formulas. The choice changes the rate of batches,
never the result of training on a given batch.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Self

from appo.algorithms.run.config import Config
from appo.algorithms.run.placement import MAX_ENVS_PER_WORKER, Sampling, fills_evenly, most_envs, plan_workers
from appo.algorithms.runtime.topology import Placement

# A request and its reply between processes on two cores: 15 to 25 us by eventfd and mailbox row, and their handling.
# A slot handed over and given back, for each side: two hops through a queue of 11 us, wake-ups, and their handling.
ROUND_TRIP_SECONDS = 30e-6
HAND_OVER_SECONDS = 60e-6
# What a process forked from one that has torch has of its own: 16 MiB in actors with a small network, 130 in a learner.
PROCESS_BYTES = 64 << 20
# Plans this close to the best are as good: measurements of a few milliseconds are no better than that.
MARGIN = 0.04
# More environments than fill a macro batch need slots, processes and time to come back to; they have to pay that much,
# and as much again for every doubling beyond twice as many.
MARGIN_OF_MORE = 0.1
# Of --step_timeout_seconds, that a step of all environments of an actor may be expected to take.
SHARE_OF_TIMEOUT = 0.25
# Share of its time that an actor or a policy worker can be counted on for; episodes of a trained policy cost other than
# those of a random one, and a plan that is short of actors loses more than one that has them to spare.
RELIABLE = 0.8
# The same of actors fewer than the cores, which stay idle if those are short. A step of one of 64 games of VizDoom
# takes twice as long as one of the few that were timed: the others have driven its memory out of the caches.
RELIABLE_FEW = 0.6
# The same of a learner, whose batches all cost the same, but whose core other processes want too.
RELIABLE_LEARNER = 0.9
# Of the speed of training over threads, where it was not measured.
THREADS_EXPONENT = 0.7
# Environments of a plan by the number whose agents fill a macro batch with one trajectory each. Twice as many make
# larger forward passes; fewer are for scarce memory.
SHARES = (1.0, 2.0, 0.5, 0.25, 0.125, 1 / 16, 1 / 32)
Curve = tuple[tuple[int, float], ...]
"""Seconds by a count, in rising order."""
NOTHING: Curve = ((1, 0.0),)
"""Cost of work that a run does not do: runs without actors neither step environments nor act."""


@dataclass(frozen=True)
class Costs:
    """Measured costs, in seconds of one core.

    Attributes:
        env: seconds of a group's step with the actor's work, by environments in the group.
        act: seconds of a forward pass with sampling, by rows.
        learn: seconds of training on one sample in all epochs, with copying, by threads.
        env_bytes: memory of one environment.
    """

    env: Curve
    act: Curve
    learn: Curve
    env_bytes: int

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Make costs of their `plain` form, before or after JSON (KeyError, TypeError, ValueError: a wrong form)."""
        curves = {name: tuple((int(n), float(s)) for n, s in plain[name]) for name in ("env", "act", "learn")}
        if not all(curves.values()):
            raise ValueError("a curve without a point")
        return cls(**curves, env_bytes=int(plain["env_bytes"]))

    def plain(self) -> dict[str, Any]:
        """Return the costs as JSON holds them."""
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """A choice of sampling flags with the predicted speed."""

    sampling: Sampling
    samples_per_second: float


def at(curve: Curve, count: int) -> float:
    """Return seconds at a count: straight lines between the points and beyond the last; proportional below two points.

    >>> at(((1, 2.0), (5, 6.0)), 3), at(((1, 2.0), (5, 6.0)), 7), at(((2, 3.0),), 4)
    (4.0, 8.0, 6.0)
    """
    if len(curve) == 1 or count < curve[0][0]:
        return curve[0][1] * count / curve[0][0]
    right = min(max(1, bisect_left([n for n, _ in curve], count)), len(curve) - 1)
    (low, below), (high, above) = curve[right - 1 : right + 1]
    return below + (above - below) * (count - low) / (high - low)


def with_threads(curve: Curve, threads: int) -> float:
    """Return seconds with that many threads: a power of them, by the first and the last point of the curve.

    >>> round(with_threads(((1, 8.0), (4, 2.0)), 2), 6), with_threads(((1, 8.0),), 4)
    (4.0, 32.0)
    """
    (few, slow), (many, quick) = curve[0], curve[-1]
    if few == many:
        return at(curve, threads)
    return float(slow * (quick / slow) ** (math.log(threads / few) / math.log(many / few)))


def rising(points: Iterable[tuple[int, float]]) -> Curve:
    """Return the curve through measured points; a smaller count that took longer was disturbed, and is corrected.

    >>> rising([(1, 3.0), (4, 2.0), (16, 5.0)])
    ((1, 2.0), (4, 2.0), (16, 5.0))
    """
    curve = list(points)
    for i in range(len(curve) - 1, 0, -1):
        curve[i - 1] = (curve[i - 1][0], min(curve[i - 1][1], curve[i][1]))
    return tuple(curve)


def predict(costs: Costs, plan: Sampling, config: Config, num_agents: int, cores: int) -> float:
    """Predict the samples per second of a plan.

    The slowest part decides: actors, policy workers, learners, the time from an observation to its action, or all parts
    together on the available cores.
    """
    policies, rollout = config.sampling.num_policies, int(config.learning.rollout)
    if not plan.num_workers:
        return RELIABLE_LEARNER * policies / with_threads(costs.learn, plan.learner_threads)
    envs, rows = plan.num_envs_per_worker // plan.num_splits, plan.num_envs_per_worker // plan.num_splits * num_agents
    learn = 0.0 if config.sampling.sampler_only else with_threads(costs.learn, plan.learner_threads)
    step, act = at(costs.env, envs), at(costs.act, rows) / rows
    hand_over = HAND_OVER_SECONDS / (rollout * rows)
    sample = step / rows + hand_over
    reliable = RELIABLE if plan.num_workers >= cores else RELIABLE_FEW
    # Actors lose seconds per sample to learner threads on the same cores.
    crowding = max(0.0, (plan.num_workers + plan.learner_threads) / cores - 1) if plan.num_workers < cores else 0.0
    total, preempted = learn * plan.learner_threads + hand_over, plan.num_workers * learn * crowding
    if plan.placement == "local":
        sample += act
        limits = [reliable * plan.num_workers / (sample + preempted)]
    else:
        groups = plan.num_workers * plan.num_splits
        batch = max(rows, rows * groups // 2)
        forward = at(costs.act, batch)
        sample += ROUND_TRIP_SECONDS / 2 / rows
        act = forward / batch + ROUND_TRIP_SECONDS / 2 / rows
        limits = [
            reliable * plan.num_workers / (sample + preempted),
            RELIABLE * policies * config.sampling.policy_workers_per_policy / act,
            RELIABLE * groups * rows / (step + forward + ROUND_TRIP_SECONDS),
        ]
        total += act
    total += sample
    return min(RELIABLE_LEARNER * policies / (learn + hand_over), *limits, cores / total)


def choose(
    costs: Costs, config: Config, num_agents: int, cores: int, memory: Callable[[Sampling], int], free_bytes: int
) -> Plan:
    """Choose the simplest of the fastest plans that flags and memory allow.

    Given flags of the configuration stay. `memory` returns the bytes of shared memory that a plan needs; all processes
    together may take `free_bytes`.
    """
    if not config.algorithm.needs_actors:
        return _choose_threads(costs, config, cores)
    plans = _in_time(_young(candidates(config, cores, num_agents), config, num_agents), costs, config)
    needs = {plan: memory(plan) + _private_bytes(plan, costs.env_bytes, config) for plan in plans}
    fitting = [plan for plan in plans if needs[plan] <= free_bytes] or [min(plans, key=needs.__getitem__)]
    columns = config.learning.macro_batch_columns / num_agents
    rates = {plan: predict(costs, plan, config, num_agents, cores) for plan in fitting}
    worth = {plan: rate * (1 - _margin(_envs(plan) / columns)) for plan, rate in rates.items()}
    best = max(worth.values())
    good = (plan for plan in fitting if worth[plan] >= (1 - MARGIN) * best)
    chosen = min(good, key=lambda plan: _complexity(plan, columns))
    return Plan(chosen, rates[chosen])


def _choose_threads(costs: Costs, config: Config, cores: int) -> Plan:
    """Choose the fewest threads that train about as fast as any number: the only choice without actors."""
    rule = plan_workers(config, cores, "local")
    counts = _counts(config.sampling.learner_main_loop_num_cores, max(1, cores // config.sampling.num_policies))
    plans = [replace(rule, learner_threads=threads) for threads in counts]
    rates = {plan: predict(costs, plan, config, 1, cores) for plan in plans}
    chosen = next(plan for plan in plans if rates[plan] >= (1 - MARGIN) * max(rates.values()))
    return Plan(chosen, rates[chosen])


def _margin(macro_batches: float) -> float:
    """Return the required gain in speed of more environments than one macro batch, by their ratio."""
    return MARGIN_OF_MORE * max(1.0, math.log2(macro_batches)) if macro_batches > 1 else 0.0


def _young(plans: Iterable[Sampling], config: Config, num_agents: int) -> list[Sampling]:
    """Return the plans with at most `most_envs` environments, or with the fewest of all.

    Only even plans are returned, if they use half as many actors at least.
    """
    distinct = list(dict.fromkeys(plans))
    even = [plan for plan in distinct if fills_evenly(plan, config, num_agents)]
    if even and 2 * max(plan.num_workers for plan in even) >= max(plan.num_workers for plan in distinct):
        distinct = even
    most = max(most_envs(config, num_agents), min(map(_envs, distinct)))
    return [plan for plan in distinct if _envs(plan) <= most]


def _in_time(plans: list[Sampling], costs: Costs, config: Config) -> list[Sampling]:
    """Return the plans whose steps are too short to count as hanging, or the plans with the shortest steps."""
    steps = {plan: plan.num_splits * at(costs.env, plan.num_envs_per_worker // plan.num_splits) for plan in plans}
    longest = max(SHARE_OF_TIMEOUT * config.sampling.step_timeout_seconds, min(steps.values()))
    return [plan for plan in plans if steps[plan] <= longest]


def is_open(config: Config, device: str, cores: int) -> bool:
    """Return whether tuning has a choice: a placement with processes, and flags that leave something open.

    Runs that must repeat themselves are never tuned, because measurements vary.
    """
    sampling = config.sampling
    if config.algorithm.whole_rollouts:  # an actor per core, which differentiates too: nothing is left to choose
        return False
    given = sampling.inference != "auto" and sampling.num_workers and sampling.num_envs_per_worker
    if not config.algorithm.needs_actors:
        given = sampling.learner_main_loop_num_cores
    wanted = sampling.auto_tune and sampling.inference != "serial" and not given
    return device == "cpu" and cores > 1 and wanted and not config.repeatable


def report(costs: Costs, plan: Plan, num_agents: int = 1) -> str:
    """Return costs and choice in one line: seconds of an environment's step, of acting and of learning per sample."""
    sampling, predicted = plan.sampling, f"predicted {_count(plan.samples_per_second)} samples/s"
    learn = with_threads(costs.learn, sampling.learner_threads)
    if not sampling.num_workers:
        threads = f"{sampling.learner_threads} learner thread{'s' * (sampling.learner_threads > 1)}"
        return f"learn {in_unit(learn)}/sample -> no actors, {threads}, {predicted}"
    envs = sampling.num_envs_per_worker // sampling.num_splits
    env, act = at(costs.env, envs) / envs, at(costs.act, envs * num_agents) / envs / num_agents
    measured = f"env {in_unit(env)}, act {in_unit(act)}, learn {in_unit(learn)}/sample"
    groups = f" in {sampling.num_splits} groups" * (sampling.num_splits > 1)
    agents = f" of {num_agents} agents" * (num_agents > 1)
    threads = f", {sampling.learner_threads} learner threads" * (sampling.learner_threads > 1)
    workers = (
        f"{sampling.placement}, {sampling.num_workers} actor{'s' * (sampling.num_workers > 1)} x "
        f"{sampling.num_envs_per_worker} envs{agents}{groups}{threads}"
    )
    return f"{measured} -> {workers}, {predicted}"


def in_unit(seconds: float) -> str:
    """Return seconds in s, ms or us."""
    unit, name = next(((unit, name) for unit, name in ((1.0, "s"), (1e-3, "ms")) if seconds >= unit), (1e-6, "us"))
    return f"{seconds / unit:.3g} {name}"


def _count(number: float) -> str:
    for limit, letter in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{letter}"
    return f"{number:.3g}"


def candidates(config: Config, cores: int, num_agents: int = 1) -> Iterator[Sampling]:
    """Yield every reasonable plan; given flags hold in all plans.

    The agents of all environments together fill about one macro batch with one trajectory each. Many more would make
    samples older and first updates late.
    """
    s = config.sampling
    placements: tuple[Placement, ...] = ("local", "central")  # `serial` has nothing that could be started again
    for placement in placements:
        if s.inference not in ("auto", placement):
            continue
        halves = placement == "central" and not s.num_envs_per_worker % 2
        splits = (s.worker_num_splits,) if s.worker_num_splits else (1, 2) if halves else (1,)
        workers = _counts(s.num_workers, cores)
        if config.takes_turns:  # the rules know a number of actors whose rounds make whole iterations
            workers = sorted({*workers, plan_workers(config, cores, placement, num_agents).num_workers})
        threads = _counts(s.learner_main_loop_num_cores, thread_limit(cores))
        for num_workers, num_splits, learner_threads, share in product(workers, splits, threads, SHARES):
            given = replace(s, num_workers=num_workers, worker_num_splits=num_splits)
            plan = plan_workers(replace(config, sampling=given), cores, placement, num_agents)
            if not given.num_envs_per_worker:
                envs = min(MAX_ENVS_PER_WORKER, int(plan.num_envs_per_worker * share)) // plan.num_splits
                plan = replace(plan, num_envs_per_worker=max(1, envs) * plan.num_splits)
            yield replace(plan, learner_threads=learner_threads)


def thread_limit(cores: int) -> int:
    """Return the most learner threads that can pay: half of the cores, as actors need the rest, or both of two."""
    return max(min(2, cores), cores // 2)


def usual_ratio(threads: int) -> float:
    """Return the unmeasured ratio of training seconds with that many threads to seconds with one."""
    return float(threads**-THREADS_EXPONENT)


def threads_to_time(costs: Costs, config: Config, num_agents: int, cores: int) -> int:
    """Return the number of threads to time in training; 0 if even ideal threads would not pay."""
    if not config.algorithm.needs_actors:
        return limit if (limit := max(1, cores // config.sampling.num_policies)) > 1 else 0
    limit, seconds = thread_limit(cores), at(costs.learn, 1)
    if limit == 1:
        return 0
    ideal = replace(costs, learn=((1, seconds), (limit, seconds / limit)))
    plans = _young(candidates(config, cores, num_agents), config, num_agents)
    rates = {plan: predict(ideal, plan, config, num_agents, cores) for plan in plans}
    alone = max((rate for plan, rate in rates.items() if plan.learner_threads == 1), default=math.inf)
    return limit if max(rates.values()) * (1 - MARGIN) > alone else 0


def _counts(given: int, limit: int) -> list[int]:
    """Return the given count alone, or else powers of two up to the limit, the limit and the limit minus one."""
    if given:
        return [given]
    return sorted(n for n in {1 << i for i in range(limit.bit_length())} | {limit, limit - 1} if 1 <= n <= limit)


def _envs(plan: Sampling) -> int:
    return plan.num_workers * plan.num_envs_per_worker


def _private_bytes(plan: Sampling, env_bytes: int, config: Config) -> int:
    policy_workers = config.sampling.policy_workers_per_policy if plan.placement == "central" else 0
    processes = plan.num_workers + config.sampling.num_policies * (1 + policy_workers)
    return processes * PROCESS_BYTES + _envs(plan) * env_bytes


def _complexity(plan: Sampling, columns: float) -> tuple[float, ...]:
    """Order simpler plans first: few environments beyond one batch, few processes, groups and threads."""
    away = abs(math.log(_envs(plan) / columns))
    return plan.placement == "central", away, plan.num_workers, plan.num_splits, plan.learner_threads
