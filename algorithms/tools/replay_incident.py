"""`appo replay` repeats the actions that preceded the failure of an environment."""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Generator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from appo.algorithms.playing.episodes import EpisodeRecorder
from appo.algorithms.run.config import Config
from appo.algorithms.run.trust import PLAYED, is_marked, uses
from appo.algorithms.runtime.processes.prctl import die_with_parent
from appo.algorithms.runtime.processes.restarts import ending_of
from appo.algorithms.tools.flags import ReplayConfig
from appo.envs.agents.multi_agent import loop_over
from appo.envs.config import EnvConfig
from appo.envs.incidents import HANG, Incident, error_name, restore_random_state
from appo.envs.make import make_group, make_single
from appo.envs.spec import Array, EnvSpec, step_row
from appo.envs.vectors.gym_vector import GymVector
from appo.utils.command_line import complain, say
from appo.utils.errors import EnvironmentFailure, UsageError
from appo.utils.run_folder import RunFolder
from appo.utils.user_modules import keep_out_of
from appo.utils.values import shown

NOT_REPRODUCED = 1
END_SECONDS = 5.0
MOST_ENVS = 65_536


class Outcome(NamedTuple):
    """The result of a replay; the name of the error is empty without a failure."""

    num_steps: int
    error: str = ""
    message: str = ""
    traceback: str = ""


def replay(config: ReplayConfig) -> int:
    """Repeat an incident and print whether the environment fails again; return 0 for an equal failure.

    Raises:
        UsageError: the incident cannot be read or repeated.
    """
    incident = Incident.read(Path(config.incident))
    _require_trust(config, incident)
    env = Config.from_saved(incident.flags).env.as_trained
    if incident.num_steps > len(incident.actions):
        raise UsageError(
            f"{shown(config.incident)} cannot be repeated: {incident.num_steps} steps were too many to keep them"
        )
    if incident.seeds and config.render:
        raise UsageError("a vector of environments cannot be shown")
    render_mode = "human" if config.render else None
    say(f"incident: {incident.message} ({_when(incident, incident.num_steps)}, seed {incident.seed})")
    if incident.ended_process:
        outcome = repeat_apart(incident, env, render_mode, config.hang_seconds)
    else:
        outcome = repeat(incident, env, render_mode)
    if not outcome.error:
        what = "its episode ended" if outcome.num_steps < incident.num_steps else "nothing failed"
        say(f"not reproduced: {what} after {outcome.num_steps} steps")
        return NOT_REPRODUCED
    complain(outcome.traceback)
    same = outcome.error == incident.error
    say(f"{'reproduced' if same else 'not reproduced'}: {outcome.message} ({_when(incident, outcome.num_steps)})")
    return 0 if same else NOT_REPRODUCED


def _require_trust(config: ReplayConfig, incident: Incident) -> None:
    """Refuse code of a stranger, unless trusted or named by a run with the mark of the user (UsageError lists it)."""
    path = Path(config.incident).absolute()
    run = RunFolder(path.parent.parent)
    if is_of_run := run.incidents == path.parent:
        keep_out_of(run.path)
    if config.trust or not (used := uses(incident.flags, PLAYED)):
        return
    content = run.read_config() if is_of_run else {}
    if any(content.get(name) != value for name, value in incident.flags.items()) or not is_marked(content):
        raise UsageError(
            f"{shown(config.incident)} is of no run of yours, and would use {', '.join(used)}: --trust if you know"
            " where it comes from"
        )


def repeat(
    incident: Incident, config: EnvConfig, render_mode: str | None = None, tell: Callable[[int], None] = lambda _: None
) -> Outcome:
    """Make the environment of an incident, begin the recorded episode and take the actions until a failure.

    The replay stops if the episode ends too early: the environment does not repeat itself. A vector is never reset as a
    whole, so all steps of a vector are repeated.

    `tell` is called with the number of each step before the step, and with 0 after the reset.

    Raises:
        UsageError: the environment cannot be made, or has different actions or random numbers.
    """
    steps = _steps_of_vector(incident, config) if incident.seeds else _steps(incident, config, render_mode)
    done = 0
    try:
        with contextlib.closing(steps):
            for done in steps:
                tell(done)
    except EnvironmentFailure as failure:
        trace = "".join(traceback.format_exception(failure.__cause__ or failure))
        return Outcome(done, error_name(failure), str(failure), trace)
    return Outcome(done)


