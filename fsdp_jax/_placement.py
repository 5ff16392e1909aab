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
from fsdp_jax._policies import Shard
from fsdp_jax._spec import ParamSpec
from fsdp_jax._stacks import named_layer_dims

PlacementFn = Callable[[Any], Shard | None]
UNEVEN = ("auto", "pad", "error")


def largest_dim(param: Any) -> Shard | None:
    """A `shard_placement_fn` that cuts the largest dim, the first one of equals.

    For parameters whose dim 0 is small or odd, such as convolution kernels `(height,
    width, in, out)`. A layer dim that NNX metadata names is left out. Where the dim
    does not divide, `uneven` says what happens, as for dim 0.

    Args:
        param: a parameter's Variable.

    Returns:
        `Shard(dim)`; None for a scalar.

    Source: README, "Which dim is cut"; PyTorch has no default but dim 0.
    """
    shape, layers = tuple(param.shape), named_layer_dims(param)
    dims = range(layers, len(shape))
    return Shard(max(dims, key=lambda d: shape[d])) if dims else None


def check_placement(who: str, placement_fn: Any, uneven: Any) -> None:
    """Raise unless the arguments that choose the dim to cut are what they may be.

    Raises:
        TypeError: `placement_fn` cannot be called.
        ValueError: an unknown `uneven`.
    """
    if placement_fn is not None and not callable(placement_fn):
        raise TypeError(
            f"{who}: shard_placement_fn must be callable, got "
            f"{type(placement_fn).__name__}."
        )
    if uneven not in UNEVEN:
        raise ValueError(f"{who}: uneven must be one of {UNEVEN}, got {uneven!r}.")


def rest_of(
    name: str,
    variable: Any,
    info: MeshInfo,
    placement_fn: PlacementFn | None,
    memory_kind: str | None,
    uneven: str,
    layers: int,
) -> ParamSpec:
    """Decide how one parameter rests.

    Args:
        name: its dotted name.
        variable: that holds it.
        info: mesh and the roles of its axes.
        placement_fn: as the user gave it.
        memory_kind: of the memory that it rests in; None for device memory.
        uneven: what to do where a dim does not divide, one of `UNEVEN`.
        layers: how many of its leading dims count layers.

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
    n, shape = info.num_shards, tuple(value.shape)
    asked = _asked(name, variable, shape, placement_fn)
    others = _others(name, value, info)

    def spec(dim: int | None, reason: str = "", padding: int = 0) -> ParamSpec:
        size = shape[dim] if dim is not None else 0
        where: dict[str, Any] = {"others": others, "memory_kind": memory_kind}
        return ParamSpec(
            name, dim, size, info, reason, padding=padding, layers=layers, **where
        )

    if not shape:
        return spec(None, "a scalar has no dim to cut")
    if not info.shard_axes:
        return spec(None, "no axis of the mesh shards")
    by_dim = dict(others)
    blocks = [info.size(by_dim.get(d, ())) for d in range(-len(shape), 0)]
    if 0 in shape:
        return spec(None, f"shape {shape} has no elements")
    first = layers - len(shape)
    elsewhere = asked is not None and asked.dim not in (0, -len(shape))
    explicit = elsewhere and placement_fn is not largest_dim
    dim = asked.dim % len(shape) - len(shape) if asked and elsewhere else first
    if first >= 0:
        return spec(None, f"all dims of {shape} count layers")
    pieces = n * blocks[dim]
    if shape[dim] % pieces == 0:
        return spec(dim)
    if uneven == "pad":
        if blocks[dim] > 1:
            raise NotImplementedError(
                f"fully_shard: parameter {name!r} of shape {shape} is cut over "
                f"{by_dim[dim]} on dim {dim}, and its pieces do not divide over {n} "
                "devices. uneven='pad' cannot pad within pieces: use uneven='auto', or "
                "cut another dim with shard_placement_fn."
            )
        return spec(dim, padding=_layout.padding_for(shape[dim], n))
    if uneven == "error" or explicit:
        where = f" in each of {blocks[dim]} pieces" if blocks[dim] > 1 else ""
        raise (ValueError if uneven == "error" else NotImplementedError)(
            f"fully_shard: parameter {name!r} of shape {shape} is to be cut on dim "
            f"{dim + len(shape)}, but {shape[dim]} does not divide over {n} devices"
            f"{where}. Use uneven='pad', or cut another dim with shard_placement_fn"
            + (", or uneven='auto'." if uneven == "error" and not explicit else ".")
        )
    chosen, reason = _layout.choose_dim(shape, n, blocks, first)
    return spec(chosen, reason)


def _asked(
    name: str, variable: Any, shape: tuple[int, ...], placement_fn: PlacementFn | None
) -> Shard | None:
    """What the user's function says of a parameter.

    Raises:
        ValueError: no placement, or one on a dim that the parameter does not have.
    """
    asked = placement_fn(variable) if placement_fn is not None else None
    if asked is not None and not isinstance(asked, Shard):
        raise ValueError(
            f"fully_shard: shard_placement_fn returned {asked!r} for parameter "
            f"{name!r}. Return Shard(dim) or None."
        )
    if asked is not None and not -len(shape) <= asked.dim < len(shape):
        advice = f"one of 0 to {len(shape) - 1}" if shape else "None for a scalar"
        raise ValueError(
            f"fully_shard: shard_placement_fn returned {asked} for parameter {name!r} "
            f"of shape {shape}, which has no such dim. Give {advice}."
        )
    return asked


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
