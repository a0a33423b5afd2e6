"""Parts of algorithms whose actions are choices; torch-free at import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appo.utils.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from appo.algorithms.runtime.algorithm import Context
    from appo.envs.spec import EnvSpec


def require_choices(algo: str, spec: EnvSpec | None) -> None:
    """Refuse a known environment whose actions are not choices (UsageError)."""
    if spec is not None and any(spec.action.is_real):
        raise UsageError(
            f"--algo={algo} needs choices, the environment has continuous actions: add --continuous_as_bins=N, or take"
            " SAC, APPO or PPO"
        )
    if spec is not None and any(part.kind == "bernoulli" for part in spec.action.parts):
        raise UsageError(f"--algo={algo} needs Discrete or MultiDiscrete actions, the environment has MultiBinary ones")


def epsilon_of_rows(context: Context) -> Tensor | None:
    """Return the probability of a random action of every row of the run, see `EpsilonConfig`; None for a player.

    Rows whose actions other machines choose have the last probability, which nothing reads.
    """
    from appo.algorithms.ops.q_learning import epsilon_ladder

    if context.arena is None:
        return None
    rows = len(context.arena["Trajectories.group_counts"]) * context.arena["Trajectories.valid"].shape[2]
    ladder = epsilon_ladder(context.acting_rows or rows, context.flags.epsilon, context.flags.epsilon_alpha)
    return ladder[[*range(len(ladder)), *[-1] * (rows - len(ladder))]]