def repeat_apart(incident: Incident, config: EnvConfig, render_mode: str | None, hang_seconds: float) -> Outcome:
    """Repeat an incident that ended or stopped the process, in another process (UsageError: see `repeat`)."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_repeat_there, args=(theirs, incident, config, render_mode), daemon=False)
    process.start()
    theirs.close()
    done = 0
    try:
        while ours.poll(hang_seconds):
            told = ours.recv()
            if isinstance(told, UsageError):
                raise told
            if isinstance(told, Outcome):
                return told
            done = told
        os.kill(process.pid or 0, signal.SIGABRT)  # faulthandler prints the stack
        return Outcome(done, HANG, f"nothing has happened for {hang_seconds:g} s")
    except EOFError:
        process.join(END_SECONDS)
        ending = ending_of(process.exitcode)
        return Outcome(done, ending, f"its process ended with {ending}")
    finally:
        process.join(END_SECONDS)
        process.kill()


def _repeat_there(pipe: Connection, incident: Incident, config: EnvConfig, render_mode: str | None) -> None:
    """Send the number of every step and the outcome."""
    die_with_parent(getattr(multiprocessing.parent_process(), "pid", None))
    with contextlib.suppress(OSError, ValueError):  # stderr may not be a file
        faulthandler.enable()
    try:
        pipe.send(repeat(incident, config, render_mode, pipe.send))
    except UsageError as error:
        pipe.send(error)


def _steps(incident: Incident, config: EnvConfig, render_mode: str | None) -> Generator[int, None, None]:
    """Repeat the actions of one environment; yield the number of each step before the step."""
    # The spec comes from a second environment: the search for masks takes a reset.
    with contextlib.closing(make_group(replace(config, env_vectorization="python"), 1)) as group:
        spec, number = group.spec, 0
    actions, recorder = _actions(incident, spec, spec.num_agents), EpisodeRecorder(spec.num_agents)
    env, row = make_single(config, render_mode), step_row(spec, spec.num_agents)
    with contextlib.closing(loop_over([lambda: env], name=config.env, spec=spec)) as loop:
        loop.reset([incident.seed], row.obs)
        if incident.random_state is not None:
            restore_random_state(env, incident.random_state)
            loop.reset([None], row.obs)
        yield 0
        for number, action in enumerate(actions, start=1):
            yield number
            recorder.add(row, ~row.first, loop.step(action, row))
            if recorder.over:
                break
        if incident.place == "reset" and number == len(actions):
            loop.reset([None], row.obs)


def _steps_of_vector(incident: Incident, config: EnvConfig) -> Generator[int, None, None]:
    """Repeat the actions of a vector; yield the number of each step. A second vector provides the spec."""
    if not all(type(seed) is int for seed in incident.seeds) or len(incident.seeds) > MOST_ENVS:
        raise UsageError(f"the seeds of the incident are no numbers, or more than {MOST_ENVS}")
    with contextlib.closing(make_group(config, len(incident.seeds))) as group:
        if isinstance(group, GymVector) and not group.ends.is_declared:
            group.settle_mode()
        spec, rows = group.spec, group.num_rows
    actions, row = _actions(incident, spec, rows), step_row(spec, rows)
    with contextlib.closing(make_group(config, len(incident.seeds), spec=spec)) as group:
        group.reset(incident.seeds, row.obs)
        yield 0
        for number, action in enumerate(actions, start=1):
            yield number
            group.step(action, row)


def _when(incident: Incident, num_steps: int) -> str:
    places = {"step": f"in step {num_steps}", "reset": f"in the reset after {num_steps} steps", "init": "when made"}
    return places.get(incident.place, f"in its {incident.place}")


def _actions(incident: Incident, spec: EnvSpec, rows: int) -> Array:
    """Return the stored actions [N, R, A]."""
    try:
        stored = np.array(incident.actions, spec.action.dtype)
        return stored.reshape(len(incident.actions), rows, spec.action.num_values)
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"the actions of the incident are none of this environment: {error}") from error
