"""Environments that a program gives as a class or function instead of a name, found by name in our processes.

An importable object is named by its module, as on the command line. Any other object (a class of a notebook, a REPL,
stdin, the script itself or the inside of a function, a lambda) gets a name here, and worker processes receive the
object by value. No file holds the object: a later start has to be given the object again.
"""

import sys
from collections.abc import Callable
from itertools import count
from typing import Any

from appo.utils.errors import UsageError, text_of
from appo.utils.values import shown

MODULE = "<program>"
"""Stands for the module in the name of an object that cannot be imported; no module can have this name."""

NUMBER = "#"
"""Stands before the number that makes a repeated name unique; names contain it nowhere else."""

_objects: dict[str, Callable[..., Any]] = {}
"""Name -> maker of the environment, in the process of the program, and in workers from the first use."""

_sent: dict[str, bytes] = {}
"""Name -> maker as bytes: main sends the bytes, a worker received them."""


def name_of(env: object, is_factory: Callable[[object], bool]) -> str:
    """Return the name of an environment from a program; `find` then finds the environment by the name.

    Args:
        env: a name, a class or a function.
        is_factory: test whether `--env` accepts a function as a maker of environments, by the name of its module.

    Raises:
        UsageError: the object is neither a name nor a maker of environments.
    """
    if isinstance(env, str):
        return env
    if not callable(env):
        made = type(env).__name__
        raise UsageError(
            f"env={made}(...) is an object: give the class, or a function that makes one, such as env={made}"
        )
    module, own = getattr(env, "__module__", None), getattr(env, "__qualname__", "")
    imported = sys.modules.get(str(module))
    can_be_imported = module != "__main__" and getattr(imported, "__spec__", None) is not None
    if can_be_imported and getattr(imported, own, None) is env and (isinstance(env, type) or is_factory(env)):
        return f"{module}:{own}"
    # A run that goes on still makes what it was given, whatever has the same name since.
    name = word = f"{MODULE}:{_word(env)}"
    for number in count(2):
        if _objects.setdefault(name, env) is env:
            return name
        name = f"{word}{NUMBER}{number}"
    raise AssertionError("numbers have no end")


def _word(env: object) -> str:
    """Return the name of a class or function; for a partial, of the function inside."""
    while hasattr(env, "func"):
        env = env.func
    word = str(getattr(env, "__name__", type(env).__name__))
    return word if word.isidentifier() else "function"


def unnumbered(name: str) -> str:
    """Return a name without the number that makes a repeated name unique."""
    return name.partition(NUMBER)[0]


def is_given(name: str) -> bool:
    """Return whether a name stands for an object that cannot be imported."""
    return name.startswith(f"{MODULE}:")


def is_again(before: str, now: str) -> bool:
    """Return whether a run of a given environment may go on with an environment of the same class name."""
    own, other = before.partition(":")[2], now.rpartition(":")[2]
    return is_given(before) and unnumbered(own) == unnumbered(other)


def find(name: str) -> Callable[..., Any]:
    """Return the maker of an environment by name (UsageError: the process was not given the object)."""
    if name not in _objects:
        if name not in _sent:
            own = unnumbered(name.partition(":")[2])
            raise UsageError(
                f"the environment of this run was given as a class or function, {shown(own)}, which no file keeps: give"
                f" it again, as env={own} to train or load_policy, or put it into a module and give --env=module:{own}"
            )
        _objects[name] = _from_bytes(_sent[name])
    return _objects[name]


def to_bytes(name: str, *, anew: bool = False) -> bytes | None:
    """Return a given environment as bytes for another process of ours; None for any other name.

    The bytes of a run are those of its start (`anew`): a class may change between two runs.

    Raises:
        UsageError: the object contains values that cannot be sent to another process.
    """
    if name in _objects and (anew or name not in _sent):
        import cloudpickle  # noqa: TID251 (it writes here; who reads it, `_from_bytes` says)

        try:
            _sent[name] = cloudpickle.dumps(_objects[name])
        except Exception as error:  # each kind of thing that cannot be sent has an error of its own
            raise UsageError(
                f"env={unnumbered(name.partition(':')[2])} cannot be sent to worker processes: {type(error).__name__}:"
                f' {text_of(error)}; make such things in its constructor, or train with inference="serial"'
            ) from error
    return _sent.get(name)


def take(name: str, content: bytes) -> None:
    """Keep, in a worker, the bytes that main sent with the plan of the process."""
    if _sent.get(name) != content:
        _sent[name] = content
        _objects.pop(name, None)


def _from_bytes(content: bytes) -> Callable[..., Any]:
    """Make the class or function again from main's bytes.

    Reading a pickle runs code, so no pickle is ever read from a file. The bytes arrive with the arguments of the
    process, through the pipe by which multiprocessing started the process. The program at the other end owns the code
    and could have started the process with any other code as well.
    """
    import cloudpickle  # noqa: TID251 (bytes of our own parent process, see above)

    made: Callable[..., Any] = cloudpickle.loads(content)
    return made
