"""Figures computed by a user's function before each record of a policy is written."""

import logging
import math
from collections.abc import Mapping

from appo.algorithms.runtime.callbacks import Hooks, finite
from appo.utils.errors import text_of
from appo.utils.user_modules import find_function

log = logging.getLogger(__name__)


class CustomSummaries:
    """Calls the user's `function(policy, statistics)`, which returns figures by tag, and callbacks, which add more.

    An exception costs the figures of the call and one warning. The call runs in main between two messages, and should
    take milliseconds.

    Args:
        name: name of the function, as package.module:function; empty: no function.

    Raises:
        UsageError: the function does not exist.
    """

    def __init__(self, name: str, hooks: Hooks | None = None) -> None:
        self.name, self._hooks = name, hooks
        self._function = find_function("custom_summaries", name) if name else None
        self._warned = False

    def __call__(self, policy: int, statistics: Mapping[str, float]) -> dict[str, float]:
        """Return new finite figures beside the counters and tags of a policy."""
        found: dict[str, float] = {}
        if self._function is not None:
            try:
                found = {str(tag): float(value) for tag, value in self._function(policy, dict(statistics)).items()}
            except Exception as error:  # the user's code may raise anything
                if not self._warned:
                    text = f"{type(error).__name__}: {text_of(error)}"
                    log.warning("--custom_summaries=%s failed (said once): %s", self.name, text, exc_info=error)
                    self._warned = True
        found = {tag: value for tag, value in found.items() if math.isfinite(value) and tag not in statistics}
        if self._hooks is None:
            return found
        figures = {**statistics, **found}
        self._hooks.tell("before_logging", policy, figures)
        return found | {tag: value for tag, value in finite(figures).items() if tag not in statistics}
