"""How one parameter rests: on which dim it is cut, and within what other cuts.

What must not live here: changing anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from fsdp_jax import _layout
from fsdp_jax._mesh import MeshInfo, Others
from fsdp_jax._param import ParamSpec
from fsdp_jax._policies import Shard


def rest_of(
    name: str,
    variable: Any,
    info: MeshInfo,
    placement_fn: Callable[[Any], Shard | None] | None,
    memory_kind: str | None,
) -> ParamSpec:
    """Decide how one parameter rests.

    Args:
        name: its dotted name.
        variable: that holds it.
        info: mesh and the roles of its axes.
        placement_fn: as the user gave it.
        memory_kind: of the memory that it rests in; None for device memory.

    Raises:
        ValueError, NotImplementedError: it cannot rest on this mesh, or not as asked.
    """
    value = variable.get_raw_value()
    kinds = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    if not isinstance(value, kinds):
        raise ValueError(
            f"fully_shard: parameter {name!r} holds a {type(value).__name__}, not an "
            "array. Pass it in ignored_params."
        )
    if not value.shape:
        raise ValueError(
            f"fully_shard: parameter {name!r} has no dimensions, so there is no dim 0 "
            "to cut. Give it shape (1,), or pass it in ignored_params."
        )
    n, shape = info.num_shards, tuple(value.shape)
    where: dict[str, Any] = {
        "others": _others(name, value, info),
        "memory_kind": memory_kind,
    }
    asked = placement_fn(variable) if placement_fn is not None else None
    if asked is not None and not isinstance(asked, Shard):
        raise ValueError(
            f"fully_shard: shard_placement_fn returned {asked!r} for parameter "
            f"{name!r}. Return Shard(dim) or None."
        )
    if asked is not None and not -len(shape) <= asked.dim < len(shape):
        raise ValueError(
            f"fully_shard: shard_placement_fn returned {asked} for parameter {name!r} "
            f"of shape {shape}, which has no such dim. Give one of 0 to "
            f"{len(shape) - 1}."
        )
    if not info.shard_axes:
        return ParamSpec(name, None, 0, info, "no axis of the mesh shards", **where)
    by_dim = dict(where["others"])
    blocks = [info.size(by_dim.get(d, ())) for d in range(-len(shape), 0)]
    if asked is None or asked.dim in (0, -len(shape)):
        dim, reason = _layout.choose_dim(shape, n, blocks)
        size = shape[dim] if dim is not None else 0
        return ParamSpec(name, dim, size, info, reason, **where)
    dim = asked.dim if asked.dim < 0 else asked.dim - len(shape)
    if shape[dim] % (n * blocks[dim]) or not shape[dim]:
        raise NotImplementedError(
            f"fully_shard: shard_placement_fn returned {asked} for parameter {name!r} "
            f"of shape {shape}, but {shape[dim]} does not divide over {n} devices"
            + (f" in each of {blocks[dim]} pieces" if blocks[dim] > 1 else "")
            + ". Return another dim, or None."
        )
    return ParamSpec(name, dim, shape[dim], info, **where)


def _others(name: str, value: Any, info: MeshInfo) -> Others:
    """The dims of a parameter that axes without a data role cut.

    Raises:
        ValueError: the mesh has such axes, and the parameter is not distributed over
            it, or is cut over a data axis already.
    """
    if info.size(info.other_axes) == 1:
        return ()
    found = jax.typeof(value) if isinstance(value, Tracer) else value
    sharding = getattr(found, "sharding", None)
    how = (
        "Put it there first: jax.device_put(value, NamedSharding(mesh, spec)), with "
        "PartitionSpec() for one that no axis cuts."
    )
    if not isinstance(sharding, NamedSharding):
        raise ValueError(
            f"fully_shard: parameter {name!r} is not distributed over the mesh, whose "
            f"axes {info.other_axes} have no data role: found {sharding}. {how}"
        )
    mesh, own = sharding.mesh, info.mesh
    same = (mesh.axis_names, mesh.axis_sizes) == (own.axis_names, own.axis_sizes)
    if isinstance(mesh, Mesh):
        same = same and bool((mesh.devices == own.devices).all())
    if not same:
        raise ValueError(
            f"fully_shard: parameter {name!r} is distributed over {mesh}, which is not "
            f"the same mesh as {own}. {how}"
        )
    others = []
    for dim, entry in enumerate(sharding.spec):
        axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
        if taken := [axis for axis in axes if axis in info.data_axes]:
            raise ValueError(
                f"fully_shard: parameter {name!r} is cut over the data axes {taken} "
                f"already ({sharding.spec}). Expected Replicate() on them, that is a "
                f"spec that leaves {info.data_axes} unused. {how}"
            )
        if axes:
            others.append((dim - len(value.shape), tuple(axes)))
    return tuple(others)
