"""The first batch of a run: a warning while the batch does not fill, and an error if the run ends before training."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from appo.algorithms.run.config import Config
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.config import ENDLESS
from appo.algorithms.runtime.monitor.monitor import Monitor
from appo.algorithms.runtime.topology import Topology
from appo.utils.errors import NothingTrained, UsageError
from appo.utils.metrics import duration

log = logging.getLogger(__name__)
SAY_AFTER_SECONDS = 8.0  # that nothing is trained; what has not begun to train by then may never


def budget_of(config: Config, frames_per_step: int) -> Budget:
    """Return the budget of a run; refuse one that ends before a replay holds the steps of the first update."""
    own, env_steps = {"learning_starts": getattr(config.learning, "learning_starts", 0)}, config.run.train_for_env_steps
    steps = max(int((own | values)["learning_starts"]) for values in config.per_policy)
    flag = "train_for_env_steps"
    if config.run.deterministic_resume and config.run.save_every_env_steps < env_steps:
        # Each segment between checkpoints begins with an empty replay.
        flag, env_steps = "save_every_env_steps", config.run.save_every_env_steps
    if config.algorithm.replays and not config.sampling.sampler_only and env_steps <= steps * frames_per_step:
        raise UsageError(
            f"--{flag}={env_steps} ends before the first update, which --learning_starts={steps} delays"
            f" to {steps * frames_per_step:,} env steps: lower --learning_starts, or raise --{flag}"
        )
    return Budget.of(config.run, config.sampling, frames_per_step)


def log_refill(
    text: str, config: Config, env_steps: float, resumed: Sequence[Mapping[str, Any]], frames_per_step: int
) -> None:
    """Log that a resumed replay fills again; warn if the budget ends before the replay is full enough to train."""
    begun = max(int(state.get("env_steps", 0)) for state in resumed)
    if env_steps - begun <= config.learning.learning_starts * frames_per_step:
        log.warning("%s; nothing is trained, as the run ends before, at %d env steps", text, env_steps)
    else:
        log.info("%s", text)


@dataclass
class FirstBatch:
    """Steps that the learners of a run need before the first update.

    Attributes:
        columns: whole rollouts that all learners need together; 0: only `steps` counts.
        steps: steps that all learners need together.
        topology: topology of the run.
        policies: numbers of the policies that learn.
        is_looked_at: whether the moment of the warning is over.
        updates_before: updates of earlier starts, by policy; a replay that fills again makes none of them.
    """

    columns: int
    steps: int
    topology: Topology
    policies: tuple[int, ...]
    is_looked_at: bool = False
    updates_before: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Config, topology: Topology, resumed: Sequence[Mapping[str, Any]] = ()) -> Self | None:
        """Return the first batch of a start; None for a run that only samples, or plays no environment."""
        learning = tuple(policy for policy in range(topology.num_policies) if policy not in config.frozen)
        if config.sampling.sampler_only or not config.algorithm.needs_actors or not learning:
            return None
        columns = int(config.learning.macro_batch_columns)
        if mix := getattr(config.learning, "mix", None):  # of an algorithm that reads datasets too
            columns = mix.played(columns)
        columns *= len(learning)
        replayed = len(learning) * int(getattr(config.learning, "learning_starts", 0))  # of an algorithm with a replay
        return cls(
            columns=0 if replayed else columns,
            steps=replayed or columns * topology.rollout,
            topology=topology,
            policies=learning,
            updates_before=tuple(int(state.get("updates", 0)) for state in resumed) if replayed else (),
        )

    def is_trained(self, monitor: Monitor) -> bool:
        """Return whether any learning policy has been trained: in this start or before, from a replay in this start."""
        before = self.updates_before or (0,) * len(monitor.policies)
        totals = ((monitor.policies[policy].totals, before[policy]) for policy in self.policies)
        # Samples of a replay (without columns) may still wait for the first update.
        return any(total["updates"] > earlier or (self.columns and total["samples"]) for total, earlier in totals)

    def is_full(self, monitor: Monitor) -> bool:
        """Return whether the collected steps fill the batch."""
        return self._whole(monitor) >= self.columns if self.columns else monitor.stepped >= self.steps

    def lacks(self, monitor: Monitor, seconds: float) -> str:
        """Return a text with the collected steps, the steps of a batch, and the flags to change."""
        steps, t = monitor.stepped, self.topology
        kind = "step is" if steps == 1 else "steps are"
        if not self.columns:
            there = f"{steps:,} {kind} collected, training begins at {self.steps:,} (--learning_starts)"
            flags = "--learning_starts"
        else:
            there = (
                f"{steps:,} {kind} collected, {self._whole(monitor)} rollouts of {t.rollout} steps are whole, and a"
                f" batch takes {self.columns} of those ({self.steps:,} steps)"
            )
            flags = "--batch_size, --num_batches_per_iteration or --rollout"
        soon = ""
        if steps:
            rows = t.rows * t.num_groups
            of_each = math.ceil(self.columns / rows) * t.rollout if self.columns else self.steps / rows
            needed, given = seconds * of_each * rows / steps, monitor.budget.seconds
            late = f", and {given:g} s are given" * (given < needed and given < ENDLESS["seconds"])
            soon = f", {duration(needed)} from the start at this speed{late}"
        now = f"{t.num_actors} x {t.groups_per_actor * t.rows} agents: --num_workers, --num_envs_per_worker"
        return f"{there}{soon}: lower {flags}, or play more environments (now {now})"

    def tick(self, monitor: Monitor) -> None:
        """Log once, after `SAY_AFTER_SECONDS`, the missing steps, if nothing is trained by then."""
        seconds = time.monotonic() - monitor.started
        if self.is_looked_at or seconds < SAY_AFTER_SECONDS:
            return
        self.is_looked_at = True
        if not self.is_trained(monitor) and not self.is_full(monitor):
            log.warning("nothing is trained after %.0f s: %s", seconds, self.lacks(monitor, seconds))

    def check(self, monitor: Monitor, reason: str) -> None:
        """Raise `NothingTrained`, with the numbers, if the time ended before training; log if a replay's steps did."""
        seconds, learning = monitor.budget.seconds, [monitor.policies[policy].totals for policy in self.policies]
        # Steps of a batch over which a learner failed are used up, so a budget can end with them.
        lost = sum(total.get("lost", 0) for total in learning)
        if seconds > 0 and lost and not any(total["updates"] for total in learning):
            raise NothingTrained(f"{reason}, and nothing is trained: learners failed over all {lost:,} samples")
        if self.is_trained(monitor) or seconds <= 0:
            return
        lacks = self.lacks(monitor, min(seconds, time.monotonic() - monitor.started))
        if monitor.budget.reached(monitor.policies):
            # Steps of a replay count when they are stored, so a budget can end without an update.
            if not self.columns and all(
                monitor.budget.trained(each["env_steps"], each["samples"]) for each in learning
            ):
                full = "no update was due so soon, or no stored step can be drawn (replay/unsampled)"
                log.warning("nothing is trained: %s", full if self.is_full(monitor) else lacks)
            return
        full = "a batch is full, and training on it takes longer"
        text = f"{reason}, and nothing is trained: {full if self.is_full(monitor) else lacks}"
        if not any(self.updates_before):
            raise NothingTrained(text)
        log.warning("%s", text)  # in this start alone: what earlier starts have trained is kept

    def _whole(self, monitor: Monitor) -> int:
        return self.topology.rows * sum(totals.get("trajectories", 0) for totals in monitor.workers.values())
