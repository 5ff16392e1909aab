"""Gather and scatter a group inside a per-device program.

The only file that names `jax.lax` collectives. What must not live here: modules,
Variables, or what happens between a gather and its scatter.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fsdp_jax import _layout
from fsdp_jax._mesh import MeshInfo

Array = jax.Array


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """A value that rides along in a pytree without being traced."""

    value: Any


@dataclasses.dataclass(frozen=True)
class GroupComm:
    """How one group travels. Static and hashable.

    Attributes:
        mesh: mesh and sharding axes of the group.
        dims: cut dim of each member, negative; None for a member kept whole.
        param_dtype: floating members are cast to it before the gather; None: as is.
        reduce_dtype: gradients are summed in it; None: as they were computed.
        divisor: what the sum over devices is divided by.
        threshold_bytes: full members under this size share a buffer.
        name: path of the module, on the collectives in profiles.
    """

    mesh: MeshInfo
    dims: tuple[int | None, ...]
    param_dtype: jnp.dtype | None
    reduce_dtype: jnp.dtype | None
    divisor: float
    threshold_bytes: int
    name: str

    def only(self, members: Sequence[int]) -> GroupComm:
        """How some members of the group travel."""
        return dataclasses.replace(self, dims=tuple(self.dims[i] for i in members))


def cast_floating(x: Array, dtype) -> Array:
    """Cast `x` if it is floating and `dtype` is given."""
    if dtype is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x.astype(dtype)


def _full_shape(shard: Array, dim: int, num_shards: int) -> tuple[int, ...]:
    shape = list(shard.shape)
    shape[dim] *= num_shards
    return tuple(shape)


def _rows_first(x: Array, dim: int, num_shards: int) -> Array:
    """Cut full `x` along `dim` and flatten: `(num_shards, size // num_shards)`."""
    dim %= x.ndim
    cut = x.shape[:dim] + (num_shards, x.shape[dim] // num_shards) + x.shape[dim + 1 :]
    return jnp.moveaxis(x.reshape(cut), dim, 0).reshape(num_shards, -1)


def _rows_back(rows: Array, shard_shape: tuple[int, ...], dim: int) -> Array:
    """Undo `_rows_first`: join `(num_shards, size)` rows along `dim`."""
    num_shards, dim = rows.shape[0], dim % len(shard_shape)
    joined = jnp.moveaxis(rows.reshape((num_shards, *shard_shape)), 0, dim)
    full = list(shard_shape)
    full[dim] *= num_shards
    return joined.reshape(full)


def gather_group(
    shards: Sequence[Array], comm: GroupComm, kind: str = "gather"
) -> list[Array]:
    """Gather the full arrays of a group, small ones in one collective per dtype.

    Args:
        shards: one array per member: the shard, or the whole for a dim of None.
        comm: how the group travels.
        kind: "gather" or "regather", for the name in profiles.

    Returns:
        One full array per member, in `comm.param_dtype` where floating.
    """
    shards = [cast_floating(s, comm.param_dtype) for s in shards]
    n = comm.mesh.num_shards
    full = list(shards)
    cut = [i for i, dim in enumerate(comm.dims) if dim is not None and n > 1]
    shapes = [_full_shape(shards[i], _dim(comm, i), n) for i in cut]
    buckets = _layout.make_buckets(
        shapes, [shards[i].dtype for i in cut], comm.threshold_bytes
    )
    for bucket in buckets:
        members = [cut[m] for m in bucket.members]
        if not bucket.packed:
            (i,) = members
            full[i] = _all_gather(shards[i], comm, _dim(comm, i), kind)
            continue
        flat = jnp.concatenate([shards[i].reshape(-1) for i in members])
        rows = _all_gather(flat[None], comm, 0, kind)
        for i, piece in zip(members, _split(rows, [shards[i].size for i in members])):
            full[i] = _rows_back(piece, shards[i].shape, _dim(comm, i))
    return full


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


def scatter_group(
    grads: Sequence[Array | None], dtypes: Sequence, comm: GroupComm
) -> list[Array | None]:
    """Sum full gradients over the devices and keep this device's shard.

    Members of dim None are not summed here: they have no shard, and whoever
    differentiates averages them once with all other whole parameters.

    Args:
        grads: one full gradient per member; None where there is nothing to reduce.
        dtypes: dtype of each member at rest, which its gradient gets back.
        comm: how the group travels.

    Returns:
        One gradient per member, shaped as the shard and divided by `comm.divisor`.
    """
    n = comm.mesh.num_shards
    out: list[Array | None] = list(grads)
    cut, wire, factors = [], [], []
    for i, (grad, dim) in enumerate(zip(grads, comm.dims, strict=True)):
        if grad is None:
            continue
        if dim is None:
            out[i] = grad.astype(dtypes[i])
            continue
        reduced = cast_floating(grad, comm.reduce_dtype)
        before, after = _layout.divide_factors(reduced.dtype, comm.divisor)
        cut.append(i)
        wire.append(reduced / before if before != 1 else reduced)
        factors.append(after)
    buckets = _layout.make_buckets(
        [g.shape for g in wire], [g.dtype for g in wire], comm.threshold_bytes
    )
    for bucket in buckets:
        if bucket.packed and n > 1:
            rows = [_rows_first(wire[m], _dim(comm, cut[m]), n) for m in bucket.members]
            sums = _reduce_scatter(jnp.concatenate(rows, axis=1), comm, 0)
            pieces = _split(sums, [r.shape[1] for r in rows])
        else:
            pieces = [
                _reduce_scatter(wire[m], comm, _dim(comm, cut[m]))
                for m in bucket.members
            ]
        for m, piece in zip(bucket.members, pieces):
            i = cut[m]
            full = grads[i]
            assert full is not None
            shape = _layout.shard_shape(full.shape, comm.dims[i], n)
            mean = piece / factors[m] if factors[m] != 1 else piece
            out[i] = mean.reshape(shape).astype(dtypes[i])
    return out


def _dim(comm: GroupComm, member: int) -> int:
    dim = comm.dims[member]
    assert dim is not None
    return dim


def _split(rows: Array, sizes: Sequence[int]) -> list[Array]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(jax.lax.slice_in_dim(rows, start, start + size, axis=1))
        start += size
    return pieces


def _scope(kind: str, name: str):
    """Names a collective in profiles and reports: `fsdp:gather:blocks.3`."""
    plain = re.sub(r"[^\w.\-]", "_", name, flags=re.ASCII)  # a scope is a path
    return jax.named_scope(f"fsdp:{kind}:{plain}")


def _all_gather(x: Array, comm: GroupComm, dim: int, kind: str) -> Array:
    with _scope(kind, comm.name):
        for axes in comm.mesh.gather_stages:
            x = jax.lax.all_gather(x, axes, axis=dim % x.ndim, tiled=True)
    return x


# Of few long rows XLA:TPU makes an all-reduce, twice the traffic, unless it finds a way
# to cut their length: 32,000 no, 32,768 yes. Of the same rows as tiles of 128 it makes
# a reduce-scatter. Shorter ones need no help. benchmarks/README.md, "Few rows".
_FEW_ROWS, _SHORT, _TILE = 16, 14336, 128


def _reduce_scatter(x: Array, comm: GroupComm, dim: int) -> Array:
    dim %= x.ndim
    stages = zip(comm.mesh.shard_axes, comm.mesh.axis_sizes)
    with _scope("reduce_scatter", comm.name):
        for stage, (axis, size) in enumerate((a, s) for a, s in stages if s > 1):
            shape = list(x.shape)
            shape[dim] //= size
            few = stage > 0 and dim == 0 and shape[0] <= _FEW_ROWS
            if few and x.ndim == 2 and shape[1] % _TILE == 0 and shape[1] > _SHORT:
                x = x.reshape(x.shape[0], -1, _TILE)
            x = jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
            x = x.reshape(shape)
    return x


def own_shard(full: Array, dim: int | None, mesh: MeshInfo, divisor: float) -> Array:
    """This device's piece of a gathered array that every device holds alike.

    The gradient of the piece is complete already, while that of the gathered array is
    summed over devices and divided by `divisor`: it is scaled up to survive that.
    """
    if dim is None or mesh.num_shards == 1:
        return full
    size = full.shape[dim] // mesh.num_shards
    axis = dim % full.ndim

    def plain(full):
        start = device_index(mesh) * size
        return jax.lax.dynamic_slice_in_dim(full, start, size, axis=axis)

    def backward(shape, ct):
        start = device_index(mesh) * size
        zeros = jnp.zeros(shape.value, ct.dtype)
        return (
            jax.lax.dynamic_update_slice_in_dim(zeros, ct * divisor, start, axis=axis),
        )

    cut = jax.custom_vjp(plain)
    cut.defvjp(lambda full: (plain(full), Static(full.shape)), backward)
    return cut(full)


def device_index(mesh: MeshInfo) -> Array:
    """Position of this device among the data devices, row-major, shape ()."""
    return jax.lax.axis_index(mesh.shard_axes)


def sum_over_devices(x, mesh: MeshInfo, name: str):
    """Sum a pytree over the data devices in as few collectives as XLA can."""
    with _scope("all_reduce", name):
        return jax.lax.psum(x, mesh.shard_axes) if mesh.num_shards > 1 else x


def mean_over_devices(x, mesh: MeshInfo, name: str):
    """Mean of a pytree of floating arrays over the data devices."""
    n, total = mesh.num_shards, sum_over_devices(x, mesh, name)
    return jax.tree.map(lambda s: s / n if n > 1 else s, total)
