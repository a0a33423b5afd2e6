"""The budget of a run: when training ends, how much of it is used up, and how long the rest takes."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from algorithms.runtime.config import ENDLESS, RunConfig, SamplingConfig
from algorithms.runtime.monitor.policy_progress import PolicyProgress
from utils.windows import RateMeter

BENCHMARK_ENV_STEPS, BENCHMARK_SAMPLES = 2_000_000, 1_000_000


@dataclass(frozen=True)
class Budget:
    """Says when a run has done what was asked of it.

    Attributes:
        env_steps, samples: per policy, of all starts.
        seconds: of this start.
        episode_return: mean return of the last episodes that every policy must reach; None: any.
        collected: steps of all actors, for runs that only sample; None: no limit.
    """

    env_steps: int
    samples: float = math.inf
    seconds: float = math.inf
    episode_return: float | None = None
    collected: int | None = None

    @classmethod
    def of(cls, run: RunConfig, sampling: SamplingConfig, frames_per_step: int) -> "Budget":
        """Return the budget that the flags describe."""
        env_steps, samples = run.train_for_env_steps, 2**62
        if sampling.benchmark:
            env_steps, samples = min(env_steps, BENCHMARK_ENV_STEPS), BENCHMARK_SAMPLES
        collected = min(-(-env_steps // frames_per_step), samples) if sampling.sampler_only else None
        return cls(env_steps, samples, run.train_for_seconds, run.train_until_return, collected)

    def plain(self) -> dict[str, float | None]:
        """Return the limits that hold from one start to the next, as status.json has them."""
        return {name: value for name, value in asdict(self).items() if name != "collected"}

    def trained(self, env_steps: int, samples: int) -> bool:
        """Whether a policy with these totals has been trained enough."""
        return env_steps >= self.env_steps or samples >= self.samples

    def reached(self, policies: Sequence[PolicyProgress]) -> str | None:
        """Why there is nothing left to learn for these policies, or None while there is."""
        policies = [policy for policy in policies if not policy.frozen]
        if all(self.trained(p.totals["env_steps"], p.totals["samples"]) for p in policies):
            return f"every policy has learned from {min(p.totals['env_steps'] for p in policies)} env steps"
        goal = self.episode_return
        if goal is not None and all(
            p.episode_return.count >= p.stats_avg and p.episode_return.mean >= goal for p in policies
        ):
            return f"the mean return has reached {min(p.episode_return.mean for p in policies):.2f}"
        return None

    def spent(self, policies: Sequence[PolicyProgress], collected: int, elapsed_seconds: float) -> str | None:
        """Why a run is over, so many collected steps and seconds after its start, or None while it is not."""
        if elapsed_seconds >= self.seconds:
            return f"{self.seconds:g} seconds are over"
        if self.collected is not None and collected >= self.collected:
            return f"{self.collected} steps are collected"
        return self.reached(policies)

    def seconds_left(self, policies: Sequence[PolicyProgress], collected: int, elapsed_seconds: float) -> float:
        """Estimate the seconds until the first limit is reached, at the speed of the last minute; perhaps infinity.

        Env steps and samples are reached when the slowest policy has them.
        """
        trained = 0.0
        for progress in (one for one in policies if not one.frozen):
            env_steps = _seconds_to(self.env_steps - progress.totals["env_steps"], progress.env_step_rate)
            samples = _seconds_to(self.samples - progress.totals["samples"], progress.sample_rate)
            trained = max(trained, min(env_steps, samples))
        sampled = math.inf
        if self.collected is not None and collected:
            sampled = (self.collected - collected) / collected * elapsed_seconds
        return max(0.0, min(trained, sampled, self.seconds - elapsed_seconds))

    def share(self, policies: Sequence[PolicyProgress], collected: int, elapsed_seconds: float) -> float | None:
        """Return how much of the nearest limit is used up, from 0 to 1; None if none was set."""
        if all(getattr(self, name) >= endless for name, endless in ENDLESS.items()):
            return None
        learning = (p.totals for p in policies if not p.frozen)
        parts = [max(totals["env_steps"] / self.env_steps, totals["samples"] / self.samples) for totals in learning]
        sampled = collected / self.collected if self.collected else 0.0
        in_time = elapsed_seconds / self.seconds if self.seconds else 1.0
        return min(1.0, max(min(parts), sampled, in_time))


def _seconds_to(left: float, meter: RateMeter) -> float:
    """Return how long so many more take at the speed of the last minute."""
    rate = meter.rates()[60.0]
    return 0.0 if left <= 0 else left / rate if rate > 0 else math.inf
