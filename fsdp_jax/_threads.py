"""What keeps calls of one model in several threads apart.

What lives here: the lock on what threads share, and which private copies the calls of
this thread run on. What must not: making such copies (`_private`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

# Held for short changes of state, never while a user's function runs.
LOCK = threading.RLock()


def locked(method: Callable[..., T]) -> Callable[..., T]:
    """A method that holds the lock: what a Variable holds and how change together."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> T:
        with LOCK:
            return method(*args, **kwargs)

    return run


# Per running call of this thread, the outermost first: the caller's objects by the ids
# of their copies, and the copies by the ids of the caller's objects.
OPEN: ContextVar[tuple[tuple[dict[int, Any], dict[int, Any]], ...]] = ContextVar(
    "fsdp_jax_open", default=()
)


def current(node: T) -> T:
    """What stands for a module or Variable in the calls of this thread."""
    for _, copies in OPEN.get():
        node = copies.get(id(node), node)
    return node


def original(node: T) -> T:
    """The caller's object that a module or Variable is a private copy of, or itself."""
    for originals, _ in reversed(OPEN.get()):
        node = originals.get(id(node), node)
    return node
