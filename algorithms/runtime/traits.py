"""What sets the policies of one run apart."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

KEY = "traits"
"""In the plain state of a learner."""


@dataclass(frozen=True)
class Traits:
    """What a policy learns with. Saved with its weights, in one piece, so that it never has those of another policy.

    Attributes:
        hyperparameters: learning flag -> value, of the flags in which policies differ.
        reward_shaping: coefficients of the environment's rewards; {}: it has none.
        changes: decisions of main about this policy so far; an order has the number that follows.
        adoptions: how often its weights were replaced by those of another policy.
        decided_env_steps: of the policy at the last decision.
    """

    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    reward_shaping: Mapping[str, Any] = field(default_factory=dict)
    changes: int = 0
    adoptions: int = 0
    decided_env_steps: int = 0

    def plain(self) -> dict[str, Any]:
        """As JSON holds them."""
        return asdict(self)

    @classmethod
    def in_state(cls, meta: Mapping[str, Any]) -> Self | None:
        """Those in the plain state of a learner, as `plain_state` has checked it; None: it is of no population."""
        return cls(**meta[KEY]) if KEY in meta else None
