"""Values that `check` compares: whole, in host memory, the same in every process.

What must not live here: running anything but copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fsdp_jax._mesh import MeshInfo


@dataclasses.dataclass(frozen=True)
class Held:
    """An array in host memory.

    Attributes:
        data: its values; of random keys their data.
        impl: of random keys; None for numbers.
    """

    data: np.ndarray
    impl: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array, as JAX sees it."""
        return self.data.shape[: self.data.ndim - (self.impl is not None)]

    def placed(self, mesh: MeshInfo, spec: PartitionSpec) -> jax.Array:
        """The data on a mesh, which may span several processes."""
        sharding = NamedSharding(mesh.mesh, spec)
        host = self.data
        return jax.make_array_from_callback(host.shape, sharding, lambda at: host[at])

    def used(self, data: jax.Array) -> jax.Array:
        """What computes with the placed data, traced."""
        if self.impl is None:
            return data
        return jax.random.wrap_key_data(data, impl=self.impl)


def is_key(x: Any) -> bool:
    """Whether an array is one of random keys."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def as_data(x: Any) -> Any:
    """Random keys as their data, other arrays as they are."""
    return jax.random.key_data(x) if is_key(x) else x


def to_host(x: Any) -> Held:
    """The whole array in every process; all must ask.

    Raises:
        TypeError: it is being traced.
    """
    if isinstance(x, Tracer):
        raise TypeError(
            "check: an argument is being traced. check runs programs and compares "
            "their numbers: call it outside of jit, once before the loop."
        )
    impl = jax.random.key_impl(x) if is_key(x) else None
    x = as_data(x)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if x.sharding.memory_kind not in (None, "device"):
            x = jax.device_put(x, x.sharding.with_memory_kind("device"))
        if x.is_fully_replicated:
            x = x.addressable_data(0)
        else:
            x = multihost_utils.process_allgather(x, tiled=True)
    return Held(np.asarray(x), impl)


def agreed(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What process 0 has, in every process, so that all conclude the same."""
    if jax.process_count() == 1:
        return list(arrays)
    return [np.asarray(x) for x in multihost_utils.broadcast_one_to_all(tuple(arrays))]


def one_device(mesh: MeshInfo) -> MeshInfo:
    """A mesh with the same axes over one device, of this process."""
    mine = jax.process_index()
    device = next(d for d in mesh.mesh.devices.flat if d.process_index == mine)
    names = mesh.mesh.axis_names
    devices = np.array([device]).reshape([1] * len(names))
    return dataclasses.replace(mesh, mesh=Mesh(devices, names))


def automatic(mesh: MeshInfo) -> MeshInfo:
    """The same mesh with axes that are all Auto."""
    return dataclasses.replace(mesh, mesh=Mesh(mesh.mesh.devices, mesh.mesh.axis_names))


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """What counts as equal: `|a - b| <= atol + rtol * max(|b|)`, over a whole array.

    Attributes:
        rtol: relative to the largest number of the array.
        atol: absolute.
    """

    rtol: float
    atol: float

    def difference(self, actual: np.ndarray, expected: np.ndarray) -> Difference:
        """Compare two arrays."""
        if actual.shape != expected.shape:
            return Difference(np.inf, np.inf, False)
        if not actual.size or np.array_equal(actual, expected):
            return Difference(0.0, 0.0, True)
        exact = not any(_inexact(x) for x in (actual, expected))
        a, b = wide(actual), wide(expected)
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return Difference(np.inf, np.inf, False)
        with np.errstate(invalid="ignore"):
            gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        finite = np.abs(b[np.isfinite(b)])
        largest, scale = float(gap.max()), float(finite.max(initial=0.0))
        relative = largest / scale if scale else (np.inf if largest else 0.0)
        limit = 0.0 if exact else self.atol + self.rtol * scale
        return Difference(largest, relative, largest <= limit)

    def equal(self, actual: np.ndarray, expected: np.ndarray) -> bool:
        """Whether two arrays count as equal."""
        return self.difference(actual, expected).equal


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far an array is from another.

    Attributes:
        largest: absolute difference; infinite for other shapes, or another pattern of
            what is not finite.
        relative: the same over the largest number of the array.
        equal: whether it is within the tolerance.
    """

    largest: float
    relative: float
    equal: bool


def _inexact(x: np.ndarray) -> bool:
    return x.dtype.kind in "fcV" or x.dtype.name.startswith(("bfloat", "float"))


def wide(x: np.ndarray) -> np.ndarray:
    """In double precision."""
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
