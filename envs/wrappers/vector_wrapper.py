"""gymnasium's base class of wrappers around vectors, for type checkers."""

from typing import TYPE_CHECKING, Any

from gymnasium.vector import VectorWrapper

if TYPE_CHECKING:
    AnyVectorWrapper = VectorWrapper[Any, Any, Any, Any, Any]
else:
    AnyVectorWrapper = VectorWrapper  # has other parameters in other versions
