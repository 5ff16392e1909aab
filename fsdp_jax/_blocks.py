"""The order of rows of a parameter whose cut dim other axes of the mesh cut too.

At rest such a dim is cut over the other axes first and each of those blocks over the
sharding axes. A per-device program cuts a dim over its own axes first, so that the rows
change places on the way in and out; no device moves any data for it. What must not live
here: anything that gathers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fsdp_jax._move import constrain, in_order, to_rest, to_space
from fsdp_jax._policies import PINNED_HOST
from fsdp_jax._spec import ParamSpec


def _swap(x: jax.Array, dim: int, outer: int, inner: int) -> jax.Array:
    """Rows of `dim` in order `(outer, inner, rest)` to order `(inner, outer, rest)`."""
    at = dim % x.ndim
    cut = (*x.shape[:at], outer, inner, -1, *x.shape[at + 1 :])
    return jnp.swapaxes(x.reshape(cut), at, at + 1).reshape(x.shape)


def enter_program(x: Any, param: ParamSpec | None) -> Any:
    """A global array as a per-device program cuts it.

    What the program does not gather comes in device memory, to be computed with:
    there the devices' cotangents of it are added up.
    """
    if param is not None and param.memory_kind is not None and not param.cut:
        x = to_space(x, jax.memory.Space.Device)
    if param is None or param.blocks == 1 or param.dim is None:
        return x
    return _swap(x, param.dim, param.blocks, param.mesh.num_shards)


def leave_program(x: Any, param: ParamSpec | None, lead: tuple[str, ...] = ()) -> Any:
    """A global array out of a per-device program, as the parameter rests.

    Args:
        x: like the parameter, or one of them per replica.
        param: how the parameter rests.
        lead: the axes that cut a dim in front of the parameter's.
    """
    if param is None:
        return x
    if param.blocks > 1 and param.dim is not None:
        x = _swap(x, param.dim, param.mesh.num_shards, param.blocks)
    if param.others:
        dim = param.dim if param.cut else None
        rest = param.mesh.sharding(x.ndim, dim, param.others)
        if lead:
            rest = NamedSharding(rest.mesh, PartitionSpec(lead, *rest.spec[1:]))
        x = constrain(x, rest)
    if lead:
        return x
    if param.memory_kind == PINNED_HOST and param.mesh.platform == "tpu":
        x = in_order(x)
    return to_rest(x, param.memory_kind)
