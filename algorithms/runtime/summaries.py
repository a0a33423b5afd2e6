"""Figures of one's own beside ours: a user's function, called before each record of a policy is written."""

import logging
import math
from collections.abc import Mapping

from utils.errors import text_of
from utils.functions import find_function

log = logging.getLogger(__name__)


class CustomSummaries:
    """Calls `function(policy, statistics)`, which returns figures by tag; what it raises costs those and one warning.

    It runs in main between two messages, so it should take milliseconds.

    Args:
        name: of the function, as package.module:function; empty: there is none.

    Raises:
        UsageError: there is no such function.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._function = find_function("custom_summaries", name) if name else None
        self._warned = False

    def __call__(self, policy: int, statistics: Mapping[str, float]) -> dict[str, float]:
        """The figures it returns for the counters and tags of a policy, without those that are not finite."""
        if self._function is None:
            return {}
        try:
            found = {str(tag): float(value) for tag, value in self._function(policy, dict(statistics)).items()}
        except Exception as error:  # the user's code may raise anything
            if not self._warned:
                text = f"{type(error).__name__}: {text_of(error)}"
                log.warning("--custom_summaries=%s failed (said once): %s", self.name, text)
                self._warned = True
            return {}
        return {tag: value for tag, value in found.items() if math.isfinite(value) and tag not in statistics}
