"""The results of the checks."""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 470


class Failed(Exception):
    """A check failed."""


@dataclass
class Report:
    """Results of checks and figures, printed at once.

    Attributes:
        device: "cuda" or "cpu".
        directory: directory of the runs.
        checks: results of checks.
        figures: figures by name.
    """

    device: str
    directory: Path
    checks: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float:
        return LIMIT_SECONDS - (time.monotonic() - self.began)

    def check(self, name: str, function: Callable[["Report"], str]) -> None:
        """Run a check and print a line."""
        try:
            passed, detail = True, function(self)
        except Failed as failure:
            passed, detail = False, str(failure)
        except Exception as error:  # a broken check fails; all other checks still run
            passed, detail = False, f"{type(error).__name__}: {error}"
            traceback.print_exc()
        self.checks.append({"name": name, "passed": passed, "detail": detail})
        print(f"{'ok' if passed else 'FAILED':6} {name}: {detail}", flush=True)

    def figure(self, name: str, value: Any) -> None:
        """Keep and print a figure."""
        self.figures[name] = value
        print(f"       {name}: {value if isinstance(value, str) else f'{value:,.0f}'}", flush=True)


def within(difference: float, limit: float) -> str:
    """Return the difference in words; fail above the limit."""
    if not difference <= limit:
        raise Failed(f"largest difference {difference:.1e}, allowed {limit:.0e}")
    return f"largest difference {difference:.1e}"
