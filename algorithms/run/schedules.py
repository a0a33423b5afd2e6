"""Linear schedules of a run: their budget, and a line in the log."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from appo.algorithms.parts.config import annealed
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.config import ENDLESS
from appo.utils.errors import UsageError
from appo.utils.metrics import duration

log = logging.getLogger(__name__)
HORIZON = "train_for_env_steps"
"""Flag of a preset at which linear schedules end, unless the user gives a budget."""


def without_horizon(
    asked: Mapping[str, Any], saved: Mapping[str, object], preset: Mapping[str, object]
) -> list[dict[str, object]]:
    """Return flags of a saved run and of a preset; a time given by the user replaces the preset's env steps."""
    layers = [dict(saved), dict(preset)]
    if asked.get("train_for_seconds", ENDLESS["seconds"]) < ENDLESS["seconds"]:
        layers = [{name: x for name, x in one.items() if name != HORIZON or x != preset.get(HORIZON)} for one in layers]
    return layers


def check_clock(learning: Any, budget: Budget) -> None:
    """Refuse schedules over time in a run that must repeat (UsageError)."""
    limits = budget.shares(0, 0.0)
    numbers = [
        *annealed(learning),
        *_rising(learning),
        *["epsilon_decay"] * bool(getattr(learning, "epsilon_decay", 0)),
    ]
    if not budget.by_clock and not limits and budget.seconds < ENDLESS["seconds"] and numbers:
        raise UsageError(
            f"--lockstep and --deterministic_resume repeat no clock: {', '.join(numbers)} can change over"
            f" --{HORIZON}, not over --train_for_seconds"
        )


def _rising(learning: Any) -> dict[str, float]:
    beta = getattr(learning, "priority_beta", None)
    if beta is None or not learning.prioritized_replay or beta == learning.priority_beta_final:
        return {}
    return {"priority_beta": beta}


def log_schedules(learning: Any, budget: Budget, resumed: Sequence[Mapping[str, Any]]) -> None:
    """Log a line about linear schedules of a resumed run, or without a budget.

    Args:
        learning: flags of the algorithm.
        budget: budget of this start.
        resumed: plain state of every policy, {} for a new policy; the policy with most env steps counts.
    """
    shares, numbers = budget.shares(max(int(state.get("env_steps", 0)) for state in resumed), 0.0), annealed(learning)
    rising = _rising(learning)
    if getattr(learning, "epsilon_decay", 0) and not shares:
        log.warning("--epsilon_decay needs --%s or --train_for_seconds; without, two iterations explore", HORIZON)
    if (kept := numbers | rising) and not shares:
        values = ", ".join(f"{name} stays {value:g}" for name, value in kept.items())
        log.warning("linear schedules need --%s or --train_for_seconds; without a budget %s", HORIZON, values)
    elif (numbers or rising) and any(resumed):
        limit = max(shares, key=shares.__getitem__)
        of_time = f"{duration(budget.earlier_seconds)} of training and --train_for_seconds={budget.seconds:g}"
        whole = f"--{HORIZON}={budget.env_steps}" if limit == "env_steps" else of_time
        now = {name: value * (1 - shares[limit]) for name, value in numbers.items()}
        now |= {name: value + shares[limit] * (learning.priority_beta_final - value) for name, value in rising.items()}
        values = ", ".join(f"{name} {value:.3g}" for name, value in now.items())
        log.info("linear schedules go on at %.1f%% of %s: %s", 100 * shares[limit], whole, values)
