"""Who listens to a run in main: the monitor, what shows it, and the callbacks of the user."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from algorithms.appo.config import Config
from algorithms.population.comparison import comparison
from algorithms.runtime.callbacks import Callbacks, Hooks
from algorithms.runtime.console import Title, aim_of, console_for
from algorithms.runtime.monitor import Monitor
from algorithms.runtime.performance import Machine
from algorithms.runtime.runner import Budget
from algorithms.runtime.telling import TellingMonitor

log = logging.getLogger(__name__)


class Watching:
    """Makes them as the flags ask.

    Args:
        config: all flags.
        callbacks: objects that are told of reports, besides those that flags name.
    """

    def __init__(self, config: Config, callbacks: Sequence[Callbacks] = ()) -> None:
        self.config, self.callbacks = config, callbacks

    def monitor(self, resumed: Sequence[Mapping[str, Any]], budget: Budget, machine: Machine) -> Monitor:
        """What listens to all reports, and who shows them."""
        flags, directory = self.config.logging, self.config.run.run_directory
        arguments = (directory, flags, resumed, budget.limits(), machine, self.config.frozen)
        monitor = self._telling(arguments) if flags.callbacks or self.callbacks else Monitor(*arguments)
        monitor.console = console_for(flags, Title(directory, self.config.env.env, aim_of(budget.plain())))
        return monitor

    def _telling(self, arguments: tuple[Any, ...]) -> Monitor:
        monitor = TellingMonitor(*arguments)
        monitor.listen(Hooks.make(self.config.logging.callbacks, self.config.to_flat(), None, self.callbacks))
        return monitor

    def compare(self, monitor: Monitor) -> None:
        """Say how the policies compare that --per_policy has set apart, if nothing else has."""
        if self.config.population.per_policy and not self.config.population.with_pbt:
            for line in comparison(monitor.policies, self.config.per_policy):
                log.info("%s", line)
