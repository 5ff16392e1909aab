"""The setters of a sharded module.

What lives here: checking a new value and putting it into the state. What must not: what
the values do, which is read where they act.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from flax import nnx

from fsdp_jax._ordering import Ordering
from fsdp_jax._state import is_sharded, set_state, sharded_modules, state_of


class Knobs(nnx.Module):
    """The setters that `FSDPModule` inherits."""

    def set_reshard_after_forward(
        self, reshard_after_forward: bool, recurse: bool = True
    ) -> None:
        """Set whether gathered parameters are freed after forward.

        Args:
            reshard_after_forward: True frees them and gathers again in backward, also
                for the root; False keeps them.
            recurse: whether inner sharded modules are set too.

        Raises:
            ValueError: not a bool.

        Source: specification, table of knobs; PyTorch.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                "set_reshard_after_forward: expected a bool, got "
                f"{reshard_after_forward!r}. Integers and None can only be given to "
                "fully_shard."
            )
        for module in sharded_modules(self) if recurse else [self]:
            set_state(module, reshard_after_forward=reshard_after_forward)

    def set_packing_threshold_bytes(
        self, threshold_bytes: int, *, recurse: bool = True
    ) -> None:
        """Set under which size parameters share one collective per dtype.

        Args:
            threshold_bytes: full parameters of fewer bytes are packed; 0 packs none.
            recurse: whether inner sharded modules are set too.

        Raises:
            ValueError: not an int, or negative.

        Source: README, "What happens when".
        """
        number = isinstance(threshold_bytes, int) and not isinstance(
            threshold_bytes, bool
        )
        if not number or threshold_bytes < 0:
            raise ValueError(
                "set_packing_threshold_bytes: expected a number of bytes, 0 or more, "
                f"got {threshold_bytes!r}."
            )
        for module in sharded_modules(self) if recurse else [self]:
            set_state(module, threshold_bytes=threshold_bytes)

    def set_ordering(self, ordering: Ordering | None, *, recurse: bool = True) -> None:
        """Set what the gathers and reductions of the group wait for.

        Has a meaning in a per-device program only; see `Ordering`.

        Args:
            ordering: None for the one that was measured best on the mesh's platform.
            recurse: whether inner sharded modules are set too.

        Raises:
            TypeError: neither an `Ordering` nor None.

        Source: README, "The schedule".
        """
        if ordering is not None and not isinstance(ordering, Ordering):
            raise TypeError(
                "set_ordering: expected an fsdp_jax.Ordering or None, got "
                f"{type(ordering).__name__}."
            )
        for module in sharded_modules(self) if recurse else [self]:
            set_state(module, ordering=ordering)

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """Let the gathers of other modules start when this one's forward begins.

        Without it each waits as its `Ordering` says; on TPU for the module called just
        before it. XLA decides how much of the time allowed it uses: a longer look-ahead
        can hide more and keeps more full parameters alive. Numbers do not change.

        Args:
            modules: sharded modules that are called later in the same program; an empty
                list takes the setting back.

        Raises:
            TypeError: not a list or tuple.
            ValueError: one of them is not sharded. The setting stays as it was.

        Source: specification, table of knobs; PyTorch.
        """
        keys = _keys(modules, "set_modules_to_forward_prefetch")
        set_state(self, forward_prefetch=keys)

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """Let the second gathers of other modules start with this one's backward.

        Without it each waits for the gradient of its own output, or as its `Ordering`
        says. See `set_modules_to_forward_prefetch`.

        Args:
            modules: sharded modules whose backward comes later; an empty list takes the
                setting back.

        Raises:
            TypeError: not a list or tuple.
            ValueError: one of them is not sharded. The setting stays as it was.

        Source: specification, table of knobs; PyTorch.
        """
        keys = _keys(modules, "set_modules_to_backward_prefetch")
        set_state(self, backward_prefetch=keys)


def _keys(modules: Any, who: str) -> tuple[str, ...]:
    """The keys of sharded modules; one that has none yet gets one."""
    if not isinstance(modules, (list, tuple, nnx.List)):
        raise TypeError(
            f"{who}: expected a list of sharded modules, got {type(modules).__name__}."
        )
    for i, module in enumerate(modules):
        if not is_sharded(module):
            raise ValueError(
                f"{who}: entry {i} is a {type(module).__name__} that fully_shard was "
                "not applied to. Shard it first."
            )
    for module in modules:
        if state_of(module).key is None:
            set_state(module, key=uuid.uuid4().hex)
    return tuple(str(state_of(module).key) for module in modules)
