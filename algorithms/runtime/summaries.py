"""Figures of one's own beside ours: a user's function, called before each record of a policy is written."""

import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from utils.errors import UsageError

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
        self._function = _find(name) if name else None
        self._warned = False

    def __call__(self, policy: int, statistics: Mapping[str, float]) -> dict[str, float]:
        """The figures it returns for the counters and tags of a policy, without those that are not finite."""
        if self._function is None:
            return {}
        try:
            found = {str(tag): float(value) for tag, value in self._function(policy, dict(statistics)).items()}
        except Exception as error:  # the user's code may raise anything
            if not self._warned:
                text = f"{type(error).__name__}: {' '.join(str(error).split())}"
                log.warning("--custom_summaries=%s failed (said once): %s", self.name, text)
                self._warned = True
            return {}
        return {tag: value for tag, value in found.items() if math.isfinite(value) and tag not in statistics}


def _find(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise UsageError(f"--custom_summaries={name} must read package.module:function")
    here = os.getcwd()
    if here not in sys.path:  # where `--env` looks for modules too; last, so that it shadows no installed package
        sys.path.append(here)
    try:
        function: object = getattr(import_module(module_name), function_name)
    except Exception as error:  # the user's module may raise anything
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UsageError(f"--custom_summaries={name} failed: {text}") from error
    if not callable(function):
        raise UsageError(f"--custom_summaries={name} is a {type(function).__name__}, not a function")
    return function
