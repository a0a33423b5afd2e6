"""Environments that a program gives as a class or function instead of a name: found by name in processes of ours.

What can be imported is named by its module, as on the command line. Anything else (a class of a notebook, a REPL,
stdin or the script itself, of the inside of a function, a lambda) has a name here that leads to the object, and is sent
to our own worker processes by value. No file ever holds it: a later start has to be given it again.
"""

import sys
from collections.abc import Callable
from itertools import count
from typing import Any

from appo.utils.errors import UsageError, text_of
from appo.utils.values import shown

MODULE = "<program>"
"""Stands in the place of a module in the names of what cannot be imported; no module can be called so."""

NUMBER = "#"
"""Stands before a number in the name of what is called as something else that was given; in no other name."""

_objects: dict[str, Callable[..., Any]] = {}
"""Name -> what makes the environment, in the process of the program, and in others as soon as it is asked for."""

_sent: dict[str, bytes] = {}
"""Name -> the same as bytes: what main sends, and a worker has got from main."""


def name_of(env: object, is_factory: Callable[[object], bool]) -> str:
    """Return the name of an environment that a program gives, by which `find` knows it from now on.

    Args:
        env: a name, a class or a function.
        is_factory: whether `--env` takes a function as one that makes environments, by the name of its module.

    Raises:
        UsageError: it is neither a name nor something that makes environments.
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
    """Return what the class or function is called; a partial as what it calls."""
    while hasattr(env, "func"):
        env = env.func
    word = str(getattr(env, "__name__", type(env).__name__))
    return word if word.isidentifier() else "function"


def unnumbered(name: str) -> str:
    """Return a name without the number that it has where others had the same one before it."""
    return name.partition(NUMBER)[0]


def is_given(name: str) -> bool:
    """Return whether a name is that of something which cannot be imported."""
    return name.startswith(f"{MODULE}:")


def is_again(before: str, now: str) -> bool:
    """Return whether a run of an environment that was given may go on with this one: its class has that name."""
    own, other = before.partition(":")[2], now.rpartition(":")[2]
    return is_given(before) and unnumbered(own) == unnumbered(other)


def find(name: str) -> Callable[..., Any]:
    """Return what makes the environment of that name.

    Raises:
        UsageError: this process was not given it.
    """
    if name not in _objects:
        if name not in _sent:
            own = unnumbered(name.partition(":")[2])
            raise UsageError(
                f"the environment of this run was given as a class or function, {shown(own)}, which no file keeps: give"
                f" it again, as env={own} to train or load_policy, or put it into a module and give --env=module:{own}"
            )
        _objects[name] = _from_bytes(_sent[name])
    return _objects[name]


def to_bytes(name: str) -> bytes | None:
    """Return an environment that was given as bytes for another process of ours; None for any other name.

    Raises:
        UsageError: it holds what no other process can be given.
    """
    if name in _objects and name not in _sent:
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
    """In a worker: keep what main has sent with the plan of this process."""
    if _sent.get(name) != content:
        _sent[name] = content
        _objects.pop(name, None)


def _from_bytes(content: bytes) -> Callable[..., Any]:
    """Make the class or function again that main has sent.

    Reading a pickle runs code, which is why nothing here reads one from a file. These bytes have come with the
    arguments of this process through the pipe by which multiprocessing has started it, from the program whose own
    code they are: it could have started this process with any other code as well.
    """
    import cloudpickle  # noqa: TID251 (bytes of our own parent process, see above)

    made: Callable[..., Any] = cloudpickle.loads(content)
    return made
