"""Gather and scatter a group inside a per-device program.

The only file that names `jax.lax` collectives. What must not live here: modules,
Variables, or what happens between a gather and its scatter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from fsdp_jax import _layout
from fsdp_jax._comm import GroupComm, cast_floating, padded, unpadded
from fsdp_jax._mesh import MeshInfo, Others
from fsdp_jax._move import to_space
from fsdp_jax._raw_reads import SCOPE

Array = jax.Array


def _full_shape(shard: Array, dim: int, num_shards: int) -> tuple[int, ...]:
    return _layout.padded_shape(shard.shape, dim, shard.shape[dim] * (num_shards - 1))


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


@jax.named_scope(SCOPE)
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
    shards = [cast_floating(s, comm.param_dtype) for s in on_devices(shards, comm)]
    n = comm.mesh.num_shards
    full = list(shards)
    cut = [i for i, dim in enumerate(comm.dims) if dim is not None and n > 1]
    travelling = comm.only(cut)

    def gather(shards: list[Array]) -> list[Array]:
        dims, full = [_dim(travelling, i) for i in range(len(shards))], list(shards)
        buckets = _layout.make_buckets(
            [_full_shape(s, dim, n) for s, dim in zip(shards, dims)],
            [s.dtype for s in shards],
            comm.threshold_bytes,
        )
        for bucket in buckets:
            members = bucket.members
            if not bucket.packed:
                (i,) = members
                full[i] = _all_gather(shards[i], comm, dims[i], kind)
                continue
            flat = jnp.concatenate([shards[i].reshape(-1) for i in members])
            rows = _all_gather(flat[None], comm, 0, kind)
            pieces = _split(rows, [shards[i].size for i in members])
            for i, piece in zip(members, pieces):
                full[i] = _rows_back(piece, shards[i].shape, dims[i])
        return full

    gathered = _on_pieces(gather, travelling)([shards[i] for i in cut])
    for i, x in zip(cut, gathered, strict=True):
        full[i] = unpadded(x, comm, i)
    return full


@jax.named_scope(SCOPE)
def on_devices(shards: Sequence[Array], comm: GroupComm) -> list[Array]:
    """The shards in device memory.

    Before anything waits for them: on TPU a barrier over arrays in both memories makes
    XLA compute on the host (jax 0.10.2, libtpu 0.0.42).
    """
    if not comm.offloaded:
        return list(shards)
    return [to_space(s, jax.memory.Space.Device) for s in shards]


def _on_pieces(f: Callable, comm: GroupComm) -> Callable:
    """`f`, a function of one array per member, on pieces over the other axes too.

    Otherwise XLA would gather a member over those axes before every collective over the
    data axes. What `f` returns is cut over the other axes as the members are.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    axes = {a for o in comm.others for _, names in o for a in names} - set(manual)
    if not axes:
        return f

    def spec(x: Array, others: Others) -> PartitionSpec:
        entries: list[Any] = [None] * x.ndim
        for at, names in others:
            entries[at] = tuple(a for a in names if a in axes) or None
        return PartitionSpec(*entries)

    def on_pieces(arrays: list[Array]) -> list[Array]:
        specs = [spec(x, o) for x, o in zip(arrays, comm.others, strict=True)]
        return jax.shard_map(
            f, in_specs=(specs,), out_specs=specs, axis_names=axes, check_vma=False
        )(arrays)

    return on_pieces


