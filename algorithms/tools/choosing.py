"""The choice between an on-policy algorithm and SAC by measured costs; docs/choosing.md explains the arithmetic."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from appo.algorithms.run.algorithms import DEFAULT
from appo.algorithms.run.config import Config, resolve
from appo.algorithms.run.folder import LOCATION
from appo.algorithms.run.tuning.choice import report
from appo.algorithms.run.tuning.measure import Measurement
from appo.utils.command_line import words_of_flag
from appo.utils.errors import AppoError, Interrupted

OFF_POLICY = "SAC"
STEPS: Mapping[str, float] = {"APPO": 10.0, "PPO": 10.0, OFF_POLICY: 1.0}
"""Steps to a return, in multiples of the steps of SAC: an assumption, not a measurement.

Source: at 100,000 steps SAC returns 6,156 in HalfCheetah and 632 in Humanoid (mean of ten seeds, raw curves in
`results/baseline` of github.com/dojeon-ai/SimbaV2 at 14fafb2), at 1,000,000 steps PPO returns 5,819 (rl-baselines3-zoo)
and 700 (raw curves in `results/stateRL_cpusim` of github.com/Holiday-Robot/FlashSAC at 87edc90).
"""
PAYS = 1.1
"""Gain in speed for which the command has an actor per core in place of the preset's number of actors."""


class Contender(NamedTuple):
    """An algorithm at its predicted speed.

    Attributes:
        algo: name of the algorithm, of `STEPS`.
        samples_per_second: predicted agent steps per second.
        figures: measured costs and plan in words.
        command: command that trains with the algorithm.
    """

    algo: str
    samples_per_second: float
    figures: str = ""
    command: str = ""

    @property
    def seconds(self) -> float:
        """Return seconds to a return, per step that SAC needs: steps needed / steps per second.

        >>> Contender("APPO", 1000.0).seconds, Contender("SAC", 250.0).seconds
        (0.01, 0.004)
        """
        return STEPS[self.algo] / self.samples_per_second


def compared(own: Contender, rival: Contender) -> str:
    """Return the algorithm that reaches a return first, with the figures behind the choice, and its command."""
    first, second = sorted((own, rival), key=lambda one: one.seconds)
    few, many = sorted((own, rival), key=lambda one: STEPS[one.algo])
    return (
        f"--algo={first.algo} reaches a return {second.seconds / first.seconds:.2g} times as fast as {second.algo}, if"
        f" {many.algo} needs {STEPS[many.algo] / STEPS[few.algo]:g} times as many steps (docs/choosing.md);"
        f" {first.algo}: {first.figures}; {second.algo}: {second.figures}; type: {first.command}"
    )


def choice(
    own: Measurement,
    measure: Callable[[Config], Measurement],
    cores: int,
    asked: Mapping[str, object] = {},
) -> str:
    """Return in one line which algorithm to take, or why the algorithm of the run stays.

    The check of the other algorithm decides whether the other algorithm suits the actions.

    Args:
        own: measured costs of the run's algorithm, a key of `STEPS`.
        measure: measures the costs of another configuration.
        cores: number of cores.
        asked: flags of the run whose values `own` has in shares of several learners.
    """
    config = own.probe.config
    algo = config.run.algo
    other = OFF_POLICY if STEPS[algo] > STEPS[OFF_POLICY] else DEFAULT
    # Flags of learning have other good values in another algorithm.
    given = config.given - {"config"} - config.table.by_part["learning"].keys() | {"env", "train_dir", "experiment"}
    flat = config.to_flat()
    try:
        rival = measure(resolve({**{name: flat[name] for name in given}, "algo": other})[0])
    except Interrupted:
        raise
    except AppoError as error:
        return f"--algo={algo} stays: {' '.join(str(error).split())}"
    if own.costs is None or rival.costs is None:
        return f"--algo={algo} stays: costs on a CPU decide, and none were measured"
    return compared(contender(own, cores, asked), contender(rival, cores))


def contender(found: Measurement, cores: int, asked: Mapping[str, object] = {}) -> Contender:
    """Return a measured algorithm at the speed of its best plan, with the command of the given flags.

    Values of `asked` stand in the command; the plan of one of several learners has shares of them.
    """
    config, costs, flat = found.planned, found.costs, {**found.probe.config.to_flat(), **asked}
    assert costs is not None
    plan, flags = found.plan(config, cores), {name: flat[name] for name in flat if name in config.given}
    if config.sampling.num_workers and "num_workers" not in flags:
        sampling = replace(config.sampling, num_workers=cores)
        every = found.plan(replace(config, sampling=sampling), cores)
        if every.samples_per_second > PAYS * plan.samples_per_second:
            plan, flags = every, {**flags, "num_workers": cores}
    flags = {"algo": config.run.algo, **{name: value for name, value in flags.items() if name not in LOCATION}}
    words = [word for name, value in flags.items() for word in words_of_flag(name, value)]
    figures = report(costs, plan, found.probe.spec.num_agents)
    return Contender(config.run.algo, plan.samples_per_second, figures, shlex.join(["appo", "train", *words]))
