"""The budget of a run: the end of training, the share used up, and the remaining time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from appo.algorithms.runtime.config import ENDLESS, RunConfig, SamplingConfig

if TYPE_CHECKING:  # both import numpy, which `--help` does without
    from appo.algorithms.runtime.monitor.policy_progress import PolicyProgress
    from appo.utils.windows import RateMeter

OVER = "over"
"""Name in the totals of a learner that is one of several: whether rank 0 has ended the run."""

BENCHMARK = {"env_steps": 2_000_000, "samples": 1_000_000}
"""Limits for all policies together in one start; the first one reached ends a benchmark."""


@dataclass(frozen=True)
class Budget:
    """The limits of a run.

    Attributes:
        env_steps, samples: limits per policy, over all starts.
        seconds: limit of this start.
        episode_return: mean return of the last episodes that every policy must reach; None: no goal.
        collected: limit on the steps of all actors, for runs that only sample; None: no limit.
        benchmark: whether `BENCHMARK` is a limit too.
        earlier_seconds: seconds of training of earlier starts.
        by_clock: whether schedules follow the seconds.
    """

    env_steps: int
    samples: float = math.inf
    seconds: float = math.inf
    episode_return: float | None = None
    collected: int | None = None
    benchmark: bool = False
    earlier_seconds: float = 0.0
    by_clock: bool = True

    @classmethod
    def of(cls, run: RunConfig, sampling: SamplingConfig, frames_per_step: int) -> Budget:
        """Return the budget described by the flags."""
        env_steps, samples, collected = run.train_for_env_steps, 2**62, None
        if sampling.sampler_only:
            frames = min(env_steps, BENCHMARK["env_steps"]) if sampling.benchmark else env_steps
            collected = min(-(-frames // frames_per_step), BENCHMARK["samples"] if sampling.benchmark else samples)
        seconds, goal = run.train_for_seconds, run.train_until_return
        by_clock = not (run.deterministic_resume or sampling.lockstep)
        return cls(env_steps, samples, seconds, goal, collected, sampling.benchmark, by_clock=by_clock)

    def after(self, resumed: Sequence[Mapping[str, Any]]) -> Budget:
        """Return the budget of a start that resumes these plain states, one per policy; {}: a new policy."""
        from appo.algorithms.runtime.monitor.policy_progress import elapsed_before

        return replace(self, earlier_seconds=elapsed_before(resumed))

    def plain(self) -> dict[str, float | None]:
        """Return the limits that remain from one start to the next, as written to status.json."""
        names = ("env_steps", "samples", "seconds", "episode_return")
        return {name: value for name, value in asdict(self).items() if name in names}

    def shares(self, env_steps: int, seconds: float) -> dict[str, float]:
        """Return the used share of each limit that schedules follow, from 0 to 1; {} without a limit.

        Seconds count over all starts: a start ends `seconds` after the seconds of earlier starts.

        Args:
            env_steps: env steps that the policy has learned from, over all starts.
            seconds: seconds of this start.
        """
        used: dict[str, tuple[float, float]] = {"env_steps": (env_steps, self.env_steps)}
        if self.by_clock:
            used["seconds"] = (self.earlier_seconds + seconds, self.earlier_seconds + self.seconds)
        return {name: min(1.0, done / limit) for name, (done, limit) in used.items() if 0 < limit < ENDLESS[name]}

    def progress(self, env_steps: int, seconds: float) -> float:
        """Return the used share of the budget of schedules: the largest of `shares`; 0 without a limit."""
        return max(self.shares(env_steps, seconds).values(), default=0.0)

    def trained(self, env_steps: int, samples: int) -> bool:
        """Return whether these totals of a policy reach the limits."""
        return env_steps >= self.env_steps or samples >= self.samples

    def reached(self, policies: Sequence[PolicyProgress]) -> str | None:
        """Return the reason why no policy has anything left to learn, or None."""
        policies = [policy for policy in policies if not policy.frozen]
        if any(policy.totals.get(OVER) for policy in policies):
            return "rank 0 has ended the run"
        if all(self.trained(p.totals["env_steps"], p.totals["samples"]) for p in policies):
            return f"every policy has learned from {min(p.totals['env_steps'] for p in policies)} env steps"
        goal = self.episode_return
        if goal is not None and all(
            p.episode_return.count >= p.stats_avg and p.episode_return.mean >= goal for p in policies
        ):
            return f"the mean return has reached {min(p.episode_return.mean for p in policies):.2f}"
        return None

    def spent(self, policies: Sequence[PolicyProgress], collected: int, elapsed_seconds: float) -> str | None:
        """Return the reason why a run is over, or None; steps and seconds count from its start."""
        if elapsed_seconds >= self.seconds:
            return f"{self.seconds:g} seconds are over"
        if self.collected is not None and collected >= self.collected:
            return f"{self.collected} steps are collected"
        done = _of_this_start(policies)
        if self.benchmark and any(done[name] >= most for name, most in BENCHMARK.items()):
            return f"the benchmark is over: {done['env_steps']} env steps, {done['samples']} samples"
        return self.reached(policies)

    def seconds_left(self, policies: Sequence[PolicyProgress], collected: int, elapsed_seconds: float) -> float:
        """Estimate the seconds until the first limit, at the speed of the last minute; may be infinite.

        The slowest policy decides when limits of env steps and samples are reached.
        """
        trained = 0.0
        for progress in (one for one in policies if not one.frozen):
            env_steps = _seconds_to(self.env_steps - progress.totals["env_steps"], progress.env_step_rate)
            samples = _seconds_to(self.samples - progress.totals["samples"], progress.sample_rate)
            trained = max(trained, min(env_steps, samples))
        if self.benchmark:
            done = _of_this_start(policies)
            meters = {"env_steps": [p.env_step_rate for p in policies], "samples": [p.sample_rate for p in policies]}
            for name, most in BENCHMARK.items():
                speed = sum(rate for meter in meters[name] if (rate := meter.rates()[60.0]) > 0)  # nan while unknown
                trained = min(trained, max(0.0, most - done[name]) / speed if speed else math.inf)
        sampled = math.inf
        if self.collected is not None and collected:
            sampled = (self.collected - collected) / collected * elapsed_seconds
        return max(0.0, min(trained, sampled, self.seconds - elapsed_seconds))

    def share(self, policies: Sequence[PolicyProgress], collected: int, elapsed_seconds: float) -> float | None:
        """Return the used share of the nearest limit, from 0 to 1; None without a limit."""
        if not self.benchmark and all(getattr(self, name) >= endless for name, endless in ENDLESS.items()):
            return None
        learning = (p.totals for p in policies if not p.frozen)
        parts = [max(totals["env_steps"] / self.env_steps, totals["samples"] / self.samples) for totals in learning]
        sampled = collected / self.collected if self.collected else 0.0
        in_time = elapsed_seconds / self.seconds if self.seconds else 1.0
        done = _of_this_start(policies) if self.benchmark else {}
        of_benchmark = max((number / BENCHMARK[name] for name, number in done.items()), default=0.0)
        return min(1.0, max(min(parts), sampled, in_time, of_benchmark))


def _of_this_start(policies: Sequence[PolicyProgress]) -> dict[str, int]:
    """Return the totals trained by all policies together since their restoration."""
    return {name: sum(policy.since_start(name) for policy in policies) for name in BENCHMARK}


def _seconds_to(left: float, meter: RateMeter) -> float:
    """Return the seconds for so many more at the speed of the last minute."""
    rate = meter.rates()[60.0]
    return 0.0 if left <= 0 else left / rate if rate > 0 else math.inf
