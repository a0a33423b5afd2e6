"""Functions of the user's that a flag names."""

from collections.abc import Callable
from typing import Any

from utils.errors import UsageError, text_of
from utils.user_modules import import_user_module


def find_function(flag: str, name: str) -> Callable[..., Any]:
    """The function that `--flag=package.module:function` names; the working directory is looked into too.

    Raises:
        UsageError: there is no such function.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise UsageError(f"--{flag}={name} must read package.module:function")
    try:
        function: object = getattr(import_user_module(module_name), function_name)
    except Exception as error:  # the user's module may raise anything
        text = f"{type(error).__name__}: {text_of(error)}"
        raise UsageError(f"--{flag}={name} failed: {text}") from error
    if not callable(function):
        raise UsageError(f"--{flag}={name} is a {type(function).__name__}, not a function")
    return function
