"""Means that are right wherever they can be represented, even if the sum cannot.

Summed in 32 bits or more, and divided before by a power of two, which loses nothing.
What must not live here: which values are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fsdp_jax import _collectives
from fsdp_jax._mesh import MeshInfo

Array = jax.Array


def _before(x: Array, count: int) -> Array:
    """What is summed."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return _divided(x, 2 ** (count - 1).bit_length())


def _after(total: Array, count: int, dtype: jnp.dtype) -> Array:
    """The mean, of the sum."""
    return _divided(total, count / 2 ** (count - 1).bit_length()).astype(dtype)


def _divided(x: Array, by: float) -> Array:
    return x / by if by != 1 else x


def mean_over_devices(
    x, mesh: MeshInfo, name: str, axes: Sequence[str] | None = None, count: int = 0
):
    """Mean of a pytree of floating arrays over the data devices.

    Args:
        x: the pytree.
        mesh: mesh and the roles of its axes.
        name: for profiles.
        axes: those of the data axes to sum over; None for all.
        count: by which the sum is divided; 0 for the number of data devices.
    """
    count = count or mesh.num_devices
    parts = jax.tree.map(lambda x: _before(x, count), x)
    total = _collectives.sum_over_devices(parts, mesh, name, axes)
    return jax.tree.map(lambda x, t: _after(t, count, x.dtype), x, total)


def mean_over_rows(x: Array) -> Array:
    """Mean of a floating array `(count, ...)` over its first dim."""
    return _after(_before(x, len(x)).sum(0), len(x), x.dtype)


def divided_sum(x: Array, mesh: MeshInfo, name: str, divisor: float) -> Array:
    """The sum of an array over the data devices, divided, whatever by."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    total = _collectives.sum_over_devices(_divided(wide, divisor), mesh, name)
    return total.astype(x.dtype)