@jax.named_scope(SCOPE)
def scatter_group(
    grads: Sequence[Array | None], dtypes: Sequence, comm: GroupComm
) -> list[Array | None]:
    """Sum full gradients over the devices and keep this device's shard.

    What `comm.defer` names is left out. Members of dim None are not summed here: they
    have no shard, and whoever differentiates averages them once with all other whole
    parameters.

    Args:
        grads: one full gradient per member; None where there is nothing to reduce.
        dtypes: dtype that each gradient gets.
        comm: how the group travels.

    Returns:
        One gradient per member, shaped as the shard and divided by what the sums so far
        are divided by; a full one, as it was, if all is left out.

    Raises:
        RuntimeError: reductions are to be left out, and the program has no place for
            gradients that are not reduced.
    """
    if comm.defer == "refuse" and any(g is not None for g in grads):
        raise RuntimeError(
            f"the gradients of module {comm.name or 'the root'!r} are not to be "
            "reduced (set_requires_gradient_sync or set_requires_all_reduce is False), "
            "but only fsdp_jax.value_and_grad and grad can return such gradients. Use "
            "them, or set gradient sync to True."
        )
    out: list[Array | None] = list(grads)
    for i, grad in enumerate(grads):
        if grad is not None and comm.dims[i] is None:
            out[i] = grad.astype(dtypes[i])
    cut = [i for i, g in enumerate(grads) if g is not None and comm.dims[i] is not None]
    there: list[Any] = [grads[i] for i in cut]
    wire = [cast_floating(g, comm.reduce_dtype) for g in there]
    if comm.defer == "all":
        for i, g in zip(cut, wire, strict=True):
            out[i] = g.astype(dtypes[i])
        return out
    here, mesh = comm.defer == "all_reduce", comm.mesh
    divisor = comm.divisors[0] if here else comm.divisor
    count = mesh.num_shards if here else mesh.num_devices
    factors = [_layout.divide_factors(g.dtype, divisor, count) for g in wire]
    travelling = comm.only(cut)
    scatter = _on_pieces(lambda wire: _scatter(wire, factors, travelling), travelling)
    for i, g, (_, last) in zip(cut, scatter(wire), factors, strict=True):
        g = g.astype(dtypes[i])
        out[i] = g / last if last < 1 else g
    return out


def _scatter(
    wire: list[Array], factors: Sequence[tuple[float, float]], comm: GroupComm
) -> list[Array]:
    """Reduce full gradients to shards, and over replicas unless that is deferred.

    Args:
        wire: one full gradient per member.
        factors: what each is divided by, before and after; after not if less than one.
        comm: how the members travel.
    """
    wire = [padded(g, comm, i) for i, g in enumerate(wire)]
    n, replicas = comm.mesh.num_shards, comm.mesh.replicate_axes
    here = comm.defer == "all_reduce"
    sums: list[Any] = [_divided(g, f[0]) for g, f in zip(wire, factors, strict=True)]
    for bucket in _layout.make_buckets(
        [g.shape for g in wire], [g.dtype for g in wire], comm.threshold_bytes
    ):
        if bucket.packed and comm.mesh.num_devices > 1:
            rows = [_rows_first(sums[m], _dim(comm, m), n) for m in bucket.members]
            total = _reduce_scatter(jnp.concatenate(rows, axis=1), comm, 0)
            if not here:
                total = sum_over_devices(total, comm.mesh, comm.name, replicas)
            pieces = _split(total, [r.shape[1] for r in rows])
        else:
            pieces = [
                _reduce_scatter(sums[m], comm, _dim(comm, m)) for m in bucket.members
            ]
            if not here:
                pieces = sum_over_devices(pieces, comm.mesh, comm.name, replicas)
        for m, piece in zip(bucket.members, pieces):
            shape = _layout.shard_shape(wire[m].shape, comm.dims[m], n)
            sums[m] = _divided(piece, max(factors[m][1], 1)).reshape(shape)
    return sums


