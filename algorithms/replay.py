"""`appo replay`: does again what an environment was asked to do before it failed."""

import contextlib
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from algorithms.appo.config import Config
from envs.config import EnvConfig
from envs.incidents import Incident, error_name, restore_random_state
from envs.make import make_group, make_single
from envs.python_loop import PythonLoop
from envs.spec import Array, EnvSpec, StepRow
from utils.command_line import format_help, parse_command_line, print_and_exit, say, wants_help
from utils.config import flag, flags_of
from utils.errors import EnvironmentFailure, UsageError
from utils.values import shown

USAGE = "appo replay INCIDENT [flags]      for example: appo replay train_dir/a/incidents/env_actor_0_0.json"
NOT_REPRODUCED = 1


@dataclass(frozen=True)
class ReplayConfig:
    """Repeating what led an environment to fail."""

    incident: str = flag("", "file of the incident, in incidents/ of a run; it may be the first word without a name")
    render: bool = flag(False, "open a window and show every step")


class Outcome(NamedTuple):
    """How far an environment came, and how it failed then, if it did."""

    num_steps: int
    failure: EnvironmentFailure | None


def parse_replay(argv: Sequence[str]) -> ReplayConfig:
    """Return the configuration of a command line of `appo replay`; `--help` prints the flags and exits."""
    flags = flags_of(ReplayConfig)
    if wants_help(argv):
        print_and_exit(format_help(USAGE, {"Replay": flags}, {}))
    words = [f"--incident={argv[0]}", *argv[1:]] if argv and not argv[0].startswith("-") else argv
    config = ReplayConfig(**parse_command_line(words, flags))  # type: ignore[arg-type]
    if not config.incident:
        raise UsageError("appo replay needs the file of an incident: look into incidents/ of the run")
    return config


def replay(config: ReplayConfig) -> int:
    """Repeat an incident and say whether the environment fails again; the exit code, 0 if it does in the same way.

    Raises:
        UsageError: the incident cannot be read or repeated.
    """
    incident = Incident.read(Path(config.incident))
    env = Config.from_flat(incident.flags).env
    if incident.num_steps > len(incident.actions):
        raise UsageError(
            f"{shown(config.incident)} cannot be repeated: {incident.num_steps} steps were too many to keep them"
        )
    say(f"incident: {incident.message} ({_when(incident, incident.num_steps)}, seed {incident.seed})")
    outcome = repeat(incident, env, "human" if config.render else None)
    failure = outcome.failure
    if failure is None:
        early = outcome.num_steps < incident.num_steps
        say(f"not reproduced: {'its episode ended' if early else 'nothing failed'} after {outcome.num_steps} steps")
        return NOT_REPRODUCED
    sys.stderr.write("".join(traceback.format_exception(failure.__cause__ or failure)))
    same = error_name(failure) == incident.error
    say(f"{'reproduced' if same else 'not reproduced'}: {failure} ({_when(incident, outcome.num_steps)})")
    return 0 if same else NOT_REPRODUCED


def repeat(incident: Incident, config: EnvConfig, render_mode: str | None = None) -> Outcome:
    """Make the environment of an incident, begin the same episode and take the same actions, until it fails.

    It stops where the episode ends too early, as the environment then does not repeat itself.

    Raises:
        UsageError: the environment cannot be made, or its actions or random numbers are others.
    """
    done = 0
    try:
        spec = _spec(config)
        actions = _actions(incident, spec)
        env, row = make_single(config, render_mode), _row(spec)
        with contextlib.closing(PythonLoop([lambda: env], name=config.env, spec=spec)) as loop:
            loop.reset([incident.seed], row.obs)
            if incident.random_state is not None:
                restore_random_state(env, incident.random_state)
                loop.reset([None], row.obs)
            while done < len(actions) and not (row.terminated[0] or row.truncated[0]):
                done += 1
                loop.step(actions[done - 1][None], row)
            if incident.place == "reset" and done == len(actions):
                loop.reset([None], row.obs)
    except EnvironmentFailure as failure:
        return Outcome(done, failure)
    return Outcome(done, None)


def _when(incident: Incident, num_steps: int) -> str:
    places = {"step": f"in step {num_steps}", "reset": f"in the reset after {num_steps} steps", "init": "when made"}
    return places.get(incident.place, f"in its {incident.place}")


def _spec(config: EnvConfig) -> EnvSpec:
    """What the environment is like, found out from another one: looking for masks takes a reset."""
    with contextlib.closing(make_group(replace(config, env_vectorization="python"), 1)) as group:
        return group.spec


def _actions(incident: Incident, spec: EnvSpec) -> Array:
    """The stored actions [N, A]."""
    try:
        return np.array(incident.actions, spec.action.dtype).reshape(len(incident.actions), spec.action.num_values)
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"the actions of the incident are none of this environment: {error}") from error


def _row(spec: EnvSpec) -> StepRow:
    obs = {key: np.zeros((1, *o.shape), o.dtype) for key, o in spec.observations.items()}
    first, terminated, truncated = np.zeros((3, 1), np.bool_)
    return StepRow(obs, first, np.zeros(1, np.float32), terminated, truncated, np.zeros(1, np.int32))
