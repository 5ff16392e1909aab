"""The setters of a sharded module.

What lives here: checking a new value and putting it into the state. What must not: what
the values do, which is read where they act.
"""

from __future__ import annotations

import math
import numbers
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

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether parameters are freed between micro-batches.

        Has a meaning for `value_and_grad(..., num_microbatches=k)` only: False gathers
        a group once for all of them instead of in each. Afterwards, and in everything
        else, parameters are freed in any case.

        Args:
            reshard_after_backward: False keeps them.
            recurse: whether inner sharded modules are set too.

        Raises:
            ValueError: not a bool.

        Source: PyTorch `set_reshard_after_backward`.
        """
        _check_bool("set_reshard_after_backward", reshard_after_backward)
        for module in sharded_modules(self) if recurse else [self]:
            set_state(module, reshard_after_backward=reshard_after_backward)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether gradients are reduced over the devices.

        While it is off, `value_and_grad` returns a `PendingGradients`; with
        micro-batches it reduces once, after the last of them. Sets what
        `set_requires_all_reduce` sets too.

        Args:
            requires_gradient_sync: False leaves every device its own gradients.
            recurse: whether inner sharded modules are set too.

        Raises:
            ValueError: not a bool.

        Source: specification, table of knobs; PyTorch.
        """
        _check_bool("set_requires_gradient_sync", requires_gradient_sync)
        for module in sharded_modules(self) if recurse else [self]:
            set_state(
                module,
                requires_gradient_sync=requires_gradient_sync,
                requires_all_reduce=requires_gradient_sync,
            )

    def set_requires_all_reduce(
        self, requires_all_reduce: bool, *, recurse: bool = True
    ) -> None:
        """Set whether gradients are reduced over replicas, next to the shards.

        While it is off, `value_and_grad` reduce-scatters and returns a
        `PendingGradients` of one gradient per replica. Changes nothing on a mesh
        without replicating axes, nor while gradient sync is off.

        Args:
            requires_all_reduce: False leaves every replica its own gradients.
            recurse: whether inner sharded modules are set too.

        Raises:
            ValueError: not a bool.

        Source: specification, table of knobs; PyTorch.
        """
        _check_bool("set_requires_all_reduce", requires_all_reduce)
        for module in sharded_modules(self) if recurse else [self]:
            set_state(module, requires_all_reduce=requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Set what this module's own summed gradients are divided by.

        The result is the sum over all data devices, replicas among them, divided once,
        for every `reduction`. Inner modules keep theirs.

        Args:
            factor: None for the default: the number of data devices where the loss is
                their mean, else 1.

        Raises:
            ValueError: neither a positive number nor None.

        Source: specification, table of knobs; PyTorch.
        """
        number = isinstance(factor, numbers.Real) and not isinstance(factor, bool)
        if factor is not None and not (number and 0 < float(factor) < math.inf):
            raise ValueError(
                "set_gradient_divide_factor: expected a positive number, or None for "
                f"the default, got {factor!r}."
            )
        given = None if factor is None else float(factor)
        set_state(self, gradient_divide_factor=given)

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


def share_comm_ctx(modules: Sequence[Any]) -> None:
    """Let several roots order their collectives with each other, and with no others.

    All modules of a per-device program order theirs in one log, so roots that run in it
    share their communication already, unlike in PyTorch. This gives some roots, with
    all their inner sharded modules, a log of their own: what they gather and reduce
    waits for one another (look-ahead and prefetch cross from root to root) and for
    nothing else in the program, such as a frozen teacher next to two students. Values
    do not change. A root that shares with others already leaves them.

    Args:
        modules: sharded modules, the roots of what shares; an empty list changes
            nothing. An inner module given without its root leaves the order of that.
            Every call compiles anew.

    Raises:
        TypeError: not a list or tuple.
        ValueError: one of them is not sharded, or on another mesh. Nothing was changed.

    Source: specification, "share_comm_ctx"; PyTorch `share_comm_ctx`.
    """
    _check_sharded(modules, "share_comm_ctx")
    meshes = [state_of(module).mesh for module in modules]
    for i, mesh in enumerate(meshes):
        if mesh != meshes[0]:
            raise ValueError(
                f"share_comm_ctx: entry {i} is sharded over {mesh.mesh}, and the first "
                f"one over {meshes[0].mesh}. Modules on one mesh can share."
            )
    context = uuid.uuid4().hex
    for root in modules:
        for module in sharded_modules(root):
            set_state(module, comm_context=context)


def _check_bool(who: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{who}: expected a bool, got {value!r}.")


def _check_sharded(modules: Any, who: str) -> None:
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


def _keys(modules: Any, who: str) -> tuple[str, ...]:
    """The keys of sharded modules; one that has none yet gets one."""
    _check_sharded(modules, who)
    for module in modules:
        if state_of(module).key is None:
            set_state(module, key=uuid.uuid4().hex)
    return tuple(str(state_of(module).key) for module in modules)
