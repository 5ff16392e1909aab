"""Putting a value under a sharding, whatever kind of value it is.

What must not live here: which sharding, and the Variables that hold values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, NamedSharding

from fsdp_jax._compiled import compiled
from fsdp_jax._layout import padded_shape
from fsdp_jax._policies import PINNED_HOST


@functools.lru_cache(maxsize=256)
def mover(targets: tuple[NamedSharding, ...]) -> Callable:
    """A compiled identity that puts arrays under shardings, one dispatch for all."""
    return compiled(lambda *xs: xs, out_shardings=targets)


def move(value: Any, target: NamedSharding) -> Any:
    """Put a value under a sharding, whatever kind of value it is.

    Concrete arrays are copied (also across processes), traced ones constrained,
    abstract ones relabelled.
    """
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=target)
    if isinstance(value, Tracer):
        return constrain(value, target)
    if getattr(value, "sharding", None) == target:
        return value
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return mover((target,))(value)[0]
    if target.is_fully_addressable:
        return jax.device_put(value, target)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = move(jax.random.key_data(value), target)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, target, lambda index: host[index])


def place(value: Any, target: NamedSharding) -> Any:
    """Bring an argument to the mesh; of traced ones only those on Explicit axes."""
    if isinstance(value, Tracer) and AxisType.Explicit not in target.mesh.axis_types:
        return value
    return move(value, target)


def pad(value: Any, dim: int, rows: int) -> Any:
    """Add rows of zeros at the end of a dim of a value of any kind."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(padded_shape(value.shape, dim, rows), value.dtype)
    widths = [(0, 0)] * value.ndim
    widths[dim] = (0, rows)
    if isinstance(value, np.ndarray):
        return np.pad(value, widths)
    return jnp.pad(value, widths)


def unpad(value: Any, dim: int, rows: int, whole: NamedSharding) -> Any:
    """Take rows away at the end of a dim of a value that rests.

    On the devices. XLA keeps a traced one cut, on axes of which JAX lets it decide;
    else it comes whole: JAX refuses arrays whose rows do not divide.

    Args:
        value: of any kind.
        dim: from which dim.
        rows: how many.
        whole: the sharding of the whole array.
    """
    shape = padded_shape(value.shape, dim, -rows)
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, value.dtype, sharding=whole)
    if isinstance(value, Tracer) and AxisType.Explicit not in whole.mesh.axis_types:
        if is_away(value):
            value = to_space(value, jax.memory.Space.Device)
    else:
        value = move(value, whole)
    return jax.lax.slice(value, [0] * len(shape), shape)


def memory_space(value: Any) -> Any:
    """The memory in which a trace knows a value to be."""
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    return host if is_away(value) else device


def to_space(value: Any, space: Any) -> Any:
    """Put an array into a memory; its cotangent goes back to where it was.

    JAX (0.12) leaves the cotangent where it is unless it is told where that was.
    """
    return jax.device_put(value, space, src=memory_space(value))


def is_away(value: Any) -> bool:
    """Whether a trace knows a value to be in host memory."""
    return getattr(jax.typeof(value), "memory_space", None) == jax.memory.Space.Host


def constrain(value: jax.Array, target: NamedSharding) -> jax.Array:
    """Put a traced array under a sharding, on axes of either kind.

    Of the two kinds of host memory only the pinned one is known to a trace.
    """
    on_device = NamedSharding(target.mesh, target.spec)
    if is_away(value):
        value = to_space(value, jax.memory.Space.Device)
    if AxisType.Explicit in target.mesh.axis_types:
        value = jax.sharding.reshard(value, on_device)
    else:
        with jax.disable_jit(False):  # under it an eager one does nothing
            value = jax.lax.with_sharding_constraint(value, on_device)
    return to_rest(value, target.memory_kind)


def to_rest(value: jax.Array, memory_kind: str | None) -> jax.Array:
    """Move a traced array to the memory of a kind."""
    if memory_kind != PINNED_HOST:
        return value
    return to_space(value, jax.memory.Space.Host)


def in_order(value: jax.Array) -> jax.Array:
    """Let an array lie in the order of its dims, on its way to the host.

    XLA:TPU (libtpu 0.0.42) gives the gradients of a scanned stack another order, and
    then refuses to pass them to a computation on the host. Arrays of fewer than three
    dims it gathers when it is told so.
    """
    if value.ndim < 3:
        return value
    return with_layout_constraint(value, Layout(tuple(range(value.ndim))))


def for_pickle(value: Any, what: str) -> Any:
    """Copy an array to host memory for pickling; abstract values pass."""
    if isinstance(value, jax.Array):
        if isinstance(value, Tracer):
            raise RuntimeError(
                f"pickle: {what} is being traced. Pickle outside of jit."
            )
        if not value.is_fully_addressable:
            raise RuntimeError(
                f"pickle: {what} is spread over several processes, so no process can "
                "pickle it alone. Use a checkpoint library on model.state_dict()."
            )
        return np.asarray(value)
    if isinstance(value, jax.ShapeDtypeStruct):  # its sharding holds devices
        return jax.ShapeDtypeStruct(value.shape, value.dtype)
    return value
