"""The program that trains, seen from worker processes: script, notebook or session.

A worker imports the script that started the run. Workers cannot import a notebook, an interactive session or stdin. An
environment defined there is sent by value (`envs/given.py`); other names defined there are refused here.
"""

import ast
import contextlib
import multiprocessing
import os
import sys
from pathlib import Path
from types import FrameType

import gymnasium

from appo.algorithms.run.config import Config
from appo.algorithms.run.directory.code import NAMED_IN_WORKERS
from appo.envs import given
from appo.utils.errors import UsageError

GUARD = 'if __name__ == "__main__":'
MAIN = "__main__"


def check_program(config: Config, *, has_workers: bool) -> None:
    """Refuse an environment or a script that worker processes cannot get from the calling program.

    Raises:
        UsageError: with the cure.
    """
    own = given.is_given(config.env.env)
    if own and config.logging.eval_every_sec:
        raise UsageError(
            f"--eval_every_sec evaluates in a command of its own, which cannot know {config.env.env}: put the class"
            ' into a module and give env="module:Class"'
        )
    if not has_workers:
        return
    if own:
        given.to_bytes(config.env.env, anew=True)
    if script_of(MAIN) is not None:
        return
    made_by = registered.entry_point if (registered := gymnasium.registry.get(config.env.env)) else None
    if callable(made_by) and getattr(made_by, "__module__", "") == MAIN:
        made = getattr(made_by, "__name__", "MyEnv")
        raise UsageError(
            f"env={config.env.env} is registered by a notebook, a session or stdin, which worker processes cannot"
            f" import: give what it makes, as env={made}"
        )
    flat = config.to_flat()
    for flag in NAMED_IN_WORKERS:
        value = flat.get(flag)
        for name in value if isinstance(value, list) else [value]:
            if str(name).startswith(f"{MAIN}:"):
                raise UsageError(
                    f"--{flag}={name}: worker processes cannot import a notebook, a session or stdin: put it into a"
                    f' file my_module.py and give {flag}="my_module:{str(name).partition(":")[2]}", or train with'
                    ' inference="serial"'
                )


def given_again(config: Config) -> str:
    """Return the line about the `env` that later starts need, for an environment that no file keeps."""
    own, run = given.unnumbered(config.env.env.partition(":")[2]), config.run.experiment
    return (
        f"{run}: its environment is a class or function of this program, {own}, which no file keeps: to resume it give"
        f" env={own} again, to enjoy it load_policy(..., env={own}), or --env=module:{own} once it lies in a module"
    )


def script_of(name: str) -> Path | None:
    """Return the file of a module that a child can run; None for a notebook, a session, `python -c` and stdin."""
    if (path := getattr(sys.modules.get(name), "__file__", None)) is None:
        return None
    found = Path(getattr(multiprocessing.process, "ORIGINAL_DIR", None) or os.curdir, path)
    return found if found.is_file() else None


def refuse_imported_script(*, has_workers: bool) -> None:
    """Refuse to train in a worker process that imports an unguarded script.

    In main, the line of the script that is running shows whether a guard surrounds the call.

    Raises:
        UsageError: with the cure.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            f"a worker process imports your script, which would train there again: put what it does under `{GUARD}`"
        )
    path, line = script_of(MAIN), _line_of_script(sys._getframe())
    if not has_workers or path is None or line is None:
        return
    with contextlib.suppress(OSError, ValueError):  # of a script that has changed since
        if not _is_guarded(path.read_text(encoding="utf-8"), line):
            raise UsageError(
                f"line {line} of {path.name} trains, and every worker process, which imports {path.name}, would train"
                f" there again: put what it does under `{GUARD}`"
            )


def _line_of_script(frame: FrameType | None) -> int | None:
    """Return the line that the main script executes outside of functions; None: the script is not running."""
    names = vars(sys.modules[MAIN])
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is names:
            return frame.f_lineno
        frame = frame.f_back
    return None


def _is_guarded(text: str, line: int) -> bool:
    """Return whether a line lies inside an `if` that tests `__name__`."""
    guards = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.If) and any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test))
    )
    return any(node.lineno <= line <= (node.end_lineno or node.lineno) for node in guards)
