"""The mesh of a call, and `shard_batch`.

What must not live here: how arguments are cut in a call (`_arguments`), and running
anything.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from fsdp_jax import _arguments, _functional, _opaque
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._move import move
from fsdp_jax._state import sharded_modules, state_of


def mesh_of(nodes: Sequence[Any], who: str) -> MeshInfo:
    """The one mesh that all sharded modules in `nodes` share.

    Raises:
        ValueError: there is no sharded module, or there are several meshes.
    """
    modules = [m for node in nodes for m in sharded_modules(node)]
    if not modules:
        raise ValueError(
            f"{who}: no argument is, or contains, a module that fully_shard was "
            "applied to. Shard the model first, or use nnx for an unsharded one."
        )
    meshes = {state_of(m).mesh for m in modules}
    if len(meshes) > 1:
        raise ValueError(
            f"{who}: the sharded modules live on {len(meshes)} different meshes. Shard "
            "all modules of one program over one mesh."
        )
    return meshes.pop()


def check_context(mesh: MeshInfo, who: str) -> None:
    """Raise if `jax.set_mesh` has set another mesh than the model's."""
    context, own = jax.sharding.get_abstract_mesh(), mesh.mesh
    if context.empty:
        return
    if (context.axis_names, context.axis_sizes) != (own.axis_names, own.axis_sizes):
        raise ValueError(
            f"{who}: jax.set_mesh has set a mesh with axes {context.axis_names} of "
            f"sizes {context.axis_sizes}, but the model is sharded over "
            f"{own.axis_names} of sizes {own.axis_sizes}. Shard the model over the "
            "mesh that is set, or call this under the model's own mesh."
        )


def shard_batch(batch: Any, model: Any) -> Any:
    """Place host arrays on the model's mesh, cut on dim 0 over the data devices.

    In a program of several processes each passes its own part of the global batch, the
    same number of rows everywhere, in the order of the process index. They compare
    their numbers of rows first, which waits for work that the devices have yet to do;
    where that matters use `jax.make_array_from_process_local_data`.

    Args:
        batch: tree of arrays, `(rows, ...)` of this process; scalars are replicated. A
            `jax.ShapeDtypeStruct` stands for the rows of all processes and stays one.
        model: a sharded module, or one that contains some; also a Linen one.

    Returns:
        The tree with global `jax.Array`s, `(rows of all processes, ...)`.

    Raises:
        ValueError: no sharded module in `model`, the rows of this process do not divide
            over its data devices, or another process has another number of rows.
        TypeError: a leaf that is neither an array nor a number.

    Source: README, "The loop".
    """
    who = "shard_batch"
    mesh = mesh_of(_functional.model_nodes(model), who)
    here = mesh.places_here()
    if mesh.num_devices > 1:
        rows = {np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x)}
        _opaque.check_nodes(who, "batch", batch, rows, "leave it out of shard_batch")

    def place(keys: Any, x: Any) -> Any:
        path = "batch" + jax.tree_util.keystr(keys)
        if mesh.compile_only or isinstance(x, jax.ShapeDtypeStruct):
            x = jax.eval_shape(jnp.asarray, x)
            return move(
                x, NamedSharding(mesh.mesh, _arguments.default_spec(path, x, mesh, who))
            )
        if not _functional.is_array(x) and not isinstance(x, (bool, int, float)):
            _opaque.check(who, path, x)
            raise TypeError(f"{who}: {path} is a {type(x).__name__}, not an array.")
        if isinstance(x, Tracer):
            raise TypeError(
                f"{who}: {path} is being traced. Call shard_batch outside of jit; "
                "value_and_grad cuts traced arrays itself."
            )
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return move(
                x, NamedSharding(mesh.mesh, _arguments.default_spec(path, x, mesh, who))
            )
        host = x if isinstance(x, jax.Array) else np.asarray(x)
        if isinstance(host.dtype, np.dtype) and host.dtype.kind in "OSU":
            raise TypeError(f"{who}: {path} has dtype {host.dtype}, not numbers.")
        if host.ndim == 0:
            return move(host, mesh.sharding(0, None))
        if host.shape[0] % here:
            raise ValueError(
                f"{who}: {path} has {host.shape[0]} rows, which do not divide over the "
                f"{here} devices of this process. Pad or trim the batch."
            )
        target = NamedSharding(mesh.mesh, mesh.data_spec())
        if target.is_fully_addressable:
            return jax.device_put(host, target)
        if jnp.issubdtype(host.dtype, jax.dtypes.prng_key):
            data = np.asarray(jax.random.key_data(host))
            data = jax.make_array_from_process_local_data(target, data)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(host))
        return jax.make_array_from_process_local_data(target, np.asarray(host))

    _agree_on_rows(batch, mesh)
    return jax.tree_util.tree_map_with_path(place, batch)


_NUM_COMPARED = 64


def _agree_on_rows(batch: Any, mesh: MeshInfo) -> None:
    """Raise in every process if processes bring different numbers of rows.

    With different sizes they would compile different programs, whose collectives then
    wait for each other or mix up their data. Each call compares a vector of fixed
    length, so that this very comparison cannot go wrong in that way.
    """
    if jax.process_count() == 1 or mesh.mesh.devices.size != jax.device_count():
        return
    leaves = [
        (jax.tree_util.keystr(keys), np.shape(x)[0])
        for keys, x in jax.tree_util.tree_leaves_with_path(batch)
        if np.ndim(x) and getattr(x, "is_fully_addressable", True)
    ]
    mine = np.full(_NUM_COMPARED + 1, -1, np.int32)
    rows = [size for _, size in leaves[:_NUM_COMPARED]]
    mine[: len(rows)] = rows
    mine[-1] = zlib.crc32(repr(leaves).encode()) & 0x7FFFFFFF
    everyone = np.asarray(multihost_utils.process_allgather(mine))
    if (everyone == mine).all():
        return
    differ = int(np.argmax((everyone != everyone[0]).any(axis=0)))
    found = "the arrays have other names, or are more than the first 64"
    if differ < _NUM_COMPARED:
        key = leaves[differ][0] if differ < len(rows) else ""
        found = (
            f"batch{key} has {everyone[:, differ].tolist()} rows in the processes 0, "
            "1, ... (-1: no such array)"
        )
    raise ValueError(
        f"shard_batch: processes bring different batches: {found}. Every process must "
        "bring the same arrays with the same number of rows. Pad or trim them."
    )