@jax.named_scope(SCOPE)
def all_reduce_group(
    grads: Sequence[Array], dtypes: Sequence, comm: GroupComm, axes: tuple[str, ...]
) -> list[Array]:
    """Sum gradients over some axes, small ones in one collective per dtype.

    Args:
        grads: one per member, alike in shape on all devices along `axes`.
        dtypes: dtype that each gradient gets.
        comm: how the group travels.
        axes: the replicating axes for shards that are summed over the others already,
            all data axes for members that are kept whole.
    """
    whole = axes == comm.mesh.data_axes
    divisor = comm.divisor if whole else comm.divisors[1]
    count = comm.mesh.size(axes)

    def reduce(wire: list[Array]) -> list[Array]:
        sums = [_divided(g, f[0]) for g, f in zip(wire, factors)]
        for bucket in _layout.make_buckets(
            [g.shape for g in wire], [g.dtype for g in wire], comm.threshold_bytes
        ):
            members = bucket.members
            if bucket.packed:
                flat = jnp.concatenate([sums[m].reshape(-1) for m in members])
                total = sum_over_devices(flat[None], comm.mesh, comm.name, axes)
                pieces = _split(total, [sums[m].size for m in members])
            else:
                alone = [sums[m] for m in members]
                pieces = sum_over_devices(alone, comm.mesh, comm.name, axes)
            for m, piece in zip(members, pieces):
                last = max(factors[m][1], 1)
                sums[m] = _divided(piece.reshape(sums[m].shape), last)
        return sums

    wire = [cast_floating(g, comm.reduce_dtype) for g in grads]
    factors = [_layout.divide_factors(g.dtype, divisor, count) for g in wire]
    done = [g.astype(d) for g, d in zip(_on_pieces(reduce, comm)(wire), dtypes)]
    return [g / f[1] if f[1] < 1 else g for g, f in zip(done, factors)]


def _divided(x: Array, by: float) -> Array:
    return x / by if by != 1 else x


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
    plain = plain or "(root)"  # XLA drops a name that ends with a colon
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


@jax.named_scope(SCOPE)
def own_shard(full: Array, comm: GroupComm) -> Array:
    """This device's piece of a gathered array that every device holds alike.

    Args:
        full: the one member of a group.
        comm: how that travels.
    """
    (dim,), mesh = comm.dims, comm.mesh
    if dim is None:
        return full

    def cut(arrays):
        whole = padded(arrays[0], comm, 0)
        axis = dim % whole.ndim
        size = whole.shape[axis] // mesh.num_shards
        start = device_index(mesh, mesh.shard_axes) * size
        return [jax.lax.dynamic_slice_in_dim(whole, start, size, axis=axis)]

    return _on_pieces(cut, comm)([full])[0]


def device_index(mesh: MeshInfo, axes: Sequence[str] | None = None) -> Array:
    """Position of this device along axes, all data axes by default, shape ()."""
    return jax.lax.axis_index(tuple(mesh.data_axes if axes is None else axes))


def sum_over_devices(x, mesh: MeshInfo, name: str, axes: Sequence[str] | None = None):
    """Sum a pytree over the data devices in as few collectives as XLA can.

    Args:
        x: the pytree.
        mesh: mesh and the roles of its axes.
        name: for profiles.
        axes: those of the data axes to sum over; None for all.
    """
    axes = tuple(mesh.data_axes if axes is None else axes)
    with _scope("all_reduce", name):
        return jax.lax.psum(x, axes) if mesh.size(axes) > 1 else x


def sum_of_pieces(
    f: Callable[[Array], Array],
    arrays: Sequence[Array],
    specs: Sequence[PartitionSpec],
    mesh: Mesh,
) -> Array:
    """The sum over arrays and all their pieces of a function that returns scalars.

    Called on global arrays. Every piece counts once, however many devices hold it, and
    one scalar is summed over the devices.

    Args:
        f: of one piece.
        arrays: global arrays.
        specs: how each of them is cut over the mesh.
        mesh: whose devices hold them.
    """

    def per_device(pieces: list[Array]) -> Array:
        total = jnp.zeros(())
        for x, spec in zip(pieces, specs, strict=True):
            cut = {a for e in spec if e for a in (e if isinstance(e, tuple) else (e,))}
            copies = mesh.size // math.prod(mesh.shape[a] for a in cut)
            total = total + _divided(f(x), copies)
        with _scope("all_reduce", "norm"):
            return jax.lax.psum(total, mesh.axis_names) if mesh.size > 1 else total

    return jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=(list(specs),),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(list(arrays))
