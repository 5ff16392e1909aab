"""Unsharding a module outside of its forward, and bringing it back.

What lives here: `UnshardHandle`, started gathers, resharding. What must not: what a
forward gathers for itself.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import Any

from fsdp_jax import _gather
from fsdp_jax._param_group import ParamGroup
from fsdp_jax._state import comm_of, group_of, set_state, state_of
from fsdp_jax._threads import LOCK, current, original


class UnshardHandle:
    """A gather that was started by `unshard(async_op=True)`.

    Source: specification, "Calling forward directly"; PyTorch `UnshardHandle`.
    """

    def __init__(self, module: Any, shards: list[Any], full: list[Any]) -> None:
        # Weakly: a started gather must not keep its module alive. Not a call's copy.
        module = original(module)
        self._module = weakref.ref(module, functools.partial(_drop, id(module)))
        self._gathered: tuple[list[Any], list[Any]] | None = (shards, full)

    @property
    def pending(self) -> bool:
        """Whether `wait()` has something to do."""
        return self._gathered is not None

    def wait(self) -> None:
        """Make the module's parameters the full arrays; a second call does nothing.

        A parameter that was written since the gather started is gathered anew. After
        `reshard()`, or a forward that used the gather, there is nothing to wait for.

        Raises:
            RuntimeError: in a traced function, for a module from outside of it.
        """
        with LOCK:
            module, gathered = self._module(), self._gathered
            if gathered is None or module is None:
                return
            shards, full = gathered
            self.cancel()
            take_started(module)
            module = current(module)
            group = group_of(module)
            if group.full:
                return
            now = group.values()
            if len(now) != len(shards) or any(a is not b for a, b in zip(now, shards)):
                full = gather_own_dtype(module, group)
            group.keep_values(full, full=True, asked="unshard()")
            set_state(module, forwards_left=state_of(module).num_forwards)

    def cancel(self) -> None:
        """Forget the gather."""
        self._gathered = None


# Started gathers, to be used by the next forward or dropped by reshard(). They change
# what is gathered when, in eager mode only; nothing traced looks here.
# By id: a module that is a dataclass cannot be hashed.
STARTED: dict[int, UnshardHandle] = {}


def _drop(key: int, _: Any) -> None:
    STARTED.pop(key, None)


def take_started(module: Any) -> UnshardHandle | None:
    """The started gather of a module, which from now on is the caller's."""
    return STARTED.pop(id(original(module)), None)


def gather_own_dtype(module: Any, group: ParamGroup) -> list[Any]:
    """Full arrays of a group in the parameters' own dtype."""
    if group.mesh.per_device():
        group.check_shards()
        comm = dataclasses.replace(comm_of(module, group), param_dtype=None)
        return _gather.gather_kept(group.values(), comm, sinks=group.local("sink"))
    return group.gather_global()


def reshard_now(module: Any) -> None:
    """Bring a module's group to rest; does nothing more if it is."""
    with LOCK:
        group, state = group_of(module), state_of(module)
        if group.full:
            shards = group.shards(comm_of(module, group))
            group.keep_values(shards, full=False, asked="reshard()")
        if state.forwards_left:
            set_state(module, forwards_left=0)
