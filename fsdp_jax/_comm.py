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
from fsdp_jax._move import pad

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
        paddings: per member the rows of zeros at the end of its cut dim while it rests.
        param_dtype: floating members are cast to it before the gather; None: as is.
        reduce_dtype: gradients are summed in it; None: as they were computed.
        divisors: what the sum over the sharding axes is divided by, and what the sum
            over the replicating ones is.
        threshold_bytes: full members under this size share a buffer.
        name: path of the module, on the collectives in profiles.
        defer: which reductions are left to a later call.
        offloaded: whether its members rest in host memory.
        user_program: whether it travels in a `jax.shard_map` of the user's own.
        nested: there, whether in a program inside of it, such as a call of `jax.jit`.
    """

    mesh: MeshInfo
    dims: tuple[int | None, ...]
    others: tuple[Others, ...]
    paddings: tuple[int, ...]
    param_dtype: jnp.dtype | None
    reduce_dtype: jnp.dtype | None
    divisors: tuple[float, float]
    threshold_bytes: int
    name: str
    defer: Defer = ""
    offloaded: bool = False
    user_program: bool = False
    nested: bool = False

    @property
    def divisor(self) -> float:
        """What the sum over all data devices is divided by."""
        return self.divisors[0] * self.divisors[1]

    @property
    def exit_divisor(self) -> float:
        """What the cotangent of a shard is divided by to be the gradient.

        It is the mean over the replicas already, see `_cotangents`.
        """
        return self.divisor / self.mesh.num_replicas

    def undivided(self) -> GroupComm:
        """How cotangents travel: summed over shards, the mean over replicas."""
        divisors = (1.0, float(self.mesh.num_replicas))
        return dataclasses.replace(self, divisors=divisors)

    def sum_dtype(self, dtype: Any) -> Any:
        """Dtype in which the gradients of a member of this dtype are summed."""
        if not jnp.issubdtype(dtype, jnp.floating):
            return dtype
        return self.reduce_dtype or self.param_dtype or dtype

    def only(self, members: Sequence[int]) -> GroupComm:
        """How some members of the group travel."""
        of_each = self.dims, self.others, self.paddings
        dims, others, paddings = (tuple(x[i] for i in members) for x in of_each)
        return dataclasses.replace(self, dims=dims, others=others, paddings=paddings)


def cast_floating(x: Array, dtype) -> Array:
    """Cast `x` if it is floating and `dtype` is given."""
    if dtype is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x.astype(dtype)


def padded(x: Array, comm: GroupComm, member: int) -> Array:
    """A full array of a member, with the padding that it rests with."""
    dim, rows = comm.dims[member], comm.paddings[member]
    return pad(x, dim, rows) if rows and dim is not None else x


def unpadded(x: Array, comm: GroupComm, member: int) -> Array:
    """A gathered array of a member without its padding."""
    dim, rows = comm.dims[member], comm.paddings[member]
    if not rows or dim is None:
        return x
    return jax.lax.slice(x, [0] * x.ndim, _layout.padded_shape(x.shape, dim, -rows))


def small_members(full: Sequence[Any], comm: GroupComm) -> set[int]:
    """Positions of the members that travel packed if there are several, or not at all.

    Args:
        full: arrays of the group when gathered, or their shapes and dtypes.
        comm: how the group travels.
    """
    shapes = (
        _layout.padded_shape(x.shape, dim, rows)
        for x, dim, rows in zip(full, comm.dims, comm.paddings, strict=True)
    )
    return {
        i
        for i, (x, shape, dim) in enumerate(zip(full, shapes, comm.dims))
        if dim is None or _layout.size_bytes(shape, x.dtype) < comm.threshold_bytes
    }
