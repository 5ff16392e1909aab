"""How one group travels: what its collectives need to know.

What lives here: a static description, and what follows from it. What must not: the
collectives (`_collectives`), and where the description comes from (`_state`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fsdp_jax import _layout
from fsdp_jax._mesh import MeshInfo, Others

Array = jax.Array
Defer = Literal["", "all_reduce", "all", "refuse"]
"""Reductions left to a later call: none, those over replicas, all; or what a program
that has no place for their results must not start."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """A value that rides along in a pytree without being traced."""

    value: Any


@dataclasses.dataclass(frozen=True)
class GroupComm:
    """How one group travels. Static and hashable.

    Attributes:
        mesh: mesh of the group and the roles of its axes.
        dims: cut dim of each member, negative; None for a member kept whole.
        others: per member its dims, negative, that other axes of the mesh cut.
        param_dtype: floating members are cast to it before the gather; None: as is.
        reduce_dtype: gradients are summed in it; None: as they were computed.
        divisors: what the sum over the sharding axes is divided by, and what the sum
            over the replicating ones is.
        threshold_bytes: full members under this size share a buffer.
        name: path of the module, on the collectives in profiles.
        defer: which reductions are left to a later call.
        offloaded: whether its members rest in host memory.
    """

    mesh: MeshInfo
    dims: tuple[int | None, ...]
    others: tuple[Others, ...]
    param_dtype: jnp.dtype | None
    reduce_dtype: jnp.dtype | None
    divisors: tuple[float, float]
    threshold_bytes: int
    name: str
    defer: Defer = ""
    offloaded: bool = False

    @property
    def divisor(self) -> float:
        """What the sum over all data devices is divided by."""
        return self.divisors[0] * self.divisors[1]

    def sum_dtype(self, dtype: Any) -> Any:
        """Dtype in which the gradients of a member of this dtype are summed."""
        if not jnp.issubdtype(dtype, jnp.floating):
            return dtype
        return self.reduce_dtype or self.param_dtype or dtype

    def only(self, members: Sequence[int]) -> GroupComm:
        """How some members of the group travel."""
        dims, others = ([x[i] for i in members] for x in (self.dims, self.others))
        return dataclasses.replace(self, dims=tuple(dims), others=tuple(others))


def cast_floating(x: Array, dtype) -> Array:
    """Cast `x` if it is floating and `dtype` is given."""
    if dtype is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x.astype(dtype)


def small_members(full: Sequence[Any], comm: GroupComm) -> set[int]:
    """Positions of the members that travel packed if there are several, or not at all.

    Args:
        full: arrays of the group when gathered, or their shapes and dtypes.
        comm: how the group travels.
    """
    return {
        i
        for i, (x, dim) in enumerate(zip(full, comm.dims, strict=True))
        if dim is None or _layout.size_bytes(x.shape, x.dtype) < comm.threshold_bytes
    }
